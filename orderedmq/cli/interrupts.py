"""Ctrl-C that waits for a step which must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C in the block at its end; a second Ctrl-C interrupts the block."""
    # Where Ctrl-C was ignored from the start (nohup, a job in the background), it stays ignored.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    count = 0

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if count:
        raise KeyboardInterrupt
