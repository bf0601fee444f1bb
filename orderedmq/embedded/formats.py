"""Recognises a store and its format, initialises new stores, and upgrades stores of an earlier format.

Format 1 had no seals, format 2 no database of parked messages. A store of an earlier format is upgraded in one transaction when
it is first opened. A process of the version with format 2 that has it open at that moment may go on; with format 1, all
processes must run this version.
"""

from __future__ import annotations

import json
import struct
import uuid
from pathlib import Path
from typing import Any

import lmdb

from orderedmq.broker import TopicInfo
from orderedmq.conditions import StoreCondition
from orderedmq.embedded import layout, seal
from orderedmq.embedded.transaction import WRITTEN, Transaction, damaged
from orderedmq.errors import StoreError


def prepare(env: Any, path: Path, create: bool) -> tuple[dict[str, Any], str]:
    """Return the databases of an environment by name, and the store's id. Initialises or upgrades the store if need be.

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
    elif layout.to_number(version) < layout.FORMAT:
        _upgrade(env, path)
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
        f"the store at {path} has format {version}, this version reads up to {layout.FORMAT}: upgrade orderedmq",
    )


def _not_ours(path: Path) -> StoreError:
    return StoreError(StoreCondition.NOT_A_STORE, f"{path} has an LMDB file that is not this broker's; choose another path")


def _upgrade(env: Any, path: Path) -> None:
    """Make the databases that are missing; seal every value if the format is 1.

    Raises StoreError CORRUPT if a value without a seal cannot be read, because a seal would vouch for it.
    """
    with env.begin(write=True) as txn:
        # A store of format 1 may be older than some of its databases, too.
        handles = {name: env.open_db(name.encode(), txn=txn) for name in layout.DATABASES}
        version = layout.to_number(txn.get(seal.FORMAT_KEY, db=handles["meta"]))
        if version == layout.FORMAT:
            # Another process was first.
            return
        after = Transaction(txn, handles, path)
        for database in layout.DATABASES if version == 1 else ():
            if database == seal.UNSEALED:
                continue
            for key, value in list(txn.cursor(db=handles[database])):
                if database == "meta" and key == seal.FORMAT_KEY:
                    continue
                _require_readable(database, key, value, path)
                after.put(database, key, value)
        txn.put(seal.FORMAT_KEY, layout.number(layout.FORMAT), db=handles["meta"])
        after.sign(always=True)


def _require_readable(database: str, key: bytes, value: bytes, path: Path) -> None:
    """Raises StoreError CORRUPT if a value without its seal cannot be decoded."""
    try:
        decode_value(database, key, value)
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise damaged(path, f"{layout.described(database, key)} cannot be read ({error})") from error


def decode_value(database: str, key: bytes, value: bytes) -> object:
    """Decode a value without its seal. Raises ValueError, TypeError, KeyError or struct.error."""
    match database:
        case "topics":
            return TopicInfo(**json.loads(value))
        case "queues":
            return layout.queue_of(key), layout.QueueState.unpack(value)
        case "index":
            return layout.queue_of(key), layout.Chunk.unpack(value)
        case "groups":
            return layout.group_of(key), layout.to_number(value)
        case "locks":
            return layout.group_of(key), layout.lock_from_json(value)
        case "members":
            return layout.member_from_json(value)
        case "dead" | "parked":
            return layout.group_of(key), layout.to_number(value)
        case "tokens":
            return json.loads(value)
        case "staged":
            return layout.from_staged(value)
        case "batches":
            return json.loads(value)
        case "meta" if key == b"store_id":
            return value.decode()
        case "meta" if key == WRITTEN:
            return layout.to_number(value[:8]), layout.to_number(value[8:])
        case "meta" if key == layout.CLOCKS:
            return layout.clocks_from_json(value)
        case _:
            return layout.to_number(value)
