"""Pure functions that check the messages handled during a storm: whether any were lost or out of order, and who repeated messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Handled(NamedTuple):
    """A message that a member handled. ``at``: time on the machine's monotonic clock, in ns; ``by``: the kind of member."""

    at: int
    by: str
    queue: str
    offset: int


class Acknowledged(NamedTuple):
    """A message that the broker acknowledged to the producer, with its queue and offset."""

    queue: str
    offset: int
    body: str


class Verdict(NamedTuple):
    """``lost``: acknowledged messages that are not at their offset. ``unhandled``: queued messages that no member handled.
    ``skipped``: messages whose first handling was out of order in their queue. ``repeats``: how often messages were handled
    again, by the kinds of member that handled them first and again. ``first``: how many messages each kind of member handled
    first.
    """

    lost: list[Acknowledged]
    unhandled: list[tuple[str, int]]
    skipped: list[tuple[str, int]]
    repeats: Counter[str]
    first: Counter[str]


def judge(queues: Mapping[str, Sequence[str]], acknowledged: Iterable[Acknowledged], handled: Iterable[Handled]) -> Verdict:
    """Return the verdict. ``queues`` has the bodies of each queue from offset 0 on, at the end of the storm."""
    lost = [one for one in acknowledged if one.body not in queues.get(one.queue, ())[one.offset : one.offset + 1]]
    first: dict[tuple[str, int], str] = {}
    reached: dict[str, int] = defaultdict(int)
    skipped: list[tuple[str, int]] = []
    repeats: Counter[str] = Counter()
    for one in sorted(handled):
        place = one.queue, one.offset
        if place in first:
            repeats[f"{first[place]}, then {one.by}"] += 1
            continue
        first[place] = one.by
        if one.offset != reached[one.queue]:
            skipped.append(place)
        reached[one.queue] = max(reached[one.queue], one.offset + 1)
    unhandled = [
        (queue, offset) for queue, bodies in queues.items() for offset in range(len(bodies)) if (queue, offset) not in first
    ]
    return Verdict(lost, unhandled, skipped, repeats, Counter(first.values()))
