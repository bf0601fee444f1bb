"""Leaves out queues and ranges of offsets in which no message can satisfy all of the given comparisons. Pure.

Rule: no message outside the part that is kept fits all comparisons. A message inside need not fit them either, so the caller compares
it again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from orderedmq.model import MessageQueue, OffsetRange

Column = Literal["topic", "queue_id", "queue_offset", "store_timestamp"]
Operator = Literal["=", "!=", "<", "<=", ">", ">="]
Value = int | str

_ORDER: Final[Mapping[Operator, Callable[[Value, Value], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Comparison:
    """A comparison of a column with values of its type. Times are in µs since the epoch.

    ``=``: the column equals one of ``values``. ``!=``: it equals none of them. The other operators have exactly one value.
    """

    column: Column
    operator: Operator
    values: tuple[Value, ...]

    def fits(self, value: Value) -> bool:
        """Whether the comparison holds for a message with this value in the column."""
        if self.operator in ("=", "!="):
            return (value in self.values) == (self.operator == "=")
        return _ORDER[self.operator](value, self.values[0])

    def bounds(self) -> tuple[int | None, int | None]:
        """Return the least number that fits, and the greatest one plus 1. A bound that does not exist is None."""
        numbers = [value for value in self.values if isinstance(value, int)]
        match self.operator:
            case "=":
                return (min(numbers), max(numbers) + 1) if numbers else (0, 0)
            case "<":
                return None, numbers[0]
            case "<=":
                return None, numbers[0] + 1
            case ">":
                return numbers[0] + 1, None
            case ">=":
                return numbers[0], None
        return None, None


@dataclass(frozen=True)
class Pruning:
    """Comparisons that must all hold for a message. If there are none, everything is kept."""

    comparisons: tuple[Comparison, ...] = ()

    def part(
        self, queue: MessageQueue, span: OffsetRange, slack: int, offset_at: Callable[[int], int | None]
    ) -> OffsetRange | None:
        """Return the part of a queue's range whose messages can fit, or None if none can.

        ``offset_at`` returns the offset of the first message that was stored at a time (µs since the epoch) or later. It returns the
        queue's end if there is no such message, and None if the offset is unknown. ``slack``: the number of µs by which a message's store
        time may be earlier than the store time of a previous message.
        """
        if not self._keeps(queue):
            return None
        low, high = self._bounds("queue_offset")
        begin = span.begin if low is None else max(span.begin, low)
        end = span.end if high is None else min(span.end, high)
        since, until = self._bounds("store_timestamp")
        if since is not None and until is not None and since >= until:
            return None
        # If the clock went back, a binary search finds a message near the time, not necessarily the first one. But a search for a time
        # that is earlier (for the end: later) by the slack excludes no message that fits.
        if begin < end and since is not None and (found := offset_at(since - slack)) is not None:
            begin = max(begin, found)
        if begin < end and until is not None and (found := offset_at(until + slack)) is not None:
            end = min(end, found)
        return OffsetRange(begin, end) if begin < end else None

    def _keeps(self, queue: MessageQueue) -> bool:
        """Whether the queue can have messages that fit, according to its topic and number.

        A topic with ``%`` in its name is not compared, because its messages may show another topic (retries show the original one).
        """
        known: dict[str, Value] = {"queue_id": queue.queue_id}
        if "%" not in queue.topic:
            known["topic"] = queue.topic
        return all(one.fits(known[one.column]) for one in self.comparisons if one.column in known)

    def _bounds(self, column: Column) -> tuple[int | None, int | None]:
        found = [one.bounds() for one in self.comparisons if one.column == column]
        lows = [low for low, _ in found if low is not None]
        highs = [high for _, high in found if high is not None]
        return max(lows, default=None), min(highs, default=None)
