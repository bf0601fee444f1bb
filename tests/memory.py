"""A folder in memory, for tests that make and read many files and lose no power."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, in memory where the machine has a place for it, else on the disk. It is deleted at the end."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)
