"""Which messages of a range a task has decided, after the class ProcessQueue of RocketMQ's client. Pure.

As in Java, the progress is the offset of the lowest undecided message, however many behind it are decided, and after the last message if
all are. Java keeps the undecided messages in a tree. This class keeps the runs of offsets between them, and joins runs that touch. So
there are fewer runs than undecided messages, although one message may hold up millions behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


class ProcessQueue:
    """The messages of one range. ``begin``: the range's first offset.

    Each offset is put once and removed once. An offset below the last one that was put, and not put itself, counts as decided: a filter or
    an earlier attempt has left it out.
    """

    __slots__ = ("_begins", "_end", "_ends", "progress", "waiting")

    def __init__(self, begin: int) -> None:
        #: The number of undecided messages.
        self.waiting = 0
        #: The offset up to which everything is decided.
        self.progress = begin
        #: The offset after the last message that was put.
        self._end = begin
        #: The runs of decided offsets from the progress on: begin → end, and end → begin.
        self._ends: dict[int, int] = {}
        self._begins: dict[int, int] = {}

    def put_message(self, offsets: Sequence[int]) -> None:
        """Put the next messages of the range. Raises ValueError unless their offsets ascend, within this call and from call to call."""
        gaps = [(last + 1, first) for last, first in pairwise((self._end - 1, *offsets)) if last + 1 != first]
        for begin, end in gaps:
            if end < begin:
                raise ValueError(f"message {end} came after message {begin - 1}")
        for begin, end in gaps:
            self._decide(begin, end)
        self.waiting += len(offsets)
        if offsets:
            self._end = offsets[-1] + 1

    def remove_message(self, offsets: Sequence[int]) -> int:
        """Make undecided messages, whose offsets ascend, decided. Return the progress."""
        begin, end = offsets[0], offsets[-1] + 1
        if end - begin == len(offsets):
            self._decide(begin, end)
        else:
            for offset in offsets:
                self._decide(offset, offset + 1)
        self.waiting -= len(offsets)
        if self.progress in self._ends:
            self.progress = self._ends.pop(self.progress)
            del self._begins[self.progress]
        return self.progress

    def _decide(self, begin: int, end: int) -> None:
        begin = self._begins.pop(begin, begin)
        end = self._ends.pop(end, end)
        self._ends[begin] = end
        self._begins[end] = begin
