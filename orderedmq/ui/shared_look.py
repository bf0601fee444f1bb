"""Reads a part of a broker's state. All watchers share the result until the next read is due.

Rules: the broker is read only when a result is requested, by one thread at a time. Other threads wait up to `PATIENCE` seconds
for the result, then get the previous one. The next read is due at least `LEAST` seconds after the start of the last read, after a
pause at least as long as the last read took, and late enough that reads use at most `SHARE` of a core. For this share, the smaller
CPU cost of the last two reads counts, because the first read also loads modules. If the broker reports that nothing has changed,
the next read waits up to `UNCHANGED` seconds.
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
#: Seconds that a viewer waits for a read that another viewer has started, before it gets the previous result.
PATIENCE: Final = 0.3
#: The share of one core that reads may use.
SHARE: Final = 1 / 75


class SharedLook(Generic[T]):
    """Calls ``look``, which reads the broker, when its result is requested and a new read is due.

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
        #: When the last read began and ended, in monotonic seconds; the CPU seconds of the last two reads, with their rendering.
        self._begun = self._at = 0.0
        self._cost = self._former_cost = 0.0
        #: When the broker last reported that nothing had changed.
        self._unchanged = 0.0
        #: When the result was last requested, in monotonic seconds.
        self.asked = 0.0

    def get(self) -> T:
        """Return the result of the last read, or of a new read if one is due. If the read failed, raises its OrderedMQError."""
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
        """Add the CPU time of rendering the result to the cost of the read."""
        self._cost += seconds

    @property
    def due_in(self) -> float:
        """Seconds until the next read is due."""
        return max(0.0, self._due - self._clock())

    @property
    def age(self) -> float:
        """Seconds since the broker was last read, or reported that nothing had changed."""
        return self._clock() - max(self._at, self._unchanged)

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
            # Read the number before calling `look`, so that a change during the call makes the next read due.
            self._seen = self._change()
            self._found, self._failed = self._look(), None
        except OrderedMQError as error:
            self._failed = error
        finally:
            self._at = self._clock()
            self._cost, self._former_cost = self._cpu() - spent, self._cost
