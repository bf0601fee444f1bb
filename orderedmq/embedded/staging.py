"""Stages the rows of one attempt of a task: encodes and writes them while the task continues. They are invisible until published.

Rules: each attempt writes into its own segment file and takes no lock. An attempt with few bytes writes no file: its receipt carries
the payloads, and the publishing transaction stores them. From 1 MiB of rows on, a thread encodes and writes the rows. It gets the
rows through an in-memory queue with two places, so that reading, routing and writing overlap.
"""

from __future__ import annotations

import contextlib
import json
import queue as queues
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import xxhash

from orderedmq.broker import Receipt, SinkBatch, TopicInfo
from orderedmq.conditions import SinkCondition
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import index, payloads, runs
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.index import topic_of
from orderedmq.embedded.store import schema, transaction
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import BATCHES, SEGMENTS, Chunk
from orderedmq.embedded.store.segment_file import Header, SegmentWriter
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import SinkError, StoreError, no_such_queue, rows_gone
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange, check_topic
from orderedmq.routing.content_hash import content_sum64
from orderedmq.routing.selector import routed_before
from orderedmq.schema import PRODUCER_COLUMNS

#: From this many bytes of rows on, starting a thread is worth its cost.
THREAD_BYTES: Final = 1024 * 1024


class StagedChunk(NamedTuple):
    """A chunk that is not visible yet, and its payload if it is not in a segment."""

    chunk: Chunk
    payload: bytes | None


class Staged(NamedTuple):
    """The part of a receipt that a publish needs: the chunks in order, and the size of the segment file in bytes (0: no file).

    ``content``: the sum of the rows' content hashes per topic, by which a repeated batch is recognised. It is empty if the batch is
    recognised by its sources, or not at all.
    """

    chunks: tuple[StagedChunk, ...]
    size: int
    content: Mapping[str, int]
    #: Over how many queues the rows of each topic are spread.
    spread: Mapping[str, int]


