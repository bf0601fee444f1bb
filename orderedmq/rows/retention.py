"""How retention by age measures a message's age if the machine's wall clock was set. Pure.

A message's age is the time since it was stored, on the wall clock. If that clock is set forward, all messages stored earlier
look older than they are. Therefore the steps by which the clock was set are recorded. Retention subtracts a step as long as messages
stored before the step may be too young to be deleted. A step is noticed by comparison with the monotonic clock, which is never set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from orderedmq.ownership.lock import Instant

#: The smallest difference between the two clocks, in µs, that counts as a step. Smaller corrections are normal.
STEP: Final = 60 * 1_000_000
#: Maximum number of recorded steps.
MOST: Final = 64


@dataclass(frozen=True)
class Clocks:
    """A machine's clocks at one moment of a boot. ``wall`` is in µs since the epoch.

    ``steps``: the steps by which the wall clock was set, oldest first, as (time in seconds of the monotonic clock, step in µs).
    """

    at: Instant
    wall: int
    steps: tuple[tuple[float, int], ...] = ()

    def read(self, at: Instant, wall: int) -> Clocks:
        """Return the clocks with their current values, or ``self`` if the wall clock has not been set since."""
        if at.boot_id != self.at.boot_id:
            # Whether the wall clock was set between the two boots is unknown, so begin without steps.
            return Clocks(at, wall)
        step = wall - self.wall - round(at.since(self.at) * 1e6)
        return self if abs(step) < STEP else Clocks(at, wall, _fitting((*self.steps, (at.seconds, step))))

    def ahead(self, now: Instant, seconds: float) -> int:
        """Return the number of µs by which a message from the last ``seconds`` may look older than it is."""
        most = total = 0
        for when, step in reversed(self.steps):
            if now.seconds - when > seconds:
                break
            total += step
            most = max(most, total)
        return most


def _fitting(steps: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
    """Return at most `MOST` steps: the smallest step is joined with the next one, so that no message looks older than before."""
    if len(steps) <= MOST:
        return steps
    smallest = min(range(MOST), key=lambda number: abs(steps[number][1]))
    (_, step), (when, following) = steps[smallest : smallest + 2]
    return (*steps[:smallest], (when, max(following, step + following)), *steps[smallest + 2 :])
