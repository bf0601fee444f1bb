"""Appends rows to a topic from outside Spark, each to the queue that its sharding key chooses."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.core.selector import KeyedSelectorName, keyed
from orderedmq.core.sharding_key import GivenKeyType, hashed_keys
from orderedmq.model import check_topic
from orderedmq.trace_context import require, sending


class Producer:
    """Writes rows to one topic as the sink does: each goes to the queue that its sharding key chooses.

    Not thread-safe: it counts rows without a key, which go round-robin.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        sharding_key_type: GivenKeyType = "auto",
        selector: KeyedSelectorName = "hash",
        trace_context: bool = False,
    ) -> None:
        """``log`` is that of a connection: ``connect(...).log``, or with RocketMQ's message trace ``connect(...).traced().log``.

        ``sharding_key_type`` ("auto", "text", "int" or "long") and ``selector`` ("hash" or "mod") are the sink's options
        shardingKeyType and messageQueueSelector. ``trace_context``: each send is an OpenTelemetry span, whose context goes into the
        properties of messages that have none (`orderedmq.trace_context`). Raises TopicError MISSING, or RESERVED for a topic that
        belongs to a consumer group; OptionError MISSING without the package opentelemetry-api.
        """
        if trace_context:
            require("Producer(trace_context=True)")
        check_topic(topic, writing=True)
        self._log = log
        self._topic = topic
        self._key_type: GivenKeyType = sharding_key_type
        self._queues = log.targets(topic)
        self._selector = keyed(selector)
        self._trace_context = trace_context

    def send(self, rows: pa.RecordBatch) -> None:
        """Append rows in their order within each queue. They are durable when it returns.

        Columns: ``body`` (binary or string, required), ``sharding_key`` (string or whole number; null: no key), ``tags`` and
        ``keys`` (strings), ``properties`` (a map of strings). Others are ignored. There is one append per queue: the more rows,
        the less each costs. Raises SchemaError, MessageError, and the errors of `Log.append`; the queues before the failed one
        then have their rows.
        """
        if self._trace_context and rows.num_rows:
            with sending(self._queues[0].broker_name, self._topic, rows) as carrying:
                self._send(carrying)
        else:
            self._send(rows)

    def _send(self, rows: pa.RecordBatch) -> None:
        keys = None
        if "sharding_key" in rows.schema.names:
            keys = hashed_keys(rows.column("sharding_key"), self._key_type, f"a batch for topic {self._topic!r}")
        chosen = self._selector.select(rows, keys, len(self._queues))
        order = np.argsort(chosen, kind="stable")
        together = rows.take(pa.array(order))
        begin = 0
        for number, count in enumerate(np.bincount(chosen, minlength=len(self._queues)).tolist()):
            if count:
                self._log.append(self._queues[number], together.slice(begin, count))
                begin += count
