"""``consume_concurrently``: runs a Python listener over messages in no order, in Spark's tasks: RocketMQ's concurrent listener."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from pyspark.sql import DataFrame

from ordered_source.listener import key_shell
from ordered_source.listener.key_shell import Answer, Kind
from ordered_source.listener.lying import Lying
from ordered_source.listener.messages import Message
from ordered_source.listener.tasks import NEEDED, require_columns
from ordered_source.listener.tracing import NO_TRACING, Tracing
from orderedmq.core import key_order
from orderedmq.core.concurrently import (
    ConcurrentRange,
    ConcurrentSettings,
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyHook,
    ConsumeConcurrentlyStatus,
)
from orderedmq.core.key_order import Batch, Outcome
from orderedmq.core.listener import call
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.model import MessageQueue

log = logging.getLogger("orderedmq")

NAME: Final = "consume_concurrently"

#: (messages, context) → status.
ConcurrentListener = Callable[[Sequence[Any], ConsumeConcurrentlyContext], ConsumeConcurrentlyStatus | None]


def consume_concurrently(
    df: DataFrame,
    listener: ConcurrentListener | type,
    *,
    consume_message_batch_max_size: int = 1,
    concurrency: int = 1,
    max_reconsume_times: int = 16,
    hooks: Sequence[ConsumeConcurrentlyHook] = (),
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    enable_msg_trace: bool = False,
    customized_trace_topic: str | None = None,
    trace_context: bool = False,
) -> DataFrame:
    """Run ``listener(messages, context) -> ConsumeConcurrentlyStatus`` over queues, in no order: MessageListenerConcurrently.

    ``df`` is a stream of the source with ``parkingLot=true``, or over RocketMQ with ``retryTopic=true``. If you give a schema, it
    names topic, broker_name, queue_id, queue_offset, body and lock_token, and with a retry topic reconsume_times. ``messages`` is
    a sequence of 1 to ``consume_message_batch_max_size`` (at most 1024) messages with fields named like the columns; ``context``
    is a ConsumeConcurrentlyContext. Up to ``concurrency`` batches of a queue are at the listener at once, in threads: it must be
    thread-safe, or a class, of which each thread makes an object as with `consume_orderly`. ``hooks`` are called before and
    after each call, in its thread.

    Each message that was not consumed (RECONSUME_LATER, None, an exception, or an index above ``context.ack_index``) is put
    into the group's parking lot alone. It comes back after 10 s, 30 s, 1 min … 2 h, or after the delay level that the listener
    chose (``context.delay_level_when_next_consume``). After ``max_reconsume_times`` retries (-1: 16, as in RocketMQ) it goes to
    the topic %DLQ%<group>.

    With ``retryTopic=true`` the message's broker does that, as for a Java MessageListenerConcurrently (CONSUMER_SEND_MSG_BACK).
    The message comes back through the topic %RETRY%<group>, to whichever member of the group has its queue, or becomes a dead
    letter. ``message.topic`` is then still the topic that it was sent to, and ``context.message_queue`` is a queue of the retry
    topic. If its batch runs again, it may be sent back again, and then comes twice, as in Java.

    Returns a DataFrame with a row per message: topic string, broker_name string, queue_id int, begin_offset long, end_offset
    long (exclusive), status string, attempts int, duration double (seconds), error string, sharding_key string, due_timestamp
    timestamp. The status is SUCCESS, DEAD_LETTER, PARKED, DROPPED or REPEATED, as with `consume_orderly`, or SENT_BACK. A row's
    topic is that of its queue, which may be the retry topic. Write the rows somewhere: the listener runs only when Spark runs
    the DataFrame. ``credentials`` and ``tls`` are those of the source.

    ``enable_msg_trace=True``: over RocketMQ, the calls are in its message trace, as those of a Java consumer, in the topic
    ``customized_trace_topic`` (default: RMQ_SYS_TRACE_TOPIC). ``trace_context=True``: each call runs in an OpenTelemetry span in
    the trace context of its messages (`orderedmq.trace_context`); needs ``includeProperties=true`` and the package
    opentelemetry-api.

    Raises SchemaError MISSING_COLUMN and OptionError INVALID at once. When the query runs, a task raises OptionError
    UNSUPPORTED for rows that were read without a lock, or with neither a parking lot nor a retry topic, MISSING without the
    ``credentials`` that the source used, LockError LOST if another owner may have the queue.
    """
    require_columns(df, NEEDED, NAME)
    settings = ConcurrentSettings(consume_message_batch_max_size, concurrency, max_reconsume_times)
    tracing = Tracing.parse(df, NAME, enable_msg_trace, customized_trace_topic, trace_context)
    return key_shell.run(df, Concurrently(listener, settings, tuple(hooks), credentials, tls, tracing))


class Concurrently(Kind[ConcurrentRange]):
    """``consume_concurrently``."""

    def __init__(
        self,
        listener: ConcurrentListener | type,
        settings: ConcurrentSettings,
        hooks: Sequence[ConsumeConcurrentlyHook] = (),
        credentials: Credentials | None = None,
        tls: TlsOptions | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        most, calls = settings.most_retries, settings.concurrency
        super().__init__(NAME, listener, calls, credentials, tls, alone=True, max_reconsume_times=most, tracing=tracing)
        self._settings, self._hooks = settings, hooks

    def engine(
        self, queue: MessageQueue, now: float, room: int, lot: Sequence[key_order.Message], lying: Lying
    ) -> ConcurrentRange:
        settings = replace(self._settings, parking_lot_max_messages=room)
        return ConcurrentRange(queue, settings, now, lot, lying.offsets)

    def call(self, listener: Any, messages: Sequence[Message], queue: MessageQueue) -> Answer:
        context = ConsumeConcurrentlyContext(queue)
        status, error = call(listener, messages, context, self._hooks, log.warning, ConsumeConcurrentlyStatus)
        return status, error, context

    def consumed(self, engine: ConcurrentRange, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        status, error, context = answer
        return engine.consumed(batch, status, error, now, context.ack_index, context.delay_level_when_next_consume)
