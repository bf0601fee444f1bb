"""A lock that transactions share and a resize holds exclusively, because the map may be resized only while no transaction runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ResizeLock:
    """A shared/exclusive lock: many threads may share it, or one holds it alone. A thread that shares it must not call ``exclusive``."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sharing = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._sharing += 1
        try:
            yield
        finally:
            with self._condition:
                self._sharing -= 1
                if not self._sharing:
                    self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no thread shares the lock, then keep other threads from sharing it until the block ends."""
        with self._condition:
            self._condition.wait_for(lambda: not self._sharing)
            yield
