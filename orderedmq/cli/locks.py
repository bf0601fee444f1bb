"""``orderedmq lock``: who owns which queue, and taking a lock away."""

from __future__ import annotations

from typing import Annotated

import typer

from orderedmq.broker import Broker
from orderedmq.cli import completion
from orderedmq.cli.groups import OWNER, Group, owner_fields, queue_fields
from orderedmq.cli.shell import Column, Shell, command, commands
from orderedmq.errors import OptionError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, check_group
from orderedmq.seek import check_queue

app = commands("Who owns which queue; release.")

_QUEUE = (Column("group", "group"), Column("topic", "topic"), Column("queue", "queue", right=True))


@command(app, "list")
def list_locks(
    shell: Shell,
    group: Annotated[
        str | None, typer.Option("--group", help="Only this consumer group.", metavar="GROUP", autocompletion=completion.groups)
    ] = None,
) -> None:
    """Show all queue locks that are held: by whom, since when, and whether the owner is alive."""
    if group is not None:
        check_group(group)
    with shell.broker() as broker:
        held = sorted((lock for lock in broker.admin.locks(group) if lock.held), key=lambda lock: (lock.group, lock.queue))
    rows = [{**queue_fields(lock.group, lock.queue), "epoch": lock.epoch, **owner_fields(lock)} for lock in held]
    shell.show(rows, (*_QUEUE, Column("epoch", "epoch", right=True), *OWNER), none="no queue is locked")


@command(app, "release")
def release(
    shell: Shell,
    group: Group,
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC[/QUEUE]", help="Only these (default: all queues of the group).", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if its owner is alive: that query fails before it commits.")
    ] = False,
) -> None:
    """Take queue locks away. Refused, for all of them, if the owner of one is alive.

    This is for a query that hangs and still renews its locks: one that was killed holds nothing, and a lock that is not renewed ends after
    60 seconds.
    """
    check_group(group)
    asked = [_parsed(text) for text in queues or ()]
    with shell.broker() as broker:
        broker.admin.group_offsets(group)
        held = [lock for lock in broker.admin.locks(group) if lock.held]
        named = {queue for one in asked for queue in _named(broker, *one)}
        wanted = sorted(lock.queue for lock in held if not asked or lock.queue in named)
        gone = broker.admin.release(group, wanted, force=force)
    owners = {lock.queue: lock.client_id for lock in held}
    rows = [{**queue_fields(group, queue), "owner": owners[queue]} for queue in gone]
    shell.show(rows, (*_QUEUE, Column("owner", "taken from")), none=f"none of these queues is locked in group {group}")


def _parsed(text: str) -> tuple[str, int | None]:
    """TOPIC, TOPIC/QUEUE, or TOPIC/BROKER/QUEUE as errors print a queue."""
    topic, *rest = text.split("/")
    if len(rest) == 2 and rest[0] == EMBEDDED_BROKER:
        del rest[0]
    if not topic or len(rest) > 1 or not all(part.isascii() and part.isdigit() for part in rest):
        raise OptionError("INVALID", f"{text!r} is neither TOPIC nor TOPIC/QUEUE; write for example orders/3")
    return topic, int(rest[0]) if rest else None


def _named(broker: Broker, topic: str, number: int | None) -> list[MessageQueue]:
    """Raises TopicError MISSING or NO_SUCH_QUEUE."""
    if number is None:
        return broker.log.queues(topic)
    queue = MessageQueue(topic, EMBEDDED_BROKER, number)
    check_queue(broker.log, queue)
    return [queue]
