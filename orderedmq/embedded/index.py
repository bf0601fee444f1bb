"""The records of topics, and each queue's index entries, which make messages visible. The caller holds the transaction.

Rules: a queue's chunks are contiguous from ``min_offset`` to ``max_offset``. A chunk that is added after a small chunk is merged
with it, like a carry in a binary counter. So small batches leave few chunks, and a row is rewritten at most about ten times before
it is in a chunk of 8k rows. Retention by age deletes whole chunks from the front of each queue, and retention by size deletes the
topic's oldest chunks.
"""

from __future__ import annotations

import heapq
import itertools
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Final

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import payloads
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.schema import (
    CHUNKS,
    INLINE,
    OFFSETS,
    QUEUES,
    RESIZES,
    SETTINGS,
    TOPICS,
    Chunk,
    QueueRow,
    ResizeRow,
    Setting,
    TopicRow,
)
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import StoreError, no_such_queue
from orderedmq.model import DEFAULT_COMPRESSION, EMBEDDED_BROKER, MessageQueue, OffsetRange, missing_topic
from orderedmq.parking import origin, parked_queue
from orderedmq.rows.retention import Clocks

#: A tail chunk of this many rows or more is not merged. It is at least half full, and reading it costs about as much per row as reading
#: a full chunk.
MERGE_BELOW: Final = 8192
#: A tail chunk of this many bytes or more is not merged, so that a chunk of large messages is not rewritten to add a few more.
MERGE_BELOW_BYTES: Final = 1024 * 1024
#: Maximum chunks of a topic that one write deletes by retention, so that its transaction stays short. It may also delete twice as many as
#: it adds. Otherwise the topic could grow for ever.
RETIRE_AT_ONCE: Final = 64


def state(txn: Transaction, queue: MessageQueue) -> QueueRow:
    """Return the state of a queue. Raises TopicError MISSING or NO_SUCH_QUEUE."""
    at = txn.get(QUEUES, *schema.key_of(queue))
    if at is None:
        if txn.get(TOPICS, queue.topic) is None:
            raise missing_topic(queue.topic)
        raise no_such_queue(queue.topic, queue.queue_id)
    return at


def holding(txn: Transaction, queue: MessageQueue, offset: int) -> Chunk:
    """Return the chunk that holds ``offset``. Raises StoreError CORRUPT if no chunk holds it."""
    key = schema.key_of(queue)
    chunk = txn.floor(CHUNKS, *key, offset)
    if chunk is not None and chunk[:2] == key and chunk.first_offset <= offset < chunk.end:
        return chunk
    raise txn.damaged(f"queue {queue} has no chunk with message {offset}")


def chunks(txn: Transaction, queue: MessageQueue, at: QueueRow, offset: int) -> Iterator[Chunk]:
    """Yield the chunks from the one that holds ``offset`` to the last. Raises StoreError CORRUPT at a gap."""
    offset = max(offset, at.min_offset)
    if offset >= at.max_offset:
        return
    first = holding(txn, queue, offset)
    key, end = schema.key_of(queue), first.end
    yield first
    if end >= at.max_offset:
        return
    for chunk in txn.following(CHUNKS, *key, end):
        if chunk[:2] != key or chunk.first_offset != end or chunk.rows < 1:
            raise txn.damaged(f"queue {queue} has no chunk with message {end}")
        yield chunk
        end = chunk.end
        if end >= at.max_offset:
            return
    raise txn.damaged(f"queue {queue} ends at {at.max_offset}, but its chunks end at {end}")


