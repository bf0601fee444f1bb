"""Stores payloads, and counts the chunks of each segment and the bytes of each topic. The caller holds the transaction.

A segment is needed as long as a chunk in the index points into it. The table ``segments`` counts these chunks, and the table
``space`` counts the bytes that a topic takes on the disk. Both change in the transaction that changes the index.
"""

from __future__ import annotations

import json

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.store.schema import INLINE, PAYLOADS, SEGMENTS, SPACE, Chunk, Segment, Space
from orderedmq.embedded.store.transaction import Transaction


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
        segment = txn.get(SEGMENTS, chunk.segment) or Segment(chunk.segment)
        topics = json.loads(segment.topics)
        topics[topic.incarnation] = topics.get(topic.incarnation, 0) + chunk.stored_bytes
        txn.put(Segment(segment.token, segment.chunks + 1, json.dumps(topics)))
        txn.keep(chunk.segment)


def release(txn: Transaction, topic: TopicInfo, chunk: Chunk) -> None:
    """Release the payload of a chunk that leaves the index. A segment's space is free when the index has no chunk in it any more."""
    if chunk.segment == INLINE:
        txn.delete(PAYLOADS, chunk.position)
        _add_space(txn, topic.incarnation, -chunk.stored_bytes)
        return
    segment = txn.get(SEGMENTS, chunk.segment)
    if segment is None:
        raise txn.damaged(f"segment {chunk.segment} has chunks but no entry")
    if segment.chunks > 1:
        txn.put(segment._replace(chunks=segment.chunks - 1))
        return
    txn.delete(SEGMENTS, chunk.segment)
    txn.drop(chunk.segment)
    for incarnation, size in json.loads(segment.topics).items():
        _add_space(txn, incarnation, -size)


def share(txn: Transaction, topic: TopicInfo, chunk: Chunk) -> int:
    """Return the bytes of ``topic`` that deleting the chunk frees: its payload, or ``topic``'s share of the payload's segment."""
    if chunk.segment == INLINE:
        return chunk.stored_bytes
    segment = txn.get(SEGMENTS, chunk.segment)
    return 0 if segment is None else int(json.loads(segment.topics).get(topic.incarnation, 0))


def load(txn: Transaction, chunk: Chunk) -> bytes | pa.Buffer:
    """Return a verified payload. Raises StoreError CORRUPT (see `Store.consult`)."""
    payload = txn.payload(chunk)
    codec.verify(payload, chunk)
    return payload


def space(txn: Transaction, topic: TopicInfo) -> int:
    """Return the bytes that a topic's messages take: readable messages, and deleted ones whose segment is still needed."""
    row = txn.get(SPACE, topic.incarnation)
    return 0 if row is None else row.bytes


def forget_space(txn: Transaction, topic: TopicInfo) -> None:
    """Stop counting the bytes of a topic that is being deleted."""
    txn.delete(SPACE, topic.incarnation)


def begin_space(txn: Transaction, topic: TopicInfo) -> None:
    """Begin to count the bytes of a new topic."""
    txn.put(Space(topic.incarnation))


def _add_space(txn: Transaction, incarnation: str, size: int) -> None:
    row = txn.get(SPACE, incarnation)
    # The bytes of a deleted topic are no longer counted.
    if row is not None:
        txn.put(row._replace(bytes=row.bytes + size))
