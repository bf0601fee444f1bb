"""What of a task's rows is in a queue already: how far back to look, and which rows are missing. Pure.

A *bookmark* is a number that a sink keeps for each queue: the offset behind the first message of its last committed batch, or the
queue's end when the sink first came there. So one of a batch's messages lies below the bookmark exactly when the batch was committed.
A bookmark that is too low, or lost, makes a look longer and nothing wrong; one that is too high would.

Rules: what is read is believed. Rows are compared with messages by what they say, since Spark may hand a retry its rows in another
order; of rows that say the same, as many are missing as there are more of them. An attempt's messages are the first rows it was given,
so what a later attempt adds keeps the order of a key, as long as all rows of the key were in one task of each, in the same order.

A run of the batch may have its rows in other partitions than an earlier one, so what another run sent may be any task's. It is taken by
each task whose rows say the same: where tasks of one run have rows that say the same, several may take one message. So at the worst
fewer messages than rows are there, never more; the commit sends what is missing then (contested.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from orderedmq.model import OffsetRange
from orderedmq.rocketmq.sink.message_stamp import Found, Writer, digests

#: Messages of the first look, which is all there is to read unless the sink failed or others write much. A broker gives 32 at once.
FIRST_STEP: Final = 32
#: Steps grow up to this.
LARGEST_STEP: Final = 8192
#: So many messages at a queue's end are looked at when nothing is known of the sink there: it may have been forgotten.
PROBE: Final = 2048
#: Batches after which an old one is refused instead of compared, as on the embedded broker.
KEPT: Final = 100


class Lookback:
    """A walk through a queue from its end backwards, in steps that grow: `next` says what to read, `saw` takes what was there.

    A batch's partitions write the same queues, so nearly all that was sent since the bookmark may be others'. So a walk goes past what
    came in one request with another partition's message, if that is more than a step, and reads the message at the other end. What
    another run of the batch sent is read, all of it.
    """

    def __init__(self, writer: Writer, bookmark: int | None, end: int) -> None:
        """``bookmark`` None: none is known. ``end``: of the queue."""
        self._writer = writer
        self._least = 0
        # The message just below it is the last committed batch's first one, which tells whether that is ours.
        self._floor = 0 if bookmark is None else max(0, bookmark - 1)
        self._at = end
        self._step = FIRST_STEP
        #: Per run and partition of our batch whose messages may be ours: the lowest sequence that was seen.
        self._firsts: dict[tuple[str, int], int] = {}
        #: The lowest offset of these.
        self._lowest_own: int | None = None
        self._older = False
        self._newest = -1
        # A message that was read, and where the walk was then, while it goes past the rest of that message's request.
        self._passed: tuple[Found, int] | None = None
        self._believes = True

    def begins(self, least: int) -> None:
        """The queue's first message that is still there: whoever asks for it only when a walk is long spares a question."""
        self._least = least
        self._floor = max(least, self._floor)
        if self._passed is not None:
            self._at = min(max(self._at, least + 1), self._passed[1])

    def next(self) -> OffsetRange | None:
        """What to read now; None at the end of the walk."""
        floor = self._lowest
        # Not at a first message: what had no right to be sent, or another run, may lie before it. Nor at an older batch's while first ones
        # are still to come: a late attempt of that batch sent it. Of an old batch a distance has to do, it may be the topic's first one;
        # it was committed, so what is not found is not sent.
        firsts = not any(self._firsts.values())
        far = self._is_old and self._lowest_own is not None and self._lowest_own - self._at >= PROBE
        complete = firsts and (self._older or far)
        if self._at <= floor or complete or self._newest - self._writer.batch >= KEPT:
            return None
        begin = max(floor, self._at - self._step)
        return OffsetRange(begin, self._at)

    @property
    def _is_old(self) -> bool:
        return self._newest > self._writer.batch

    @property
    def _lowest(self) -> int:
        # A batch that newer ones followed began below the bookmark.
        return self._least if self._is_old else self._floor

    def saw(self, messages: Sequence[Found]) -> Sequence[Found]:
        """The sink's messages in the range that `next` named, in order: of others' at least the first and the last one.

        Returns those that count: none if they are going to be read again.
        """
        looked = self.next()
        assert looked is not None
        if self._passed is not None and not self._arrived(self._passed[0], messages):
            # It is not what it says: read all that was passed, and pass no more.
            self._at, self._passed, self._believes = self._passed[1], None, False
            return ()
        for message in messages:
            self._newest = max(self._newest, message.batch)
            self._older = self._older or message.batch < self._writer.batch
            if self._is_own(message):
                stream = (message.run, message.partition)
                self._firsts[stream] = min(self._firsts.get(stream, message.sequence), message.sequence)
                self._lowest_own = message.offset if self._lowest_own is None else min(self._lowest_own, message.offset)
        self._at, self._passed = looked.begin, None
        self._step = min(2 * self._step, LARGEST_STEP)
        if self._believes and messages and messages[0].offset == looked.begin:
            self._pass_by(messages[0])
        return messages

    def _pass_by(self, message: Found) -> None:
        """Go to where the message's request began, or to the lowest message to be read: that is read, and must be what it should."""
        target = max(message.begin, self._lowest) + 1
        if not self._is_own(message) and self._at - target > self._step:
            self._passed = (message, self._at)
            # The message that must be there, and one more, which may be of another request.
            self._at, self._step = target, 2

    def _arrived(self, left: Found, messages: Sequence[Found]) -> bool:
        """Whether the last one that was read belongs to the request of the one that was left."""
        if not messages or messages[-1].offset != self._at - 1:
            return False
        last = messages[-1]
        return last[1:3] == left[1:3] and (last.run, last.request, last.begin) == (left.run, left.request, left.begin)

    def _is_own(self, message: Found) -> bool:
        return may_be_of(self._writer, message)