def add(txn: Transaction, chunk: Chunk, now: int, payload: codec.Pieces | None = None) -> OffsetRange:
    """Make a chunk visible at the end of its queue, and return its offsets. ``now`` is in µs since the epoch.

    ``payload``: the chunk's payload, if it is not stored yet. A payload that is already stored must be counted (`payloads.hold`).
    """
    queue = schema.queue_of(chunk)
    at = state(txn, queue)
    stamp = max(now, at.last_stored)
    chunk = chunk._replace(first_offset=at.max_offset, first_stored=stamp, last_stored=stamp)
    new = OffsetRange(chunk.first_offset, chunk.end)
    parts = [chunk]
    read: list[tuple[bytes | pa.Buffer, Chunk]] = []
    while parts[0].first_offset > at.min_offset:
        size = sum(part.rows for part in parts)
        try:
            tail = holding(txn, queue, parts[0].first_offset - 1)
        except StoreError:
            break
        if tail.rows >= MERGE_BELOW or tail.rows > 2 * size or tail.rows + size > codec.CHUNK_ROWS:
            break
        # The limit also holds for uncompressed bodies, because each merge and each pull decompresses the whole chunk.
        total = sum(max(part.stored_bytes, part.body_bytes) for part in (tail, *parts))
        if tail.stored_bytes >= MERGE_BELOW_BYTES or total > codec.CHUNK_BYTES:
            break
        try:
            read.insert(0, (payloads.load(txn, tail), tail))
        except (StoreError, OSError):
            # A later read reports the damaged chunk. It must not prevent appending new messages here.
            break
        parts.insert(0, tail)
    kept_bytes = at.stored_bytes - sum(part.stored_bytes for part in parts[:-1])
    if read:
        read.append((b"".join(payload) if payload is not None else payloads.load(txn, chunk), chunk))
        payload, merged = codec.merge(read, chunk.codec)
        for part in parts[:-1]:
            payloads.release(txn, part)
            txn.delete(CHUNKS, *part[:3])
        if chunk.segment != INLINE:
            payloads.release(txn, chunk)
        chunk = merged
    if payload is not None:
        chunk = payloads.place(txn, payload, chunk)
    txn.put(chunk)
    txn.put(at._replace(max_offset=new.end, stored_bytes=kept_bytes + chunk.stored_bytes, last_stored=stamp))
    return new


def retire(txn: Transaction, queue: MessageQueue, *, before: int) -> int:
    """Delete the chunks of a queue that end at or before ``before``. Return the number of messages deleted."""
    at = state(txn, queue)
    stored = chunks(txn, queue, at, at.min_offset)
    return _delete(txn, queue, list(itertools.takewhile(lambda chunk: chunk.end <= before, stored)))


def _delete(txn: Transaction, queue: MessageQueue, gone: Sequence[Chunk]) -> int:
    """Delete ``gone``, the first chunks of a queue, and return the number of their messages."""
    if not gone:
        return 0
    at = state(txn, queue)
    for chunk in gone:
        payloads.release(txn, chunk)
        txn.delete(CHUNKS, *chunk[:3])
    begin = gone[-1].end
    txn.put(at._replace(min_offset=begin, stored_bytes=at.stored_bytes - sum(chunk.stored_bytes for chunk in gone)))
    return begin - at.min_offset


def queues_of(topic: TopicInfo) -> list[MessageQueue]:
    """Return all queues of a topic. The first ``topic.queues`` take messages."""
    return [MessageQueue(topic.name, EMBEDDED_BROKER, number) for number in range(topic.queues + topic.closed)]


def targets_of(topic: TopicInfo) -> list[MessageQueue]:
    """Return the queues of a topic that take messages."""
    return queues_of(topic)[: topic.queues]


def listed(txn: Transaction, topic: TopicInfo) -> list[MessageQueue]:
    """Return the queues of a topic without closed ones of which nothing is left: no message, and none in a group's parking lot."""
    queues = queues_of(topic)
    closed = queues[topic.queues :]
    groups = groups_with_lots(txn, topic.name) if closed else []

    def needed(queue: MessageQueue) -> bool:
        at = state(txn, queue)
        return at.min_offset < at.max_offset or any(_has_parked(txn, group, queue) for group in groups)

    return queues[: topic.queues] + [queue for queue in closed if needed(queue)]


