"""``orderedmq topic``: create, list, describe, alter, resize, trim, delete."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import typer

from orderedmq.broker import Broker, Keep, TopicInfo
from orderedmq.cli import queue_names
from orderedmq.cli.queue_names import queue_fields
from orderedmq.cli.shell import Column, Shell, command, commands
from orderedmq.conditions import OptionCondition, TopicCondition, UnavailableCondition
from orderedmq.errors import GroupError, OptionError, RocketMQUnavailableError, TopicError
from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.options.values import (
    EARLIEST,
    LATEST,
    invalid,
    parse_duration,
    parse_offsets_json,
    parse_size,
    queue_spans,
    shown,
)
from orderedmq.tools.group_state import GroupQueue, group_queues
from orderedmq.tools.parked import LotReader
from orderedmq.tools.readable import duration, moment, number, recent_moment, size, yes_no

T = TypeVar("T")

app = commands("Create, inspect, alter, trim and delete topics.")

Name = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, autocompletion=queue_names.topics)]
Queues = Annotated[int, typer.Option("--queues", min=1, max=MAX_QUEUES, help="Number of queues.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_KEPT = (
    Column("retention_seconds", "kept for", duration, right=True),
    Column("retention_bytes", "kept up to", size, right=True),
    Column("compression", "compression"),
)


def parse_retention(text: str) -> float:
    """Return the number of seconds in a duration such as 30m or 7d. Raises OptionError INVALID."""
    days = re.fullmatch(r"([0-9]{1,9})d", text.strip())
    if days:
        return int(days[1]) * 86400.0
    try:
        return parse_duration(text.strip(), "--retention-time")
    except OptionError as error:
        raise invalid(
            "--retention-time", f"{shown(text)} is not a duration. Write a whole number and s, m, h or d, for example 7d"
        ) from error


def topic_row(topic: TopicInfo) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "queues": topic.queues,
        "closed": topic.closed,
        "retention_seconds": topic.retention_seconds,
        "retention_bytes": topic.retention_bytes,
        "compression": topic.compression,
        "incarnation": topic.incarnation,
    }


@command(app, "create")
def create(
    shell: Shell,
    name: Name,
    queues: Queues,
    retention_time: Annotated[
        str | None, typer.Option(help="Keep messages for this time: 7d, 12h, 30m (default: forever).", metavar="TIME")
    ] = None,
    retention_size: Annotated[
        str | None,
        typer.Option(
            help="Keep at most this many bytes in all queues together: 10g, 500m (default: no limit).", metavar="SIZE"
        ),
    ] = None,
    compression: Annotated[Literal["none", "lz4"], typer.Option(help="The compression of stored messages.")] = "lz4",
    message_type: Annotated[
        Literal["NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED"] | None,
        typer.Option(help="Over RocketMQ 5: the type of the messages, which a RocketMQ Proxy checks.", show_default=False),
    ] = None,
    if_not_exists: Annotated[
        bool,
        typer.Option("--if-not-exists", help="Accept an existing topic unchanged if it has the same number of queues."),
    ] = False,
) -> None:
    """Create a topic, and also the store if it is missing."""
    settings = {
        "retention_seconds": None if retention_time is None else parse_retention(retention_time),
        "retention_bytes": None if retention_size is None else parse_size(retention_size.strip(), "--retention-size"),
        "compression": compression,
    }
    created = same_type = True
    with shell.broker() as broker:
        try:
            info = broker.admin.create_topic(name, queues, message_type=message_type, **settings)  # type: ignore[arg-type]
        except TopicError as error:
            if error.sub != TopicCondition.EXISTS or not if_not_exists:
                raise
            info, created = broker.log.topic(name), False
            same_type = message_type in (None, broker.admin.message_type(name))
    if info.queues != queues:
        raise TopicError(
            TopicCondition.QUEUE_COUNT,
            f"topic {name!r} exists with {info.queues} queues, not {queues}. Give --queues {info.queues}, or see orderedmq topic "
            "resize",
        )
    if created:
        text = f"created topic {name} with {queues} queues in {shell.address}"
    else:
        text = f"topic {name} exists with {queues} queues in {shell.address}"
    shell.done({**topic_row(info), "created": created}, text)
    if not (created or (same_type and all(getattr(info, setting) == value for setting, value in settings.items()))):
        shell.note(f"topic {name} keeps its settings. Use orderedmq topic alter to change its retention")


@command(app, "list")
def list_topics(shell: Shell) -> None:
    """Show all topics with their queues, messages and settings."""
    rows = []
    with shell.broker() as broker:
        for topic in broker.log.topics():
            try:
                bounds = broker.log.bounds(broker.log.queues(topic.name)).values()
            except TopicError:
                # The topic was deleted after it was listed.
                continue
            rows.append({**topic_row(topic), "messages": sum(at.max_offset - at.min_offset for at in bounds)})
    columns = (
        Column("topic", "topic"),
        Column("queues", "queues", number, right=True),
        Column("messages", "messages", number, right=True),
        *_KEPT,
    )
    shell.show(rows, columns, none=f"there are no topics in {shell.address}")


@command(app, "describe")
def describe(shell: Shell, name: Name) -> None:
    """Show each queue of a topic: offsets, size on disk, times."""
    with shell.broker() as broker:
        topic = broker.log.topic(name)
        details = broker.admin.describe_topic(name)
        waits = _waits(broker, name)
        message_type = broker.admin.message_type(name)
    rows = [
        {
            **queue_fields(queue.queue),
            "min_offset": queue.bounds.min_offset,
            "max_offset": queue.bounds.max_offset,
            "messages": queue.bounds.max_offset - queue.bounds.min_offset,
            "stored_bytes": queue.stored_bytes,
            "chunks": queue.chunks,
            "first_stored": moment(queue.first_timestamp),
            "last_stored": moment(queue.last_timestamp),
            "readable": queue.readable,
            **({} if message_type is None else {"message_type": message_type}),
        }
        for queue in details
    ]
    limits = [
        f"{column.title} {column.text(value)}" for column in _KEPT if (value := topic_row(topic)[column.field]) is not None
    ]
    columns = (
        *queue_names.columns(rows, topic=False),
        Column("min_offset", "first", number, right=True),
        Column("max_offset", "next", number, right=True),
        Column("messages", "messages", number, right=True),
        Column("stored_bytes", "size", size, right=True),
        Column("chunks", "chunks", number, right=True),
        Column("first_stored", "oldest (UTC)", recent_moment),
        Column("last_stored", "newest (UTC)", recent_moment),
        *(() if all(row["readable"] for row in rows) else (Column("readable", "readable", yes_no),)),
    )
    total = (
        f"{number(sum(row['messages'] for row in rows))} messages{'' if message_type is None else f' of type {message_type}'}"
    )
    closed = len(rows) - topic.queues
    queues = f"{topic.queues} queues" + (f" and {closed} that take no more messages" if closed > 0 else "")
    shell.show(rows, columns, title=f"{name}: {', '.join([queues, total, *limits])}")
    for state in waits:
        shell.done(
            {"topic": name, "group": state.group, **queue_fields(state.queue), "waits_for": state.waits},
            f"group {state.group}: queue {state.queue.queue_id} waits for {state.waits}",
        )


def _waits(broker: Broker, topic: str) -> list[GroupQueue]:
    """Return the queues of a topic that wait for others in some group, because the topic was resized."""
    out: list[GroupQueue] = []
    for group in broker.admin.groups() if broker.log.resizes([topic]) else ():
        # A group may have been deleted after it was listed.
        with contextlib.suppress(GroupError):
            out += [state for state in group_queues(broker, group) if state.queue.topic == topic and state.waits is not None]
    return out


def _parked_groups(broker: Broker, topic: str) -> list[str]:
    """Return the groups that have parked messages of a topic. They hold up its other queues after a resize."""
    groups: list[str] = []
    for group in broker.admin.groups():
        # A group may have been deleted after it was listed.
        with contextlib.suppress(GroupError):
            if any(queue.topic == topic and lot.messages for queue, lot in LotReader(broker).look(group).items()):
                groups.append(group)
    return groups


@command(app, "alter")
def alter(
    shell: Shell,
    name: Name,
    retention_time: Annotated[
        str | None,
        typer.Option(
            help="Keep messages for this time: 7d, 12h, 30m, or none to keep them forever.", metavar="TIME", show_default=False
        ),
    ] = None,
    retention_size: Annotated[
        str | None,
        typer.Option(
            help="Keep at most this many bytes in all queues together: 10g, 500m, or none for no limit.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Change how long a topic keeps its messages. The next write or topic trim deletes messages beyond the new limits."""
    if retention_time is None and retention_size is None:
        raise OptionError(
            OptionCondition.MISSING, "the command does not say what to change. Give --retention-time, --retention-size or both"
        )
    with shell.broker() as broker:
        changed = broker.admin.alter_topic(
            name,
            retention_seconds=_changed(retention_time, parse_retention),
            retention_bytes=_changed(retention_size, lambda text: parse_size(text.strip(), "--retention-size")),
        )
    limits = [duration(changed.retention_seconds)] if changed.retention_seconds is not None else []
    limits += [f"up to {size(changed.retention_bytes)}"] if changed.retention_bytes is not None else []
    shell.done(topic_row(changed), f"topic {name} keeps messages {' and '.join(limits) or 'forever'}")


