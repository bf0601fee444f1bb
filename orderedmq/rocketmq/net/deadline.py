"""The moment by which an operation ends, with all its retries."""

from __future__ import annotations

import threading
import time
from typing import Final, Self

#: Seconds for an operation, with all its requests and their retries, if nothing else is said.
REQUEST_TIMEOUT: Final = 30.0
#: Minimum seconds for a request to one of several servers that share a time limit.
LEAST_TIMEOUT: Final = 0.5


class Deadline(float):
    """A moment in monotonic seconds. It is a float, so it compares with `time.monotonic`."""

    __slots__ = ()

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the moment that many seconds from now."""
        return cls(time.monotonic() + seconds)


def seconds_to(deadline: float) -> float:
    """Return the seconds left until a deadline: 0 once it has passed, and no more than a lock can wait."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