def may_be_of(writer: Writer, message: Found) -> bool:
    """Whether a message may be one of the writer's rows: sent by its partition in this run, or by anyone in another run of its batch."""
    return message.batch == writer.batch and (message.run != writer.run or message.partition == writer.partition)


class Ledger:
    """What one attempt knows of its rows in one queue: which messages are theirs, and what is still to be sent."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        #: Messages of this partition in this run that no row was found for yet: offsets by what they say.
        self._unclaimed: dict[bytes, list[int]] = {}
        #: The same of messages that other runs of the batch sent; and how many there were.
        self._others: dict[bytes, list[int]] = {}
        self.of_others = 0
        #: The offsets of those of them that were found to be rows.
        self.taken: list[int] = []
        self._acknowledged: list[OffsetRange] = []
        #: The sequence of the next message.
        self.sequence = 0
        #: Everything below was read.
        self.seen = 0
        #: Whether the batch was committed before: nothing may be added to it.
        self.committed = False
        #: The sink's newest batch that was seen; -1: none.
        self.newest = -1
        #: Where the messages are that may be this partition's, others' among them.
        self.span: OffsetRange | None = None
        self.found = self.sent = self.missing = 0

    @property
    def extra(self) -> int:
        """Messages of this partition in this run that are none of the rows."""
        return sum(map(len, self._unclaimed.values()))

    def knows(self, committed: int) -> None:
        """The sink's newest batch that was committed; -1: none is known."""
        self.newest = max(self.newest, committed)
        self.committed = self.committed or committed >= self._writer.batch

    def read(self, messages: Iterable[Found], end: int, bookmark: int | None = None) -> None:
        """The sink's messages in a range that was not read before. ``end``: everything below it was read."""
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
            elif not any(known.begin <= message.offset < known.end for known in self._acknowledged):
                self._unclaimed.setdefault(message.digest, []).append(message.offset)
                self.sequence = max(self.sequence, message.sequence + 1)
                self._extend(message.offset, message.offset + 1)
        self.seen = max(self.seen, end)
        self._acknowledged = [known for known in self._acknowledged if known.end > self.seen]

    def claim(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that are to be sent: those that no message was found for, unless the batch is committed."""
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

    def acknowledged(self, offset: int, count: int) -> None:
        """The broker has stored ``count`` rows from ``offset`` on."""
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
