"""What the pulls of all brokers share: the limit of their bytes, and reading a queue up to a known end."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.errors import beyond_end
from orderedmq.model import MessageQueue


def bounded(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Return the first rows whose bodies fit into ``max_bytes``, at least one; without the column body, all rows."""
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

    It never waits for messages. If a pull is empty, the queue ends before ``end``, which it had when ``end`` was read: that
    raises DataLossError BEYOND_END. Otherwise it raises the errors of `Log.pull`.
    """
    while begin < end:
        batch = log.pull(queue, begin, min(max_messages, end - begin), max_bytes, columns, None, end)
        if not batch.num_rows:
            known = f"it had messages up to {end} a moment ago"
            raise beyond_end(queue, begin, known, log.tail_loss)
        begin += batch.num_rows
        yield batch
