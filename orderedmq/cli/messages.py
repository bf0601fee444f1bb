"""``orderedmq peek``: shows messages, also as they arrive, without a group and without moving an offset."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

import typer

from orderedmq.broker import Log
from orderedmq.cli import queue_names
from orderedmq.cli.queue_names import stored_key
from orderedmq.cli.shell import LONGEST, WHOLE, Column, Full, Shell, command, commands, parse_moment
from orderedmq.cli.topics import Name
from orderedmq.conditions import DataLossCondition, OptionCondition
from orderedmq.errors import DataLossError, OptionError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.tools.readable import body_fields, body_text, moment, one_line, recent_moment, shortened
from orderedmq.tools.reader import Ranges, Selection, batches, ranges, rows

app = commands("")

_COLUMNS = (
    "topic",
    "broker_name",
    "queue_id",
    "queue_offset",
    "sharding_key",
    "tags",
    "keys",
    "body",
    "store_timestamp",
    "message_id",
)
#: Seconds between two polls of a broker without `Log.change`, and of a broker with it.
_LOOK: Final = 0.5
_GLANCE: Final = 0.1
#: Messages that are shown if no option says how many.
_MOST: Final = 10


@command(app, "peek")
def peek(
    shell: Shell,
    topic: Name,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            help="Only this queue: its number, or BROKER/QUEUE or TOPIC/BROKER/QUEUE if several brokers have a queue with that number.",
            metavar="QUEUE",
            show_default=False,
        ),
    ] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Begin at this offset. Needs --queue.", show_default=False)] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only messages stored at this time or later, in ISO-8601 (UTC unless it has a zone), as 18:05 of today, or 5m ago.",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Number of messages to show from the end.", show_default=False)
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            help="Maximum number of messages (default: 10, or no limit with --follow).",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(parser=stored_key, help="Only messages with this sharding key.", metavar="TEXT", show_default=False),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Show new messages as they arrive, until Ctrl-C. With --last, --offset or --since, also show earlier messages.",
        ),
    ] = False,
    full: Full = False,
) -> None:
    """Show the first or last messages of a topic, or messages from an offset on. Messages of several queues are in the order of arrival.

    A body is shown as text if it is UTF-8, else in hexadecimal digits. A table has one line per message, with the beginning of its body,
    and times without the date of today. With --full, and in JSON, values are complete. --follow cuts a value after 1,920 characters.
    """
    if last is not None and count is not None and not follow:
        raise OptionError(OptionCondition.CONFLICT, "option --last already says how many messages to show. Drop --count")
    chosen = Selection((*_COLUMNS, "properties") if shell.json else _COLUMNS, key, last=last)
    stored = None if since is None else parse_moment(since, "--since")
    with shell.broker() as broker:
        spans = ranges(broker.log, topic, queue or "", offset, stored)
        if follow:
            from_end = last is not None or (offset is None and since is None)
            topic_or_queue = partial(_queues, broker.log, topic, None if queue is None else spans)
            _follow(shell, broker.log, topic_or_queue, spans, from_end, chosen, count, full)
            return
        most = sys.maxsize if last is not None else count or _MOST
        # One message more than is shown tells whether more messages follow.
        chosen = chosen if last is not None else replace(chosen, first=most + 1)
        messages = [row for part in _parts(broker.log, spans, chosen) for row in part]
    more = len(messages) > most
    del messages[most:]
    columns: tuple[Column, ...] = (
        *queue_names.columns(messages, topic=False),
        Column("queue_offset", "offset", right=True),
        Column("store_timestamp", "stored (UTC)", recent_moment),
        Column("sharding_key", "key"),
        Column("tags", "tags"),
        *((Column("keys", "keys"),) if full else ()),
        Column("body", "body", cut=True),
    )
    if not shell.json:
        messages = [{**message, "body": body_text(message)} for message in messages]
    if not any(message["tags"] for message in messages):
        columns = tuple(column for column in columns if column.field != "tags")
    shell.show(messages, columns, none="no messages", full=full)
    if more:
        shell.note("more messages follow. Give --count, --last or --since")


def _follow(
    shell: Shell,
    log: Log,
    queues: Callable[[], Sequence[MessageQueue]],
    spans: Ranges,
    from_end: bool,
    chosen: Selection,
    count: int | None,
    full: bool,
) -> None:
    """Show messages as they arrive, until Ctrl-C or until ``count`` messages are shown. First show the last ones that `chosen` has.

    ``queues`` returns the queues to read. ``from_end``: begin at the ends of ``spans``, not at their beginnings.
    """
    if sys.stdout.isatty():
        shell.note("waiting for messages. Press Ctrl-C to end")

    def parts() -> Iterator[list[dict[str, Any]]]:
        if chosen.last is not None:
            yield from _parts(log, spans, chosen)
        positions = {each: end if from_end else begin for each, (begin, end) in spans.items()}
        for arrived in arrivals(log, queues, positions, shell.note):
            yield from _parts(log, arrived, replace(chosen, last=None))

    lines, left = Lines(shell, full), sys.maxsize if count is None else count
    try:
        for part in parts():
            lines.show(part[:left], body_text)
            left -= len(part)
            if left <= 0:
                return
    except KeyboardInterrupt:
        # Ctrl-C is the normal end.
        return


def _queues(log: Log, topic: str, only: Ranges | None) -> list[MessageQueue]:
    return [queue for queue in log.queues(topic) if only is None or queue in only]


def _parts(log: Log, spans: Ranges, chosen: Selection) -> Iterator[list[dict[str, Any]]]:
    """Yield messages in the order of arrival."""
    return ([_readable(row) for row in rows(batch)] for batch in batches(log, spans, chosen))


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    body: bytes = row.pop("body")
    row["store_timestamp"] = moment(row["store_timestamp"])
    where = {"topic": row.pop("topic"), "broker": row.pop("broker_name"), "queue_id": row.pop("queue_id")}
    return {**where, **row, **body_fields(body)}


def arrivals(
    log: Log, queues: Callable[[], Sequence[MessageQueue]], positions: dict[MessageQueue, int], note: Callable[[str], None]
) -> Iterator[Ranges]:
    """Yield the ranges of messages that have arrived from ``positions`` on. This never ends.

    A new queue is read from its first message. Raises TopicError MISSING if the topic is deleted, and DataLossError TOPIC_RECREATED
    if a queue ends before its position.
    """
    while True:
        changed = log.change()
        arrived = {}
        for queue, at in log.bounds(queues()).items():
            begin = positions.setdefault(queue, at.min_offset)
            if begin > at.max_offset:
                raise DataLossError(
                    DataLossCondition.TOPIC_RECREATED,
                    f"queue {queue} ends at {at.max_offset}, but it had reached {begin}: topic {queue.topic!r} was "
                    "deleted and created again, or its broker lost messages. Run the command again",
                )
            if begin < at.min_offset:
                note(
                    f"messages {begin} to {at.min_offset - 1} of queue {queue} were deleted by retention before they were shown"
                )
                begin = at.min_offset
            if begin < at.max_offset:
                arrived[queue] = OffsetRange(begin, at.max_offset)
            positions[queue] = at.max_offset
        if arrived:
            yield arrived
            continue
        time.sleep(_LOOK if changed is None else _GLANCE)
        while changed is not None and log.change() == changed:
            time.sleep(_GLANCE)


class Lines:
    """Prints messages, one per line. A table is impossible, because its column widths depend on messages that have not arrived yet.

    ``full``: do not cut long values.
    """

    def __init__(self, shell: Shell, full: bool) -> None:
        self._shell = shell
        self._full = full
        self._queue_width = 0

    def show(self, rows: Sequence[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
        """Print messages as JSON lines, or as lines of queue, offset, time, key, tag and body. Flushes the output."""
        for row in rows:
            if self._shell.json:
                self._shell.emit(row)
                continue
            queue_name = str(row["queue_id"]) if row["broker"] == EMBEDDED_BROKER else f"{row['broker']}/{row['queue_id']}"
            self._queue_width = max(self._queue_width, len(queue_name))
            when = f"{row['store_timestamp'][:10]} {row['store_timestamp'][11:19]}"
            shown = (
                f"{queue_name:>{self._queue_width}} {row['queue_offset']:>8}",
                when,
                row["sharding_key"],
                row["tags"],
                text(row),
            )
            parts = [part or "-" for part in shown]
            self._shell.say("  ".join(one_line(part if self._full else shortened(part, LONGEST, WHOLE)) for part in parts))
        sys.stdout.flush()