def _changed(text: str | None, parse: Callable[[str], T]) -> T | Keep | None:
    """Return the value of an option: Keep.KEEP if it is not given, None for no limit, else the parsed limit."""
    if text is None:
        return Keep.KEEP
    return None if text.strip().lower() == "none" else parse(text)


@command(app, "resize")
def resize(shell: Shell, name: Name, queues: Queues) -> None:
    """Change a topic's number of queues, up or down, while it is written and read. Every key keeps its order.

    A queue is read beyond the resize when the queues that may have older messages of its keys are processed up to there. Over RocketMQ
    the topic takes no messages for about 50 s first, until every producer has noticed. Run a killed command again.
    """
    with shell.broker() as broker:
        resized = broker.admin.resize_topic(name, queues)
        parked = _parked_groups(broker, name)
    closed = f". {resized.closed} others take no more messages and are read to their ends" if resized.closed else ""
    shell.done(topic_row(resized), f"topic {name} has {resized.queues} queues{closed}")
    for group in parked:
        shell.note(
            f"group {group} has parked messages in this topic. Queues that may have had their keys are read beyond the resize once the parked "
            f"messages are decided: see orderedmq parked list {group}"
        )


@command(app, "trim")
def trim(
    shell: Shell,
    name: Name,
    before: Annotated[
        str | None,
        typer.Option(
            help='Delete messages before these offsets: {"orders": {"embedded": {"0": 23, "1": -1}}}, where -1 is the end. Queues that are '
            "not named keep their messages (default: delete by the topic's retention).",
            metavar="JSON",
        ),
    ] = None,
) -> None:
    """Delete old messages in whole chunks, by the topic's retention or before given offsets."""
    with shell.broker() as broker:
        topic = broker.log.topic(name)
        if before is None:
            gone = broker.admin.trim(name)
        else:
            gone = broker.admin.trim(name, _limits(name, before, broker.log.bounds(broker.log.queues(name))))
        bounds = broker.log.bounds(broker.log.queues(name))
    rows = [
        {
            **queue_fields(queue),
            "deleted": gone.get(queue, 0),
            "min_offset": at.min_offset,
            "max_offset": at.max_offset,
        }
        for queue, at in bounds.items()
    ]
    columns = (
        *queue_names.columns(rows, topic=False),
        Column("deleted", "deleted", number, right=True),
        Column("min_offset", "first", number, right=True),
        Column("max_offset", "next", number, right=True),
    )
    shell.show(rows, columns)
    if before is None and topic.retention_seconds is None and topic.retention_bytes is None:
        shell.note(f"topic {name} keeps messages forever, so no message is due for deletion. Give --before")


