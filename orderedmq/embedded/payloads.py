"""Stores payloads, and counts the chunks of each segment. The caller holds the transaction.

A segment is needed as long as a chunk in the index points into it. The table ``segments`` counts these chunks. It changes in the
transaction that changes the index.
"""

from __future__ import annotations

import pyarrow as pa

from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.store.schema import INLINE, PAYLOADS, SEGMENTS, Chunk, Segment
from orderedmq.embedded.store.transaction import Transaction


def place(txn: Transaction, payload: codec.Pieces, chunk: Chunk) -> Chunk:
    """Write the payload of a chunk that is about to be added to the index. Return the chunk with its place."""
    segment, position = txn.place(payload)
    placed = chunk._replace(segment=segment, position=position)
    hold(txn, placed)
    return placed


def hold(txn: Transaction, chunk: Chunk) -> None:
    """Count a chunk whose payload is already stored, and that is about to be added to the index."""
    if chunk.segment != INLINE:
        segment = txn.get(SEGMENTS, chunk.segment) or Segment(chunk.segment)
        txn.put(segment._replace(chunks=segment.chunks + 1))
        txn.keep(chunk.segment)


def release(txn: Transaction, chunk: Chunk) -> None:
    """Release the payload of a chunk that leaves the index. A segment's space is free when the index has no chunk in it any more."""
    if chunk.segment == INLINE:
        txn.delete(PAYLOADS, chunk.position)
        return
    segment = txn.get(SEGMENTS, chunk.segment)
    if segment is None:
        raise txn.damaged(f"segment {chunk.segment} has chunks but no entry")
    if segment.chunks > 1:
        txn.put(segment._replace(chunks=segment.chunks - 1))
        return
    txn.delete(SEGMENTS, chunk.segment)
    txn.drop(chunk.segment)


def load(txn: Transaction, chunk: Chunk) -> bytes | pa.Buffer:
    """Return a verified payload. Raises StoreError CORRUPT (see `Store.consult`)."""
    payload = txn.payload(chunk)
    codec.verify(payload, chunk)
    return payload
