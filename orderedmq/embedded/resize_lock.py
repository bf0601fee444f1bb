"""A gate that many threads pass and one can have for itself: the map's size may change only while no transaction of the process runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Counts who is inside. A thread that is inside must not ask to be alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        with self._condition:
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                if not self._inside:
                    self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody is inside, and lets nobody in."""
        with self._condition:
            self._condition.wait_for(lambda: not self._inside)
            yield
