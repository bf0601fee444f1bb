"""The Log protocol on the store: topics, offsets, pulling and appending messages."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log, PullSettings, QueueBounds, Receipt, TopicInfo
from orderedmq.conditions import OptionCondition
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import garbage, index, payloads
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.index import topic_of
from orderedmq.embedded.staging import EmbeddedStaging, discard, make_visible
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import QUEUES, RESIZES, Chunk, QueueRow
from orderedmq.embedded.store.store_file import another_store
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import OptionError, StoreError, aged_out, beyond_end, recreated
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.routing.generations import Resize
from orderedmq.routing.selector import require_targets
from orderedmq.rows.filters import Filter
from orderedmq.rows.message_rows import normalise
from orderedmq.schema import bounded, concat_batches, select_schema
from orderedmq.text import MalformedText, repaired_rows

_BODY = ("body",)
_STORED = ("store_timestamp",)


def append_rows(txn: Transaction, topic: TopicInfo, queue: MessageQueue, rows: pa.RecordBatch, now: int) -> OffsetRange:
    """Append rows that were checked (`normalise`), and return their offsets. ``now`` is in µs since the epoch.

    Use this for rows that are known only inside the transaction. `EmbeddedLog.append` writes large rows before its transaction begins.
    """
    begin = end = index.state(txn, queue).max_offset
    number = codec.CODECS.index(topic.compression)
    for piece in codec.pieces(rows):
        payload, chunk = codec.encode(piece, queue, number, now)
        end = index.add(txn, chunk, now, payload).end
    return OffsetRange(begin, end)


def rows_between(
    txn: Transaction, queue: MessageQueue, begin: int, end: int, columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of [``begin``, ``end``) with ``columns``, one chunk at a time. All texts are valid UTF-8.

    Raises TopicError MISSING or NO_SUCH_QUEUE; DataLossError AGED_OUT if ``begin`` is before the first message, BEYOND_END if ``end``
    is after the queue's end; StoreError CORRUPT.
    """
    topic, at = topic_of(txn, queue.topic), index.state(txn, queue)
    _require_there(queue, at, begin, end)
    for chunk in index.chunks(txn, queue, at, begin) if begin < end else ():
        first = chunk.first_offset
        if first >= end:
            return
        skipped = max(0, begin - first)
        yield _whole(txn, topic, chunk, columns).slice(skipped, min(end, chunk.end) - first - skipped)


def rows_at(txn: Transaction, queue: MessageQueue, offsets: Sequence[int], columns: tuple[str, ...]) -> pa.RecordBatch:
    """Return the messages at the sorted ``offsets``, with ``columns``. Each chunk is read once. Raises the errors of `rows_between`."""
    topic, at = topic_of(txn, queue.topic), index.state(txn, queue)
    _require_there(queue, at, offsets[0], offsets[-1] + 1)
    batches, done = [], 0
    while done < len(offsets):
        chunk = index.holding(txn, queue, offsets[done])
        end = bisect.bisect_left(offsets, chunk.end, done)
        places = pa.array([offset - chunk.first_offset for offset in offsets[done:end]], pa.int64())
        batches.append(_whole(txn, topic, chunk, columns).take(places))
        done = end
    return concat_batches(batches)


def _require_there(queue: MessageQueue, at: QueueRow, begin: int, end: int) -> None:
    if begin < at.min_offset:
        raise aged_out(queue, begin, at.min_offset)
    if end > at.max_offset:
        raise beyond_end(queue, at.max_offset, f"offset {end - 1} was asked for", EmbeddedLog.tail_loss)


def _whole(txn: Transaction, topic: TopicInfo, chunk: Chunk, columns: tuple[str, ...]) -> pa.RecordBatch:
    """Return all messages of a chunk. All texts are valid UTF-8."""
    return repaired_rows(codec.rows_of(payloads.load(txn, chunk), chunk, columns, topic.incarnation))[0]


