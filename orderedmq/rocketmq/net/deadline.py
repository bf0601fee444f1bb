"""The time by which an operation must end, including all its retries, and the waits between the retries."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final, Self

#: The default time limit of an operation, with all its requests and their retries, in seconds.
REQUEST_TIMEOUT: Final = 30.0
#: The minimum time limit of a request to one of several servers that share a time limit, in seconds.
LEAST_TIMEOUT: Final = 0.5
#: The minimum time for another attempt, in seconds. With less, a busy server's answer would come too late, and the error would be a
#: timeout instead of the cause of the failures before.
_LEAST_ATTEMPT: Final = 0.2


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


def leaves_attempt(deadline: float, delay: float) -> bool:
    """Return whether there is time for another attempt after ``delay`` seconds."""
    return time.monotonic() + delay + _LEAST_ATTEMPT < deadline


@dataclass(frozen=True)
class Backoff:
    """Waits that grow by ``factor`` from ``first`` to ``most`` seconds. Each is shortened by a random share of at most ``jitter``.

    Because of the jitter, clients that have lost the same server do not all reconnect at the same time.
    """

    first: float = 0.05
    most: float = 2.0
    factor: float = 2.0
    jitter: float = 0.5

    def delay(self, failures: int, draw: float) -> float:
        """Return the seconds to wait after ``failures`` failures in a row; 0 after none. ``draw`` is a random number in [0, 1)."""
        if failures < 1:
            return 0.0
        # Limit the exponent, because a float would overflow if a server is down for days.
        longest = min(self.most, self.first * self.factor ** min(failures - 1, 64))
        return longest * (1.0 - self.jitter * draw)


#: The waits between attempts to connect to one address.
CONNECT = Backoff(first=0.05, most=2.0)
#: The waits between attempts at one request, if the server was too busy or the route may be wrong. Java pulls again 20 ms after
#: FLOW_CONTROL.
RETRY = Backoff(first=0.02, most=1.0)