def groups_with_lots(txn: Transaction, topic: str) -> list[str]:
    """Return the groups that have parking lots for a topic."""
    return [name[0] for row in txn.scan(TOPICS) if (name := origin(row.name)) is not None and name[1] == topic]


def _has_parked(txn: Transaction, group: str, queue: MessageQueue) -> bool:
    lot = schema.key_of(parked_queue(group, queue))
    at, processed = txn.get(QUEUES, *lot), txn.get(OFFSETS, group, *lot)
    return at is not None and at.max_offset > (0 if processed is None else processed.next_offset)


def resize(txn: Transaction, topic: TopicInfo, queues: int) -> TopicInfo:
    """Make ``queues`` the number of queues to which the topic's messages go from now on. Record where the former ones end."""
    if queues == topic.queues:
        return topic
    every = queues_of(topic)
    resized = replace(topic, queues=queues, closed=max(len(every), queues) - queues)
    ends = [state(txn, queue).max_offset for queue in every]
    former = list(txn.scan(RESIZES, topic.name))
    number = former[-1].number + 1 if former else 0
    if not groups_with_lots(txn, topic.name):
        begins = [state(txn, queue).min_offset for queue in every]
        # Nobody can read a message from before these resizes any more.
        for row in itertools.takewhile(lambda row: all(at <= begin for at, begin in zip(json.loads(row.ends), begins)), former):
            txn.delete(RESIZES, *row[:2])
    txn.put(ResizeRow(topic.name, number, topic.queues, queues, json.dumps(ends)))
    put_queues(txn, resized, len(every))
    return resized


def retain(txn: Transaction, topic: TopicInfo, clock: Clock, *, most: int | None) -> dict[MessageQueue, int]:
    """Apply a topic's retention, and return the messages deleted per queue. ``most``: maximum number of chunks.

    Call this after each write to the topic (`most_after`), even if it has no retention: it also records whether the wall clock was set,
    which a later retention must know.
    """
    out: dict[MessageQueue, int] = {}
    recorded, clocks = _clocks(txn, clock)
    if clocks is not recorded:
        txn.put(Setting(schema.CLOCKS, None, schema.clocks_to_text(clocks)))
    for overdue in (_expired, _oldest):
        for queue, gone in overdue(txn, topic, clocks, clock, most).items():
            out[queue] = out.get(queue, 0) + _delete(txn, queue, gone)
            most = None if most is None else most - len(gone)
    return out


def most_after(added: int) -> int:
    """Return how many chunks a write that has added ``added`` chunks to a topic may delete there."""
    return RETIRE_AT_ONCE + 2 * added


def is_overdue(txn: Transaction, topic: TopicInfo, clock: Clock) -> bool:
    """Whether `retain` would delete a message now."""
    _, clocks = _clocks(txn, clock)
    return any(overdue(txn, topic, clocks, clock, 1) for overdue in (_expired, _oldest))


def _expired(
    txn: Transaction, topic: TopicInfo, clocks: Clocks, clock: Clock, most: int | None
) -> dict[MessageQueue, list[Chunk]]:
    """Return the first chunks of each queue whose messages are all too old."""
    out: dict[MessageQueue, list[Chunk]] = {}
    if topic.retention_seconds is None:
        return out
    older = clock.wall() - clocks.ahead(clock.instant(), topic.retention_seconds) - int(topic.retention_seconds * 1e6)
    for queue in queues_of(topic):
        at = state(txn, queue)
        expired = itertools.takewhile(lambda chunk: chunk.last_stored < older, chunks(txn, queue, at, at.min_offset))
        gone = list(itertools.islice(expired, most))
        if gone:
            out[queue] = gone
            most = None if most is None else most - len(gone)
    return out


