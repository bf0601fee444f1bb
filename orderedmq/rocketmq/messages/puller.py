"""Pulls one queue and decodes the answers piece by piece, while the broker works on the next requests (see `fetch`).

Rules: rows have consecutive offsets, or a DataLossError is raised, also for a message that cannot be read. A message of another queue
raises ProtocolError. After 120 s without progress, TIMEOUT is raised.

A broker answers a pull with a filter as if messages that it cannot read did not match. It deletes messages in order, so all of a pull's
messages were stored if, after the last answer, the first one without a row still is. `Puller.pull_matching` pulls that message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Final, TypeVar

import pyarrow as pa

from orderedmq.broker import DEFAULT_PULL, PullSettings
from orderedmq.conditions import DataLossCondition, RocketMQCondition
from orderedmq.errors import DataLossError, OrderedMQError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.gather import total_bytes
from orderedmq.rocketmq.codec.row_decoder import PIECE_BYTES
from orderedmq.rocketmq.messages.answers import (
    Answers,
    PullLimits,
    QueueFacts,
    average_body,
    before_gap,
    cut_at_gap,
    decode_rows,
    drop_repeats,
)
from orderedmq.rocketmq.messages.fetch import Fetch
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP
from orderedmq.rows.filters import Filter
from orderedmq.schema import bounded, concat_batches, select_schema
from orderedmq.text import MalformedText

T = TypeVar("T")

#: Seconds without a message after which a pull fails, as Java's ``pullMaxIdleTime``.
PULL_MAX_IDLE: Final = 120.0
#: Seconds until the average body size is measured again.
_AVERAGE_AGE: Final = 10.0
#: Seconds for which messages that were read ahead can be used by the next pull. Limited because the topic may be deleted.
_AHEAD_AGE: Final = 10.0
#: A pull of at least this many messages reads ahead and ends where an answer ends. That would cut smaller pulls short.
AHEAD: Final = 4096
#: Bytes of the block in `keep_freed_pages`: larger than any array that decoding makes.
_LARGE_BLOCK: Final = 8 * 1024 * 1024


@cache
def keep_freed_pages() -> None:
    """Make glibc keep freed memory, which it would otherwise return to the system and request again for each decoded piece.

    Fresh pages take about a sixth of the decoding time. This function allocates and frees one large block. After that, glibc takes
    smaller blocks from its heap, and keeps freed memory of up to twice the size of the large block (mallopt(3), M_MMAP_THRESHOLD). With
    another C library this has no effect.
    """
    bytearray(_LARGE_BLOCK)


class Puller:
    """Pulls messages of any queue. Thread-safe."""

    def __init__(self, client: Client, settings: PullSettings = DEFAULT_PULL, *, patience: float = PULL_MAX_IDLE) -> None:
        """``patience``: seconds without progress after which a pull fails."""
        self._client = client
        self._settings = settings
        self._group = TOOLS_GROUP
        self._patience = patience
        self._facts: dict[MessageQueue, QueueFacts] = {}
        #: The fetches that read ahead, and since when. The next pull of a queue continues with the queue's fetch.
        self._ahead: dict[MessageQueue, tuple[Fetch, float]] = {}
        note = MalformedText().note
        self._decode = partial(decode_rows, malformed=note, names=client.names, verify_crc=settings.verify_body_crc)
        keep_freed_pages()

    def ask_as_group(self, ask: Callable[[str], T]) -> T:
        """Call ``ask`` with the group TOOLS_CONSUMER. If the account lacks permission for that group, use the reader's group.

        The reader's group is not tried first, because a pull in that group would consume a pending reset by RocketMQ's own tools, which
        the group's next commit has to notice.
        """
        try:
            return ask(self._group)
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION or self._settings.group in (None, self._group):
                raise
        assert self._settings.group is not None
        answer = ask(self._settings.group)
        self._group = self._settings.group
        return answer

    def knows(self, queue: MessageQueue) -> bool:
        """Return whether the queue existed when it was last pulled."""
        return queue in self._facts

    def average(self, queue: MessageQueue) -> float | None:
        """Return the approximate average bytes of the bodies pulled last; None if none was pulled in the last 10 s."""
        state = self._facts.get(queue)
        return state.body_bytes if state is not None and time.monotonic() - state.measured < _AVERAGE_AGE else None

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        until: int | None = None,
    ) -> pa.RecordBatch:
        """Pull rows; see `Log.pull`. Also raises RocketMQUnavailableError TIMEOUT."""
        rows = _Rows(queue, offset, max_bytes, columns, self._decode)
        state = self._fetch(queue, offset, max_messages, max_bytes, None, rows.add, until)
        if not rows.batches:
            return pa.RecordBatch.from_pylist([], schema=select_schema(columns))
        batch = rows.batches[0] if len(rows.batches) == 1 else concat_batches(rows.batches)
        state.body_bytes, state.measured = average_body(batch, rows.received, state.body_bytes), time.monotonic()
        return bounded(batch.select(list(columns)), max_bytes)

    def pull_matching(
        self, queue: MessageQueue, offset: int, max_messages: int, max_bytes: int, columns: tuple[str, ...], matching: Filter
    ) -> tuple[pa.RecordBatch, int]:
        """Pull the rows that match; see `Log.pull_matching`. Also raises RocketMQUnavailableError TIMEOUT."""
        parts: list[memoryview] = []
        end = offset

        def take(piece: Answers) -> bool:
            nonlocal end
            parts.extend(piece.parts)
            end = piece.end
            return True

        state = self._fetch(queue, offset, max_messages, max_bytes, matching, take)
        answer = state.answer
        batch, end = self._decode(queue, parts, columns, offset, end, max_bytes, tags=frozenset(matching.tags))
        batch = drop_repeats(batch)
        if (gap := offset + before_gap(batch, offset)) < end:
            try:
                self._require_stored(queue, gap)
            except DataLossError:
                # The next pull begins at the lost message and raises the error.
                if gap == offset:
                    raise
                batch, end = batch.slice(0, gap - offset), gap
            # The next answers have more than one message.
            state.answer = answer
        rows = bounded(batch.select(list(columns)), max_bytes)
        if rows.num_rows < batch.num_rows:
            end = batch.column("queue_offset")[rows.num_rows].as_py()
        return rows, end

    def _require_stored(self, queue: MessageQueue, offset: int) -> None:
        """Raise DataLossError unless the broker has this message, even if it cannot be decoded."""
        row = _Rows(queue, offset, 0, ("queue_offset",), self._decode)
        try:
            self._fetch(queue, offset, 1, 0, None, row.add)
        except DataLossError as error:
            if error.sub != DataLossCondition.UNREADABLE:
                raise

    def _fetch(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        matching: Filter | None,
        take: Callable[[Answers], bool],
        until: int | None = None,
    ) -> QueueFacts:
        """Pass pieces to ``take`` until it returns False. Return the queue's `QueueFacts`."""
        ahead = self._take_ahead(queue, offset, max_messages) if matching is None else None
        state = self._facts.get(queue) or QueueFacts()
        settings = self._settings
        most = min(max_messages, settings.max_messages)
        limits = PullLimits(most, max_bytes, settings.max_messages, settings.max_bytes)
        end = offset + most
        reads_ahead = until is not None and most >= AHEAD
        stop = max(end, until) if until is not None and reads_ahead else end

        def run(group: str) -> None:
            nonlocal ahead
            fetch, ahead = ahead or Fetch(self._client, queue, group, state, self._patience, offset, matching), None
            keep = False
            try:
                fetch.begin(limits, stop)
                while fetch.position < end and (piece := fetch.next_piece(end - fetch.position)) is not None:
                    # End after one piece: the next pull finds its messages read ahead, which is faster than joining pieces.
                    if not take(piece) or reads_ahead:
                        break
                keep = until is not None and offset < fetch.position < stop
            finally:
                # Another thread may have pulled the queue and stored its fetch during this pull.
                former, _ = self._ahead.pop(queue, (None, 0.0))
                if keep:
                    self._ahead[queue] = (fetch, time.monotonic())
                for unused in (former, None if keep else fetch):
                    if unused is not None:
                        unused.close()

        try:
            self.ask_as_group(run)
        except OrderedMQError:
            self._facts.pop(queue, None)
            raise
        self._facts[queue] = state
        return state

    def _take_ahead(self, queue: MessageQueue, offset: int, max_messages: int) -> Fetch | None:
        """Return the fetch that has read ahead for this pull, if any. Close fetches that do not fit or are too old."""
        now = time.monotonic()
        ahead = None
        for other in list(self._ahead):
            fetch, since = self._ahead.get(other, (None, now))
            if fetch is None or (other != queue and now - since < _AHEAD_AGE) or self._ahead.pop(other, None) is None:
                continue
            if other == queue and now - since < _AHEAD_AGE and fetch.continues(offset, max_messages):
                ahead = fetch
            else:
                fetch.close()
        return ahead