def _limits(name: str, before: str, bounds: dict[MessageQueue, Any]) -> dict[MessageQueue, int]:
    limits: dict[MessageQueue, int] = {}
    for queue, offset in parse_offsets_json(before, "--before").items():
        if queue.topic != name or queue not in bounds:
            raise OptionError(
                OptionCondition.INVALID,
                f"option --before: topic {name} has no queue {queue}. Its queues are {queue_spans(list(bounds))}",
            )
        end = bounds[queue].max_offset
        if offset > end:
            raise OptionError(OptionCondition.INVALID, f"option --before: queue {queue} ends at {end}, not at {offset}")
        limits[queue] = end if offset == LATEST else 0 if offset == EARLIEST else offset
    return limits


@command(app, "delete")
def delete(shell: Shell, name: Name, yes: Yes = False) -> None:
    """Delete a topic with its messages, its parked messages and all groups' offsets in it. Asks first."""
    with shell.broker() as broker:
        try:
            queues = broker.log.queues(name)
        except RocketMQUnavailableError as error:
            # The topic has queues for writing only.
            if error.sub != UnavailableCondition.NOT_READABLE:
                raise
            queues = broker.log.targets(name)
        # The account may delete the topic without the right to read its messages, which `Admin.describe_topic` needs.
        bounds = broker.log.bounds(queues).values()
        messages = sum(at.max_offset - at.min_offset for at in bounds)
        shell.ask(f"Delete topic {name} with {messages:,} messages and its parked messages from {shell.address}?", yes)
        broker.admin.delete_topic(name)
    shell.done({"topic": name, "deleted": messages}, f"deleted topic {name} with {messages:,} messages")