class EmbeddedLog(Log):
    """The Log protocol. Thread-safe."""

    tail_loss = "the store was replaced by an older copy"

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._malformed = MalformedText()
        #: Place, columns and rows of the chunk that was read last. They are kept because consecutive small pulls read the same chunk.
        self._last: tuple[str, int, tuple[str, ...], pa.RecordBatch] | None = None

    def reading(self, how: PullSettings) -> EmbeddedLog:
        """Return this log, which needs no settings because it prefetches nothing."""
        del how
        return self

    def topics(self) -> list[TopicInfo]:
        with self._store.read() as txn:
            return index.all_topics(txn)

    def topic(self, name: str) -> TopicInfo:
        with self._store.read() as txn:
            return topic_of(txn, name)

    def queues(self, topic: str) -> list[MessageQueue]:
        with self._store.read() as txn:
            return index.listed(txn, topic_of(txn, topic))

    def readable(self, topic: str) -> list[MessageQueue]:
        return self.queues(topic)

    def targets(self, topic: str) -> list[MessageQueue]:
        return index.targets_of(self.topic(topic))

    def resizes(self, topics: Iterable[str]) -> list[Resize]:
        names = set(topics)
        with self._store.read() as txn:
            # A query may read thousands of topics, few of which were ever resized.
            rows = [row for row in txn.scan(RESIZES) if row.topic in names]
            return [schema.resize_of(row, not topic_of(txn, row.topic).own_selector) for row in rows]

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        """Return the topic's incarnation and the store's id, which do not depend on ``offsets``. A copy of a store has the same id."""
        del offsets
        return f"{self.topic(topic).incarnation}@{self._store.segments.store_id}"

    def require_place_of(self, anchor: str) -> None:
        if anchor and anchor.partition("@")[2] != self._store.segments.store_id:
            raise another_store(self._store.path)

    def is_another(self, topic: str, anchor: str) -> bool:
        return _incarnation(anchor) not in ("", self.topic(topic).incarnation)

    def change(self) -> int:
        """Return a number that changes with every write to the store."""
        return self._store.last_change()

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        out: dict[MessageQueue, QueueBounds] = {}
        with self._store.read() as txn:
            for queue in queues:
                at = txn.get(QUEUES, *schema.key_of(queue))
                if at is not None:
                    out[queue] = QueueBounds(at.min_offset, at.max_offset)
        return out

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        def find(txn: Transaction) -> int:
            at = index.state(txn, queue)
            low, high = at.min_offset, at.max_offset
            # A binary search over chunks works because store timestamps never go back within a queue.
            while low < high:
                chunk = index.holding(txn, queue, (low + high) // 2)
                if chunk.last_stored < timestamp:
                    low = chunk.end
                elif chunk.first_stored >= timestamp:
                    high = chunk.first_offset
                else:
                    stamps = codec.decode(payloads.load(txn, chunk), chunk, _STORED)["store_timestamp"]
                    later = pc.greater_equal(stamps, pa.scalar(timestamp, stamps.type))
                    return chunk.first_offset + int(pc.index(later, True).as_py())
            return max(low, at.min_offset)

        return self._store.consult(find)

    def stored_at(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        def find(txn: Transaction) -> dict[MessageQueue, int]:
            found = {}
            for queue, offset in offsets.items():
                at = _state(txn, queue)
                if not at.min_offset <= offset < at.max_offset:
                    continue
                chunk = index.holding(txn, queue, offset)
                first = chunk.first_offset
                found[queue] = chunk.first_stored
                # Only a merged chunk has several store times.
                if chunk.first_stored < chunk.last_stored and offset > first:
                    stamps = codec.decode(payloads.load(txn, chunk), chunk, _STORED)["store_timestamp"]
                    found[queue] = stamps.cast(pa.int64())[offset - first].as_py()
            return found

        return self._store.consult(find)

    def advance(self, queue: MessageQueue, begin: int, end: int, max_bytes: int) -> int:
        def find(txn: Transaction) -> int:
            left = max_bytes
            for chunk in index.chunks(txn, queue, _state(txn, queue), begin):
                first = chunk.first_offset
                if first >= end:
                    break
                whole = begin <= first and chunk.end <= end
                if whole and chunk.body_bytes <= left:
                    left -= chunk.body_bytes
                    continue
                low, high = max(begin, first), min(end, chunk.end)
                if low >= high:
                    break
                body = codec.decode(payloads.load(txn, chunk), chunk, _BODY)["body"]
                sizes = pc.binary_length(body.slice(low - first, high - low))
                sums = pc.cumulative_sum(sizes.cast(pa.int64()))
                fitting = int(pc.sum(pc.less_equal(sums, left)).as_py() or 0)
                if fitting < len(sums):
                    return low + fitting
                left -= sums[-1].as_py()
            return end

        return self._store.consult(find)

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        anchor: str | None = None,
        until: int | None = None,
    ) -> pa.RecordBatch:
        # A store answers immediately, so no deadline is needed.
        del until

        def gather(txn: Transaction) -> tuple[TopicInfo, list[tuple[Chunk, Any]]]:
            topic = topic_of(txn, queue.topic)
            if anchor is not None and _incarnation(anchor) != topic.incarnation:
                raise recreated(queue.topic)
            at = index.state(txn, queue)
            if offset < at.min_offset:
                raise aged_out(queue, offset, at.min_offset)
            if offset > at.max_offset:
                raise beyond_end(queue, at.max_offset, f"offset {offset} was asked for", self.tail_loss)
            if offset == at.max_offset:
                return topic, []
            return topic, self._gather(txn, queue, at, offset, max_messages, max_bytes, columns)

        topic, parts = self._store.consult(gather)
        if not parts:
            return _empty(columns)
        return self._join(parts, offset, max_messages, max_bytes, columns, topic.incarnation)

    def pull_matching(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        matching: Filter,
        anchor: str | None = None,
    ) -> tuple[pa.RecordBatch, int]:
        select_schema(columns)
        wanted = columns if "tags" in columns else (*columns, "tags")
        batch = self.pull(queue, offset, max_messages, max_bytes, wanted, anchor)
        rows = batch.filter(matching.matching(batch.column("tags")))
        return rows.select(list(columns)), offset + batch.num_rows

    def require_filter(self, matching: Filter, topics: Sequence[str]) -> None:
        del topics
        if matching.sql:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                "the embedded broker does not filter by SQL. Filter the DataFrame (DataFrame.filter)",
            )

    def require_rights(self, topics: Sequence[str], group: str | None) -> None:
        """Do nothing: a user who may open the store's files has all rights."""

    def _gather(
        self,
        txn: Transaction,
        queue: MessageQueue,
        at: QueueRow,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
    ) -> list[tuple[Chunk, bytes | pa.Buffer | pa.RecordBatch]]:
        """Return one or more consecutive chunks, from the one that holds ``offset`` on, with their payloads or decoded rows.

        Chunks are added until they have a quarter of ``max_messages``, or until the next chunk would exceed ``max_bytes``.
        """
        parts: list[tuple[Chunk, bytes | pa.Buffer | pa.RecordBatch]] = []
        rows = size = 0
        for chunk in index.chunks(txn, queue, at, offset):
            if parts and (rows >= max_messages // 4 or size + chunk.body_bytes > max_bytes):
                break
            last = self._last
            if last is not None and last[:3] == (chunk.segment, chunk.position, columns):
                parts.append((chunk, last[3]))
            else:
                # `_join` verifies the payload, after the transaction has ended.
                parts.append((chunk, txn.payload(chunk)))
            rows += chunk.end - max(chunk.first_offset, offset)
            size += chunk.body_bytes
        return parts

    def _join(
        self,
        parts: list[tuple[Chunk, bytes | pa.Buffer | pa.RecordBatch]],
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        incarnation: str,
    ) -> pa.RecordBatch:
        batches = []
        for chunk, payload in parts:
            first = chunk.first_offset
            if isinstance(payload, pa.RecordBatch):
                batch = payload
            else:
                codec.verify(payload, chunk)
                rows = codec.rows_of(payload, chunk, columns, incarnation)
                batch = self._malformed.repaired(rows, schema.queue_of(chunk), first)
                self._last = (chunk.segment, chunk.position, columns, batch)
            batches.append(batch.slice(max(0, offset - first)))
        joined = batches[0] if len(batches) == 1 else concat_batches(batches)
        return bounded(joined.slice(0, max_messages), max_bytes)

    def append(
        self,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue] = (),
        *,
        also: Callable[[Transaction], None] = lambda _: None,
    ) -> dict[MessageQueue, OffsetRange]:
        """See `Log.append`. One transaction calls ``also`` and adds all rows."""
        staging = EmbeddedStaging(self._store, self._clock, None)
        try:
            for queue, some in rows.items():
                staging.add(queue, normalise(some, f"queue {queue}"))
            receipt = staging.receipt()
        except BaseException:
            staging.abandon()
            raise
        with contextlib.closing(staging), self._published_or_gone(receipt), self._store.write() as txn:
            for topic in {queue.topic for queue in among}:
                require_targets(topic, among, index.targets_of(topic_of(txn, topic)))
            also(txn)
            ends = {queue: index.state(txn, queue).max_offset for queue in rows}
            added = make_visible(txn, [receipt], self._clock)
        garbage.tidy(self._store, self._clock)
        return {queue: added.get(queue, OffsetRange(end, end)) for queue, end in ends.items()}

    @contextlib.contextmanager
    def _published_or_gone(self, receipt: Receipt) -> Iterator[None]:
        """If the ``with`` body fails, delete the receipt's segment, unless the segment was published despite the error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StoreError), self._store.write() as txn:
                discard(txn, [receipt])
            raise


def _state(txn: Transaction, queue: MessageQueue) -> QueueRow:
    """Return a queue's state, that of an empty queue if it does not exist."""
    return txn.get(QUEUES, *schema.key_of(queue)) or QueueRow(queue.topic, queue.queue_id)


def _incarnation(anchor: str) -> str:
    """Return the topic's incarnation in an anchor. The anchor of a batch read has nothing else."""
    return anchor.partition("@")[0]


def _empty(columns: tuple[str, ...]) -> pa.RecordBatch:
    schema = select_schema(columns)
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
