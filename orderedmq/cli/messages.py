"""``orderedmq peek``: a look at messages, without a group and without moving anything."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from orderedmq.broker import Log
from orderedmq.cli import places
from orderedmq.cli.shell import Column, Shell, command, moment, short_moment
from orderedmq.cli.topics import Name
from orderedmq.errors import OffsetError, OptionError
from orderedmq.model import MessageQueue

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


def add_to(app: typer.Typer) -> None:
    command(app, "peek")(peek)


def peek(
    shell: Shell,
    topic: Name,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            help="Only this queue: its number, or BROKER/QUEUE or TOPIC/BROKER/QUEUE where several brokers have one of that number.",
            metavar="QUEUE",
            show_default=False,
        ),
    ] = None,
    offset: Annotated[int | None, typer.Option(min=0, help="Begin at this offset; needs --queue.", show_default=False)] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The last so many messages.", show_default=False)] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="At most so many messages.")] = 10,
    key: Annotated[str | None, typer.Option(help="Only messages with this sharding key.", show_default=False)] = None,
) -> None:
    """Show messages: the first of a topic, or from an offset on, or the last; of several queues in the order of their arrival.

    A body is shown as text if it is UTF-8, else in hexadecimal digits.
    """
    if offset is not None and (queue is None or last is not None):
        raise OptionError("CONFLICT", "option --offset needs --queue, and excludes --last")
    with shell.broker() as broker:
        queues = broker.log.queues(topic)
        if queue is not None:
            queues = [places.one(queue, queues)]
        most = last or count
        found = [part for one in queues for part in _look(broker.log, one, offset, most, key, backwards=last is not None)]
    if len(queues) > 1 and found:
        # Each queue's messages stay in order: their times never go back.
        table = pa.Table.from_batches(found)
        order = pc.sort_indices(
            table, [(name, "ascending") for name in ("store_timestamp", "broker_name", "queue_id", "queue_offset")]
        )
        found = table.take(order).to_batches()
    rows = [_readable(row) for part in found for row in part.to_pylist()]
    columns: tuple[Column, ...] = (
        *places.columns(rows, topic=False),
        Column("queue_offset", "offset", right=True),
        Column("store_timestamp", "stored (UTC)", short_moment),
        Column("sharding_key", "key"),
        Column("tags", "tags"),
        Column("body", "body"),
    )
    if not shell.json:
        rows = [{**row, "body": body_text(row)} for row in rows]
    if not any(row["tags"] for row in rows):
        columns = tuple(column for column in columns if column.field != "tags")
    shell.show(rows[-most:] if last else rows[:most], columns, none="no messages")


def _look(
    log: Log, queue: MessageQueue, offset: int | None, most: int, key: str | None, *, backwards: bool
) -> list[pa.RecordBatch]:
    """The first or last ``most`` messages of a queue, of those with ``key`` if it is given."""
    at = log.bounds([queue])[queue]
    begin, end = at.min_offset, at.max_offset
    if offset is not None:
        if offset > end:
            raise OffsetError("BEYOND_END", f"queue {queue} ends at {end}, there is no offset {offset}")
        begin = max(begin, offset)
    if backwards and key is None:
        begin = max(begin, end - most)
    out: list[pa.RecordBatch] = []
    rows = 0
    while begin < end and (backwards or rows < most):
        batch = log.pull(queue, begin, min(_PULL_ROWS, end - begin) if key or backwards else most - rows, _PULL_BYTES, _COLUMNS)
        begin += batch.num_rows
        place = _COLUMNS.index("store_timestamp")
        batch = batch.set_column(place, "store_timestamp", batch.column(place).cast(pa.int64()))
        if key is not None:
            batch = batch.filter(pc.fill_null(pc.equal(batch["sharding_key"], key), False))
        out.append(batch)
        rows += batch.num_rows
        while backwards and rows - out[0].num_rows >= most:
            rows -= out.pop(0).num_rows
    return out


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    body: bytes = row.pop("body")
    row["store_timestamp"] = moment(row["store_timestamp"])
    where = {"topic": row.pop("topic"), "broker": row.pop("broker_name"), "queue_id": row.pop("queue_id")}
    return {**where, **row, **body_fields(body)}


def body_fields(body: bytes) -> dict[str, Any]:
    """A body as text if it is UTF-8, else in hexadecimal digits."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_hex": body.hex(), "body": None}


def body_text(row: dict[str, Any]) -> str:
    """The same for a table."""
    return f"0x{row['body_hex']}" if row["body"] is None else row["body"]
