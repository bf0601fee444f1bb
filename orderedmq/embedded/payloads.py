"""Stores payloads, and counts the chunks of each segment and the bytes of each topic. The caller holds the transaction.

A segment is needed as long as a chunk in the index points into it. The entry in ``segments`` counts these chunks, and the entry in
``space`` counts the bytes that a topic takes on the disk. Both change in the transaction that changes the index.
"""

from __future__ import annotations

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.layout import INLINE, Chunk, SegmentState
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MessageQueue


def place(txn: Transaction, topic: TopicInfo, payload: codec.Pieces, chunk: Chunk) -> Chunk:
    """Write the payload of a chunk that is about to be added to the index for ``topic``. Return the chunk with its place."""
    segment, position = txn.place(payload)
    placed = chunk._replace(segment=segment, position=position)
    hold(txn, topic, placed)
    return placed


def hold(txn: Transaction, topic: TopicInfo, chunk: Chunk) -> None:
    """Count a chunk whose payload is already stored, and that is about to be added to the index for ``topic``."""
    _add_space(txn, topic.incarnation, chunk.stored_bytes)
    if chunk.segment != INLINE:
        state = segment_state(txn, chunk.segment) or SegmentState(0, {})
        state.chunks += 1
        state.topics[topic.incarnation] = state.topics.get(topic.incarnation, 0) + chunk.stored_bytes
        txn.put("segments", chunk.segment, state.pack())
        txn.keep(chunk.segment)


def release(txn: Transaction, topic: TopicInfo, chunk: Chunk) -> None:
    """Release the payload of a chunk that leaves the index. A segment's space is free when the index has no chunk in it any more."""
    if chunk.segment == INLINE:
        txn.delete("payloads", layout.number(chunk.position))
        _add_space(txn, topic.incarnation, -chunk.stored_bytes)
        return
    state = segment_state(txn, chunk.segment)
    if state is None:
        raise txn.damaged(f"segment {chunk.segment.hex()} has chunks but no entry")
    state.chunks -= 1
    if state.chunks:
        txn.put("segments", chunk.segment, state.pack())
        return
    txn.delete("segments", chunk.segment)
    txn.drop(chunk.segment)
    for incarnation, size in state.topics.items():
        _add_space(txn, incarnation, -size)


def share(txn: Transaction, topic: TopicInfo, chunk: Chunk) -> int:
    """Return the bytes of ``topic`` that deleting the chunk frees: its payload, or ``topic``'s share of the payload's segment."""
    if chunk.segment == INLINE:
        return chunk.stored_bytes
    state = segment_state(txn, chunk.segment)
    return 0 if state is None else state.topics.get(topic.incarnation, 0)


def load(txn: Transaction, queue: MessageQueue, first: int, chunk: Chunk) -> bytes | pa.Buffer:
    """Return a verified payload. Raises StoreError CORRUPT (see `Store.consult`)."""
    payload = txn.payload(chunk)
    codec.verify(payload, chunk, queue, first)
    return payload


def segment_state(txn: Transaction, segment: bytes) -> SegmentState | None:
    value = txn.get("segments", segment)
    return None if value is None else SegmentState.unpack(value)


def space(txn: Transaction, topic: TopicInfo) -> int:
    """Return the bytes that a topic's messages take: readable messages, and deleted ones whose segment is still needed."""
    value = txn.get("space", topic.incarnation.encode())
    return 0 if value is None else layout.to_number(value)


def forget_space(txn: Transaction, topic: TopicInfo) -> None:
    """Stop counting the bytes of a topic that is being deleted."""
    txn.delete("space", topic.incarnation.encode())


def begin_space(txn: Transaction, topic: TopicInfo) -> None:
    """Begin to count the bytes of a new topic."""
    txn.put("space", topic.incarnation.encode(), layout.number(0))


def _add_space(txn: Transaction, incarnation: str, size: int) -> None:
    key = incarnation.encode()
    value = txn.get("space", key)
    # The bytes of a deleted topic are no longer counted.
    if value is not None:
        txn.put("space", key, layout.number(layout.to_number(value) + size))
