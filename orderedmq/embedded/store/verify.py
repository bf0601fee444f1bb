"""Verifies a store's file before LMDB reads it, whenever a process opens the store.

Rules: the newest snapshot is verified, inside a read transaction, so that its pages are not reused during the verification. Other
processes may write at the same time, so inconsistent pages are read again. Each of the file's two snapshots must have been written
by the transaction that its meta page names, because a changed bit in that page could make LMDB use the older snapshot and lose the
last write. Payloads in LMDB and in segments are not read, because the index has their checksums.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from orderedmq.embedded.store import layout, pages
from orderedmq.embedded.store.pages import Meta, Read, Snapshot, Tree
from orderedmq.embedded.store.transaction import WRITTEN, damaged, written

#: How often inconsistent pages are read again, and seconds between two reads. Another process may be writing these pages.
TRIES: Final = 20
PAUSE: Final = 0.005


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Read]:
    """Yield a function that returns bytes of the store's file, given position and size.

    The function reads by a system call, not through a map, so that an unreadable sector raises an error instead of a signal.
    """
    descriptor = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A damaged page may lead to a position that is too large for any file, where pread would raise an error.
        yield lambda position, size: os.pread(descriptor, size, position) if position < 1 << 62 else b""
    finally:
        os.close(descriptor)


def require_metas(path: Path) -> None:
    """Verify the meta pages before LMDB opens the file. Raises StoreError CORRUPT."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), reading(path) as read:
        _retry(path, lambda: _wrong_metas(read))


def _wrong_metas(read: Read) -> str | None:
    pair = pages.metas(read)
    return None if pair is None else pages.wrong_metas(pair)


def _retry(path: Path, wrong: Callable[[], str | None]) -> None:
    why = wrong()
    for _ in range(TRIES):
        if why is None:
            return
        time.sleep(PAUSE)
        why = wrong()
    if why is not None:
        raise damaged(path, why)


def require_sound(path: Path, env: Any) -> None:
    """Verify the newest snapshot of an open environment.

    An LMDB file that is not a store of this broker is not refused here. Raises StoreError CORRUPT.
    """

    def wrong() -> str | None:
        with env.begin() as txn:
            pair = pages.metas(read)
            if pair is None:
                return None
            now = next((meta for meta in pair if meta.transaction == txn.id()), None)
            if now is None:
                return f"no meta page has transaction {txn.id()}, which is the last transaction"
            _require_trees(path, read, now)
            other = pair[0] if now is pair[1] else pair[1]
            return wrong_writer(read, other)

    with reading(path) as read:
        _retry(path, wrong)


def _require_trees(path: Path, read: Read, meta: Meta) -> None:
    def report(what: str) -> NoReturn:
        raise damaged(path, what)

    snapshot = Snapshot(read, meta, report)
    trees = snapshot.databases()
    if "meta" not in trees:
        return
    names = {entry.key: snapshot.value(entry) for entry in snapshot.entries(trees["meta"], "meta")}
    version = names.get(layout.FORMAT_KEY)
    if version is None:
        return
    mine = layout.without_seal("meta", WRITTEN, names.get(WRITTEN, b""))
    wrong = wrong_signature(layout.to_number(version) if len(version) == 8 else -1, mine, meta)
    if wrong is not None:
        report(wrong)
    if layout.to_number(version) != layout.FORMAT:
        return
    if set(trees) != set(layout.DATABASES):
        report(f"its databases are not those of a store: {', '.join(sorted(trees))}")
    for name in layout.DATABASES:
        if name != "meta":
            snapshot.walk(trees[name], name, exact=name == layout.UNSEALED)
    snapshot.require_free()


def wrong_signature(version: int, mine: bytes | None, meta: Meta) -> str | None:
    """Return what is wrong with the format or the transaction that a snapshot names, or None if both are right.

    ``mine``: the value of WRITTEN, None if that entry is missing or fails its seal.
    """
    if version >= 0 and version != layout.FORMAT and mine != written(meta.transaction):
        # Another version of orderedmq may write another value for WRITTEN.
        return None
    if mine is None:
        return "the record of its last transaction is missing or fails its checksum"
    if version != layout.FORMAT or mine != written(meta.transaction):
        return f"transaction {meta.transaction} of format {version} has the entries of another transaction or format"
    return None


def wrong_writer(read: Read, meta: Meta) -> str | None:
    """Return an error text if the older snapshot was not written by the transaction that its meta page names, else None.

    Nothing else in that snapshot is verified, because LMDB uses only the snapshot's transaction number.
    """
    wrong: list[str] = []
    snapshot = Snapshot(read, meta, wrong.append)
    tree: Tree | None = snapshot.databases().get("meta")
    entries = snapshot.entries(tree, "meta") if tree is not None else ()
    value = next((snapshot.value(entry) for entry in entries if entry.key == WRITTEN), b"")
    writer = None if wrong else layout.without_seal("meta", WRITTEN, value)
    # Another version of orderedmq may write another format number after the transaction's number.
    if writer is None or writer[:8] == layout.number(meta.transaction):
        return None
    return f"the meta page of transaction {meta.transaction} has the entries of another transaction"
