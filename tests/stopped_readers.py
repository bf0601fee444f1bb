"""Ends the streaming readers that a test drives itself, without Spark."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from ordered_source.stream_reader import StreamReader


@contextlib.contextmanager
def stopped(*readers: StreamReader) -> Iterator[None]:
    """Stop the readers after the body, the last one first, and restore the handler of SIGTERM, which readers replace."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for reader in reversed(readers):
            reader.stop()
        signal.signal(signal.SIGTERM, handler)
