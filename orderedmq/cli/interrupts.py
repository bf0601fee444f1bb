"""Delays Ctrl-C until the end of a step that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delayed() -> Iterator[None]:
    """Delay the KeyboardInterrupt of a Ctrl-C until the end of the block. A second Ctrl-C interrupts the block immediately."""
    # If Ctrl-C was ignored from the start (nohup, a background job), it stays ignored.
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
