"""Which part of some queues can have messages that fit comparisons: queues, ranges of offsets, times. Pure.

Rule: no message outside the part fits all comparisons. A message inside may not fit either: whoever asks compares it again.
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
    """A column compared with values of its own type, a time in µs since the epoch.

    ``=``: the column has one of ``values``; ``!=``: it has none of them. The other operators have exactly one value.
    """

    column: Column
    operator: Operator
    values: tuple[Value, ...]

    def fits(self, value: Value) -> bool:
        """Whether a message with this value in the column fits."""
        if self.operator in ("=", "!="):
            return (value in self.values) == (self.operator == "=")
        return _ORDER[self.operator](value, self.values[0])

    def bounds(self) -> tuple[int | None, int | None]:
        """Return the least number that fits, and the number behind the greatest; None without a bound."""
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
    """Comparisons that a message must fit all. Without any, everything is kept."""

    comparisons: tuple[Comparison, ...] = ()

    def part(
        self, queue: MessageQueue, span: OffsetRange, slack: int, offset_at: Callable[[int], int | None]
    ) -> OffsetRange | None:
        """Return the part of a range of a queue whose messages can fit; None if none can.

        ``offset_at`` returns the offset of the first message that was stored at a time (µs since the epoch) or later, else the queue's
        end; None if it cannot tell. ``slack``: µs by which a message may have been stored earlier than one before it.
        """
        if not self._keeps(queue):
            return None
        low, high = self._bounds("queue_offset")
        begin = span.begin if low is None else max(span.begin, low)
        end = span.end if high is None else min(span.end, high)
        since, until = self._bounds("store_timestamp")
        if since is not None and until is not None and since >= until:
            return None
        # With a clock that goes back, a binary search finds some message of the time, not the first. All before one that is older
        # by the slack are too old, and all behind one that is younger by it are too young.
        if begin < end and since is not None and (found := offset_at(since - slack)) is not None:
            begin = max(begin, found)
        if begin < end and until is not None and (found := offset_at(until + slack)) is not None:
            end = min(end, found)
        return OffsetRange(begin, end) if begin < end else None

    def _keeps(self, queue: MessageQueue) -> bool:
        """Whether the queue can have messages that fit, by its topic and number.

        A name with ``%`` is not compared: messages of such a topic may show another one (retries show the first topic).
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
