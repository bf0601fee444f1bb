"""Dead letters: messages that a listener gave up, in the topic %DLQ%<group>.

When a message that was retried too often is sent to %RETRY%<group>, the broker creates the dead letter topic and stores the message there
(AbstractSendMessageProcessor.handleRetryAndDLQ). A Java orderly consumer uses this when it gives a message up. Here, the first letter is
sent in this way, because this needs no right to create topics. Later letters are sent to the dead letter topic directly, in batches, or
like the first one if the account may not write to the topic. A letter is stored at the broker of its message's queue.

`orderedmq.rocketmq.append` stores each letter once. A letter is identified by its UNIQ_KEY, a hash of (group, queue, offset) and of the
epoch of the queue's last reset, so that letters from before it do not count. The key is searched among the last LOOK_BACK
letters. Two clients that add letters of one queue at the same time can miss each other's letters. The queue's lock should prevent that.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import PullSettings
from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import GroupError, OrderedMQError, RocketMQError
from orderedmq.model import (
    DEAD_LETTER_PREFIX,
    MAX_PROPERTIES_BYTES,
    RESERVED_PROPERTIES,
    RETRY_PREFIX,
    MessageQueue,
    OffsetRange,
)
from orderedmq.rocketmq.append.broker_port import BrokerPort, Timing, await_end, send_request
from orderedmq.rocketmq.append.once import Appender
from orderedmq.rocketmq.codec.encode import Packing, SendBody, encode, property_columns
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import checks
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.wire import rights
from orderedmq.rocketmq.wire.message_requests import SendResult
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rows.dead_letters import ORIGIN_OFFSET, REAL_QUEUE, REAL_TOPIC, dead_letter_id
from orderedmq.rows.message_rows import normalise

#: Number of letters at the topic's end that are searched for a repeated letter.
LOOK_BACK: Final = 32 * 1024
#: The properties of a letter that name its origin. Producers may not set them (rows.dead_letters).
_ORIGIN: Final = ("REAL_TOPIC", "REAL_QID", "ORIGIN_MESSAGE_ID", "RECONSUME_TIME")
_PIECE: Final = 4096
_TIMING: Final = Timing(patience=GROUP_TIMEOUT)


def key_of(group: str, queue: MessageQueue, offset: int, reset: int = 0) -> str:
    """Return the UNIQ_KEY of a letter: 32 hex digits, the form that RocketMQ's tools expect. ``reset``: the queue's register `reset`."""
    identity = dead_letter_id(group, queue, offset) + (f"/{reset}" if reset else "")
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest().upper()


class _Origin(NamedTuple):
    """The place of a letter's message, as the letter's properties name it. A field is None if its property is missing."""

    topic: str | None
    queue_id: str | None
    offset: str | None


class DeadLetterTopic:
    """Adds letters to dead letter topics. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, offsets: GroupOffsets) -> None:
        self._client = client
        self._log = log
        self._offsets = offsets
        #: For each dead letter queue: its last LOOK_BACK letters by key, in their order, and the offset up to which it was read.
        self._seen: dict[MessageQueue, tuple[dict[str, _Origin], int]] = {}

    def put(
        self,
        group: str,
        queue: MessageQueue,
        letters: pa.RecordBatch,
        offsets: Sequence[int],
        require_lock: Callable[[], None],
    ) -> int:
        """Append the letters that are not stored yet, in order, and return their number.

        ``require_lock`` raises an error if the queue's lock is lost. Raises the errors of `normalise` and `Client.call`.
        """
        # A Java producer may have sent a message with a longer key than this package sends.
        rows = normalise(letters, f"dead letters of queue {queue}", most_key_bytes=MAX_PROPERTIES_BYTES)
        if not rows.num_rows:
            return 0
        # Check the rights before the first letter is sent, because an account that may write but not read could not find it again.
        checks.require_rights(self._client, rights.of_dead_letters(group))
        new = _Letters(self, group, queue, letters, rows, offsets)
        port = BrokerPort(self._client, queue, _TIMING, request=new.request, target=new.target, require_lock=require_lock)
        Appender(port, new).run()
        if new.added:
            # Wait, because the next call might otherwise not find these letters, or the new topic.
            await_end(lambda: self._end(new.target), new.end, GROUP_TIMEOUT)
        return new.added or 0

    # -- searching

    def known(self, group: str, queue: MessageQueue, spans: Sequence[OffsetRange]) -> set[int]:
        """Return the offsets in these ranges of the queue whose letters `put` would find in the topic."""
        target = MessageQueue(DEAD_LETTER_PREFIX + group, queue.broker_name, 0)
        try:
            origins, _ = self._look(group, target)
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION:
                raise
            # `put` requires this right, so the account has not added any letters.
            return set()
        mine = queue.topic, str(queue.queue_id)
        every = [
            (key, int(origin.offset))
            for key, origin in origins.items()
            if origin[:2] == mine and origin.offset and origin.offset.isdecimal()
        ]
        begins = [span.begin for span in spans]
        stored = [(key, at) for key, at in every if (after := bisect_right(begins, at)) and at < spans[after - 1].end]
        if not stored:
            return set()
        reset = self._offsets.resets(group, [queue])[queue]
        return {at for key, at in stored if key == key_of(group, queue, at, reset)}

    def _look(self, group: str, target: MessageQueue) -> tuple[dict[str, _Origin], int]:
        """Return the last letters by key, and the queue's end. The end is 0 if the queue does not exist."""
        bounds = self._log.bounds([target]).get(target)
        by_key, upto = self._seen.pop(target, ({}, 0))
        if bounds is None:
            return {}, 0
        if upto > bounds.max_offset:
            # The topic was deleted and created again.
            by_key, upto = {}, 0
        at = max(bounds.min_offset, bounds.max_offset - LOOK_BACK, upto)
        log = self._log.reading(PullSettings(group))
        while at < bounds.max_offset:
            batch = log.pull(target, at, min(_PIECE, bounds.max_offset - at), 1 << 40, ("message_id", "properties"))
            if not batch.num_rows:
                break
            named = (REAL_TOPIC, REAL_QUEUE, ORIGIN_OFFSET)
            origins = [pc.map_lookup(batch.column(1), name, "first").to_pylist() for name in named]
            by_key.update(zip(batch.column(0).to_pylist(), map(_Origin, *origins), strict=True))
            at += batch.num_rows
        # Forget older letters, because a process that lives for months would otherwise keep the key of every letter.
        for key in list(itertools.islice(by_key, max(0, len(by_key) - LOOK_BACK))):
            del by_key[key]
        self._seen[target] = (by_key, max(at, upto))
        return by_key, bounds.max_offset

    def _end(self, target: MessageQueue) -> int:
        bounds = self._log.bounds([target]).get(target)
        return bounds.max_offset if bounds is not None else -1


