"""Computes how long to wait before the next attempt. Pure: randomness comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Waits that grow by ``factor`` from ``first`` to ``most`` seconds, each shortened by a random share of up to ``jitter``.

    Jitter keeps clients that lost the same server from reconnecting all at once.
    """

    first: float = 0.05
    most: float = 2.0
    factor: float = 2.0
    jitter: float = 0.5

    def delay(self, failures: int, draw: float) -> float:
        """Return the seconds to wait after ``failures`` failures in a row, 0 before the first; ``draw`` is random in [0, 1)."""
        if failures < 1:
            return 0.0
        # The exponent is bounded: a server may be away for days, and a float would overflow.
        longest = min(self.most, self.first * self.factor ** min(failures - 1, 64))
        return longest * (1.0 - self.jitter * draw)


#: Between attempts to connect to one address.
CONNECT = Backoff(first=0.05, most=2.0)
#: Between attempts of one request, if the server was too busy or the route may be wrong. Java pulls again 20 ms after
#: FLOW_CONTROL.
RETRY = Backoff(first=0.02, most=1.0)
