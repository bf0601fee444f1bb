"""``consume_orderly`` and ``consume_concurrently``, which run a Python listener over messages in Spark's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame

from ordered_source.columns import TICKET
from ordered_source.listener import engine_task
from ordered_source.listener.engine_task import Consumer
from ordered_source.listener.task_rows import NEEDED, require_columns
from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.errors import OptionError
from orderedmq.listening.concurrent_engine import ConcurrentSettings
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.listening.listener import ConcurrentListener, ConsumeMessageHook, OrderlyListener
from orderedmq.listening.queue_engine import OrderPerQueue

_PER_QUEUE: Final = OrderPerQueue()
_CONCURRENT: Final = ConcurrentSettings()


def consume_orderly(
    df: DataFrame,
    listener: OrderlyListener | type,
    order: OrderPerQueue | OrderPerKey = _PER_QUEUE,
    *,
    hooks: Sequence[ConsumeMessageHook] = (),
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    trace_context: bool = False,
) -> DataFrame:
    """Run ``listener(messages, context) -> ConsumeOrderlyStatus`` over queues or keys in order, like RocketMQ's MessageListenerOrderly.

    ``df`` is a stream of the source with ``includeLockToken=true``, or with a schema that names topic, broker_name, queue_id,
    queue_offset, body and lock_token. ``messages`` is a sequence of messages with fields named like the columns; ``context`` is a
    ConsumeOrderlyContext. ``hooks`` are called before and after each call of the listener, in the same thread. They must not be async.

    ``order`` is `OrderPerQueue` (one batch of a queue after another; see ConsumeOrderlyStatus for the effect of each status) or
    `OrderPerKey` (several keys of a queue at the same time, each in order). OrderPerKey needs the column sharding_key and a source with
    ``parkingLot=true``, which adds lock_token and ticket. COMMIT, ROLLBACK and ``context.auto_commit`` are only for OrderPerQueue. With
    OrderPerKey, a call that uses them counts as failed.

    With a ``concurrency`` above 1 the listener is called in several threads, so it must be thread-safe or a class. Otherwise it is called
    in the task's thread. For a class, each thread that makes calls creates one object by ``listener()`` at its first call, and calls this
    object. Threads and their objects stay in the Python worker for later tasks and micro-batches, so an object may have a database
    connection. Objects are never closed; they end with the worker's process.

    The listener may be async: an ``async def`` function, or a class or an object with ``async def __call__``. Its calls are awaited in
    one event loop of the Python worker, at most ``concurrency`` at a time for each task, or with OrderPerQueue one after another. For a
    class, the loop's thread creates the object. When the queue's lock is lost, the calls that are awaiting something are cancelled, and
    the task fails when they have ended. They are also cancelled when Spark closes the task or the task fails. A warning is logged if the
    listener blocks the loop.

    Returns a DataFrame with a row per batch of messages, or with OrderPerKey per message: topic string, broker_name string, queue_id int,
    begin_offset long, end_offset long (exclusive), status string, attempts int, duration double (seconds of the calls), error string,
    sharding_key string (null for a batch), due_timestamp timestamp. The status is SUCCESS, COMMIT (accepted by the call that answered
    COMMIT), DEAD_LETTER, PARKED (``due_timestamp`` says when the message comes back, if that is known), DROPPED (an operator dropped the
    message from the parking lot) or REPEATED (the message failed in a repeat of a micro-batch that the group's offset had passed).
    ``attempts`` is 0 if an earlier attempt of the micro-batch has settled the message, so that the listener does not get it again. Write
    the rows to a sink, because the listener runs only when Spark runs the DataFrame.

    A listener connects to the broker as the source does, but rows carry no secrets: pass ``credentials`` if the source has the option
    secretKey, and ``tls`` if it has tlsKeyPassword. With ``trace_context``, each call runs in an OpenTelemetry span in the trace context of
    its messages (`orderedmq.trace_context`). This needs ``includeProperties=true`` and the package opentelemetry-api.

    This function raises SchemaError MISSING_COLUMN, OptionError INVALID, OptionError MISSING without opentelemetry-api where it is needed,
    and OptionError UNSUPPORTED with spark.speculation. When the
    query runs, a task raises OptionError UNSUPPORTED for rows that were read without a lock, with a parking lot that ``order`` does not
    allow, or without one that it needs. It raises OptionError MISSING without the ``credentials`` that the source used, LockError LOST if
    another owner may have the queue, ListenerError UNCOMMITTED if messages are taken and not committed at the end of a range, and
    ListenerError NOT_AWAITED if a listener that is not async returns a coroutine.
    """
    if isinstance(order, OrderPerKey):
        remedy = "Read with parkingLot=true, and do not drop these columns"
        require_columns(df, (*NEEDED, "sharding_key", TICKET), order.name, remedy)
    elif isinstance(order, OrderPerQueue):
        require_columns(df, NEEDED, order.name)
    else:
        raise OptionError(OptionCondition.INVALID, f"order is {order!r}, but must be OrderPerQueue() or OrderPerKey()")
    return engine_task.run(df, Consumer(listener, order, tuple(hooks), credentials, tls, trace_context))


def consume_concurrently(
    df: DataFrame,
    listener: ConcurrentListener | type,
    settings: ConcurrentSettings = _CONCURRENT,
    *,
    hooks: Sequence[ConsumeMessageHook] = (),
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    trace_context: bool = False,
) -> DataFrame:
    """Run ``listener(messages, context) -> ConsumeConcurrentlyStatus`` over queues in no order, like MessageListenerConcurrently.

    ``df`` is a stream of the source with ``parkingLot=true``. If you give a schema, it must name topic, broker_name, queue_id,
    queue_offset, body and lock_token. ``context`` is a ConsumeConcurrentlyContext. `consume_orderly` describes messages, hooks, the
    kinds of listener, and the rows that are returned.

    Each message that was not consumed (RECONSUME_LATER, None, an exception, or an index above ``context.ack_index``) is put into the
    group's parking lot separately. It comes back after 10 s, 30 s, 1 min … 2 h, or after the delay level that the listener chose
    (``context.delay_level_when_next_consume``). After ``max_reconsume_times`` retries it goes to the topic %DLQ%<group>.

    This function raises SchemaError MISSING_COLUMN, OptionError INVALID, OptionError MISSING without opentelemetry-api where it is needed,
    and OptionError UNSUPPORTED with spark.speculation. When the
    query runs, a task raises OptionError UNSUPPORTED for rows that were read without a lock or without a parking lot, OptionError MISSING
    without the ``credentials`` that the source used, LockError LOST if another owner may have the queue, and ListenerError NOT_AWAITED if
    a listener that is not async returns a coroutine.
    """
    if not isinstance(settings, ConcurrentSettings):
        raise OptionError(OptionCondition.INVALID, f"settings is {settings!r}, but must be ConcurrentSettings()")
    require_columns(df, NEEDED, settings.name)
    return engine_task.run(df, Consumer(listener, settings, tuple(hooks), credentials, tls, trace_context))
