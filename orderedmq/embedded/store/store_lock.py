"""The locks of a store between processes, and the number of the last transaction that was acknowledged.

    index.lock      byte 0     locked by the process that writes: one at a time
                    byte 1     locked by a process while it opens or closes the store: one at a time
                    byte 2     locked, shared, by every process that has the store open
                    byte 16    inode of the store's file, number of its last acknowledged transaction, and their checksum

Rules: these are record locks (``lockf``), which the system releases when their process ends and which a forked process does not have,
like SQLite's own. They belong to the process, so a thread's lock is added, and a process opens the file only once. SQLite alone would
make writers poll for their turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

NAME: Final = "index.lock"
_WRITING: Final = 0
_DOOR: Final = 1
_OPEN: Final = 2
_RECORD: Final = 16
_ACKNOWLEDGED: Final = struct.Struct("<QQ8s")


class StoreLock:
    """The file ``index.lock`` of one store, opened by this process."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._threads = {_WRITING: threading.Lock(), _DOOR: threading.Lock()}

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Wait until no other thread or process writes, and keep others waiting until the block ends."""
        return self._alone(_WRITING)

    def door(self) -> contextlib.AbstractContextManager[None]:
        """Wait until no other thread or process opens or closes the store, and keep others waiting until the block ends."""
        return self._alone(_DOOR)

    @contextlib.contextmanager
    def _alone(self, byte: int) -> Iterator[None]:
        with self._threads[byte]:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, byte)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)

    def enter(self) -> bool:
        """Count this process among those that have the store open. Return whether there was none. Call this at the `door`."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OPEN)
            alone = True
        except (BlockingIOError, PermissionError):
            alone = False
        fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        return alone

    def forget_if_alone(self) -> None:
        """Forget the last transaction if no other process has the store open. Call this at the `door`.

        A file that takes the place of a closed store's index may get its inode.
        """
        with contextlib.suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OPEN)
            self.acknowledge(0, 0)

    def acknowledge(self, inode: int, transaction: int) -> None:
        """Record that a transaction was acknowledged. Call this in the transaction's turn, after its commit."""
        numbers = struct.pack("<QQ", inode, transaction)
        # Without room the former record stays, which is only less strict.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, numbers + xxhash.xxh3_64_digest(numbers), _RECORD)

    def acknowledged(self, inode: int) -> int:
        """Return the number of the last transaction that was acknowledged, 0 if it is unknown."""
        record = os.pread(self._descriptor, _ACKNOWLEDGED.size, _RECORD)
        if len(record) < _ACKNOWLEDGED.size or xxhash.xxh3_64_digest(record[:16]) != record[16:]:
            return 0
        file, transaction, _ = _ACKNOWLEDGED.unpack(record)
        return int(transaction) if file == inode else 0

    def close(self) -> None:
        """Release all locks of this process."""
        os.close(self._descriptor)