class _Letters:
    """The letters of one queue as `Outgoing` messages, and the requests that send them."""

    def __init__(
        self,
        topic: DeadLetterTopic,
        group: str,
        queue: MessageQueue,
        letters: pa.RecordBatch,
        rows: pa.RecordBatch,
        offsets: Sequence[int],
    ) -> None:
        """``rows``: the result of `normalise` for ``letters``."""
        self._topic = topic
        self._group = group
        self._queue = queue
        self._rows = rows
        self._origin = _origin(letters, topic._client.names.spelled(queue.topic))
        self._offsets = offsets
        reset = topic._offsets.resets(group, [queue])[queue]
        self._keys = [key_of(group, queue, offset, reset) for offset in offsets]
        self.target = MessageQueue(DEAD_LETTER_PREFIX + group, queue.broker_name, 0)
        self._seen: dict[str, _Origin] = {}
        # The rows of the letters that are not stored.
        self._waiting: list[int] = []
        # Whether the current letter is sent to the retry topic, whether the account may not write to the dead letter topic, and whether
        # the group was created.
        self._by_retry = self._denied = self._made_group = False
        #: The topic's end, after the last letter that was sent.
        self.end = 0
        #: How many letters were not stored yet at the first call of `look`.
        self.added: int | None = None

    def look(self) -> bool:
        before = len(self._waiting)
        self._seen, self.end = self._topic._look(self._group, self.target)
        new: dict[str, int] = {}
        for row, key in enumerate(self._keys):
            if key not in self._seen:
                new.setdefault(key, row)
        self._waiting = list(new.values())
        if self.added is None:
            self.added = len(new)
        return len(new) < before

    def missing(self) -> Iterator[SendBody]:
        # Send the first letter alone if the topic has no letters, because it may not exist.
        first = len(self._waiting) if self._denied else 0 if self.end else 1
        # Encode, and so check, all letters before sending one.
        alone = self._encoded(0, first, Packing.ALONE)
        for number, body in enumerate(alone + self._encoded(first, len(self._waiting), Packing.BATCH)):
            self._by_retry = number < len(alone)
            yield body

    def _encoded(self, begin: int, end: int, packing: Packing) -> list[SendBody]:
        rows = self._waiting[begin:end]
        chosen = pa.array(rows, pa.int64())
        keys = pa.array([self._keys[row] for row in rows], pa.string())
        origin = {name: column.take(chosen) for name, column in self._origin.items()}
        where = f"dead letters of queue {self._queue}"
        return list(encode(self._rows.take(chosen), keys, where, extra=origin, first=begin, packing=packing))

    def request(self, body: SendBody) -> Request[SendResult]:
        """Return a request that sends letters to the topic, or sends one letter as a message that was retried too often."""
        if not self._by_retry:
            return send_request(self.target, body, self._group)
        retry = MessageQueue(RETRY_PREFIX + self._group, self._queue.broker_name, 0)
        # The broker makes this message a dead letter if its retries reach the maximum (4.9) or exceed it (5.x).
        return send_request(retry, body, self._group, reconsume_times=1, max_reconsume_times=0)

    def record_sent(self, body: SendBody, offset: int) -> None:
        sent, self._waiting = self._waiting[: body.rows], self._waiting[body.rows :]
        for row in sent:
            self._seen[self._keys[row]] = _Origin(self._queue.topic, str(self._queue.queue_id), str(self._offsets[row]))
        self.end = offset + body.rows

    def adapt(self, body: SendBody, error: OrderedMQError) -> bool:  # noqa: ARG002
        """Create the group if it is missing, or use the retry topic if the account may not write to the dead letter topic."""
        if isinstance(error, GroupError) and not self._made_group:
            self._topic._offsets.create_group(self._group, [self._queue], Deadline.after(GROUP_TIMEOUT))
            self._made_group = True
            return True
        if isinstance(error, RocketMQError) and error.sub == RocketMQCondition.NO_PERMISSION and not self._by_retry:
            self._denied = True
            return True
        return False


def _origin(letters: pa.RecordBatch, topic: str) -> dict[str, pa.Array]:
    """Return properties that name each letter's origin."""
    columns = property_columns(letters, _ORIGIN)
    # Java's tools read these properties of a dead letter.
    columns["RETRY_TOPIC"] = pa.array([topic] * letters.num_rows, pa.string())
    columns["DLQ_ORIGIN_TOPIC"] = columns["RETRY_TOPIC"]
    columns["DLQ_ORIGIN_MESSAGE_ID"] = columns["ORIGIN_MESSAGE_ID"]
    assert set(columns) <= RESERVED_PROPERTIES
    return columns
