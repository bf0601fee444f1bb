"""``orderedmq group`` and ``orderedmq lock``: how far consumer groups are, and who owns which queue."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import typer

from orderedmq.broker import Broker, LockInfo
from orderedmq.cli.shell import Column, Shell, command, commands, duration, number, yes_no
from orderedmq.model import MessageQueue, check_group

app = commands("How far consumer groups are.")
locks_app = commands("Who owns which queue.")

_OWNER = (
    Column("owner", "owner"),
    Column("lock_age", "renewed", duration, right=True),
    Column("lock_remaining", "ends in", duration, right=True),
    Column("alive", "alive", yes_no),
)


def group_rows(broker: Broker, group: str) -> list[dict[str, Any]]:
    """Each queue of which the group has an offset or a lock. Raises GroupError MISSING."""
    offsets = broker.admin.group_offsets(group)
    locks = {lock.queue: lock for lock in broker.admin.locks(group)}
    bounds = broker.log.bounds(sorted(offsets.keys() | locks.keys()))
    rows = []
    for queue, at in bounds.items():
        offset = offsets.get(queue)
        # What retention has deleted cannot be processed any more.
        lag = at.max_offset - max(at.min_offset if offset is None else offset, at.min_offset)
        rows.append({**_queue(group, queue), "offset": offset, "end": at.max_offset, "lag": lag, **_owner(locks.get(queue))})
    return rows


def _queue(group: str, queue: MessageQueue) -> dict[str, Any]:
    return {"group": group, "topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}


def _owner(lock: LockInfo | None) -> dict[str, Any]:
    held = lock is not None and lock.held
    return {
        "owner": lock.client_id if lock is not None and held else None,
        "lock_age": round(lock.age, 3) if lock is not None and held else None,
        "lock_remaining": round(lock.remaining, 3) if lock is not None and held else None,
        "alive": lock.alive if lock is not None and held else None,
    }


@command(app, "list")
def list_groups(shell: Shell) -> None:
    """Show all consumer groups: their topics, how far behind they are, and whether a query is at work."""
    rows = []
    with shell.broker() as broker:
        for group in broker.admin.groups():
            queues = group_rows(broker, group)
            rows.append(
                {
                    "group": group,
                    "topics": sorted({row["topic"] for row in queues}),
                    "queues": len(queues),
                    "lag": sum(row["lag"] for row in queues),
                    "owned_queues": sum(row["owner"] is not None for row in queues),
                    "alive": any(row["alive"] for row in queues),
                }
            )
    columns = (
        Column("group", "group"),
        Column("topics", "topics", ", ".join),
        Column("queues", "queues", number, right=True),
        Column("lag", "lag", number, right=True),
        Column("owned_queues", "owned", number, right=True),
        Column("alive", "at work", yes_no),
    )
    shell.show(rows, columns, none=f"no consumer groups in {shell.store}")


@command(app, "describe")
def describe(shell: Shell, group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]) -> None:
    """Show each queue of a group: next offset to process, the queue's end, lag, and who owns it."""
    check_group(group)
    with shell.broker() as broker:
        rows = group_rows(broker, group)
    columns = (
        Column("topic", "topic"),
        Column("queue", "queue", right=True),
        Column("offset", "offset", number, right=True),
        Column("end", "end", number, right=True),
        Column("lag", "lag", number, right=True),
        *_OWNER,
    )
    shell.show(rows, columns, none=f"group {group} has no queues left")


@command(locks_app, "list")
def list_locks(
    shell: Shell,
    group: Annotated[str | None, typer.Option("--group", help="Only this consumer group.", metavar="GROUP")] = None,
) -> None:
    """Show all queue locks that are held: by whom, since when, and whether the owner is alive."""
    if group is not None:
        check_group(group)
    held: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with shell.broker() as broker:
        for lock in broker.admin.locks(group):
            if lock.held:
                held[lock.group].append({**_queue(lock.group, lock.queue), "epoch": lock.epoch, **_owner(lock)})
    columns = (
        Column("group", "group"),
        Column("topic", "topic"),
        Column("queue", "queue", right=True),
        Column("epoch", "epoch", right=True),
        *_OWNER,
    )
    shell.show([row for name in sorted(held) for row in held[name]], columns, none="no queue is locked")
