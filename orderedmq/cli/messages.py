"""``orderedmq peek``: shows messages, also as they arrive, without a group and without moving an offset."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import typer

from orderedmq.broker import Log, QueueBounds
from orderedmq.cli import queue_names
from orderedmq.cli.queue_names import stored_key
from orderedmq.cli.shell import LONGEST, WHOLE, Column, Full, Shell, command, commands
from orderedmq.cli.topics import Name
from orderedmq.conditions import DataLossCondition, OptionCondition
from orderedmq.errors import DataLossError, OptionError, no_such_offset
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.pulls import pulls
from orderedmq.tools.browse import by_arrival
from orderedmq.tools.readable import body_fields, body_text, moment, one_line, recent_moment, shortened

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
_PULL_ROWS = 65536
_PULL_BYTES = 16 * 1024 * 1024
#: Seconds between two polls of a broker without `Log.change`, and of a broker with it.
_LOOK: Final = 0.5
_GLANCE: Final = 0.1

Pull = Callable[[MessageQueue, int, int], pa.RecordBatch]


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
            help="Show new messages as they arrive, until Ctrl-C. With --last or --offset, also show earlier messages.",
        ),
    ] = False,
    full: Full = False,
) -> None:
    """Show the first or last messages of a topic, or messages from an offset on. Messages of several queues are in the order of arrival.

    A body is shown as text if it is UTF-8, else in hexadecimal digits. A table has one line per message, with the beginning of its body,
    and times without the date of today. With --full, and in JSON, values are complete. --follow cuts a value after 1,920 characters.
    """
    if offset is not None and (queue is None or last is not None):
        raise OptionError(OptionCondition.CONFLICT, "option --offset needs --queue and excludes --last")
    if last is not None and count is not None and not follow:
        raise OptionError(OptionCondition.CONFLICT, "option --last already says how many messages to show. Drop --count")
    with shell.broker() as broker:
        queues = broker.log.queues(topic)
        if queue is not None:
            queues = [queue_names.find(queue, queues)]
        most = last or count or 10
        look = Look(broker.log, (*_COLUMNS, "properties") if shell.json else _COLUMNS, key)
        if follow:
            _follow(shell, look, topic, None if queue is None else queues[0], offset, last, count, full)
            return
        bounds = broker.log.bounds(queues)
        parts = [
            part
            for queue_at, at in bounds.items()
            for part in look.some(queue_at, at, offset, most, backwards=last is not None)
        ]
    rows = _rows(parts)
    columns: tuple[Column, ...] = (
        *queue_names.columns(rows, topic=False),
        Column("queue_offset", "offset", right=True),
        Column("store_timestamp", "stored (UTC)", recent_moment),
        Column("sharding_key", "key"),
        Column("tags", "tags"),
        Column("body", "body", cut=True),
    )
    if not shell.json:
        rows = [{**row, "body": body_text(row)} for row in rows]
    if not any(row["tags"] for row in rows):
        columns = tuple(column for column in columns if column.field != "tags")
    shell.show(rows[-most:] if last else rows[:most], columns, none="no messages", full=full)


def _follow(
    shell: Shell,
    look: Look,
    topic: str,
    queue: MessageQueue | None,
    offset: int | None,
    last: int | None,
    count: int | None,
    full: bool,
) -> None:
    """Show messages as they arrive, until Ctrl-C or until ``count`` messages are shown."""

    def there() -> list[MessageQueue]:
        queues = look.log.queues(topic)
        return queues if queue is None else [other for other in queues if other == queue]

    bounds = look.log.bounds(there())
    positions = {each: at.max_offset if offset is None else _begin(each, at, offset) for each, at in bounds.items()}
    shown, lines = 0, Lines(shell, full)
    if sys.stdout.isatty():
        shell.note("waiting for messages. Press Ctrl-C to end")
    try:
        if last is not None:
            before = [part for each, at in bounds.items() for part in look.some(each, at, None, last, backwards=True)]
            rows = _rows(before)[-last:]
            shown += len(rows)
            lines.show(rows, body_text)
        if count is not None and shown >= count:
            return
        for parts in arrivals(look.log, there, positions, look.pull, shell.note):
            rows = _rows([look.of_key(part) for part in parts])[: None if count is None else max(0, count - shown)]
            shown += len(rows)
            lines.show(rows, body_text)
            if count is not None and shown >= count:
                return
    except KeyboardInterrupt:
        # Ctrl-C is the normal end.
        return


@dataclass(frozen=True)
class Look:
    """Reads some columns of all messages, or only of messages with one sharding key."""

    log: Log
    columns: tuple[str, ...]
    key: str | None

    def pull(self, queue: MessageQueue, begin: int, end: int) -> pa.RecordBatch:
        """Return messages of all keys from ``begin`` on. Their store times are integers, and not timestamps."""
        return self._shown(self.log.pull(queue, begin, min(_PULL_ROWS, end - begin), _PULL_BYTES, self.columns))

    def _shown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        index = self.columns.index("store_timestamp")
        return batch.set_column(index, "store_timestamp", batch.column(index).cast(pa.int64()))

    def of_key(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.key is None else batch.filter(pc.fill_null(pc.equal(batch["sharding_key"], self.key), False))

    def some(
        self, queue: MessageQueue, at: QueueBounds, offset: int | None, most: int, *, backwards: bool
    ) -> list[pa.RecordBatch]:
        """Return at least the first or last ``most`` messages of a queue, or all if it has fewer.

        Raises DataLossError if messages were deleted since ``at`` was read.
        """
        begin, end = at.min_offset if offset is None else _begin(queue, at, offset), at.max_offset
        if backwards and self.key is None:
            begin = max(begin, end - most)
        elif self.key is None:
            end = min(end, begin + most)
        out: list[pa.RecordBatch] = []
        rows = 0
        for batch in pulls(self.log, queue, begin, end, _PULL_ROWS, _PULL_BYTES, self.columns):
            out.append(self.of_key(self._shown(batch)))
            rows += out[-1].num_rows
            while backwards and rows - out[0].num_rows >= most:
                rows -= out.pop(0).num_rows
            if not backwards and rows >= most:
                break
        return out


def _begin(queue: MessageQueue, at: QueueBounds, offset: int) -> int:
    """Return ``offset``, or the queue's first offset if that is greater. Raises OffsetError BEYOND_END."""
    if offset > at.max_offset:
        raise no_such_offset(queue, at.max_offset, f"offset {offset}. Give --offset {at.max_offset} or less")
    return max(at.min_offset, offset)


