"""Appends rows to a topic without Spark, each to the queue that its sharding key chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, TypeAlias

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.conditions import TopicCondition
from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue, check_topic
from orderedmq.routing.selector import KeyedSelectorName, by_queue, keyed
from orderedmq.routing.sharding_key import GivenKeyType, hashed_keys
from orderedmq.rows.given import Row, producer_rows
from orderedmq.trace_context import require, sending

Rows: TypeAlias = Mapping[MessageQueue, pa.RecordBatch]
#: How often queues are chosen for the same rows. If their topics change more often than that, the servers disagree about the queues.
_CHOICES: Final = 5


def append_chosen(
    log: Log,
    targets: dict[str, list[MessageQueue]],
    choose: Callable[[], Rows],
    append: Callable[[Rows, Collection[MessageQueue]], object] | None = None,
) -> None:
    """Append the rows for which ``choose`` chooses queues among ``targets``, by ``append`` (default: `Log.append`).

    ``targets`` has the targets of each topic. If a topic has other targets now, ``targets`` is updated and ``choose`` is called again.
    Raises the errors of `Log.append` and `Log.targets`.
    """
    for choices_left in reversed(range(_CHOICES)):
        rows = choose()
        topics = {queue.topic for queue in rows}
        try:
            if topics:
                (append or log.append)(rows, [queue for topic in topics for queue in targets[topic]])
            return
        except TopicError as error:
            # The broker may notice that a chosen queue is gone before it compares the targets. After either error no row is stored.
            if error.sub not in (TopicCondition.QUEUE_COUNT, TopicCondition.NO_SUCH_QUEUE) or not choices_left:
                raise
            now = {topic: log.targets(topic) for topic in topics}
            # A topic that had other targets for the append may have the former ones again.
            if error.sub == TopicCondition.NO_SUCH_QUEUE and all(targets[topic] == now[topic] for topic in topics):
                raise
            targets.update(now)


class Producer:
    """Writes rows to one topic as the sink does: each row goes to the queue that its sharding key chooses.

    After the topic's queues have changed, keys choose among the new ones. A producer is not thread-safe, because it counts the rows
    without a key, which go to the queues in turn.
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
        """``log`` is the log of a connection: ``connect(...).log``.

        ``sharding_key_type`` ("auto", "text", "int" or "long") and ``selector`` ("hash" or "mod") are the sink's options
        shardingKeyType and messageQueueSelector. ``trace_context``: each send is an OpenTelemetry span, and its context is added to
        the properties of messages without a context (`orderedmq.trace_context`). Raises TopicError MISSING, or RESERVED for a topic
        that belongs to a consumer group; OptionError MISSING without the package opentelemetry-api.
        """
        if trace_context:
            require("Producer(trace_context=True)")
        check_topic(topic, writing=True)
        self._log = log
        self._topic = topic
        self._key_type: GivenKeyType = sharding_key_type
        self._targets = {topic: log.targets(topic)}
        self._selector = keyed(selector)
        self._trace_context = trace_context

    def send(self, rows: Row | list[Row], *, key: str | None = None) -> None:
        """Append rows, keeping their order within each queue. The rows are durable when this method returns.

        ``rows`` is a dict of a message's columns, ``(key, body)``, a DataFrame of pandas, a table of any package that speaks Arrow (a
        `pyarrow.Table` or record batch, a frame of Polars, the messages of `orderedmq.read`), or a list of these.

        Columns: ``body`` (text or bytes; of a single message also a dict or list, which becomes JSON), which is required;
        ``sharding_key`` (text or whole number; null: no key), ``tags`` and ``keys`` (texts), ``properties`` (a map of texts, or a dict).
        ``key``: the column that has the sharding keys instead. Columns that only a broker sets are ignored; any other column is refused.

        Many rows per call are cheaper: on the embedded broker a call is one transaction, over RocketMQ one or more requests per
        queue. The rows of a queue have at most 2 GiB in each column. All rows are checked before any is sent. Raises SchemaError
        (UNKNOWN_COLUMN, MISSING_COLUMN, WRONG_TYPE), MessageError, and the errors of `Log.append`. After an error no row is stored on the
        embedded broker; over RocketMQ the error says how many rows of which queues were stored.
        """
        self._append(producer_rows(rows, key, f"topic {self._topic!r}"))

    def _append(self, rows: pa.RecordBatch) -> None:
        if self._trace_context and rows.num_rows:
            with sending(self._targets[self._topic][0].broker_name, self._topic, rows) as carrying:
                self._send(carrying)
        else:
            self._send(rows)

    def _send(self, rows: pa.RecordBatch) -> None:
        append_chosen(self._log, self._targets, lambda: dict(self._by_queue(rows)))

    def _by_queue(self, rows: pa.RecordBatch) -> Iterator[tuple[MessageQueue, pa.RecordBatch]]:
        """Return each queue that gets rows, with its rows in their order."""
        keys = None
        if "sharding_key" in rows.schema.names:
            keys = hashed_keys(rows.column("sharding_key"), self._key_type, f"a batch for topic {self._topic!r}")
        queues = self._targets[self._topic]
        chosen = self._selector.select(rows, keys, len(queues))
        return by_queue(rows, chosen, queues)