def _oldest(
    txn: Transaction, topic: TopicInfo, clocks: Clocks, clock: Clock, most: int | None
) -> dict[MessageQueue, list[Chunk]]:
    """Return the topic's oldest chunks, from all queues, such that at least the bytes of its limit remain.

    A segment's space becomes free when the index has no chunk in it any more. So the chunks that one transaction has made visible are
    taken segment by segment, and of a large batch at most about one segment is kept for a part of its messages.
    """
    del clocks, clock
    out: dict[MessageQueue, list[Chunk]] = {}
    if topic.retention_bytes is None:
        return out
    states = {queue: state(txn, queue) for queue in queues_of(topic)}
    excess = sum(at.stored_bytes for at in states.values()) - topic.retention_bytes
    if excess <= 0:
        return out
    segments: dict[str, int] = {}
    oldest: list[tuple[int, int, MessageQueue, Chunk, Iterator[Chunk]]] = []

    def push(queue: MessageQueue, rest: Iterator[Chunk]) -> None:
        chunk = next(rest, None)
        if chunk is not None:
            order = segments.setdefault(chunk.segment, len(segments))
            heapq.heappush(oldest, (chunk.last_stored, order, queue, chunk, rest))

    for queue, at in states.items():
        push(queue, chunks(txn, queue, at, at.min_offset))
    while oldest and (most is None or most > 0):
        _, _, queue, chunk, rest = heapq.heappop(oldest)
        excess -= chunk.stored_bytes
        if excess < 0:
            break
        out.setdefault(queue, []).append(chunk)
        most = None if most is None else most - 1
        push(queue, rest)
    return out


def _clocks(txn: Transaction, clock: Clock) -> tuple[Clocks | None, Clocks]:
    """Return the store's record of the clocks, and what it should be: the same, unless the wall clock was set or the machine restarted."""
    setting = txn.get(SETTINGS, schema.CLOCKS)
    clocks = None if setting is None or setting.text is None else schema.clocks_of(setting.text)
    now, wall = clock.instant(), clock.wall()
    return clocks, Clocks(now, wall) if clocks is None else clocks.read(now, wall)


def topic_at(txn: Transaction, name: str) -> TopicInfo | None:
    """Return a topic's record, None if there is no such topic."""
    row = txn.get(TOPICS, schema.topic_name(name))
    return None if row is None else TopicInfo(*row)


def topic_of(txn: Transaction, name: str) -> TopicInfo:
    """Return a topic's record. Raises TopicError MISSING."""
    topic = topic_at(txn, name)
    if topic is None:
        raise missing_topic(name, (other.name for other in all_topics(txn)))
    return topic


def incarnation_of(txn: Transaction, name: str) -> str:
    """Return what distinguishes a topic from an earlier one of the same name, "" if there is no such topic."""
    topic = topic_at(txn, name)
    return "" if topic is None else topic.incarnation


def all_topics(txn: Transaction) -> list[TopicInfo]:
    return [TopicInfo(*row) for row in txn.scan(TOPICS)]


def put_topic(txn: Transaction, topic: TopicInfo) -> None:
    seconds = topic.retention_seconds
    txn.put(TopicRow(**asdict(topic) | {"retention_seconds": None if seconds is None else float(seconds)}))


def new_incarnation() -> str:
    """Return 16 random hex digits that distinguish a topic from an earlier one of the same name."""
    return uuid.uuid4().hex[:16].upper()


def put_queues(txn: Transaction, topic: TopicInfo, begin: int = 0) -> None:
    """Store a topic's record, and create its queues from number ``begin`` on."""
    put_topic(txn, topic)
    for queue in queues_of(topic)[begin:]:
        txn.put(QueueRow(*schema.key_of(queue)))


def made(txn: Transaction, name: str, queues: int) -> TopicInfo:
    """Return a topic that the broker keeps for a group. It is created without retention if it is missing."""
    if topic_at(txn, name) is None:
        put_queues(txn, TopicInfo(name, queues, new_incarnation(), None, None, DEFAULT_COMPRESSION))
    return topic_of(txn, name)
