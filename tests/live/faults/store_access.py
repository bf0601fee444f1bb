"""Reaches into a store: ages an owner's locks and membership, so that no test waits for their end, and counts staged files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from orderedmq.embedded import garbage
from orderedmq.embedded.check import examine
from orderedmq.embedded.clock import SystemClock
from orderedmq.embedded.store.environment import Store
from orderedmq.embedded.store.layout import lock_from_json, lock_to_json, member_from_json, member_to_json
from orderedmq.ownership.lock import Instant


def age(path: str, owner: str, seconds: float) -> None:
    """Make the locks and the membership of ``owner`` older by ``seconds`` (younger if negative)."""

    def earlier(instant: Instant) -> Instant:
        return replace(instant, seconds=instant.seconds - seconds)

    store = Store.open(Path(path))
    try:
        with store.write() as txn:
            for key, value in list(txn.scan("locks")):
                lock = lock_from_json(value)
                if lock.owner == owner:
                    txn.put("locks", key, lock_to_json(replace(lock, renewed=earlier(lock.renewed))))
            for key, value in list(txn.scan("members")):
                member = member_from_json(value)
                if member.owner == owner:
                    txn.put("members", key, member_to_json(replace(member, renewed=earlier(member.renewed))))
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
