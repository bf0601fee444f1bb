"""``consume_orderly``: runs a Python listener over queues or keys, in order, in Spark's tasks.

Here is the shell of order="queue" around orderedmq.core.orderly; that of order="key" is in `key_shell`. Rules: a task of a
streaming query has a range of one queue, unless the user shuffled the rows. The engine decides; a shell calls the listener,
sleeps, asks the broker about the lock and writes dead letters. Delivery is at-least-once per micro-batch: when one task of the
batch fails, Spark runs the whole batch again, including the listeners of the other tasks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from ordered_source.columns import TICKET
from ordered_source.listener import by_key, key_shell
from ordered_source.listener.by_key import ByKey
from ordered_source.listener.messages import Window, runs
from ordered_source.listener.tasks import NEEDED, OUTCOME_SCHEMA, OUTCOMES, by_queue, lock_of, put_aside, require_columns
from ordered_source.listener.tracing import NO_TRACING, Tracing
from ordered_source.read_context import ReadContext, TaskLock
from orderedmq.concise import concise
from orderedmq.conditions import OptionCondition
from orderedmq.core.key_order import KeySettings
from orderedmq.core.listener import (
    ConsumeMessageHook,
    ConsumeOrderlyContext,
    Listener,
    OrderlySettings,
    call_listener,
)
from orderedmq.core.orderly import Batch, CheckLock, Consume, DeadLetter, Done, OrderlyQueue, Outcome, Pull, Suspend
from orderedmq.core.process_queue import Slice
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import OptionError
from orderedmq.model import MAX_OFFSET, MessageQueue, OffsetRange

log = logging.getLogger("orderedmq")

NAME: Final = "consume_orderly"


def consume_orderly(
    df: DataFrame,
    listener: Listener | type,
    *,
    order: str = "queue",
    consume_message_batch_max_size: int = 1,
    suspend_current_queue_time_millis: int = 1000,
    max_reconsume_times: int = 16,
    concurrency: int = 1,
    in_batch_attempts: int = 3,
    max_batch_seconds: float = 30.0,
    on_exhausted: str = "dead_letter",
    hooks: Sequence[ConsumeMessageHook] = (),
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    enable_msg_trace: bool = False,
    customized_trace_topic: str | None = None,
    trace_context: bool = False,
) -> DataFrame:
    """Run ``listener(messages, context) -> ConsumeOrderlyStatus`` over queues or keys, in order: RocketMQ's MessageListenerOrderly.

    ``df`` is a stream of the source with ``includeLockToken=true``, or with a schema that names topic, broker_name, queue_id,
    queue_offset, body and lock_token. ``messages`` is a sequence of 1 to ``consume_message_batch_max_size`` (at most 1024)
    messages with fields named like the columns; ``context`` is a ConsumeOrderlyContext. ``hooks`` are called before and after
    each call of the listener, in its thread.

    ``listener`` may be a class. Then each thread that makes calls makes one object, by ``listener()`` at its first call, and
    calls that. A thread and its object stay with the Python worker for later tasks and micro-batches, so the object may have a
    connection to a database. It is never closed: the worker's process ends.

    ``order="queue"``: one batch of a queue after another. A suspended batch, or one whose listener raised an exception, goes to
    the listener again after ``suspend_current_queue_time_millis`` (milliseconds, cut to 10 to 30,000), at most
    ``max_reconsume_times`` times, and then to the topic %DLQ%<group>. (-1 retries for ever, as RocketMQ does by default; that
    can hold the micro-batch for ever.) ConsumeOrderlyStatus has the effect of each status.

    ``order="key"``: the unit of order is the topic's sharding key, and a message without one is a key of its own. It needs the
    column sharding_key and a source with ``parkingLot=true``, which adds lock_token and ticket. Up to ``concurrency`` batches of a queue,
    each of one key, are at the listener at once, in threads: it must be thread-safe, or a class. A key that fails is tried
    again after the suspension while others go on. After ``in_batch_attempts`` failures, or when the micro-batch has worked on
    the queue for ``max_batch_seconds``, what the range has of the key is put into the group's parking lot, and later messages
    of the key behind it. It comes back by itself, before newer messages of the key, after 10 s, 30 s, 1 min … 2 h. A message
    that failed more than ``max_reconsume_times`` times in all becomes a dead letter and its key goes on; with
    ``on_exhausted="hold"`` the key stays parked until somebody releases it. COMMIT, ROLLBACK and ``context.auto_commit`` belong
    to ``order="queue"``: here they count as failures. With ``concurrency=1`` the listener runs in the task's own thread.

    Returns a DataFrame with a row per settled batch: topic string, broker_name string, queue_id int, begin_offset long,
    end_offset long (exclusive), status string, attempts int, duration double (seconds), error string. ``attempts`` is 0 where an
    earlier attempt of the micro-batch has made dead letters: their messages do not come again. ``order="key"`` returns a
    row per message, with sharding_key string and due_timestamp timestamp besides. Its status is SUCCESS, DEAD_LETTER, PARKED
    (``due_timestamp`` says when it comes back, if that is known), DROPPED (an operator dropped it from the parking lot) or
    REPEATED (it failed in a repeat of a micro-batch that the group's offset had passed). Write the rows somewhere: the listener
    runs only when Spark runs the DataFrame. ``credentials`` and ``tls`` are those of the source, for a cluster that requires
    them, because rows do not carry them.

    ``enable_msg_trace=True``: over RocketMQ, the calls are in its message trace, as those of a Java consumer, in the topic
    ``customized_trace_topic`` (default: RMQ_SYS_TRACE_TOPIC). ``trace_context=True``: each call runs in an OpenTelemetry span in
    the trace context of its messages (`orderedmq.trace_context`); needs ``includeProperties=true`` and the package
    opentelemetry-api.

    Raises SchemaError MISSING_COLUMN and OptionError INVALID at once. When the query runs, a task raises OptionError
    UNSUPPORTED for rows that were read without a lock, or with a parking lot where ``order`` allows none and the reverse,
    MISSING without the ``credentials`` that the source used, LockError LOST if another owner may have the queue, ListenerError
    UNCOMMITTED if messages are taken and not committed at the end of a range.
    """
    told = tuple(hooks)
    shared = (consume_message_batch_max_size, suspend_current_queue_time_millis, max_reconsume_times)
    of_key = {
        "concurrency": concurrency,
        "in_batch_attempts": in_batch_attempts,
        "max_batch_seconds": max_batch_seconds,
        "on_exhausted": on_exhausted,
    }
    if order == "key":
        require_columns(df, (*NEEDED, "sharding_key", TICKET), by_key.NAME, "parkingLot=true")
        keyed = KeySettings(*shared, **of_key)  # type: ignore[arg-type]
        tracing = Tracing.parse(df, by_key.NAME, enable_msg_trace, customized_trace_topic, trace_context)
        return key_shell.run(df, ByKey(listener, keyed, told, credentials, tls, tracing))
    if order != "queue":
        raise OptionError(OptionCondition.INVALID, f"order is {order!r}: give 'queue' or 'key'")
    _refuse_others(of_key)
    require_columns(df, NEEDED, NAME)
    settings = OrderlySettings(*shared)
    tracing = Tracing.parse(df, NAME, enable_msg_trace, customized_trace_topic, trace_context)

    @concise
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return consume(batches, listener, settings, told, credentials, tls, tracing)

    return df.mapInArrow(run, OUTCOMES)


def _refuse_others(given: Mapping[str, object]) -> None:
    """Refuse parameters that only order="key" has. Raises OptionError INVALID."""
    defaults = {one.name: one.default for one in fields(KeySettings)}
    others = [name for name, value in given.items() if value != defaults[name]]
    if others:
        raise OptionError(
            OptionCondition.INVALID,
            f'{", ".join(others)} given with order="queue", which calls the listener with one batch of a queue after another and parks '
            'nothing: give order="key", or leave them out',
        )


def consume(
    batches: Iterator[pa.RecordBatch],
    listener: Listener | type,
    settings: OrderlySettings,
    hooks: Sequence[ConsumeMessageHook],
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    tracing: Tracing = NO_TRACING,
) -> Iterator[pa.RecordBatch]:
    """Run one task: feed the rows to the listener, one queue after another, and yield the outcomes."""
    current: _Consumer | None = None
    for batch in batches:
        decided: list[Outcome] = []
        for queue, context, rows in by_queue(batch):
            if current is None or (current.queue, current.context) != (queue, context):
                if current is not None:
                    decided += current.finish()
                lock = lock_of(queue, context, credentials, tls, NAME, lot=False)
                current = _Consumer(queue, context, lock, tracing.listener(listener, lock), settings, hooks)
            decided += current.feed(rows)
        if decided:
            yield _table(decided)
    if current is not None:
        decided = current.finish()
        if decided:
            yield _table(decided)


class _Consumer:
    """Runs the engine of one queue with the listener, the broker, the clock and the log."""

    def __init__(
        self,
        queue: MessageQueue,
        context: ReadContext | None,
        lock: TaskLock,
        listener: Listener,
        settings: OrderlySettings,
        hooks: Sequence[ConsumeMessageHook],
    ) -> None:
        self.queue, self.context = queue, context
        self._broker, self._token = lock.broker, lock.token
        self._listener, self._hooks = listener, hooks
        self._engine = OrderlyQueue(queue, settings, time.monotonic())
        self._window = Window()
        self._letters: set[int] | None = None
        #: The first offset of a batch whose dead letters may be stored although their write failed: the answer may have been lost.
        self._unsure: int | None = None
        #: The context of the last call, as the listener left it.
        self._context = ConsumeOrderlyContext(queue)
        self._warned = 0

    def feed(self, rows: pa.RecordBatch) -> list[Outcome]:
        out: list[Outcome] = []
        if self._letters is None:
            # The engine has no messages yet: it checks the lock.
            out += self._drive()
            first: int = rows.column("queue_offset")[0].as_py()
            self._letters = self._broker.groups.letters(self._token, [OffsetRange(first, MAX_OFFSET)])
        for piece in self._window.add(rows):
            out += put_unsettled(self._engine, piece, self._letters)
        return out + self._drive()

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
                    status, error = None, batch.error
                    if batch.begin != self._unsure or not self._known(batch):
                        self._context = ConsumeOrderlyContext(self.queue)
                        messages = self._window.messages(batch.slices, batch.retries)
                        status, error = call_listener(self._listener, messages, self._context, self._hooks, log.warning)
                    # Without a call, the result of the batch's last call counts again: a failure.
                    self._decided(engine.consumed(self._context, status, error, clock()), out)
                case DeadLetter(batch):
                    messages = self._window.messages(batch.slices)
                    failed = put_aside(self._broker, self._token, messages, batch.error, batch.retries)
                    self._unsure = None if failed is None else batch.begin
                    self._decided(engine.dead_lettered(failed is None, failed, clock()), out)
                case Suspend(seconds):
                    time.sleep(seconds)
                case CheckLock():
                    engine.lock(self._broker.groups.check(self._token), clock())
                case Pull() | Done():
                    return out

    def _known(self, batch: Batch) -> bool:
        """Whether a message of the batch has a dead letter."""
        return bool(self._broker.groups.letters(self._token, [OffsetRange(piece.begin, piece.end) for piece in batch.slices]))

    def _decided(self, outcomes: list[Outcome], out: list[Outcome]) -> None:
        for text in self._engine.warnings[self._warned :]:
            log.warning("%s", text)
        self._warned = len(self._engine.warnings)
        if outcomes:
            out += outcomes
            self._window.forget(self._engine.floor)


def put_unsettled(engine: OrderlyQueue, piece: Slice, letters: Set[int]) -> list[Outcome]:
    """Give an engine messages, except those that became dead letters in an earlier attempt. Return the outcomes of these."""
    out: list[Outcome] = []
    for settled in runs(sorted(offset for offset in letters if piece.begin <= offset < piece.end)):
        before, rest = piece.split(settled.begin - piece.begin)
        engine.put(before)
        out += engine.settle(*settled)
        piece = rest.split(settled.messages)[1]
    engine.put(piece)
    return out


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
        schema=OUTCOME_SCHEMA,
    )
