"""Recognises a store by its format, and initialises new stores."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import lmdb

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.filesystem import sync_folder
from orderedmq.embedded.store.segments import Segments
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import StoreError


def prepare(env: Any, path: Path, segments: Segments, create: bool) -> tuple[dict[str, Any], str]:
    """Return the databases of an environment by name, and the store's id. Initialise a new store if ``create`` is true.

    If ``create`` is true, call this while the store's folder is locked. Raises StoreError MISSING, OTHER_FORMAT, NOT_A_STORE or CORRUPT.
    """
    # Count the entries before the lookup. Otherwise a store that another process initialises in between would look foreign.
    entries = env.stat()["entries"]
    try:
        meta = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            version, there = txn.get(layout.FORMAT_KEY, db=meta), txn.get(b"store_id", db=meta) is not None
    except lmdb.NotFoundError:
        version, there = None, False
    if version is None or not there:
        if entries:
            raise _not_ours(path)
        if not create:
            raise StoreError(
                StoreCondition.MISSING, f"the store at {path} is empty. Create a topic (orderedmq topic create NAME --queues N)"
            )
        _initialise(env, path, segments)
    elif layout.to_number(version) != layout.FORMAT:
        raise other(path, layout.to_number(version))
    # The databases are not opened inside a read transaction, because lmdb resets it without a commit and the handles would be lost.
    handles = {name: env.open_db(name.encode(), create=False) for name in layout.DATABASES}
    with env.begin() as txn:
        identity = Transaction(txn, handles, path, segments).get("meta", b"store_id")
    return handles, (identity or b"").decode()


def _initialise(env: Any, path: Path, segments: Segments) -> None:
    with env.begin(write=True) as txn:
        handles = {name: env.open_db(name.encode(), txn=txn) for name in layout.DATABASES}
        txn.put(layout.FORMAT_KEY, layout.number(layout.FORMAT), db=handles["meta"])
        transaction = Transaction(txn, handles, path, segments)
        transaction.put("meta", b"store_id", uuid.uuid4().hex.encode())
        transaction.sign()
        _write_metas_again(path, env.stat()["psize"])
        segments.folder.mkdir(mode=0o700, exist_ok=True)
        # The folder is synced before the commit, so that a store that exists after a loss of power is complete.
        try:
            sync_folder(path)
        except OSError:
            _remove(path, segments)
            raise


def _remove(path: Path, segments: Segments) -> None:
    """Remove the files of a store that is not initialised, so that the next attempt makes them, and therefore their names, again.

    The system counts names as written after their sync has failed, so another sync of the same names would write nothing. The file
    lock.mdb stays, because a process that has it open must share it with the processes that open it later.
    """
    with contextlib.suppress(OSError):
        (path / "data.mdb").unlink()
        segments.folder.rmdir()


def _write_metas_again(path: Path, page: int) -> None:
    """Write both meta pages of a new file again, so that the commit's sync writes them. Call this in a write transaction.

    LMDB wrote them when it made the file, perhaps in an attempt that failed because the disk reported an error (EIO). The system
    counts such pages as written, and LMDB does not write both again, because it finds them in the file.
    """
    with open(path / "data.mdb", "r+b", buffering=0) as file:
        metas = os.pread(file.fileno(), 2 * page, 0)
        os.pwrite(file.fileno(), metas, 0)


def other(path: Path, version: int) -> StoreError:
    remedy = (
        "Upgrade orderedmq" if version > layout.FORMAT else "Use the version that made it, or make a new store at another path"
    )
    return StoreError(
        StoreCondition.OTHER_FORMAT,
        f"the store at {path} has format {version}, but this version of orderedmq has format {layout.FORMAT}. {remedy}",
    )


def _not_ours(path: Path) -> StoreError:
    return StoreError(StoreCondition.NOT_A_STORE, f"{path} has an LMDB file that is not this broker's. Choose another path")
