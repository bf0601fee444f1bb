"""The rule by which a table has each message once: which rows of a micro-batch it lacks, and how far it is after them. Pure.

A table's position in a queue is the offset of the next message. Messages below it are in the table, or were left out on purpose.

If a topic is deleted and created again, its offsets start again. Brokers of RocketMQ store nothing that distinguishes the new topic, but
its messages were stored later. So a position also has the latest store timestamp of its messages: a row below the position that
was stored later is a message of the new topic. In one topic, no message below the position can have been stored later than all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError
from orderedmq.model import MessageQueue

#: The columns that identify a row's queue.
QUEUE_COLUMNS: Final = ("topic", "broker_name", "queue_id")
#: The columns that identify a row's message. They are the source's.
POSITION_COLUMNS: Final = (*QUEUE_COLUMNS, "queue_offset", "store_timestamp")


class Position(NamedTuple):
    """How far a table is in a queue: the offset of the next message, and the latest store timestamp (µs since 1970) of those before it."""

    next: int
    stored: int


Positions = Mapping[MessageQueue, Position]


def queues_of(rows: pa.RecordBatch) -> list[MessageQueue]:
    """Return the queues of the rows. Raises SchemaError MISSING_COLUMN for a row without a position."""
    for name in POSITION_COLUMNS:
        if rows.column(name).null_count:
            raise SchemaError(
                SchemaCondition.MISSING_COLUMN,
                f"a row has no {name}, so nobody can tell which message it is. Write rows of the source, not of an outer join",
            )
    distinct = pa.Table.from_batches([rows.select(QUEUE_COLUMNS)]).group_by(list(QUEUE_COLUMNS)).aggregate([])
    return sorted(MessageQueue(*queue.values()) for queue in distinct.to_pylist())


def missing(rows: pa.RecordBatch, positions: Positions) -> tuple[pa.Array, dict[MessageQueue, Position]]:
    """Return which rows a table at ``positions`` lacks, as a mask, and the positions of their queues once it has them."""
    mask = pa.repeat(False, rows.num_rows)
    offsets, stored = rows.column("queue_offset"), rows.column("store_timestamp").cast(pa.timestamp("us")).cast(pa.int64())
    moved: dict[MessageQueue, Position] = {}
    for queue in queues_of(rows):
        at = positions.get(queue, Position(0, 0))
        mine = pa.repeat(True, rows.num_rows)
        for name, value in zip(QUEUE_COLUMNS, queue, strict=True):
            mine = pc.and_(mine, pc.equal(rows.column(name), value))
        lacking = pc.and_(mine, pc.or_(pc.greater_equal(offsets, at.next), pc.greater(stored, at.stored)))
        if pc.any(lacking).as_py():
            latest = max(at.stored, pc.max(stored.filter(lacking)).as_py())
            moved[queue] = Position(pc.max(offsets.filter(lacking)).as_py() + 1, latest)
            mask = pc.or_(mask, lacking)
    return mask, moved


def merged(parts: Iterable[Positions]) -> dict[MessageQueue, Position]:
    """Return the positions after all parts of a micro-batch, from those after each part."""
    whole: dict[MessageQueue, Position] = {}
    for part in parts:
        for queue, at in part.items():
            before = whole.get(queue, at)
            whole[queue] = Position(max(before.next, at.next), max(before.stored, at.stored))
    return whole
