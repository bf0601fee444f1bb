"""``consume_orderly``: runs a Python listener over queues, in order, in Spark's tasks. A shell around orderedmq.core.orderly.

Rules: a task of a streaming query has a range of one queue, unless the user shuffled the rows. The engine decides; this module
calls the listener, sleeps, asks the broker about the lock and writes dead letters. Delivery is at-least-once per micro-batch:
when one task of the batch fails, Spark runs the whole batch again, including the listeners of the other tasks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from ordered_source import lock_token
from ordered_source.columns import LOCK_TOKEN
from ordered_source.listener.messages import Window
from orderedmq.broker import Broker
from orderedmq.concise import concise
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.core.listener import (
    ConsumeMessageHook,
    ConsumeOrderlyContext,
    Listener,
    OrderlySettings,
    call_listener,
    dead_letter_properties,
)
from orderedmq.core.lock import LockToken
from orderedmq.core.orderly import Batch, CheckLock, Consume, DeadLetter, Done, OrderlyQueue, Outcome, Pull, Suspend
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import LockError, OptionError, OrderedMQError, SchemaError
from orderedmq.model import PRODUCER_SCHEMA, MessageQueue

log = logging.getLogger("orderedmq")

#: Required columns: a message's queue, offset, body and lock.
NEEDED: Final = ("topic", "broker_name", "queue_id", "queue_offset", "body", LOCK_TOKEN)
#: Columns of the outcomes, one row per settled batch; ``end_offset`` is exclusive, ``duration`` in seconds.
OUTCOMES: Final = (
    "topic string, broker_name string, queue_id int, begin_offset long, end_offset long, status string, attempts int, "
    "duration double, error string"
)
_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("begin_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("status", pa.string()),
        ("attempts", pa.int32()),
        ("duration", pa.float64()),
        ("error", pa.string()),
    ]
)


def consume_orderly(
    df: DataFrame,
    listener: Listener,
    *,
    consume_message_batch_max_size: int = 1,
    suspend_current_queue_time_millis: int = 1000,
    max_reconsume_times: int = 16,
    hooks: Sequence[ConsumeMessageHook] = (),
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
) -> DataFrame:
    """Run ``listener(messages, context) -> ConsumeOrderlyStatus`` over each queue, in order: RocketMQ's MessageListenerOrderly.

    ``df`` is a stream of the source with ``includeLockToken=true``, or with a schema that names topic, broker_name, queue_id,
    queue_offset, body and lock_token. ``messages`` is a sequence of 1 to ``consume_message_batch_max_size`` (at most 1024)
    messages of one queue with fields named like the columns; ``context`` is a ConsumeOrderlyContext.

    A suspended batch, or one whose listener raised an exception, goes to the listener again after
    ``suspend_current_queue_time_millis`` (milliseconds, cut to 10 to 30,000), at most ``max_reconsume_times`` times, and then
    to the topic %DLQ%<group>. (-1 retries for ever, as RocketMQ does by default; that can hold the micro-batch for ever.)
    ConsumeOrderlyStatus has the effect of each status. ``hooks`` are called before and after each call of the listener.

    Returns a DataFrame with a row per settled batch: topic string, broker_name string, queue_id int, begin_offset long,
    end_offset long (exclusive), status string, attempts int, duration double (seconds), error string. Write it somewhere: the
    listener runs only when Spark runs the DataFrame. ``credentials`` and ``tls`` are those of the source, for a cluster that
    requires them, because rows do not carry them.

    Raises SchemaError MISSING_COLUMN and OptionError INVALID at once. When the query runs, a task raises OptionError
    UNSUPPORTED for rows that were read without a lock, MISSING without the ``credentials`` that the source used, LockError LOST
    if another owner may have the queue, ListenerError UNCOMMITTED if messages are taken and not committed at the end of a
    range.
    """
    missing = [name for name in NEEDED if name not in df.columns]
    if missing:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"consume_orderly needs the columns {', '.join(missing)}, the DataFrame has {', '.join(df.columns)}: read with "
            "includeLockToken=true, and do not drop these columns",
        )
    settings = OrderlySettings(consume_message_batch_max_size, suspend_current_queue_time_millis, max_reconsume_times)
    told = tuple(hooks)

    @concise
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return consume(batches, listener, settings, told, credentials, tls)

    return df.mapInArrow(run, OUTCOMES)


def consume(
    batches: Iterator[pa.RecordBatch],
    listener: Listener,
    settings: OrderlySettings,
    hooks: Sequence[ConsumeMessageHook],
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
) -> Iterator[pa.RecordBatch]:
    """Run one task: feed the rows to the listener, one queue after another, and yield the outcomes."""
    current: _Consumer | None = None
    for batch in batches:
        decided: list[Outcome] = []
        for queue, text, rows in _by_queue(batch):
            if current is None or (current.queue, current.text) != (queue, text):
                if current is not None:
                    decided += current.finish()
                broker, token = _decode_lock(queue, text, credentials, tls)
                current = _Consumer(queue, text, broker, token, listener, settings, hooks)
            decided += current.feed(rows)
        if decided:
            yield _table(decided)
    if current is not None:
        decided = current.finish()
        if decided:
            yield _table(decided)


def _decode_lock(
    queue: MessageQueue, text: str | None, credentials: Credentials | None, tls: TlsOptions | None
) -> tuple[Broker, LockToken]:
    """Return the broker and the lock under which the rows were read.

    Raises OptionError UNSUPPORTED for rows read without a lock, else as `lock_token.decode`.
    """
    if text is None:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"consume_orderly got rows of queue {queue} that were read without a lock: use a stream with a consumerGroup, neither a "
            "batch read nor messageModel=broadcasting",
        )
    lock = lock_token.decode(text, queue, credentials, tls)
    return lock.broker, lock.token


class _Consumer:
    """Runs the engine of one queue with the listener, the broker, the clock and the log."""

    def __init__(
        self,
        queue: MessageQueue,
        text: str | None,
        broker: Broker,
        token: LockToken,
        listener: Listener,
        settings: OrderlySettings,
        hooks: Sequence[ConsumeMessageHook],
    ) -> None:
        self.queue, self.text = queue, text
        self._broker, self._token = broker, token
        self._listener, self._hooks = listener, hooks
        self._engine = OrderlyQueue(queue, settings, time.monotonic())
        self._window = Window()
        self._warned = 0

    def feed(self, rows: pa.RecordBatch) -> list[Outcome]:
        for piece in self._window.add(rows):
            self._engine.put(piece)
        return self._drive()

    def finish(self) -> list[Outcome]:
        self._engine.close()
        return self._drive()

    def _drive(self) -> list[Outcome]:
        """Carry out the engine's actions until it needs more messages or is done. Return the outcomes."""
        engine, clock = self._engine, time.monotonic
        out: list[Outcome] = []
        while True:
            action = engine.next(clock())
            match action:
                case Consume(batch):
                    context = ConsumeOrderlyContext(self.queue)
                    messages = self._window.messages(batch.slices, batch.retries)
                    status, error = call_listener(self._listener, messages, context, self._hooks, log.warning)
                    self._decided(engine.consumed(context, status, error, clock()), out)
                case DeadLetter(batch):
                    failed = _put_aside(self._broker, self._token, batch, self._window)
                    self._decided(engine.dead_lettered(failed is None, failed, clock()), out)
                case Suspend(seconds):
                    time.sleep(seconds)
                case CheckLock():
                    engine.lock(self._broker.groups.check(self._token), clock())
                case Pull() | Done():
                    return out

    def _decided(self, outcomes: list[Outcome], out: list[Outcome]) -> None:
        for text in self._engine.warnings[self._warned :]:
            log.warning("%s", text)
        self._warned = len(self._engine.warnings)
        if outcomes:
            out += outcomes
            self._window.forget(self._engine.floor)


