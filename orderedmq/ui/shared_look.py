"""A look at a broker, which means to read a part of its state. All watchers share the result until the next look is due.

Rules: a look happens only when its result is requested. One thread looks at a time. Other threads wait up to `PATIENCE` seconds
for the result, then get the previous one. The next look is due at least `LEAST` seconds after the start of the last look, after a
pause at least as long as the last look took, and late enough that looks use at most `SHARE` of a core. For this share, the smaller
CPU cost of the last two looks counts, because the first look also loads modules. If the broker reports that nothing has changed,
the next look waits up to `UNCHANGED` seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from orderedmq.errors import OrderedMQError

T = TypeVar("T")

LEAST: Final = 0.9
UNCHANGED: Final = 4.5
#: Seconds that a viewer waits for a look that another viewer has started, before it gets the previous result.
PATIENCE: Final = 0.3
#: The share of one core that looks may use.
SHARE: Final = 1 / 75


class SharedLook(Generic[T]):
    """Calls ``look`` when its result is requested and a new look is due.

    ``change`` returns a number that differs after any change, or None if the broker cannot report changes. ``clock`` returns the
    monotonic time, ``cpu`` the CPU time that this thread has used, both in seconds.
    """

    def __init__(
        self,
        look: Callable[[], T],
        change: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._look = look
        self._change = change
        self._clock = clock
        self._cpu = cpu
        self._looking = threading.Lock()
        self._found: T | None = None
        self._failed: OrderedMQError | None = None
        self._seen: int | None = None
        #: When the last look began and ended, in monotonic seconds; the CPU seconds of the last two looks, with their rendering.
        self._begun = self._at = 0.0
        self._cost = self._former_cost = 0.0
        #: When the broker last reported that nothing had changed.
        self._unchanged = 0.0
        #: When the result was last requested, in monotonic seconds.
        self.asked = 0.0

    def get(self) -> T:
        """Return the result of the last look, or of a new look if one is due. If the look failed, raises its OrderedMQError."""
        self.asked = self._clock()
        nothing = self._found is None and self._failed is None
        if self._is_due() and self._looking.acquire(timeout=-1 if nothing else PATIENCE):
            try:
                if self._is_due():
                    self._look_now()
            finally:
                self._looking.release()
        if self._failed is not None:
            raise self._failed
        assert self._found is not None
        return self._found

    def spend(self, seconds: float) -> None:
        """Add the CPU time of rendering the result to the cost of the look."""
        self._cost += seconds

    @property
    def due_in(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._due - self._clock())

    @property
    def _due(self) -> float:
        cost = min(self._cost, self._former_cost)
        took = self._at - self._begun
        return max(self._begun + LEAST, self._at + took, self._begun + cost / SHARE, self._unchanged + LEAST)

    def _is_due(self) -> bool:
        now = self._clock()
        if self._at and now < self._due:
            return False
        if self._seen is None or self._failed is not None or now >= self._at + UNCHANGED:
            return True
        if self._change() != self._seen:
            return True
        self._unchanged = now
        return False

    def _look_now(self) -> None:
        self._begun, spent = self._clock(), self._cpu()
        try:
            # Read the number before the look, so that a change during this look makes the next look due.
            self._seen = self._change()
            self._found, self._failed = self._look(), None
        except OrderedMQError as error:
            self._failed = error
        finally:
            self._at = self._clock()
            self._cost, self._former_cost = self._cpu() - spent, self._cost
