"""A queue's index entries, which make messages visible. The caller holds the transaction.

Rules: a queue's chunks are contiguous from ``min_offset`` to ``max_offset``. A chunk that is added behind a small one is merged
with it, as a binary counter carries. So small batches leave few chunks, and a row is rewritten at most about ten times before
it is in a chunk of 8k rows. Retention deletes whole chunks from the front.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from orderedmq.broker import TopicInfo
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.layout import Chunk, QueueState
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import StoreError, no_such_queue
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange, missing_topic
from orderedmq.rows.retention import Clocks

#: A tail chunk of this many rows or more is not merged. It is half a full chunk, and costs about as much per row to read as a
#: full one.
MERGE_BELOW: Final = 8192
#: Maximum chunks that one append or publish retires per queue, so that its transaction stays short.
RETIRE_AT_ONCE: Final = 64


def state(txn: Transaction, queue: MessageQueue) -> QueueState:
    """Return the state of a queue. Raises TopicError MISSING or NO_SUCH_QUEUE."""
    value = txn.get("queues", layout.queue_key(queue))
    if value is None:
        topic = txn.get("topics", queue.topic.encode())
        if topic is None:
            raise missing_topic(queue.topic)
        raise no_such_queue(queue.topic, queue.queue_id)
    return QueueState.unpack(value)


def holding(txn: Transaction, queue: MessageQueue, offset: int) -> tuple[int, Chunk]:
    """Return (first offset, chunk) of the chunk that holds ``offset``. Raises StoreError CORRUPT if no chunk does."""
    key = layout.queue_key(queue)
    sought = layout.index_key(key, offset)
    entry = txn.floor("index", sought)
    if entry is not None and entry[0].startswith(key) and len(entry[0]) == len(sought):
        first, chunk = layout.index_offset(entry[0]), Chunk.unpack(entry[1])
        if first <= offset < first + chunk.rows:
            return first, chunk
    raise txn.damaged(f"queue {queue} has no chunk with its message {offset}")


def chunks(txn: Transaction, queue: MessageQueue, at: QueueState, offset: int) -> Iterator[tuple[int, Chunk]]:
    """Yield (first offset, chunk) from the chunk that holds ``offset`` to the last one. Raises StoreError CORRUPT at a gap."""
    if offset >= at.max_offset:
        return
    following, _ = holding(txn, queue, max(offset, at.min_offset))
    key = layout.queue_key(queue)
    for found, value in txn.following("index", layout.index_key(key, following)):
        first, chunk = layout.index_offset(found), Chunk.unpack(value)
        if not found.startswith(key) or len(found) != len(key) + 8 or first != following or chunk.rows < 1:
            raise txn.damaged(f"queue {queue} has no chunk with its message {following}")
        yield first, chunk
        following = first + chunk.rows
        if following >= at.max_offset:
            return
    raise txn.damaged(f"queue {queue} ends at {at.max_offset}, its chunks end at {following}")


def add(txn: Transaction, queue: MessageQueue, chunk: Chunk, now: int) -> OffsetRange:
    """Make a stored payload visible at the queue's end, and return its offsets. ``now`` is in µs since the epoch."""
    key = layout.queue_key(queue)
    at = state(txn, queue)
    stamp = max(now, at.last_stored)
    first, after = at.max_offset, at.max_offset + chunk.rows
    chunk = chunk._replace(first_stored=stamp, last_stored=stamp)
    parts = [(first, chunk)]
    read: list[tuple[bytes, Chunk]] = []
    while parts[0][0] > at.min_offset:
        size = sum(part.rows for _, part in parts)
        try:
            tail = holding(txn, queue, parts[0][0] - 1)
        except StoreError:
            break
        if tail[1].rows >= MERGE_BELOW or tail[1].rows > 2 * size or tail[1].rows + size > codec.CHUNK_ROWS:
            break
        if tail[1].stored_bytes + sum(part.stored_bytes for _, part in parts) > codec.CHUNK_BYTES:
            break
        try:
            payload = load(txn, queue, *tail)
        except StoreError:
            # A read reports the damaged chunk. Here it must not keep new messages out.
            break
        parts.insert(0, tail)
        read.insert(0, (payload, tail[1]))
    held = at.stored_bytes - sum(part.stored_bytes for _, part in parts[:-1])
    if read:
        read.append((load(txn, queue, first, chunk), chunk))
        merged, whole = codec.merge(read, chunk.codec)
        for begin, part in parts:
            txn.delete("payloads", layout.number(part.payload))
            txn.delete("index", layout.index_key(key, begin))
        chunk = store(txn, merged, whole)
    txn.put("index", layout.index_key(key, parts[0][0]), chunk.pack())
    txn.put("queues", key, QueueState(at.min_offset, after, held + chunk.stored_bytes, stamp).pack())
    return OffsetRange(first, after)