class _Rows:
    """Decoded rows with consecutive offsets from ``offset`` on."""

    def __init__(
        self,
        queue: MessageQueue,
        offset: int,
        max_bytes: int,
        columns: tuple[str, ...],
        decode: Callable[..., tuple[pa.RecordBatch, int]],
    ) -> None:
        """``decode``: see `decode_rows`."""
        self.batches: list[pa.RecordBatch] = []
        #: Bytes of the answers with these rows.
        self.received = 0
        self._queue = queue
        self._next = offset
        self._columns = columns
        self._decode = decode
        self._left = max_bytes
        self._room = max(max_bytes, PIECE_BYTES)

    def add(self, piece: Answers) -> bool:
        """Decode a piece, and return whether the next piece may be added. Raises DataLossError if no rows were decoded before."""
        queue, next_ = self._queue, self._next
        try:
            batch, end = self._decode(queue, piece.parts, self._columns, next_, piece.end, self._left)
            batch = cut_at_gap(batch, queue, next_, end)
        except DataLossError:
            # The next pull begins at the lost message and raises the error.
            if self.batches:
                return False
            raise
        self.batches.append(batch)
        self.received += sum(map(len, piece.parts))
        self._next += batch.num_rows
        self._room -= batch.nbytes
        if "body" in self._columns:
            self._left -= total_bytes(batch.column("body"))
        return self._next == piece.end and self._left > 0 and self._room > 0
