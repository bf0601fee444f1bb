"""Finds which of a task's rows are already in a queue: how far back to look, and which rows are missing. Pure.

A *bookmark* is an offset that a sink stores for each queue: the offset after the first message of its last committed batch or, before its
first commit, the end that the queue had when the sink first wrote to it. So a batch is committed exactly if one of its messages is below
the bookmark. A bookmark that is too low or lost only makes the search longer. A bookmark that is too high would hide messages.

Rules: a message that can be read counts as stored. Rows and messages are compared by content, because Spark may give a retry its rows
in another order. If more rows than messages have the same content, the surplus rows are missing. An attempt sends its rows in order, so
its messages are its first rows. Rows that a later attempt adds therefore keep the order of a key, if each attempt had all rows of the
key in one task, in the same order.

A run of the batch may have its rows in other partitions than an earlier run, so a message of another run may be any task's row. Each
task that has a row with equal content takes that message, so several tasks of one run may take the same message. The queue then has
fewer messages than rows, never more, and the commit sends the missing rows (`queue_writer.settle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from orderedmq.model import OffsetRange
from orderedmq.ownership.micro_batch import KEPT_BATCHES
from orderedmq.rocketmq.sink.message_stamp import SinkMessage, Writer, digests, may_be_of

#: Messages of the first step. It is usually the only step, unless the sink failed or others write a lot. A pull returns at most 32.
FIRST_STEP: Final = 32
#: Steps grow up to this many messages.
LARGEST_STEP: Final = 8192
#: Messages at a queue's end that are searched if no bookmark of the sink is known, because the bookmark may have been lost.
PROBE: Final = 2048


class Lookback:
    """A walk backwards from a queue's end, in growing steps: `next` returns the range to read, and `record` takes its messages.

    A batch's partitions write to the same queues, so nearly all messages since the bookmark may be from other partitions. When the
    walk meets a message of another partition, it skips the rest of that message's request if this rest is longer than a step, and reads
    the request's first message. Messages that another run of the batch sent are all read.
    """

    def __init__(self, writer: Writer, bookmark: int | None, end: int) -> None:
        """``bookmark``: None if unknown. ``end``: the queue's end."""
        self._writer = writer
        self._least = 0
        # The message just below the bookmark is the first one of the last committed batch. It shows whether that is the writer's batch.
        self._floor = 0 if bookmark is None else max(0, bookmark - 1)
        self._at = end
        self._step = FIRST_STEP
        #: For each run and partition: the lowest sequence seen among messages that may be the writer's.
        self._firsts: dict[tuple[str, int], int] = {}
        #: The lowest offset of the messages that may be the writer's.
        self._lowest_own: int | None = None
        self._older = False
        self._newest = -1
        # While a request is skipped: the message that was read from this request, and the walk's position before it skipped.
        self._skipped: tuple[SinkMessage, int] | None = None
        self._trusts_stamps = True

    def set_least(self, least: int) -> None:
        """Set the offset of the queue's first remaining message.

        A search that goes back only a little does not need it, and finding it costs a request.
        """
        self._least = least
        self._floor = max(least, self._floor)
        if self._skipped is not None:
            self._at = min(max(self._at, least + 1), self._skipped[1])

    def next(self) -> OffsetRange | None:
        """Return the range to read now; None at the end of the walk."""
        floor = self._lowest
        # A first message (sequence 0) does not end the walk, because messages that should not have been sent, or messages of another
        # run, may be before it. A message of an older batch does not end the walk while first messages are missing, because a late
        # attempt of that batch may have sent it. If newer batches followed the writer's batch, the walk also ends after PROBE messages
        # of which none may be the writer's, because there may be no older batch. In that case the batch counts as committed, so rows
        # that are not found are not sent.
        firsts = not any(self._firsts.values())
        far = self._is_old and self._lowest_own is not None and self._lowest_own - self._at >= PROBE
        complete = firsts and (self._older or far)
        if self._at <= floor or complete or self._newest - self._writer.batch >= KEPT_BATCHES:
            return None
        begin = max(floor, self._at - self._step)
        return OffsetRange(begin, self._at)

    @property
    def _is_old(self) -> bool:
        return self._newest > self._writer.batch

    @property
    def _lowest(self) -> int:
        # If newer batches followed the writer's batch, its messages begin below the bookmark.
        return self._least if self._is_old else self._floor

    def record(self, messages: Sequence[SinkMessage]) -> Sequence[SinkMessage]:
        """Take the sink's messages in the range that `next` returned, in order.

        Messages of other partitions may be left out of ``messages``, except the first and the last. Returns the messages to count; none
        if the walk will read them again.
        """
        looked = self.next()
        assert looked is not None
        if self._skipped is not None and not self._is_in_skipped_request(self._skipped[0], messages):
            # The stamp of the skipped request is wrong. Read the skipped messages, and never skip again.
            self._at, self._skipped, self._trusts_stamps = self._skipped[1], None, False
            return ()
        for message in messages:
            self._newest = max(self._newest, message.batch)
            self._older = self._older or message.batch < self._writer.batch
            if self._is_own(message):
                stream = (message.run, message.partition)
                self._firsts[stream] = min(self._firsts.get(stream, message.sequence), message.sequence)
                self._lowest_own = message.offset if self._lowest_own is None else min(self._lowest_own, message.offset)
        self._at, self._skipped = looked.begin, None
        self._step = min(2 * self._step, LARGEST_STEP)
        if self._trusts_stamps and messages and messages[0].offset == looked.begin:
            self._skip_request(messages[0])
        return messages

    def _skip_request(self, message: SinkMessage) -> None:
        """Skip to the first message of this message's request, or to the lowest message to read. `record` then verifies the stamp."""
        target = max(message.begin, self._lowest) + 1
        if not self._is_own(message) and self._at - target > self._step:
            self._skipped = (message, self._at)
            # Read two messages: one that must belong to the request, and the one before it, which may belong to another request.
            self._at, self._step = target, 2

    def _is_in_skipped_request(self, left: SinkMessage, messages: Sequence[SinkMessage]) -> bool:
        """Return whether the last message that was read belongs to the skipped request, as the stamp of ``left`` implies."""
        if not messages or messages[-1].offset != self._at - 1:
            return False
        last = messages[-1]
        return last[1:3] == left[1:3] and (last.run, last.request, last.begin) == (left.run, left.request, left.begin)

    def _is_own(self, message: SinkMessage) -> bool:
        return may_be_of(self._writer, message)