def _put_aside(broker: Broker, token: LockToken, batch: Batch, window: Window) -> str | None:
    """Write a batch to the dead letters. Return None, or the error's text if the write fails. Raises LockError."""
    messages = window.messages(batch.slices)
    letters = []
    for message in messages:
        found = {name: getattr(message, name, None) for name in ("tags", "keys", "sharding_key", "properties", "message_id")}
        properties = dead_letter_properties(
            token.queue,
            message.queue_offset,
            message_id=found["message_id"] or "",
            reconsume_times=(getattr(message, "reconsume_times", 0) or 0) + batch.retries,
            error=batch.error or "",
            properties=dict(found["properties"] or {}),
        )
        letters.append({"body": message.body, **found, "properties": list(properties.items())})
    rows = pa.RecordBatch.from_pylist(letters, schema=PRODUCER_SCHEMA)
    try:
        broker.groups.dead_letter(token, rows, [message.queue_offset for message in messages])
    except LockError:
        raise
    except OrderedMQError as error:
        return str(error)
    return None


def _by_queue(batch: pa.RecordBatch) -> Iterator[tuple[MessageQueue, str | None, pa.RecordBatch]]:
    """Split a batch's rows where the queue or the lock changes. A task has one of each, unless rows were shuffled."""
    if not batch.num_rows:
        return
    names = ("topic", "broker_name", "queue_id", LOCK_TOKEN)
    columns = [batch.column(name) for name in names]
    rows = batch.select([name for name in batch.schema.names if name != LOCK_TOKEN])
    if all(len(column.unique()) == 1 for column in columns):
        topic, broker, queue_id, text = (column[0].as_py() for column in columns)
        yield MessageQueue(topic, broker, queue_id), text, rows
        return
    begin = 0
    keys = list(zip(*(column.to_pylist() for column in columns)))
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[begin]:
            topic, broker, queue_id, text = keys[begin]
            yield MessageQueue(topic, broker, queue_id), text, rows.slice(begin, index - begin)
            begin = index


def _table(outcomes: Sequence[Outcome]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([one.queue.topic for one in outcomes], pa.string()),
            pa.array([one.queue.broker_name for one in outcomes], pa.string()),
            pa.array([one.queue.queue_id for one in outcomes], pa.int32()),
            pa.array([one.begin_offset for one in outcomes], pa.int64()),
            pa.array([one.end_offset for one in outcomes], pa.int64()),
            pa.array([one.status for one in outcomes], pa.string()),
            pa.array([one.attempts for one in outcomes], pa.int32()),
            pa.array([one.duration for one in outcomes], pa.float64()),
            pa.array([one.error for one in outcomes], pa.string()),
        ],
        schema=_SCHEMA,
    )