class EmbeddedStaging:
    """The Staging protocol, for use by one thread. ``batch`` is None for rows that this process itself publishes."""

    def __init__(self, store: Store, clock: Clock, batch: SinkBatch | None, partition: int = 0) -> None:
        self._store = store
        self._clock = clock
        self._batch = batch
        self._partition = partition
        self.token = uuid.uuid4().hex
        self._rows: dict[MessageQueue, int] = {}
        self._content: dict[str, int] = {}
        self._spread: dict[str, int] = {}
        self._codecs: dict[str, int] = {}
        self._waiting: list[tuple[MessageQueue, pa.RecordBatch]] = []
        self._waiting_bytes = 0
        self._chunks: list[StagedChunk] = []
        self._writer: SegmentWriter | None = None
        self._work: queues.Queue[list[tuple[MessageQueue, pa.RecordBatch]] | None] = queues.Queue(maxsize=2)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: Whether a repeat of the batch is recognised by the content of its rows. Known from the first row on.
        self._compared = False

    def _is_compared(self) -> bool:
        """Return False for a batch without identity, and for one with sources in this store, which are compared instead.

        A task registers its source before it gets a row of it. So if a run has no registration when it is published, it had none here.
        """
        batch = self._batch
        if batch is None or batch.sink_id is None:
            return False
        return batch.run is None or not runs.has_sources(self._store.path, batch.run)

    def targets(self, topic: str, proposed: Sequence[MessageQueue]) -> list[MessageQueue]:
        """See `Staging.targets`. Only a published batch has rows that readers see, so only its queues are kept."""
        count = None
        if self._batch is not None and self._batch.sink_id is not None:
            with self._store.read() as txn:
                batch = txn.get(BATCHES, schema.sink_key(self._batch.sink_id), self._batch.batch_id)
            count = json.loads(batch.record)["spread"].get(topic) if batch is not None else None
        queues = list(proposed) if count is None else [MessageQueue(topic, EMBEDDED_BROKER, number) for number in range(count)]
        self._spread[topic] = len(queues)
        return queues

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        if self._error is not None:
            raise self._error
        if not self._rows:
            self._compared = self._is_compared()
        if queue not in self._rows:
            check_topic(queue.topic, writing=True)
            with self._store.read() as txn:
                self._codecs[queue.topic] = codec.CODECS.index(topic_of(txn, queue.topic).compression)
                index.state(txn, queue)
        self._rows[queue] = self._rows.get(queue, 0) + rows.num_rows
        self._waiting.append((queue, rows))
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= THREAD_BYTES:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"stage-{self.token}", daemon=True)
                self._thread.start()
            self._work.put(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def receipt(self) -> Receipt:
        """See `Staging.receipt`. When this returns, all rows are on the disk or in the receipt."""
        if self._thread is None:
            encoded = list(self._encode(self._waiting))
            if sum(chunk.stored_bytes for _, chunk in encoded) <= transaction.INLINE_BYTES:
                self._chunks = [StagedChunk(chunk, b"".join(payload)) for payload, chunk in encoded]
            else:
                self._write(encoded)
        else:
            self._work.put(self._waiting)
            self._work.put(None)
            self._thread.join()
            if self._error is not None:
                raise self._error
        self._waiting = []
        if self._writer is None:
            return Receipt(self.token, self._partition, dict(self._rows), self._staged(0))
        with self._store.errors_mapped("write"):
            self._writer.finish()
        if self._batch is not None:
            self._writer.close()
        return Receipt(self.token, self._partition, dict(self._rows), self._staged(self._writer.size))

    def _staged(self, size: int) -> Staged:
        content = {topic: total % (1 << 64) for topic, total in self._content.items()}
        return Staged(tuple(self._chunks), size, content, self._spread)

    def abandon(self) -> None:
        """See `Staging.abandon`. Do not call this once the receipt was passed on."""
        if self._thread is not None and self._thread.is_alive():
            self._error = self._error or SinkError(SinkCondition.TOKEN_GONE, "the write was given up")
            self._work.put(None)
            self._thread.join()
        if self._writer is not None:
            self._writer.abandon()
            # The caller has an error to raise, which an error here must not replace.
            with contextlib.suppress(StoreError):
                self._store.segments.delete(self._writer.token)

    def close(self) -> None:
        """Release the segment's lock after the segment was published. Only for rows that this process itself publishes."""
        if self._writer is not None:
            self._writer.close()

    # -- the writing side ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._write(self._encode(work))
            except BaseException as error:  # handed to the task's thread, which raises it
                self._error = error

    def _encode(self, work: list[tuple[MessageQueue, pa.RecordBatch]]) -> Iterator[tuple[codec.Pieces, Chunk]]:
        born = self._clock.wall()
        for queue, rows in work:
            for piece in codec.pieces(rows):
                if self._compared:
                    self._content[queue.topic] = self._content.get(queue.topic, 0) + content_sum64(piece)
                yield codec.encode(piece, queue, self._codecs[queue.topic], born)

    def _write(self, encoded: Iterable[tuple[codec.Pieces, Chunk]]) -> None:
        with self._store.errors_mapped("write"):
            for payload, chunk in encoded:
                if self._writer is None:
                    self._writer = self._store.segments.create(self._header())
                position = self._writer.append(payload)
                self._chunks.append(StagedChunk(chunk._replace(segment=self._writer.token, position=position), None))

    def _header(self) -> Header:
        batch, now = self._batch, self._clock.instant()
        if batch is None:
            return Header(self.token, self._store.segments.store_id, own=True)
        return Header(
            self.token,
            self._store.segments.store_id,
            own=False,
            sink=None if batch.sink_id is None else schema.sink_key(batch.sink_id),
            batch=batch.batch_id,
            run=xxhash.xxh3_64_hexdigest((batch.run.run_id if batch.run else batch.job).encode()),
            boot=now.boot_id,
            since=now.seconds,
        )


def staged_rows(store: Store, receipt: Receipt) -> Iterator[tuple[MessageQueue, pa.RecordBatch]]:
    """Yield the rows of a receipt with their queues, in the order in which they were staged. Raises SinkError TOKEN_GONE."""
    staged: Staged = receipt.staged
    for chunk, payload in staged.chunks:
        try:
            content = payload or store.segments.read(chunk.segment, chunk.position, chunk.stored_bytes)
        except FileNotFoundError:
            raise rows_gone(receipt.partition, receipt.token) from None
        codec.verify(content, chunk)
        yield schema.queue_of(chunk), codec.rows_of(content, chunk, PRODUCER_COLUMNS, "")


def make_visible(
    txn: Transaction, receipts: Iterable[Receipt], clock: Clock, *, own_selector: bool = False
) -> dict[MessageQueue, OffsetRange]:
    """Make the rows of receipts visible in the receipts' order, apply the retention of their topics, and return their offsets.

    ``own_selector``: see `SinkBatch`. Raises TopicError QUEUE_COUNT if a topic has another number of queues than when its rows were
    staged, or NO_SUCH_QUEUE if a queue takes no more messages; SinkError TOKEN_GONE if a segment is missing, has another size than its
    receipt says, or was published before.
    """
    now = clock.wall()
    topics: dict[str, TopicInfo] = {}
    added: Counter[str] = Counter()
    ranges: dict[MessageQueue, OffsetRange] = {}
    for receipt in receipts:
        staged: Staged = receipt.staged
        segment = receipt.token
        for name, count in staged.spread.items():
            topic = topics.setdefault(name, topic_of(txn, name))
            if topic.queues != count:
                raise routed_before(name, count, topic.queues)
        if staged.size and (txn.segments.size(segment) != staged.size or txn.get(SEGMENTS, segment) is not None):
            raise rows_gone(receipt.partition, receipt.token)
        for chunk, payload in staged.chunks:
            topic = topics.get(chunk.topic) or topics.setdefault(chunk.topic, topic_of(txn, chunk.topic))
            if chunk.queue_id >= topic.queues:
                raise no_such_queue(topic.name, chunk.queue_id, f"it has {topic.queues} queues that take messages")
            if payload is None:
                payloads.hold(txn, chunk)
        # Count all chunks before adding any, because merging one chunk could otherwise release the segment that has the next.
        for chunk, payload in staged.chunks:
            added[chunk.topic] += 1
            queue = schema.queue_of(chunk)
            span = index.add(txn, chunk, now, None if payload is None else [payload])
            before = ranges.get(queue)
            ranges[queue] = OffsetRange(before.begin if before else span.begin, span.end)
    for topic in topics.values():
        if own_selector and not topic.own_selector and added[topic.name]:
            index.put_topic(txn, replace(topic, own_selector=1))
        index.retain(txn, topic, clock, most=index.most_after(added[topic.name]))
    return ranges


def discard(txn: Transaction, receipts: Iterable[Receipt]) -> None:
    """Delete the segments of receipts after the commit, unless they were published. ``txn`` must be a write transaction."""
    for receipt in receipts:
        staged: Any = receipt.staged
        if staged.size and txn.get(SEGMENTS, receipt.token) is None:
            txn.drop(receipt.token)
