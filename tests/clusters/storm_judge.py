"""Judges what the members of a group handled during a storm: nothing lost, nothing out of order, and who repeated what. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Handled(NamedTuple):
    """A member handled a message. ``at``: ns of the machine's monotonic clock; ``by``: the kind of member."""

    at: int
    by: str
    queue: str
    offset: int


class Acknowledged(NamedTuple):
    """A producer was told that its message stands there."""

    queue: str
    offset: int
    body: str


class Verdict(NamedTuple):
    """``lost``: acknowledged, and not in its place. ``unhandled``: in a queue, and no member handled it. ``skipped``: handled for the
    first time before an earlier message of its queue was. ``repeats``: how often a message was handled again, by whom first and by
    whom again. ``first``: how many messages each kind of member handled first."""

    lost: list[Acknowledged]
    unhandled: list[tuple[str, int]]
    skipped: list[tuple[str, int]]
    repeats: Counter[str]
    first: Counter[str]


def judge(queues: Mapping[str, Sequence[str]], acknowledged: Iterable[Acknowledged], handled: Iterable[Handled]) -> Verdict:
    """``queues``: the bodies of each queue from offset 0 on, as they are in the end."""
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
