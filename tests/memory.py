"""A folder in memory, for tests that create and read many files and do not need them on a disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A new folder, in memory if the machine has /dev/shm, otherwise on the disk. It is deleted at the end."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)
