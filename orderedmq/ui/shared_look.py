"""One look at a broker for all who watch: what was found is kept until the next look is due.

Rules: nobody looks while nobody asks. One thread looks at a time; others wait a moment for it, then get what was found before. The next
look is due when this process has spent at most `SHARE` of a core on looking, at least `LEAST` seconds after the last one, and not sooner
than that one took. What a look costs is what the cheaper of the last two did: a first one loads modules. A broker that can tell that
nothing has changed is not asked again for `UNCHANGED` seconds.
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
#: Seconds that a viewer waits for a look that another one's question has begun, before it gets what was found before.
PATIENCE: Final = 0.3
#: What looks may take of one core.
SHARE: Final = 1 / 75


class SharedLook(Generic[T]):
    """Calls ``look`` when its result is asked for and due. ``change`` returns a number that differs if anything changed, or None.

    ``clock`` and ``cpu``: the monotonic time, and the CPU that this thread has used, in seconds.
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
        #: When the last look began and ended, in monotonic seconds, and the CPU that it and the one before took, with what showed them.
        self._begun = self._at = 0.0
        self._cost = self._former_cost = 0.0
        #: When the broker was last asked for changes and had none.
        self._unchanged = 0.0
        #: Monotonic seconds when it was last asked for.
        self.asked = 0.0

    def get(self) -> T:
        """Return what the last look found, or look. Raises the look's OrderedMQError, which stands until the next look is due."""
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
        """Count CPU that was spent on showing what was found, too."""
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
            # Read before the look, so that a change during the look is seen by the next one.
            self._seen = self._change()
            self._found, self._failed = self._look(), None
        except OrderedMQError as error:
            self._failed = error
        finally:
            self._at = self._clock()
            self._cost, self._former_cost = self._cpu() - spent, self._cost
