"""Stages the rows of one task attempt: encodes and writes them while the task goes on, invisible until published.

Rules: ``receipt`` writes less than 1 MiB of rows itself. Larger writes go to a thread of their own behind a queue of two, so
that reading, routing and writing overlap. A transaction is closed every 8 MiB: there is one writer at a time, and a renewal
must not wait long.
"""

from __future__ import annotations

import json
import queue as queues
import threading
import uuid
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import SinkCondition
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import index
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.environment import Store
from orderedmq.embedded.store.layout import Chunk
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.embedded.topics import topic_of
from orderedmq.errors import SinkError, rows_gone
from orderedmq.model import MessageQueue, check_topic
from orderedmq.rows.message_rows import normalise

#: Bytes of payloads per transaction.
WRITE_BYTES: Final = 8 * 1024 * 1024
#: Bytes of rows from which on it pays to start a thread.
INLINE_BYTES: Final = 1024 * 1024


class EmbeddedStaging:
    """The Staging protocol; used by one thread."""

    def __init__(self, store: Store, clock: Clock, batch: SinkBatch, partition: int) -> None:
        self._store = store
        self._clock = clock
        self._batch = batch
        self._partition = partition
        self.token = uuid.uuid4().hex
        self._rows: dict[MessageQueue, int] = {}
        self._codecs: dict[str, int] = {}
        self._sequence = 0
        self._waiting: list[tuple[MessageQueue, pa.RecordBatch]] = []
        self._waiting_bytes = 0
        self._work: queues.Queue[list[tuple[MessageQueue, pa.RecordBatch]] | None] = queues.Queue(maxsize=2)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        if self._error is not None:
            raise self._error
        checked = normalise(rows, f"queue {queue}")
        if queue not in self._rows:
            check_topic(queue.topic, writing=True)
            with self._store.read() as txn:
                self._codecs[queue.topic] = codec.CODECS.index(topic_of(txn, queue.topic).compression)
                index.state(txn, queue)
        self._rows[queue] = self._rows.get(queue, 0) + checked.num_rows
        self._waiting.append((queue, checked))
        self._waiting_bytes += checked.nbytes
        if self._waiting_bytes >= INLINE_BYTES:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"stage-{self.token}", daemon=True)
                self._thread.start()
            self._work.put(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def receipt(self) -> Receipt:
        if self._thread is None:
            self._write_all(self._waiting)
        else:
            self._work.put(self._waiting)
            self._work.put(None)
            self._thread.join()
            if self._error is not None:
                raise self._error
        self._waiting = []
        return Receipt(self.token, self._partition, dict(self._rows))

    def abandon(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._error = self._error or SinkError(SinkCondition.TOKEN_GONE, "the write was given up")
            self._work.put(None)
            self._thread.join()
        if self._sequence:
            self._store.write_even_if_full(lambda txn: discard(txn, self.token))

    # -- the writing side ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        encoded: list[tuple[MessageQueue, pa.Buffer, Chunk]] = []
        size = 0
        while (work := self._work.get()) is not None:
            if self._error is not None:
                continue
            try:
                for entry in self._encode(work):
                    encoded.append(entry)
                    size += entry[2].stored_bytes
                    if size >= WRITE_BYTES:
                        self._put(encoded)
                        encoded, size = [], 0
            except BaseException as error:  # handed to the task's thread, which raises it
                self._error = error
        if self._error is None:
            try:
                self._put(encoded)
            except BaseException as error:
                self._error = error

    def _write_all(self, work: list[tuple[MessageQueue, pa.RecordBatch]]) -> None:
        self._put(list(self._encode(work)))

    def _encode(self, work: list[tuple[MessageQueue, pa.RecordBatch]]) -> Iterator[tuple[MessageQueue, pa.Buffer, Chunk]]:
        born = self._clock.wall()
        for queue, rows in work:
            for piece in codec.pieces(rows):
                yield queue, *codec.encode(piece, self._codecs[queue.topic], born)

    def _put(self, encoded: list[tuple[MessageQueue, pa.Buffer, Chunk]]) -> None:
        if not encoded:
            return
        # Counted only when it is on disk, so that the same call can be repeated once a full store has room.
        sequence = self._sequence
        with self._store.write() as txn:
            key = self.token.encode()
            if sequence == 0:
                about = {"sink": self._batch.sink_id, "batch": self._batch.batch_id, "since": self._clock.wall()}
                txn.put("tokens", key, json.dumps(about).encode())
            elif txn.get("tokens", key) is None:
                raise rows_gone(self._partition, self.token)
            for queue, payload, chunk in encoded:
                stored = index.store(txn, payload, chunk)
                txn.put("staged", layout.staged_key(self.token, sequence), layout.staged_value(queue, stored))
                sequence += 1
        self._sequence = sequence


def discard(txn: Transaction, token: str) -> None:
    """Delete the rows that were staged under ``token``, unless they were published."""
    if txn.get("tokens", token.encode()) is None:
        return
    for key, value in list(txn.scan("staged", token.encode() + b"\0")):
        _, chunk = layout.from_staged(value)
        txn.delete("payloads", layout.number(chunk.payload))
        txn.delete("staged", key)
    txn.delete("tokens", token.encode())
