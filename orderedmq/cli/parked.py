"""``orderedmq parked``: shows parked messages, and orders the owners of their queues what to do with a key or one of its messages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from orderedmq.broker import Broker
from orderedmq.cli import queue_names
from orderedmq.cli.groups import Group
from orderedmq.cli.queue_names import queue_fields, stored_key
from orderedmq.cli.shell import Column, Full, Shell, command, commands, fault
from orderedmq.cli.topics import Yes
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import check_group
from orderedmq.parking import CommandAction
from orderedmq.tools import parked as tools
from orderedmq.tools.parked import ParkedKey, chosen, described
from orderedmq.tools.readable import body_fields, body_text, duration, moment, number, preview

app = commands(
    "List, retry and hold parked keys, which wait because one of their messages failed. Drop one message, make it a dead letter, or "
    "replace its body."
)


#: Characters of a body in a question.
_PREVIEW: Final = 60

Where = Annotated[
    str | None,
    typer.Option(
        "--topic",
        help="Only messages of this topic or queue.",
        metavar="TOPIC[/BROKER/QUEUE]",
        show_default=False,
        autocompletion=queue_names.topics,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", parser=stored_key, help="This sharding key. May be repeated.", metavar="KEY", show_default=False),
]
Offsets = Annotated[
    list[int] | None,
    typer.Option(
        "--offset", min=0, help="The message at this offset, or its key. May be repeated.", metavar="N", show_default=False
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="All parked keys.")]


def _row(group: str, key: ParkedKey, now: float) -> dict[str, Any]:
    wait = key.due_in(now)
    return {
        "group": group,
        **queue_fields(key.queue),
        "sharding_key": key.key,
        "offset": key.offset,
        "messages": key.messages,
        "state": key.state,
        "due": moment(key.due and key.due * 1000),
        "due_in": None if wait is None else round(wait, 3),
        "attempts": key.ticket.attempts,
        "times_parked": key.ticket.parkings,
        "error": key.ticket.error or None,
        "oldest": moment(key.ticket.stored or None),
    }


def _shown(row: dict[str, Any], parked_key: ParkedKey, now: float) -> dict[str, Any]:
    """Return the row for a table: times become durations, and a message without a key shows its offset as its key."""
    age = duration(max(0.0, now - parked_key.ticket.stored / 1e6)) if parked_key.ticket.stored else None
    key = f"offset {parked_key.offset}" if parked_key.key is None else parked_key.key
    return {
        **row,
        "sharding_key": key,
        "due": _due(row),
        "oldest": age,
    }


def _due(row: dict[str, Any]) -> str:
    if row["state"] != "waiting":
        return str(row["state"])
    return f"in {duration(row['due_in'])}" if row["due_in"] else "now"


@command(app, "list")
def list_parked(shell: Shell, group: Group, topic: Where = None, full: Full = False) -> None:
    """Show the parked keys of a group: how many messages of each are parked, when it is tried again, and why its first message failed.

    A held key waits until somebody runs parked retry. Each message without a key is listed separately, by its offset. A table has one line
    per key and cuts longer texts. --full shows complete keys and errors, and the offset of the first message.
    """
    check_group(group)
    with shell.broker() as broker:
        keys = _parked(broker, group, topic)
    now = time.time()
    rows = [_row(group, key, now) for key in keys]
    if not shell.json:
        rows = [_shown(row, key, now) for row, key in zip(rows, keys, strict=True)]
    columns = (
        *queue_names.columns(rows),
        Column("sharding_key", "key"),
        *((Column("offset", "first offset"),) if full else ()),
        Column("messages", "parked", number, right=True),
        Column("due", "due", right=True),
        Column("attempts", "tries", number, right=True),
        Column("oldest", "oldest", right=True),
        Column("error", "error", cut=True, colour=fault),
    )
    shell.show(rows, columns, none=f"nothing is parked in group {group}", full=full)


@command(app, "retry")
def retry(
    shell: Shell,
    group: Group,
    key: Keys = None,
    offset: Offsets = None,
    everything: Everything = False,
    topic: Where = None,
) -> None:
    """Try parked keys now, including held keys.

    The query that owns the queue processes them in its next micro-batch, each key in order. A message that fails again is parked again.
    """
    check_group(group)
    with shell.broker() as broker:
        _order(shell, broker, group, "retry", chosen(group, _parked(broker, group, topic), key or (), offset or (), everything))


@command(app, "hold")
def hold(
    shell: Shell,
    group: Group,
    key: Keys = None,
    offset: Offsets = None,
    everything: Everything = False,
    topic: Where = None,
) -> None:
    """Hold parked keys until you run parked retry. Newer messages of these keys are parked after them.

    The query that owns the queue carries the command out in its next micro-batch.
    """
    check_group(group)
    with shell.broker() as broker:
        _order(shell, broker, group, "hold", chosen(group, _parked(broker, group, topic), key or (), offset or (), everything))


@command(app, "drop")
def drop(
    shell: Shell,
    group: Group,
    key: Keys = None,
    offset: Offsets = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All messages that are parked now: of the keys given, or of the group.")
    ] = False,
    topic: Where = None,
    yes: Yes = False,
) -> None:
    """Drop the first parked message of a key, on which the others wait, so that no listener sees it again. Asks first.

    The query that owns the queue drops it in its next micro-batch, and the key continues. --offset drops another message, --all drops all.
    """
    check_group(group)
    with shell.broker() as broker:
        # With --all and --key, all messages of these keys are dropped.
        is_group = everything and bool(offset or not key)
        those = chosen(group, _parked(broker, group, topic), key or (), offset or (), is_group, single=not everything)
        if those:
            shell.ask(f"Drop {described(those)} of group {group} from {_named(those)}? No listener sees what is dropped.", yes)
        _order(shell, broker, group, "drop", those)


@command(app, "dead-letter")
def make_dead_letters(shell: Shell, group: Group, key: Keys = None, offset: Offsets = None, topic: Where = None) -> None:
    """Make the first parked message of a key, on which the others wait, a dead letter now, without another try.

    The query that owns the queue does so in its next micro-batch, and the key continues. dlq replay sends the message again.
    """
    check_group(group)
    with shell.broker() as broker:
        those = chosen(group, _parked(broker, group, topic), key or (), offset or (), False, single=True)
        _order(shell, broker, group, "dead_letter", those)


@command(app, "replace")
def replace(
    shell: Shell,
    group: Group,
    key: Keys = None,
    offset: Offsets = None,
    body: Annotated[str | None, typer.Option(help="The corrected body.", metavar="TEXT", show_default=False)] = None,
    file: Annotated[
        typer.FileBinaryRead | None,
        typer.Option("--file", "-f", help="Read the corrected body from this file (-: standard input).", show_default=False),
    ] = None,
    topic: Where = None,
    yes: Yes = False,
) -> None:
    """Replace the body of the first parked message of a key, on which the others wait, and try it now. Asks first.

    The message keeps its place, key, tags and properties, and gets the property ORDEREDMQ_CORRECTED. The message in the topic stays as it
    is, for all groups. The query that owns the queue does so in its next micro-batch, and the key continues in order.
    """
    check_group(group)
    if (body is None) == (file is None):
        raise OptionError(OptionCondition.MISSING, "the command needs the corrected body. Give either --body or --file")
    corrected = file.read() if file is not None else (body or "").encode()
    with shell.broker() as broker:
        those = chosen(group, _parked(broker, group, topic), key or (), offset or (), False, single=True)
        former = tools.parked_row(broker, group, those)["body"]
        change = f"{described(those)} of group {group} from {_named(those)}, {_preview(former)}, by {_preview(corrected)}"
        shell.ask(f"Replace the body of {change}?", yes)
        _order(shell, broker, group, "replace", those, corrected)


def _parked(broker: Broker, group: str, topic: str | None) -> list[ParkedKey]:
    """Return the parked keys, only of one topic or queue if ``topic`` names it. Raises GroupError MISSING, TopicError, OptionError."""
    name = None if topic is None else queue_names.topic_of(topic)
    keys = tools.parked_keys(broker, group)
    if topic is None or name is None:
        return keys
    queues = set(queue_names.find_all(topic, broker.log.queues(name)))
    return [key for key in keys if key.queue in queues]


def _order(
    shell: Shell, broker: Broker, group: str, action: CommandAction, those: list[ParkedKey], body: bytes | None = None
) -> None:
    alive = tools.owned(broker, group)
    tools.give(broker, group, action, those, body)
    queues = sorted({key.queue for key in those})
    row = {
        "group": group,
        "action": action,
        "keys": len(those),
        "messages": sum(key.messages for key in those),
        "queues": [{**queue_fields(queue), "owned": alive.get(queue, False)} for queue in queues],
    }
    if not those:
        shell.done(row, f"nothing is parked in group {group}")
        return
    who = f"the owner of {_named(those)} carries the command out in its next micro-batch"
    shell.done(row, f"ordered to {tools.order(action, those)} of group {group}: {who}")
    alone = [key for key in those if not alive.get(key.queue, False)]
    if alone:
        shell.note(f"no query owns {_named(alone)} in group {group} now. The next owner carries the command out")


def _preview(body: bytes) -> str:
    return f"{preview(body_text(body_fields(body)), _PREVIEW)!r} ({len(body):,} bytes)"


def _named(those: Iterable[ParkedKey]) -> str:
    queues = sorted({key.queue for key in those})
    if len(queues) == 1:
        return f"queue {queues[0]}"
    return f"queues {', '.join(map(str, queues[:3]))}{' and others' if queues[3:] else ''}"