class Ledger:
    """The record of one attempt on one queue: which messages are the attempt's rows, and which rows it still has to send."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        #: Messages of this partition and run that match no row so far: offsets by content digest.
        self._unclaimed: dict[bytes, list[int]] = {}
        #: Like `_unclaimed`, for messages that other runs of the batch sent, and the number of all such messages.
        self._others: dict[bytes, list[int]] = {}
        self.of_others = 0
        #: Offsets of other runs' messages that were matched with rows.
        self.taken: list[int] = []
        self._acknowledged: list[OffsetRange] = []
        #: The sequence of the next message.
        self.sequence = 0
        #: All messages below this offset were read.
        self.seen = 0
        #: Whether the batch was committed before. If so, no row may be added to it.
        self.committed = False
        #: The sink's newest batch that was seen; -1 for none.
        self.newest = -1
        #: The smallest range with all messages that may be this partition's.
        self.span: OffsetRange | None = None
        self.found = self.sent = self.missing = 0

    @property
    def extra(self) -> int:
        """The number of messages of this partition and run that match no row."""
        return sum(map(len, self._unclaimed.values()))

    def note_committed(self, committed: int) -> None:
        """Record the sink's newest committed batch; -1 for none."""
        self.newest = max(self.newest, committed)
        self.committed = self.committed or committed >= self._writer.batch

    def read(self, messages: Iterable[SinkMessage], end: int, bookmark: int | None = None) -> None:
        """Take the sink's messages in a range that was not read before. ``end``: all messages below it were read."""
        for message in messages:
            self.newest = max(self.newest, message.batch)
            if message.batch > self._writer.batch or (
                message.batch == self._writer.batch and bookmark is not None and message.offset < bookmark
            ):
                self.committed = True
            if not may_be_of(self._writer, message):
                continue
            if message.run != self._writer.run:
                self.of_others += 1
                self._others.setdefault(message.digest, []).append(message.offset)
                self._extend(message.offset, message.offset + 1)
            elif not any(span.begin <= message.offset < span.end for span in self._acknowledged):
                self._unclaimed.setdefault(message.digest, []).append(message.offset)
                self.sequence = max(self.sequence, message.sequence + 1)
                self._extend(message.offset, message.offset + 1)
        self.seen = max(self.seen, end)
        self._acknowledged = [span for span in self._acknowledged if span.end > self.seen]

    def claim(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that match no message and must be sent; none if the batch is committed."""
        if self._unclaimed or self._others:
            missing = [not (self._take(digest) or self._take_of_others(digest)) for digest in digests(rows)]
            if not all(missing):
                self.found += rows.num_rows - sum(missing)
                rows = rows.filter(pa.array(missing, pa.bool_()))
        if self.committed:
            self.missing += rows.num_rows
            return rows.slice(0, 0)
        return rows

    def _take(self, digest: bytes) -> bool:
        offsets = self._unclaimed.get(digest)
        if not offsets:
            return False
        offsets.pop()
        if not offsets:
            del self._unclaimed[digest]
        return True

    def _take_of_others(self, digest: bytes) -> bool:
        offsets = self._others.get(digest)
        if not offsets:
            return False
        self.taken.append(offsets.pop())
        return True

    def record_sent(self, offset: int, count: int) -> None:
        """Record that the broker has stored ``count`` rows from ``offset`` on."""
        self.sequence += count
        self.sent += count
        self._extend(offset, offset + count)
        if offset <= self.seen:
            self.seen = max(self.seen, offset + count)
        else:
            self._acknowledged.append(OffsetRange(offset, offset + count))

    def _extend(self, begin: int, end: int) -> None:
        before = self.span or OffsetRange(begin, end)
        self.span = OffsetRange(min(before.begin, begin), max(before.end, end))
