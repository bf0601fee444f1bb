"""Appending rows to a topic from outside Spark, each to the queue that its sharding key chooses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.selector import HashSelector


class Producer:
    """Writes to one topic as the sink does with messageQueueSelector=hash. Not thread-safe: it keeps the turn of rows without a key."""

    def __init__(self, log: Log, topic: str) -> None:
        """Raises TopicError MISSING."""
        self._log = log
        self._queues = log.targets(topic)
        self._selector = HashSelector()

    def send(self, rows: pa.RecordBatch) -> None:
        """Append rows (PRODUCER_COLUMNS, ``body`` required) in their order; durable, queue by queue, when it returns.

        One append per queue: the more rows, the less each costs. Raises what Log.append raises; earlier queues have their rows then.
        """
        keys = rows.column("sharding_key") if "sharding_key" in rows.schema.names else None
        chosen = self._selector.select(rows, keys, len(self._queues))
        order = np.argsort(chosen, kind="stable")
        together = rows.take(pa.array(order))
        begin = 0
        for number, count in enumerate(np.bincount(chosen, minlength=len(self._queues)).tolist()):
            if count:
                self._log.append(self._queues[number], together.slice(begin, count))
                begin += count