def store(txn: Transaction, payload: object, chunk: Chunk) -> Chunk:
    """Store a payload, which is not visible yet. Return its chunk with the payload id."""
    number = txn.take_number("payload")
    txn.put("payloads", layout.number(number), payload, append=True)
    return chunk._replace(payload=number)


def load(txn: Transaction, queue: MessageQueue, first: int, chunk: Chunk) -> bytes:
    """Return a verified copy of a payload. Raises StoreError CORRUPT."""
    payload = txn.get("payloads", layout.number(chunk.payload)) or b""
    codec.verify(payload, chunk, queue, first)
    return payload


def retire(
    txn: Transaction,
    queue: MessageQueue,
    *,
    before: int | None = None,
    older: int | None = None,
    excess: int = 0,
    most: int | None = None,
) -> int:
    """Delete whole chunks from the front, and return the number of messages deleted.

    A chunk is deleted if it ends at or before offset ``before``, if its last message was stored before ``older`` (µs since the
    epoch), or if all of it fits into the ``excess`` bytes still to delete. The first chunk to which none of this applies ends
    the deletion, so a new chunk that is larger than the size limit stays. ``most``: maximum number of chunks.
    """
    key = layout.queue_key(queue)
    at = state(txn, queue)
    gone: list[tuple[int, Chunk]] = []
    for first, chunk in chunks(txn, queue, at, at.min_offset):
        if most is not None and len(gone) >= most:
            break
        by_offset = before is not None and first + chunk.rows <= before
        by_age = older is not None and chunk.last_stored < older
        by_size = chunk.stored_bytes <= excess
        if not (by_offset or by_age or by_size):
            break
        excess -= chunk.stored_bytes
        gone.append((first, chunk))
    for first, chunk in gone:
        txn.delete("payloads", layout.number(chunk.payload))
        txn.delete("index", layout.index_key(key, first))
    if not gone:
        return 0
    begin = gone[-1][0] + gone[-1][1].rows
    left = at.stored_bytes - sum(chunk.stored_bytes for _, chunk in gone)
    txn.put("queues", key, QueueState(begin, at.max_offset, left, at.last_stored).pack())
    return begin - at.min_offset


def queues_of(topic: TopicInfo) -> list[MessageQueue]:
    """Return the queues of a topic in order."""
    return [MessageQueue(topic.name, EMBEDDED_BROKER, number) for number in range(topic.queues)]


def retain(txn: Transaction, topic: TopicInfo, clock: Clock, *, most: int | None = RETIRE_AT_ONCE) -> dict[MessageQueue, int]:
    """Apply a topic's retention, and return the messages deleted per queue.

    The size limit is for all queues together. Each queue gives up its proportion of the excess.
    """
    if topic.retention_seconds is None and topic.retention_bytes is None:
        return {}
    older = None if topic.retention_seconds is None else _stored_before(txn, clock, topic.retention_seconds)
    out: dict[MessageQueue, int] = {}
    sizes = {queue: state(txn, queue).stored_bytes for queue in queues_of(topic)}
    total = sum(sizes.values())
    for queue, size in sizes.items():
        excess = 0
        if topic.retention_bytes is not None and total > topic.retention_bytes:
            excess = (total - topic.retention_bytes) * size // total
        gone = retire(txn, queue, older=older, excess=excess, most=most)
        if gone:
            out[queue] = gone
    return out


def _stored_before(txn: Transaction, clock: Clock, seconds: float) -> int:
    """Return the store time, in µs since the epoch, below which a message is older than ``seconds``."""
    at, wall = clock.instant(), clock.wall()
    value = txn.get("meta", layout.CLOCKS)
    known = None if value is None else layout.clocks_from_json(value)
    clocks = Clocks(at, wall) if known is None else known.read(at, wall)
    if clocks is not known:
        txn.put("meta", layout.CLOCKS, layout.clocks_to_json(clocks))
    return wall - clocks.ahead(at, seconds) - int(seconds * 1e6)
