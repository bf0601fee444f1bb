"""Messages of a queue up to an end that is known, pull by pull."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.errors import beyond_end
from orderedmq.model import MessageQueue


def pulls(
    log: Log, queue: MessageQueue, begin: int, end: int, max_messages: int, max_bytes: int, columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """The messages from ``begin`` to ``end``, in order and without a gap, at most ``max_messages`` in a batch.

    It never waits for messages: each pull gives some, or the queue ends there. Raises DataLossError BEYOND_END then, because it had messages
    up to ``end`` when that was read; else as `Log.pull`.
    """
    while begin < end:
        batch = log.pull(queue, begin, min(max_messages, end - begin), max_bytes, columns)
        if not batch.num_rows:
            known = f"it had messages up to {end} a moment ago"
            raise beyond_end(queue, begin, known, log.tail_loss)
        begin += batch.num_rows
        yield batch
