"""Dead letters in %DLQ%<group>, where RocketMQ's own tools look for them.

The broker creates the topic for a message of %RETRY%<group> that was retried too often
(AbstractSendMessageProcessor.handleRetryAndDLQ). A Java orderly consumer sends such a message when it gives up. The first
letter is sent like this, because it needs no right to create topics. The others go to the topic directly, in batches, or like
the first if the account may not write to the topic. A letter is stored at the broker of the queue that it comes from.

A letter is identified by its UNIQ_KEY, a hash of (group, queue, offset) and of the queue's seek number, so that a reset of the
queue forgets its letters. Before a letter is added, its key is searched for among the last LOOK_BACK letters. Two clients that
add letters of one queue at the same time can miss each other's; the queue's lock should prevent that.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import GroupError, RocketMQError
from orderedmq.model import DEAD_LETTER_PREFIX, RESERVED_PROPERTIES, RETRY_PREFIX, MessageQueue, OffsetRange
from orderedmq.rocketmq.codec.encode import SendBody, encode, property_columns
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import access
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import message_requests, rights
from orderedmq.rows.dead_letters import ORIGIN_OFFSET, REAL_QUEUE, REAL_TOPIC, dead_letter_id
from orderedmq.rows.message_rows import normalise
from orderedmq.rows.pull_settings import PullSettings

#: Letters at the topic's end that are searched for a repeat.
LOOK_BACK: Final = 32 * 1024
#: A letter's properties that name its origin and that no producer may set (rows.dead_letters).
_ORIGIN: Final = ("REAL_TOPIC", "REAL_QID", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME")
_PIECE: Final = 4096
#: Seconds between checks whether sent letters can be read.
_POLL: Final = 0.005


def key_of(group: str, queue: MessageQueue, offset: int, seek: int = 0) -> str:
    """Return the UNIQ_KEY of a letter: 32 hex digits, the form that RocketMQ's tools expect. ``seek``: the queue's seek number."""
    identity = dead_letter_id(group, queue, offset) + (f"/{seek}" if seek else "")
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest().upper()


class _Origin(NamedTuple):
    """Where a letter says that it comes from. None: it does not say."""

    topic: str | None
    queue_id: str | None
    offset: str | None


class DeadLetterTopic:
    """Adds letters to dead-letter topics. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, offsets: GroupOffsets) -> None:
        self._client = client
        self._log = log
        self._offsets = offsets
        #: Per dead-letter queue: the last LOOK_BACK letters in their order, by their keys, and the offset up to which they were read.
        self._seen: dict[MessageQueue, tuple[dict[str, _Origin], int]] = {}

    def put(self, group: str, queue: MessageQueue, letters: pa.RecordBatch, offsets: Sequence[int]) -> int:
        """Append the letters that are not there yet, in order, and return their number.

        Raises what `normalise` and `Client.call` raise.
        """
        where = f"dead letters of queue {queue}"
        rows = normalise(letters, where)
        if not rows.num_rows:
            return 0
        target = MessageQueue(DEAD_LETTER_PREFIX + group, queue.broker_name, 0)
        # Check the rights before the first letter is sent: without them it would be stored, but a repeat could not find it.
        access.require(self._client, rights.of_dead_letters(group), rights.LISTENER)
        seen, end = self._look(group, target)
        seek = self._offsets.seek_number(group, queue)
        new: dict[str, int] = {}
        for index, offset in enumerate(offsets):
            key = key_of(group, queue, offset, seek)
            if key not in new and key not in seen:
                new[key] = index
        if not new:
            return 0

        def sent(begin: int, count: int) -> None:
            for key in list(new)[begin : begin + count]:
                seen[key] = _Origin(queue.topic, str(queue.queue_id), str(offsets[new[key]]))

        chosen = pa.array(list(new.values()), pa.int64())
        keys = pa.array(list(new), pa.string())
        origin = _origin(letters.take(chosen), self._client.names.spelled(queue.topic))
        rows = rows.take(chosen)
        # Without a letter the topic may not exist. All letters are encoded, and so checked, before one is sent.
        first = 0 if end else 1
        alone = list(encode(rows.slice(0, first), keys.slice(0, first), where, extra=_slice_columns(origin, 0, first)))
        others = list(
            encode(
                rows.slice(first), keys.slice(first), where, extra=_slice_columns(origin, first, len(new) - first), first=first
            )
        )
        for body in alone:
            end = self._send_by_retry(group, queue, rows.slice(0, 1), keys, _slice_columns(origin, 0, 1), where)
            sent(body.first, body.rows)
        for body in others:
            begin = first + body.first
            end = self._send(group, queue, target, rows.slice(begin, body.rows), body, keys.slice(begin), origin, begin)
            sent(begin, body.rows)
        self._wait(target, end)
        return len(new)

    # -- looking

    def known(self, group: str, queue: MessageQueue, spans: Sequence[OffsetRange]) -> set[int]:
        """Return which offsets of the queue in these ranges have a letter that `put` would not add again."""
        target = MessageQueue(DEAD_LETTER_PREFIX + group, queue.broker_name, 0)
        try:
            seen, _ = self._look(group, target)
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION:
                raise
            # `put` requires this right, so the account has added none.
            return set()
        mine = queue.topic, str(queue.queue_id)
        every = [
            (key, int(one.offset)) for key, one in seen.items() if one[:2] == mine and one.offset and one.offset.isdecimal()
        ]
        begins = [span.begin for span in spans]
        found = [(key, at) for key, at in every if (after := bisect_right(begins, at)) and at < spans[after - 1].end]
        if not found:
            return set()
        seek = self._offsets.seek_number(group, queue)
        return {at for key, at in found if key == key_of(group, queue, at, seek)}

    def _look(self, group: str, target: MessageQueue) -> tuple[dict[str, _Origin], int]:
        """Return the last letters, by their keys, and the queue's end, which is 0 for a missing queue."""
        bounds = self._log.bounds([target]).get(target)
        seen, upto = self._seen.pop(target, ({}, 0))
        if bounds is None:
            return {}, 0
        if upto > bounds.max_offset:
            # The topic was deleted and created again.
            seen, upto = {}, 0
        at = max(bounds.min_offset, bounds.max_offset - LOOK_BACK, upto)
        log = self._log.reading(PullSettings(group))
        while at < bounds.max_offset:
            batch = log.pull(target, at, min(_PIECE, bounds.max_offset - at), 1 << 40, ("message_id", "properties"))
            if not batch.num_rows:
                break
            named = (REAL_TOPIC, REAL_QUEUE, ORIGIN_OFFSET)
            origins = [pc.map_lookup(batch.column(1), name, "first").to_pylist() for name in named]
            seen.update(zip(batch.column(0).to_pylist(), map(_Origin, *origins), strict=True))
            at += batch.num_rows
        # A process that lives for months would keep the key of every letter.
        for key in list(itertools.islice(seen, max(0, len(seen) - LOOK_BACK))):
            del seen[key]
        self._seen[target] = (seen, max(at, upto))
        return seen, bounds.max_offset

    def _wait(self, target: MessageQueue, end: int) -> None:
        """Wait some ms until letters below ``end``, and a new topic, can be read.

        Otherwise the next caller would not find them.
        """
        deadline = Deadline.after(GROUP_TIMEOUT)
        while time.monotonic() < deadline:
            bounds = self._log.bounds([target]).get(target)
            if bounds is not None and bounds.max_offset >= end:
                return
            time.sleep(_POLL)

    # -- sending

    def _send(
        self,
        group: str,
        queue: MessageQueue,
        target: MessageQueue,
        rows: pa.RecordBatch,
        body: SendBody,
        keys: pa.Array,
        origin: dict[str, pa.Array],
        first: int,
    ) -> int:
        """Send a batch to the topic itself, or letter by letter to the retry topic if that is denied; return the end offset."""
        request = message_requests.send(
            target, body.body, body.properties or "", group=group, born=_now(), batch=body.properties is None
        )
        try:
            stored = self._client.call(request, Deadline.after(GROUP_TIMEOUT), topic=queue.topic, broker_name=queue.broker_name)
            return stored.queue_offset + body.rows
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION:
                raise
        end = 0
        for row in range(rows.num_rows):
            part = _slice_columns(origin, first + row, 1)
            end = self._send_by_retry(group, queue, rows.slice(row, 1), keys.slice(row), part, f"dead letters of queue {queue}")
        return end

    def _send_by_retry(
        self, group: str, queue: MessageQueue, row: pa.RecordBatch, keys: pa.Array, origin: dict[str, pa.Array], where: str
    ) -> int:
        """Send one letter as a message of the group's retry topic that was retried too often; return the offset after it."""
        [batch] = encode(row, keys.slice(0, 1), where, extra=origin)
        body, properties = _single_message(batch)
        request = message_requests.send(
            MessageQueue(RETRY_PREFIX + group, queue.broker_name, 0),
            body,
            properties,
            group=group,
            born=_now(),
            # 4.9 wants as many retries as the maximum, 5.x wants more.
            reconsume_times=1,
            max_reconsume_times=0,
        )
        try:
            stored = self._client.call(request, Deadline.after(GROUP_TIMEOUT), topic=queue.topic, broker_name=queue.broker_name)
        except GroupError:
            self._offsets.create_group(group, [queue], Deadline.after(GROUP_TIMEOUT))
            stored = self._client.call(request, Deadline.after(GROUP_TIMEOUT), topic=queue.topic, broker_name=queue.broker_name)
        return stored.queue_offset + 1


