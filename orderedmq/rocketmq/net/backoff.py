"""Computes how long to wait before the next attempt. Pure: the random number is an argument."""

from __future__ import annotations

from dataclasses import dataclass


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
