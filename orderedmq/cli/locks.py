"""``orderedmq lock``: shows the owners of queues, and releases locks."""

from __future__ import annotations

from typing import Annotated

import typer

from orderedmq.cli import queue_names
from orderedmq.cli.groups import Group, owner_columns, owner_fields
from orderedmq.cli.queue_names import queue_fields
from orderedmq.cli.shell import Column, Shell, command, commands
from orderedmq.model import check_group
from orderedmq.tools.group_state import owners_of, short_names
from orderedmq.tools.readable import duration

app = commands("Show the owners of queues; release locks.")

_GROUP = Column("group", "group")


@command(app, "list")
def list_locks(
    shell: Shell,
    group: Annotated[
        str | None,
        typer.Option("--group", help="Only this consumer group.", metavar="GROUP", autocompletion=queue_names.groups),
    ] = None,
) -> None:
    """Show all queue locks that are held: the owner, the last renewal, and whether the owner is alive."""
    if group is not None:
        check_group(group)
    with shell.broker() as broker:
        locks = sorted((lock for lock in broker.admin.locks(group) if lock.held), key=lambda lock: (lock.group, lock.queue))
    rows = [{"group": lock.group, **queue_fields(lock.queue), "epoch": lock.epoch, **owner_fields(lock)} for lock in locks]
    columns = (
        _GROUP,
        *queue_names.columns(rows),
        Column("lock_age", "renewed", duration, right=True),
        *owner_columns(short_names(owners_of(rows))),
    )
    shell.show(rows, columns, none="no queue is locked")


@command(app, "release")
def release(
    shell: Shell,
    group: Group,
    queues: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC[/BROKER/QUEUE]",
            help="Only this topic or queue. TOPIC/QUEUE is enough if only one broker has it (default: all queues of the group).",
            show_default=False,
            autocompletion=queue_names.topics,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Release locks even if the owner is alive. That query fails before it commits.")
    ] = False,
) -> None:
    """Release queue locks. If the owner of any of them is alive, the command is refused and releases none.

    Use it if a query hangs but still renews its locks. A killed query holds no locks, and a lock ends 60 seconds after its last renewal.
    """
    check_group(group)
    for text in queues or ():
        queue_names.topic_of(text)
    with shell.broker() as broker:
        broker.admin.group_offsets(group)
        locks = [lock for lock in broker.admin.locks(group) if lock.held]
        chosen = {
            queue
            for text in queues or ()
            for queue in queue_names.find_all(text, broker.log.queues(queue_names.topic_of(text)))
        }
        gone = broker.admin.release(group, sorted(chosen if queues else {lock.queue for lock in locks}), force=force)
    released = {lock.queue: lock for lock in locks if lock.queue in gone}
    rows = [{"group": group, **queue_fields(queue), **owner_fields(released.get(queue))} for queue in gone]
    owner = Column("owner", "taken from", short_names(owners_of(rows)).__getitem__)
    shell.show(
        rows,
        (_GROUP, *queue_names.columns(rows), owner),
        none=f"none of these queues is locked in group {group}",
    )