def _rows(parts: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return messages in the order of arrival."""
    return [_readable(row) for row in by_arrival(row for part in parts for row in part.to_pylist())]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    body: bytes = row.pop("body")
    row["store_timestamp"] = moment(row["store_timestamp"])
    if "properties" in row:
        row["properties"] = dict(row["properties"] or ())
    where = {"topic": row.pop("topic"), "broker": row.pop("broker_name"), "queue_id": row.pop("queue_id")}
    return {**where, **row, **body_fields(body)}


def arrivals(
    log: Log,
    queues: Callable[[], Sequence[MessageQueue]],
    positions: dict[MessageQueue, int],
    pull: Pull,
    note: Callable[[str], None],
) -> Iterator[list[pa.RecordBatch]]:
    """Yield messages from ``positions`` on, in batches, as they arrive. This never ends. Messages of a queue are in order.

    A new queue is read from its first message. Raises TopicError MISSING if the topic is deleted, and DataLossError TOPIC_RECREATED
    if a queue ends before its position.
    """
    while True:
        changed = log.change()
        there = queues()
        batches = []
        for queue, at in log.bounds(list(there)).items():
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
                batch = pull(queue, begin, at.max_offset)
                begin += batch.num_rows
                # The batch is empty if the broker has lost messages since it returned the bounds.
                batches += [batch] if batch.num_rows else []
            positions[queue] = begin
        if batches:
            yield batches
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
