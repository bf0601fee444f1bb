"""SQLite's write-ahead log (WAL) of a store's index: makes it whole at opening, and keeps it from growing without bound.

SQLite acknowledges a transaction when the log is synced, and reads the log into memory again only when nobody else has the store open.
If a sync has failed, the transaction's end is in the system's cache but perhaps not on the disk, and the system counts it as written. A
process that finds it there would continue after it, and what it then acknowledges would be lost with the power, because a recovery ends
at the gap. SQLite itself writes over such an end as long as a process has the store open. So only the first process to open a store
must take care: it writes the whole log again and syncs it, before it opens the store.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from orderedmq.embedded.store.filesystem import sync_folder
from orderedmq.embedded.store.store_file import FILE

NAME: Final = f"{FILE}-wal"
#: From this size in bytes on, a write waits for readers, so that the log can begin anew.
LIMIT: Final = 16 * 1024 * 1024
#: Milliseconds of that wait. A reader that is stopped within a transaction keeps the log from beginning anew.
PATIENCE: Final = 100


def size(folder: Path) -> int:
    """Return the size of the log in bytes, 0 if there is none."""
    try:
        return os.stat(f"{folder}/{NAME}").st_size
    except FileNotFoundError:
        return 0


def make_whole(folder: Path) -> None:
    """Write the log of a store that nobody has open to the disk. Raises OSError."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        position = 0
        while piece := os.pread(descriptor, 1 << 20, position):
            position += os.pwrite(descriptor, piece, position)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(folder)
