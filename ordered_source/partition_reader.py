"""Reads one InputPartition in an executor: exactly its range of one queue, under the lock that the driver holds."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from ordered_source.columns import KEY_SEQUENCE, LOCK_TOKEN, TICKET, TICKET_TYPE, LotPlan, ReadContext, conform
from orderedmq.broker import Broker, Log
from orderedmq.conditions import DataLossCondition, TopicCondition
from orderedmq.connections import cached
from orderedmq.errors import DataLossError, TopicError, beyond_end, lost, queue_deleted, recreated, topic_deleted
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import run_of
from orderedmq.parking import RESTORE_COLUMNS, Lot, lot_token, restore
from orderedmq.pulls import pulls
from orderedmq.routing.generations import ONE_GENERATION, Generations
from orderedmq.rows.filters import Filter

logger = logging.getLogger("orderedmq")

#: Maximum bytes of bodies in one RecordBatch.
PULL_BYTES: Final = 16 * 1024 * 1024
#: Seconds between two checks of the lock while rows are read.
CHECK_INTERVAL: Final = 5.0
#: The columns that brokers do not have.
_OWN: Final = frozenset((KEY_SEQUENCE, LOCK_TOKEN, TICKET))


@dataclass
class QueuePartition(InputPartition):
    """One range of one queue. An executor reads it with the options of the reader.

    ``token`` is None without a group. ``streaming``: the range is part of a micro-batch, whose run is registered with the
    broker. ``lot``: the range of the queue's parking lot, which is read first, or None without the option parkingLot. If the batch
    does not read the lot, the range is empty and begins at the group's offset in the lot.
    """

    identity: str
    queue: MessageQueue
    begin: int
    end: int
    token: LockToken | None
    anchor: str
    streaming: bool
    lot: OffsetRange | None = None
    generations: Generations = ONE_GENERATION


def read(
    partition: QueuePartition, options: SourceOptions, columns: tuple[str, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the parking lot, then the rows of the queue.

    Raises LockError LOST, DataLossError, StoreError OTHER_MACHINE or CORRUPT.
    """
    broker = cached(options.endpoint, partition.identity)
    try:
        _check(broker, partition, options)
    except (DataLossError, TopicError) as error:
        _skip_loss(broker, partition, options.fail_on_data_loss, partition.begin, error)
        return
    pulled = tuple(name for name in columns if name not in _OWN)
    if "queue_offset" not in pulled and (KEY_SEQUENCE in columns or not pulled):
        pulled = (*pulled, "queue_offset")
    lot, token = partition.lot, partition.token
    context = TaskContext.get()
    lock_token = _lock_token(partition, options, context)
    run = run_of(context.getLocalProperty) if partition.streaming and context is not None else None
    if run is not None and broker.capabilities.atomic_publish:
        broker.outbox.register(run, partition.queue, OffsetRange(partition.begin, partition.end), token)
        if lot is not None and lot.messages and token is not None:
            of_lot = lot_token(token)
            broker.outbox.register(run, of_lot.queue, lot, of_lot)
    log = broker.log.reading(options.pull_settings)
    checked = time.monotonic()
    if lot is not None and token is not None and lock_token is not None:
        for rows in _read_lot(log, lot_token(token).queue, lot, partition, columns, lock_token, options.pull_batch_size):
            yield conform(rows, schema)
            checked = _check_again(broker, partition, options, checked)
    position = partition.begin
    while position < partition.end:
        most = min(options.pull_batch_size, partition.end - position)
        try:
            batch, after = _pull(log, partition, options.matching, position, most, pulled)
            if after == position:
                raise beyond_end(partition.queue, position, f"the batch was planned up to {partition.end}", log.tail_loss)
        except (DataLossError, TopicError) as error:
            position = _skip_loss(broker, partition, options.fail_on_data_loss, position, error)
            continue
        if batch.num_rows:
            yield conform(_with_own(batch, partition, columns, lock_token), schema)
        position = after
        checked = _check_again(broker, partition, options, checked)


