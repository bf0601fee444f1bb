"""Helpers for the pulls of all brokers: a limit of bytes, and reading a queue up to a known end or at given offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.errors import beyond_end
from orderedmq.model import MessageQueue

#: Offsets that are less than this apart are read by one pull, because a RocketMQ broker returns 32 messages at a time anyway.
_NEAR: Final = 32


def bounded(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Return the first rows, at least one, whose bodies fit into ``max_bytes``; all rows if there is no column body."""
    index = batch.schema.get_field_index("body")
    if index < 0 or batch.num_rows < 2:
        return batch
    sizes = pc.binary_length(batch.column(index))
    if int(pc.sum(sizes).as_py() or 0) <= max_bytes:
        return batch
    sums = pc.cumulative_sum(sizes.cast(pa.int64()))
    return batch.slice(0, max(1, int(pc.sum(pc.less_equal(sums, max_bytes)).as_py() or 0)))


def pulls(
    log: Log, queue: MessageQueue, begin: int, end: int, max_messages: int, max_bytes: int, columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages from ``begin`` to ``end``, in order and without a gap, at most ``max_messages`` in a batch.

    Never waits for messages. Raises the errors of `Log.pull`, and DataLossError BEYOND_END if a pull returns no messages. In that
    case the queue ends before ``end`` now, although it reached ``end`` when the caller read that offset.
    """
    while begin < end:
        batch = log.pull(queue, begin, min(max_messages, end - begin), max_bytes, columns, None, end)
        if not batch.num_rows:
            known = f"it had messages up to {end} a moment ago"
            raise beyond_end(queue, begin, known, log.tail_loss)
        begin += batch.num_rows
        yield batch


def pulls_at(
    log: Log, queue: MessageQueue, offsets: Sequence[int], max_messages: int, max_bytes: int, columns: tuple[str, ...]
) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    """Yield batches of the messages at ``offsets``, which are ascending, each batch with its offsets. Otherwise like `pulls`."""
    wanted = set(offsets)
    for begin, end in _runs(offsets):
        for rows in pulls(log, queue, begin, end, max_messages, max_bytes, columns):
            chosen = [at for at in range(begin, begin + rows.num_rows) if at in wanted]
            yield chosen, rows.take(pa.array([at - begin for at in chosen], pa.int64()))
            begin += rows.num_rows


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges [begin, end) that contain all of ``offsets``, which are ascending, and few other offsets."""
    if not offsets:
        return
    begin = end = offsets[0]
    for at in offsets:
        if at - end >= _NEAR:
            yield begin, end
            begin = at
        end = at + 1
    yield begin, end
