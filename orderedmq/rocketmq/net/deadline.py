"""The time by which an operation must end, including all its retries."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

#: The default time limit of an operation, with all its requests and their retries, in seconds.
REQUEST_TIMEOUT: Final = 30.0
#: The minimum time limit of a request to one of several servers that share a time limit, in seconds.
LEAST_TIMEOUT: Final = 0.5


class Deadline(float):
    """A point in time in monotonic seconds. Because it is a float, it can be compared with `time.monotonic`."""

    __slots__ = ()

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the deadline that is ``seconds`` from now."""
        return cls(time.monotonic() + seconds)


def seconds_to(deadline: float) -> float:
    """Return the seconds until a deadline: 0 if it has passed, and at most the longest time for which a lock can wait."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