def _origin(letters: pa.RecordBatch, topic: str) -> dict[str, pa.Array]:
    """Return properties that name each letter's origin."""
    found = property_columns(letters, _ORIGIN)
    # Properties that Java's tools look for in a dead letter.
    found["RETRY_TOPIC"] = pa.array([topic] * letters.num_rows, pa.string())
    found["DLQ_ORIGIN_TOPIC"] = found["RETRY_TOPIC"]
    found["DLQ_ORIGIN_MESSAGE_ID"] = found["ORIGIN_MESSAGE_ID"]
    assert set(found) <= RESERVED_PROPERTIES
    return found


def _slice_columns(columns: dict[str, pa.Array], begin: int, count: int) -> dict[str, pa.Array]:
    return {name: column.slice(begin, count) for name, column in columns.items()}


def _single_message(batch: SendBody) -> tuple[memoryview, str]:
    """Return the body and properties of a single message, sent without a batch.

    In a batch it is 20 bytes, body, 2 bytes, properties.
    """
    if batch.properties is not None:
        return batch.body, batch.properties
    length = int.from_bytes(batch.body[16:20], "big")
    return batch.body[20 : 20 + length], bytes(batch.body[22 + length :]).decode()


def _now() -> int:
    return time.time_ns() // 1_000_000
