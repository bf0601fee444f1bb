"""A shared lock for transactions, exclusive for a resize: the map may be resized only while the process runs no transaction."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Lets many threads be inside, or one be alone. A thread that is inside must not call ``alone``."""

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
        """Wait until no thread is inside, and let none in."""
        with self._condition:
            self._condition.wait_for(lambda: not self._inside)
            yield
