"""Reads a queue up to a known end, pull by pull."""

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

    It never waits for messages. If a pull is empty, the queue ends before ``end``, which it had when ``end`` was read: that
    raises DataLossError BEYOND_END. Otherwise it raises the errors of `Log.pull`.
    """
    while begin < end:
        batch = log.pull(queue, begin, min(max_messages, end - begin), max_bytes, columns)
        if not batch.num_rows:
            known = f"it had messages up to {end} a moment ago"
            raise beyond_end(queue, begin, known, log.tail_loss)
        begin += batch.num_rows
        yield batch
