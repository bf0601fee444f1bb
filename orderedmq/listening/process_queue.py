"""The messages of a range that a task has and that are not done yet, after the class ProcessQueue of RocketMQ's client. Pure.

A message *waits* from `put_message` until it is done or taken. There are two ways to get it done, as in Java:

- In order: `take_messages` takes the lowest waiting messages. `commit` makes everything taken done, `rollback` makes it wait again, and so
  does `make_message_to_consume_again` for some of it.
- In any order: `remove_message` makes waiting messages done.

Each offset is put once and done once. An offset below the last one that was put, and not put itself, counts as done: a filter or an earlier
attempt has left it out.

Java keeps each message in a tree, and messages of other keys are done far from each other, so a tree would cost more than the rest of an
engine. This class keeps *spans* of offsets. Offsets that are not put or done go into a dict first, and are cut out of the spans many
at a time.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from sortedcontainers import SortedDict

#: Cut out spans together once there are this many, and more than there are spans of waiting messages.
CUT_TOGETHER: Final = 16_384

#: Offsets, from the first to the one after the last.
Span = tuple[int, int]


class ProcessQueue:
    """The messages of one range. ``begin``: the range's first offset."""

    __slots__ = ("_behind", "_cut", "_end", "_first", "_first_end", "_taken", "progress", "waiting")

    def __init__(self, begin: int) -> None:
        #: The number of waiting messages.
        self.waiting = 0
        #: The offset up to which everything is done.
        self.progress = begin
        #: The first span with waiting messages, which begins with one, and the spans behind it, begin → end. Usually there is only one.
        self._first = self._first_end = begin
        self._behind: SortedDict[int, int] = SortedDict()
        #: Offsets in these spans that do not wait, begin → end.
        self._cut: dict[int, int] = {}
        #: The spans of taken messages, ascending.
        self._taken: list[Span] = []
        #: The offset after the last message that was put.
        self._end = begin

    @property
    def max_span(self) -> int:
        """The distance from the lowest to the highest waiting offset, or 0."""
        if not self.waiting:
            return 0
        self._cut_out()
        end: int = self._behind.peekitem()[1] if self._behind else self._first_end
        return end - 1 - self._first

    def put_message(self, offsets: Sequence[int]) -> None:
        """Put the next messages of the range. Raises ValueError unless their offsets ascend, within this call and from call to call."""
        if not offsets:
            return
        begin, end = offsets[0], offsets[-1] + 1
        gaps = []
        if end - begin != len(offsets) or offsets != list(range(begin, end)):
            gaps = [(one + 1, other) for one, other in pairwise(offsets) if one + 1 != other]
        if wrong := [gap for gap in ((self._end, begin), *gaps) if gap[1] < gap[0]]:
            raise ValueError(f"message {wrong[0][1]} came after message {wrong[0][0] - 1}")
        self._cut.update(gaps)
        if self._first >= self._first_end:
            self._first, self._first_end = begin, end
        elif self._behind:
            self._behind[begin] = end
        else:
            if self._first_end < begin:
                self._cut[self._first_end] = begin
            self._first_end = end
        self._end = end
        self.waiting += len(offsets)

    def take_messages(self, most: int) -> list[Span]:
        """Take up to ``most`` waiting messages, the lowest ones."""
        spans: list[Span] = []
        cut, taken = self._cut, self._taken
        while most and (begin := self._first) < self._first_end:
            end = min(begin + most, self._first_end)
            if cut and end - begin > 1:
                end = next((offset for offset in range(begin + 1, end) if offset in cut), end)
            self._first = end
            if cut or end == self._first_end:
                self._skip()
            most -= end - begin
            self.waiting -= end - begin
            spans.append((begin, end))
            if taken and begin < taken[-1][0]:
                insort(taken, (begin, end))
            else:
                taken.append((begin, end))
        return spans

    def commit(self) -> int:
        """Make all taken messages done. Return the offset up to which everything is done."""
        self._taken.clear()
        self.progress = self._first if self._first < self._first_end else self._end
        return self.progress

    def rollback(self) -> None:
        """Make all taken messages wait again."""
        for span in reversed(self._taken):
            self._wait(*span)
        self._taken.clear()

    def make_message_to_consume_again(self, offsets: Sequence[int]) -> None:
        """Make some of the taken messages wait again. Raises ValueError for a message that is not taken."""
        for offset in reversed(offsets):
            index = bisect_right(self._taken, (offset, self._end)) - 1
            if index < 0 or self._taken[index][1] <= offset:
                raise ValueError(f"message {offset} is not taken")
            begin, end = self._taken[index]
            parts = (begin, offset), (offset + 1, end)
            self._taken[index : index + 1] = [part for part in parts if part[0] < part[1]]
            self._wait(offset, offset + 1)

    def remove_message(self, offsets: Sequence[int]) -> int:
        """Make waiting messages done. Return the offset up to which everything is done. ``offsets`` are waiting, and ascend."""
        cut, begin, count = self._cut, offsets[0], len(offsets)
        if offsets[-1] - begin < count:
            cut[begin] = begin + count
        else:
            for offset in offsets:
                cut[offset] = offset + 1
        self.waiting -= count
        if self._first in cut:
            self._skip()
            first = self._first if self._first < self._first_end else self._end
            self.progress = min(first, self._taken[0][0]) if self._taken else first
        elif len(cut) > CUT_TOGETHER + len(self._behind):
            self._cut_out()
        return self.progress

    # -- inside

    def _wait(self, begin: int, end: int) -> None:
        """Make the messages of a span wait again."""
        self.waiting += end - begin
        if self._first >= self._first_end:
            self._first, self._first_end = begin, end
        elif end == self._first:
            self._first = begin
        elif end < self._first:
            self._behind[self._first] = self._first_end
            self._first, self._first_end = begin, end
        else:
            self._behind[begin] = end

    def _skip(self) -> None:
        """Let the first span begin with a waiting message."""
        cut, first = self._cut, self._first
        while True:
            while first in cut:
                first = cut.pop(first)
            self._first = first
            if first < self._first_end or not self._behind:
                return
            begin, self._first_end = self._behind.popitem(0)
            # A span that is done may have been in two spans.
            first = max(first, begin)

    def _cut_out(self) -> None:
        """Let the spans have only waiting messages."""
        cut = sorted(self._cut.items(), reverse=True)
        spans: list[tuple[int, int]] = []
        reached = 0
        for begin, end in ((self._first, self._first_end), *self._behind.items()):
            reached = max(reached, begin)
            while cut and cut[-1][0] < end:
                hole, hole_end = cut.pop()
                if reached < hole:
                    spans.append((reached, hole))
                reached = max(reached, hole_end)
            if reached < end:
                spans.append((reached, end))
        self._cut.clear()
        if spans:
            (self._first, self._first_end), *behind = spans
            self._behind = SortedDict(behind)
