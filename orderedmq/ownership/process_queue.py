"""The messages of one queue that a consumer holds: found and not taken, or taken and not committed.

RocketMQ's ProcessQueue, with slices (a range of offsets, with or without rows) where Java has single messages. Rules: the cost
of every method grows with the slices that it touches, never with their messages; time is an argument (monotonic seconds, as a
float); an object belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final

import pyarrow as pa
from sortedcontainers import SortedDict

from orderedmq.model import OffsetRange
from orderedmq.ownership.lock import HOLDER_TRUST

#: Seconds since the last pull after which pulling counts as dead (Java: ``pullMaxIdleTime``).
PULL_MAX_IDLE: Final = 120.0
#: Messages after which a queue is full. Java's ``pullThresholdForQueue`` is 1,000; a task that reads a closed range needs more
#: in flight than a listener, since a pull brings 32 messages at most.
MAX_MESSAGES: Final = 65_536
#: Bytes after which a queue is full (Java: ``pullThresholdSizeForQueue``, 100 MiB).
MAX_BYTES: Final = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Slice:
    """Messages ``begin`` (inclusive) to ``end`` (exclusive) of one queue, without a gap.

    ``size`` is their bytes. ``rows`` has one row per offset, in offset order; without it the slice is a bare range.
    Raises ValueError if the numbers contradict each other.
    """

    begin: int
    end: int
    size: int = 0
    rows: pa.RecordBatch | None = None

    def __post_init__(self) -> None:
        if self.begin > self.end or self.size < 0 or (self.size and self.begin == self.end):
            raise ValueError(f"no slice: offsets [{self.begin}, {self.end}) of {self.size} bytes")
        if self.rows is not None and self.rows.num_rows != self.end - self.begin:
            raise ValueError(f"{self.rows.num_rows} rows for offsets [{self.begin}, {self.end})")

    @property
    def count(self) -> int:
        return self.end - self.begin

    def split(self, n: int) -> tuple[Slice, Slice]:
        """Return the first ``n`` messages (0 <= n <= count) and the rest.

        Rows are cut without a copy. The size is divided pro rata, rounded down for the first part, so that the parts add up.
        """
        count = self.end - self.begin
        if not 0 <= n <= count:
            raise ValueError(f"cannot cut {n} messages off {count}")
        middle = self.begin + n
        size = self.size * n // count if count else 0
        head, tail = (None, None) if self.rows is None else (self.rows.slice(0, n), self.rows.slice(n))
        return Slice(self.begin, middle, size, head), Slice(middle, self.end, self.size - size, tail)


class ProcessQueue:
    """The messages of one queue between the broker and the committed offset.

    A message is *pending* (put, not taken: Java's msgTreeMap) or *taken* (not committed: consumingMsgOrderlyTreeMap), never
    both. Counters cover both kinds. Offsets may have gaps, where the broker has no message.

    The owner of the object sets ``dropped``, ``locked``, ``last_lock`` and ``last_pull``.
    """

    __slots__ = (
        "_disordered",
        "_dispatched",
        "_pending",
        "_taken",
        "dropped",
        "last_consume",
        "last_lock",
        "last_pull",
        "locked",
        "max_bytes",
        "max_messages",
        "message_count",
        "message_size",
        "queue_offset_max",
    )

    def __init__(self, now: float, *, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        """``max_messages`` and ``max_bytes`` are flow control's thresholds: see `full`."""
        self._pending: SortedDict = SortedDict()
        self._taken: SortedDict = SortedDict()
        # Java's "consuming": at most one consume task per queue is outstanding.
        self._dispatched = False
        # True while a pending offset may lie below a taken one: after a late put, or if a part is to be consumed again.
        self._disordered = False
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        #: Messages and bytes held, pending and taken.
        self.message_count = 0
        self.message_size = 0
        #: The highest offset ever put (Java: the last one put, which is lower after a late put); 0 before.
        self.queue_offset_max = 0
        self.dropped = False
        self.locked = False
        self.last_lock = now
        self.last_pull = now
        self.last_consume = now

    def __repr__(self) -> str:
        pending = ", ".join(f"{r.begin}-{r.end}" for r in self.pending())
        taken = ", ".join(f"{r.begin}-{r.end}" for r in self.taken())
        return f"ProcessQueue(pending=[{pending}], taken=[{taken}], messages={self.message_count}, bytes={self.message_size})"

    # -- the life of a message

    def put(self, messages: Slice) -> bool:
        """Hold these messages as pending. Those already held, pending or taken, stay as they are.

        Return whether to dispatch a consumer: messages are pending, and none has been dispatched since `take` last found
        nothing. Java takes an offset a second time while it is being consumed; here this would break the order.
        """
        for piece in self._unknown(messages):
            self.message_count += piece.count
            self.message_size += piece.size
            self.queue_offset_max = max(self.queue_offset_max, piece.end - 1)
            if self._taken and piece.begin < self._taken.peekitem(-1)[1].end:
                self._disordered = True
            _hold(self._pending, piece)
        if self._pending and not self._dispatched:
            self._dispatched = True
            return True
        return False

    def take(self, n: int, now: float) -> list[Slice]:
        """Take the ``n`` (>= 0) lowest pending messages, or all if there are fewer, in offset order.

        Slices are disjoint, and may have gaps between them where messages are missing: a caller that must not skip a message
        that has yet to arrive looks at `pending` first. Finding nothing ends the dispatch: the next put asks for one again.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} messages")
        self.last_consume = now
        result: list[Slice] = []
        while n and self._pending:
            first: Slice = self._pending.popitem(0)[1]
            if first.count > n:
                first, rest = first.split(n)
                self._pending[rest.begin] = rest
            n -= first.count
            self._taken[first.begin] = first
            result.append(first)
        if not result:
            self._dispatched = False
        return result

    def commit(self) -> int:
        """Forget the taken messages. Return the offset to commit, one above the highest taken; -1 when nothing is taken.

        As in Java, a pending message below the highest taken one, put late or given back, does not hold the offset back.
        (Java throws when nothing is taken.)
        """
        if not self._taken:
            return -1
        offset: int = self._taken.peekitem(-1)[1].end
        self._forget(self._taken.values())
        self._taken.clear()
        self._disordered = False
        return offset

    def rollback(self) -> None:
        """Make all taken messages pending again."""
        self._pending.update(self._taken)
        self._taken.clear()
        self._disordered = False

    def make_to_consume_again(self, messages: list[Slice]) -> None:
        """Make those of these messages that are taken pending again. Others are ignored."""
        for again in messages:
            for piece in _cut(self._taken, again.begin, again.end):
                self._pending[piece.begin] = piece
        self._disordered = bool(self._pending and self._taken) and self._first() < self._taken.peekitem(-1)[1].end

    def remove(self, begin: int, end: int, now: float) -> int:
        """Forget the pending messages among [begin, end), consumed in any order (Java's concurrent mode).

        Return the offset to commit: the first still pending, else one above the highest ever put; -1 when nothing was
        pending before.
        """
        self.last_consume = now
        if not self._pending:
            return -1
        self._forget(_cut(self._pending, begin, end))
        return self._first() if self._pending else self.queue_offset_max + 1

    def clear(self) -> None:
        """Forget every message. Flags, dispatch and timestamps stay, as in Java."""
        self._pending.clear()
        self._taken.clear()
        self._disordered = False
        self.message_count = self.message_size = self.queue_offset_max = 0

    # -- questions

    @property
    def max_span(self) -> int:
        """The distance between the lowest and the highest pending offset; 0 when nothing is pending."""
        return self._pending.peekitem(-1)[1].end - 1 - self._first() if self._pending else 0

    @property
    def has_temp_message(self) -> bool:
        """Whether any message is pending. (Messages in flight are those of `taken`.)"""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether to stop pulling for now: more messages or bytes than the threshold, as in Java's pull loop."""
        return self.message_count > self.max_messages or self.message_size > self.max_bytes

    def contains(self, offset: int) -> bool:
        """Whether the message at this offset is pending."""
        return bool(_overlapping(self._pending, offset, offset + 1))

    def pending(self) -> list[OffsetRange]:
        """Return the offsets put and not taken, as ranges that neither overlap nor touch, in order."""
        return _ranges(self._pending)

    def taken(self) -> list[OffsetRange]:
        """Return the offsets taken and not committed, as ranges that neither overlap nor touch, in order."""
        return _ranges(self._taken)

    def lock_expired(self, now: float) -> bool:
        """Whether the lock's last grant or renewal is more than 30 s ago."""
        return now - self.last_lock > HOLDER_TRUST

    def pull_expired(self, now: float) -> bool:
        """Whether the last pull is more than 120 s ago."""
        return now - self.last_pull > PULL_MAX_IDLE

    # -- inside

    def _first(self) -> int:
        begin: int = self._pending.peekitem(0)[0]
        return begin

    def _unknown(self, messages: Slice) -> list[Slice]:
        """Return the parts of a slice that are neither pending nor taken, in order."""
        if messages.begin == messages.end:
            return []
        known = _overlapping(self._pending, messages.begin, messages.end)
        known += _overlapping(self._taken, messages.begin, messages.end)
        result = []
        rest = messages
        for held in sorted(known, key=_begin):
            if held.begin > rest.begin:
                new, rest = rest.split(held.begin - rest.begin)
                result.append(new)
            rest = rest.split(min(held.end, rest.end) - rest.begin)[1]
        if rest.count:
            result.append(rest)
        return result

    def _forget(self, slices: list[Slice]) -> None:
        for piece in slices:
            self.message_count -= piece.count
            self.message_size -= piece.size

    def _check(self) -> None:
        """Assert every invariant. The cost grows with the slices held: for tests and simulations."""
        if not self._pending and not self._taken:
            assert self.message_count == self.message_size == 0, "counted, but not held"
            assert not self._disordered, "out of order without anything taken"
            return
        for tree in (self._pending, self._taken):
            assert all(key == held.begin < held.end for key, held in tree.items()), "a slice is empty or under a wrong key"
            assert all(a.end <= b.begin for a, b in pairwise(tree.values())), "slices overlap"
        held = sorted(chain(self._pending.values(), self._taken.values()), key=_begin)
        assert all(a.end <= b.begin for a, b in pairwise(held)), "a message is both pending and taken"
        assert self.message_count == sum(s.count for s in held), "message_count is not what is held"
        assert self.message_size == sum(s.size for s in held), "message_size is not what is held"
        assert self.message_count or not self.message_size, "bytes without messages"
        assert not held or held[-1].end - 1 <= self.queue_offset_max, "queue_offset_max is below a message held"
        if self._pending and self._taken and not self._disordered:
            assert self._taken.peekitem(-1)[1].end <= self._first(), "a message was taken before a lower one"
        assert self._taken or not self._disordered, "out of order without anything taken"


def _begin(held: Slice) -> int:
    return held.begin


def _overlapping(tree: SortedDict, begin: int, end: int) -> list[Slice]:
    """Return the slices of a tree that have an offset in [begin, end), in order."""
    if not tree or begin >= end or tree.peekitem(-1)[1].end <= begin:
        return []
    start = max(tree.bisect_right(begin) - 1, 0)
    keys = tree.keys()[start : tree.bisect_left(end)]
    return [tree[key] for key in keys if tree[key].end > begin]


def _cut(tree: SortedDict, begin: int, end: int) -> list[Slice]:
    """Take the offsets [begin, end) out of a tree. Return their slices, in order."""
    result = []
    for held in _overlapping(tree, begin, end):
        del tree[held.begin]
        if held.begin < begin:
            left, held = held.split(begin - held.begin)
            tree[left.begin] = left
        if held.end > end:
            held, right = held.split(end - held.begin)
            tree[right.begin] = right
        result.append(held)
    return result


def _hold(tree: SortedDict, piece: Slice) -> None:
    """Put a slice into a tree. A bare range joins the bare range that it continues, so that small puts do not pile up."""
    at = tree.bisect_left(piece.begin) - 1
    if at >= 0 and piece.rows is None:
        before: Slice = tree.peekitem(at)[1]
        if before.end == piece.begin and before.rows is None:
            piece = Slice(before.begin, piece.end, before.size + piece.size)
    tree[piece.begin] = piece


def _ranges(tree: SortedDict) -> list[OffsetRange]:
    result: list[OffsetRange] = []
    for held in tree.values():
        if result and result[-1].end == held.begin:
            result[-1] = OffsetRange(result[-1].begin, held.end)
        else:
            result.append(OffsetRange(held.begin, held.end))
    return result
