"""How retention by age counts on a machine whose wall clock is set. Pure.

A message's age is the time since it was stored, by the wall clock. Where that clock is set forward, all messages stored before
look older than they are. The steps by which it was set are therefore kept, and retention takes them off for as long as messages
from before them may be too young to be deleted. The monotonic clock shows a step: it is never set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orderedmq.ownership.lock import Instant

#: µs of difference between the two clocks that count as a step. Smaller corrections are usual.
STEP: Final = 60 * 1_000_000
#: Maximum number of steps that are kept.
MOST: Final = 64


@dataclass(frozen=True)
class Clocks:
    """A machine's clocks, as they were at one moment of this boot: ``wall`` in µs since the epoch.

    ``steps``: how the wall clock was set, oldest first: when, in seconds of the monotonic clock, and by how many µs.
    """

    at: Instant
    wall: int
    steps: tuple[tuple[float, int], ...] = ()

    def read(self, at: Instant, wall: int) -> Clocks:
        """Return the clocks as they are now: ``self`` if the wall clock was not set since."""
        if at.boot_id != self.at.boot_id:
            # Nothing is known of what happened in between.
            return Clocks(at, wall)
        step = wall - self.wall - round(at.since(self.at) * 1e6)
        return self if abs(step) < STEP else Clocks(at, wall, (*self.steps, (at.seconds, step))[-MOST:])

    def ahead(self, now: Instant, seconds: float) -> int:
        """Return by how many µs a message that was stored in the last ``seconds`` may look older than it is."""
        most = total = 0
        for when, step in reversed(self.steps):
            if now.seconds - when > seconds:
                break
            total += step
            most = max(most, total)
        return most
