"""Reaches into a store: ages an owner's locks and membership, so that no test waits for their end, and counts staged files."""

from __future__ import annotations

from pathlib import Path

from orderedmq.embedded import garbage
from orderedmq.embedded.check import examine
from orderedmq.embedded.clock import SystemClock
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import LOCKS, MEMBERS


def age(path: str, owner: str, seconds: float) -> None:
    """Make the locks and the membership of ``owner`` older by ``seconds`` (younger if negative)."""
    store = Store.open(Path(path))
    try:
        with store.write() as txn:
            for lock in [lock for lock in txn.scan(LOCKS) if lock.owner == owner]:
                txn.put(lock._replace(renewed=lock.renewed - seconds))
            for member in [member for member in txn.scan(MEMBERS) if member.owner == owner]:
                txn.put(member._replace(renewed=member.renewed - seconds))
    finally:
        store.close()


def staged(path: str) -> int:
    """The number of segment files that are not published but still could be. Files that can never be published are deleted first."""
    store = Store.open(Path(path))
    try:
        garbage.collect_now(store, SystemClock())
        return len(examine(Path(path)).unused)
    finally:
        store.close()
