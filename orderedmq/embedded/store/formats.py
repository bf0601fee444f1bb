"""Recognises a store by its format, and initialises new stores."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import lmdb

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.integrity import seal
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import StoreError


def prepare(env: Any, path: Path, create: bool) -> tuple[dict[str, Any], str]:
    """Return the databases of an environment by name, and the store's id. Initialises a new store if ``create``.

    Raises StoreError MISSING, NEWER_FORMAT, NOT_A_STORE, CORRUPT.
    """
    # Counted first: if another process initialised the store after the lookup, its entries would look foreign.
    entries = env.stat()["entries"]
    try:
        meta = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            version, there = txn.get(seal.FORMAT_KEY, db=meta), txn.get(b"store_id", db=meta) is not None
    except lmdb.NotFoundError:
        version, there = None, False
    if version is None or not there:
        if not create:
            if entries:
                raise _not_ours(path)
            raise StoreError(
                StoreCondition.MISSING, f"the store at {path} is empty; create a topic (orderedmq topic create NAME --queues N)"
            )
        _initialise(env, path)
    elif layout.to_number(version) > layout.FORMAT:
        raise newer(path, layout.to_number(version))
    # Not inside a read transaction: lmdb resets it instead of committing it, and the handles would be lost.
    handles = {name: env.open_db(name.encode(), create=False) for name in layout.DATABASES}
    with env.begin() as txn:
        identity = Transaction(txn, handles, path).get("meta", b"store_id")
    return handles, (identity or b"").decode()


def _initialise(env: Any, path: Path) -> None:
    with env.begin(write=True) as txn:
        foreign = env.stat()["entries"] > 0
        handles = {name: env.open_db(name.encode(), txn=txn) for name in layout.DATABASES}
        if txn.get(b"store_id", db=handles["meta"]) is not None:
            # Another process was first.
            return
        if foreign:
            raise _not_ours(path)
        txn.put(seal.FORMAT_KEY, layout.number(layout.FORMAT), db=handles["meta"])
        made = Transaction(txn, handles, path)
        made.put("meta", b"store_id", uuid.uuid4().hex.encode())
        made.sign()


def newer(path: Path, version: int) -> StoreError:
    """Return the error for a store of a later version."""
    return StoreError(
        StoreCondition.NEWER_FORMAT,
        f"the store at {path} has format {version}, this version reads format {layout.FORMAT}: upgrade orderedmq",
    )


def _not_ours(path: Path) -> StoreError:
    return StoreError(StoreCondition.NOT_A_STORE, f"{path} has an LMDB file that is not this broker's; choose another path")
