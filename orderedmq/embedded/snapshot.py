"""Copies a store that is in use: a consistent snapshot of its index, and the segments that they need.

Rules: segments never change, so they are hard-linked into the copy, or copied if it is on another file system. Most segments are
linked while other processes write. The rest are linked in the write transaction that also takes the snapshot of the index, so that
no segment is deleted in between. The copy's index gets its name last, because a folder without this file is not a store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.filesystem import make_folder, sync_folder
from orderedmq.embedded.store.schema import SEGMENTS
from orderedmq.embedded.store.segments import FOLDER, name_of
from orderedmq.embedded.store.store_file import FILE
from orderedmq.embedded.store.transaction import Transaction, damaged
from orderedmq.errors import StoreError

#: Maximum number of passes before the write transaction. Each pass finds fewer new segments, because the previous one took less time.
_PASSES: Final = 5
#: The folder inside the copy into which the index is copied first. Until the copy is complete, it keeps other snapshots out.
_UNFINISHED: Final = "unfinished"


@dataclass(frozen=True)
class StoreCopy:
    """The size of a copy: its number of segments, how many of them are links, and the total bytes of its files."""

    segments: int
    links: int
    bytes: int


def snapshot(path: str | Path, target: str | Path) -> StoreCopy:
    """Copy the embedded broker's store at ``path`` into the folder ``target``, which must be empty or missing.

    Programs may use the store at the same time, but writers wait for a moment. The copy has every write that returned before the call.
    It counts as another store, so a running query does not continue with it until the query is restarted. A copy with links to the
    segments takes very little space, but damage to the disk affects the store and the copy. A copy on another disk has no links.

    Raises StoreError MISSING, NOT_EMPTY, CORRUPT, PERMISSION or IO, or StoreFullError. After an error, ``target`` has no store.
    """
    source, copy = Path(os.path.abspath(path)), Path(os.path.abspath(target))
    Store.require_there(source)
    store = Store.open(source)
    try:
        with Store(copy).errors_mapped("be made"):
            if copy == source or source in copy.parents:
                why = f"{copy} is inside the store at {source}. Give another folder, which is empty or missing"
                raise StoreError(StoreCondition.NOT_EMPTY, why)
            return _Copy(store, copy).make()
    finally:
        store.close()


class _Copy:
    def __init__(self, store: Store, target: Path) -> None:
        self._store = store
        self._target = target
        self._segments = target / FOLDER
        #: The segments that are in the copy, and whether each is a link.
        self._taken: dict[str, bool] = {}

    def make(self) -> StoreCopy:
        unfinished, data = _claimed(self._target), self._target / FILE
        try:
            make_folder(self._segments)
            for _ in range(_PASSES):
                with self._store.read() as txn:
                    wanted = _wanted(txn)
                if not self._take(wanted, needed=False):
                    break
            self._store.copy_index(unfinished, lambda txn: self._finish(_wanted(txn)), self._target)
            sync_folder(self._segments)
            os.rename(unfinished / FILE, data)
            sync_folder(self._target)
        except BaseException:
            with contextlib.suppress(OSError):
                data.unlink()
            shutil.rmtree(self._segments, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        files = [data, *self._segments.iterdir()]
        return StoreCopy(len(self._taken), sum(self._taken.values()), sum(file.stat().st_size for file in files))

    def _take(self, wanted: set[str], *, needed: bool) -> int:
        """Link or copy the new segments, and return their number. A segment that no longer exists is skipped if it is not ``needed``."""
        new = wanted - set(self._taken)
        for segment in sorted(new):
            source, target = self._store.segments.folder / name_of(segment), self._segments / name_of(segment)
            try:
                self._taken[segment] = _link(source, target)
            except FileNotFoundError as error:
                if needed:
                    raise damaged(self._store.path, f"segment file {source.name} is missing") from error
        return len(new)

    def _finish(self, wanted: set[str]) -> None:
        self._take(wanted, needed=True)
        for segment in set(self._taken) - wanted:
            (self._segments / name_of(segment)).unlink()
            del self._taken[segment]


def _claimed(target: Path) -> Path:
    """Make ``target``, and in it the folder that only one snapshot can make. Raises StoreError NOT_EMPTY, and changes nothing then."""
    make_folder(target)
    unfinished = target / _UNFINISHED
    if not os.listdir(target):
        with contextlib.suppress(FileExistsError):
            unfinished.mkdir(mode=0o700)
            # Another snapshot may have been completed since the folder was listed.
            if os.listdir(target) == [_UNFINISHED]:
                return unfinished
            unfinished.rmdir()
    raise StoreError(
        StoreCondition.NOT_EMPTY,
        f"{target} is not empty, or another snapshot is being made in it. Give another folder, which is empty or missing",
    )


def _wanted(txn: Transaction) -> set[str]:
    return {segment.token for segment in txn.scan(SEGMENTS)}


def _link(source: Path, target: Path) -> bool:
    """Link a segment, or copy it where links are impossible. Return whether it is a link."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
    else:
        return True
    with open(source, "rb") as content, open(target, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        shutil.copyfileobj(content, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    return False
