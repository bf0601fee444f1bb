"""Appends rows to a topic without Spark, each to the queue that its sharding key chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from operator import index
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.conditions import OptionCondition, TopicCondition
from orderedmq.errors import OptionError, Remedy, TopicError
from orderedmq.model import PRODUCER_COLUMNS, MessageQueue, check_topic
from orderedmq.routing.selector import KeyedSelectorName, keyed
from orderedmq.routing.sharding_key import GivenKeyType, hashed_keys
from orderedmq.rows.delays import DELAY_COLUMNS, LEVEL, TIME, delays, require_types, split
from orderedmq.rows.message_rows import normalise, select_columns
from orderedmq.trace_context import require, sending

Rows: TypeAlias = Mapping[MessageQueue, pa.RecordBatch]
#: How often queues are chosen for the same rows. If their topics change more often than that, the servers disagree about the queues.
_CHOICES: Final = 5


def append_chosen(
    log: Log,
    targets: dict[str, list[MessageQueue]],
    choose: Callable[[], tuple[Rows, Rows]],
    append: Callable[[Rows, Rows, Collection[MessageQueue]], object] | None = None,
) -> None:
    """Append the rows, and the delayed rows, for which ``choose`` chooses queues among ``targets``, by ``append`` (default: `Log.append`).

    ``targets`` has the targets of each topic. If a topic has other targets now, ``targets`` is updated and ``choose`` is called again.
    Raises the errors of `Log.append` and `Log.targets`.
    """
    for left in reversed(range(_CHOICES)):
        rows, delayed = choose()
        topics = {queue.topic for queue in (*rows, *delayed)}
        try:
            if topics:
                (append or log.append)(rows, delayed, [queue for topic in topics for queue in targets[topic]])
            return
        except TopicError as error:
            # The broker may notice that a chosen queue is gone before it compares the targets. After either error no row is stored.
            if error.sub not in (TopicCondition.QUEUE_COUNT, TopicCondition.NO_SUCH_QUEUE) or not left:
                raise
            now = {topic: log.targets(topic) for topic in topics}
            if all(targets[topic] == now[topic] for topic in topics):
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
        delayed_rows: Literal["error", "unordered"] = "error",
        trace_context: bool = False,
    ) -> None:
        """``log`` is the log of a connection: ``connect(...).log``, or ``connect(...).traced().log`` for RocketMQ's message trace.

        ``sharding_key_type`` ("auto", "text", "int" or "long"), ``selector`` ("hash" or "mod") and ``delayed_rows`` ("error" or
        "unordered") are the sink's options shardingKeyType, messageQueueSelector and delayedRows. ``trace_context``: each send is
        an OpenTelemetry span, and its context is added to the properties of messages without a context
        (`orderedmq.trace_context`). Raises TopicError MISSING, or RESERVED for a topic that belongs to a consumer group;
        OptionError MISSING without the package opentelemetry-api.
        """
        if trace_context:
            require("Producer(trace_context=True)")
        check_topic(topic, writing=True)
        self._log = log
        self._topic = topic
        self._key_type: GivenKeyType = sharding_key_type
        self._targets = {topic: log.targets(topic)}
        self._selector = keyed(selector)
        self._delayed_rows = delayed_rows
        self._trace_context = trace_context

    def send(
        self, rows: pa.RecordBatch, *, delay_time_level: int | None = None, deliver_timestamp: datetime | None = None
    ) -> None:
        """Append rows, keeping their order within each queue. The rows are durable when this method returns.

        Columns: ``body`` (binary or string, required), ``sharding_key`` (string or whole number; null: no key), ``tags`` and
        ``keys`` (strings), ``properties`` (a map of strings), and over RocketMQ ``delay_time_level`` (a whole number) or
        ``deliver_timestamp`` (a timestamp with a time zone) for messages that are delivered later, as in the sink. Other columns
        are ignored. Give the argument ``delay_time_level`` or ``deliver_timestamp`` instead of a column that has the same value in
        each row.

        Many rows per call are cheaper: on the embedded broker a call is one transaction, over RocketMQ one or more requests per
        queue. The rows of a queue have at most 2 GiB in each column. All rows are checked before any is sent. Delayed rows are sent
        first, one by one, without order and at least once. Raises SchemaError; MessageError; OptionError CONFLICT for a delayed row
        with a key (unless ``delayed_rows`` is "unordered"), UNSUPPORTED if the broker cannot delay messages; and the errors of
        `Log.append`. After an error no row is stored on the embedded broker; over RocketMQ the error says how many delayed rows,
        and how many rows of which queues, were stored.
        """
        rows = select_columns(rows, (*PRODUCER_COLUMNS, *DELAY_COLUMNS), f"topic {self._topic!r}")
        rows = self._with_columns(rows, {LEVEL: delay_time_level, TIME: deliver_timestamp})
        if self._trace_context and rows.num_rows:
            with sending(self._targets[self._topic][0].broker_name, self._topic, rows) as carrying:
                self._send(carrying)
        else:
            self._send(rows)

    def _send(self, rows: pa.RecordBatch) -> None:
        now, late = self._split(rows)

        def choose() -> tuple[Rows, Rows]:
            return dict(self._by_queue(now)), {} if late is None else dict(self._by_queue(late))

        append_chosen(self._log, self._targets, choose)

    def _with_columns(self, rows: pa.RecordBatch, values: dict[str, object]) -> pa.RecordBatch:
        """Return the rows with an added column for each value that is not None. Raises OptionError CONFLICT or INVALID."""
        for name, value in values.items():
            if value is None:
                continue
            if name in rows.schema.names:
                raise OptionError(
                    OptionCondition.CONFLICT,
                    f"{name} is both an argument of send and a column of the rows. Give only one of them",
                )
            if isinstance(value, datetime):
                if value.tzinfo is None:
                    raise OptionError(
                        OptionCondition.INVALID,
                        f"{name} {value.isoformat()} has no time zone. Give it one, such as datetime.UTC",
                    )
                scalar = pa.scalar(value, pa.timestamp("us", "UTC"))
            else:
                try:
                    scalar = pa.scalar(index(value), pa.int64())  # type: ignore[arg-type]
                except (TypeError, OverflowError) as error:
                    what = "a delay level such as 3" if name == LEVEL else "a datetime with a time zone"
                    raise OptionError(OptionCondition.INVALID, f"{name} is {value!r}. Give {what}") from error
            rows = rows.append_column(name, pa.repeat(scalar, rows.num_rows))
        return rows

    def _split(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Return the rows that are not delayed, and the delayed rows or None. Columns are checked if one of them delays rows."""
        if not any(name in rows.schema.names for name in DELAY_COLUMNS):
            return rows, None
        where = f"topic {self._topic!r}"
        require_types(rows.schema, where)
        found = delays(rows, where, 0)
        plain = rows.select([name for name in rows.schema.names if name not in DELAY_COLUMNS])
        if not found:
            return plain, None
        normalise(plain, where)
        for name, column in found.items():
            plain = plain.append_column(name, column)
        now, late = split(plain)
        if late is not None and self._delayed_rows == "error" and "sharding_key" in late.schema.names:
            self._refuse_keys(late)
        return now, late

    def _refuse_keys(self, late: pa.RecordBatch) -> None:
        keys = late.column("sharding_key")
        row = pc.index(keys.is_valid(), True).as_py()
        if row >= 0:
            raise OptionError(
                OptionCondition.CONFLICT,
                f"a row for topic {self._topic!r} is delayed and has the sharding key {str(keys[row])!r}, which orders it, but a delayed "
                "message is delivered when it is due, whatever was sent before or after it, and may be delivered twice",
                Remedy(
                    'Leave the key out, or pass delayed_rows="unordered" to accept this',
                    "Leave the key out, or give --unordered to accept this",
                ),
            )

    def _by_queue(self, rows: pa.RecordBatch) -> Iterator[tuple[MessageQueue, pa.RecordBatch]]:
        """Yield each queue that gets rows, with its rows in their order."""
        keys = None
        if "sharding_key" in rows.schema.names:
            keys = hashed_keys(rows.column("sharding_key"), self._key_type, f"a batch for topic {self._topic!r}")
        queues = self._targets[self._topic]
        chosen = self._selector.select(rows, keys, len(queues))
        order = np.argsort(chosen, kind="stable")
        together = rows.take(pa.array(order))
        begin = 0
        for number, count in enumerate(np.bincount(chosen, minlength=len(queues)).tolist()):
            if count:
                yield queues[number], together.slice(begin, count)
                begin += count