def _read_lot(
    log: Log,
    parked: MessageQueue,
    span: OffsetRange,
    partition: QueuePartition,
    columns: tuple[str, ...],
    lock_token: str,
    max_messages: int,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a range of the parking lot ``parked`` as they were sent to the partition's queue, with ``columns``.

    The whole range is read first, because an operator's command at its end can apply to messages at its beginning. Raises the errors of
    `pulls` even if the user accepts losses, because a key's order is unknown if some of its parked messages are missing.
    """
    lot = Lot(span.begin)
    pieces = list[pa.RecordBatch]()
    for rows in pulls(log, parked, span.begin, span.end, max_messages, PULL_BYTES, RESTORE_COLUMNS):
        lot.add(rows)
        pieces.append(rows)
    for rows in pieces:
        messages, tickets = restore(rows, partition.queue, lot)
        if not messages.num_rows:
            continue
        own = {LOCK_TOKEN: pa.repeat(lock_token, messages.num_rows)}
        if KEY_SEQUENCE in columns:
            own[KEY_SEQUENCE] = _key_sequences(partition, messages)
        if TICKET in columns:
            each = [
                (place, ticket.attempts, ticket.parkings, ticket.due, ticket.error, ticket.offset) for place, ticket in tickets
            ]
            own[TICKET] = pa.array(each, TICKET_TYPE)
        arrays = [own[name] if name in own else messages.column(name) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _pull(
    log: Log, partition: QueuePartition, matching: Filter | None, offset: int, most: int, columns: tuple[str, ...]
) -> tuple[pa.RecordBatch, int]:
    """Return the next rows, and the offset after them."""
    queue, anchor = partition.queue, partition.anchor
    if matching is not None:
        return log.pull_matching(queue, offset, most, PULL_BYTES, columns, matching, anchor)
    batch = log.pull(queue, offset, most, PULL_BYTES, columns, anchor, partition.end)
    return batch, offset + batch.num_rows


def _lock_token(partition: QueuePartition, options: SourceOptions, context: TaskContext | None) -> str | None:
    """Return the lock_token of the partition's rows, or None without a group."""
    if partition.token is None:
        return None
    lot = partition.lot
    plan = None if lot is None else LotPlan(partition.begin, lot.begin, lot.end, options.parking_lot_max_messages)
    attempt = None if context is None else context.taskAttemptId()
    return ReadContext.of(options.endpoint, partition.identity, partition.token, plan, attempt).to_text()


def _key_sequences(partition: QueuePartition, messages: pa.RecordBatch) -> pa.Array:
    return pa.array(partition.generations.key_sequences(messages.column("queue_offset").to_numpy()))


def _with_own(
    batch: pa.RecordBatch, partition: QueuePartition, columns: tuple[str, ...], lock_token: str | None
) -> pa.RecordBatch:
    """Return the rows of a queue with ``columns``, including the columns that brokers do not have."""
    if not _OWN.intersection(columns):
        return batch
    own = {
        KEY_SEQUENCE: _key_sequences(partition, batch) if KEY_SEQUENCE in columns else None,
        LOCK_TOKEN: pa.repeat(pa.scalar(lock_token, pa.string()), batch.num_rows),
        TICKET: pa.nulls(batch.num_rows, TICKET_TYPE),
    }
    return pa.RecordBatch.from_arrays(
        [own[name] if name in own else batch.column(name) for name in columns], names=list(columns)
    )


def _check(broker: Broker, partition: QueuePartition, options: SourceOptions) -> None:
    """Raise LockError LOST if the lock was lost, or DataLossError or TopicError if it was deleted with its topic."""
    token, topic = partition.token, partition.queue.topic
    if token is None or broker.groups.check(token):
        return
    if broker.log.reading(options.pull_settings).is_another(topic, partition.anchor):
        raise recreated(topic)
    raise lost(token.group, token.queue, token.epoch, "while a task read it, and another query may own it now")


def _check_again(broker: Broker, partition: QueuePartition, options: SourceOptions, checked: float) -> float:
    """Check the lock if the last check was more than CHECK_INTERVAL ago. Return the time of the last check."""
    if time.monotonic() - checked <= CHECK_INTERVAL:
        return checked
    # If the topic was deleted, the next pull fails.
    with contextlib.suppress(DataLossError, TopicError):
        _check(broker, partition, options)
    return time.monotonic()


def _skip_loss(broker: Broker, partition: QueuePartition, fail: bool, position: int, error: DataLossError | TopicError) -> int:
    """Log a warning and return the offset after the lost messages. Raises the error if ``fail``."""
    queue = partition.queue
    if isinstance(error, TopicError):
        if error.sub == TopicCondition.NO_SUCH_QUEUE:
            error = queue_deleted(queue, f"messages from {position} were about to be read")
        else:
            error = topic_deleted(queue.topic, f"messages from {position} of queue {queue} were about to be read")
    if fail:
        raise error
    after = partition.end
    if error.sub == DataLossCondition.UNREADABLE and error.resume_at is not None:
        after = error.resume_at
    elif error.sub == DataLossCondition.AGED_OUT:
        bounds = broker.log.bounds([queue])
        least = bounds[queue].min_offset if queue in bounds else after
        # A gap in the middle of a queue is also reported as AGED_OUT, with the offset where the gap ends.
        after = min(max(least, error.resume_at or least), partition.end)
        if after <= position:
            raise error
    logger.warning("%d messages of queue %s are lost, from %d to %d (%s)", after - position, queue, position, after - 1, error)
    return after
