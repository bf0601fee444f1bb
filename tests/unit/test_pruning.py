"""The queues and ranges that comparisons leave: they contain every fitting message, and no more than necessary."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.messages.offset_search import find_first
from orderedmq.rows.pruning import Comparison, Operator, Pruning
from tests.examples import examples


class Message(NamedTuple):
    topic: str
    queue_id: int
    queue_offset: int
    store_timestamp: int


FITS: dict[str, Any] = {
    "=": lambda mine, values: mine in values,
    "!=": lambda mine, values: mine not in values,
    "<": lambda mine, values: operator.lt(mine, values[0]),
    "<=": lambda mine, values: operator.le(mine, values[0]),
    ">": lambda mine, values: operator.gt(mine, values[0]),
    ">=": lambda mine, values: operator.ge(mine, values[0]),
}
NUMBERS, TOPICS = st.integers(-2, 12), st.sampled_from(["a", "b", "ä", ""])
MANY = st.sampled_from(["=", "!="])
ONE = st.sampled_from(["<", "<=", ">", ">="])


def compared(column: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Comparison]:
    some = st.lists(values, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Comparison, st.just(column), MANY, some), st.builds(Comparison, st.just(column), ONE, st.tuples(values))
    )


COMPARISONS = st.lists(
    st.one_of(
        compared("topic", TOPICS), *(compared(name, NUMBERS) for name in ("queue_id", "queue_offset", "store_timestamp"))
    ),
    max_size=4,
)
TIMES = st.lists(st.integers(0, 10), max_size=10).map(sorted)


def fitting(messages: Sequence[Message], comparisons: Sequence[Comparison]) -> list[Message]:
    return [one for one in messages if all(FITS[rule.operator](getattr(one, rule.column), rule.values) for rule in comparisons)]


QUEUES = st.builds(MessageQueue, st.sampled_from(["a", "b", "ä"]), st.just("embedded"), st.integers(0, 2))


@pytest.mark.holds("pushed filters")
@given(COMPARISONS, QUEUES, st.integers(0, 3), st.lists(st.integers(0, 10), max_size=10).map(sorted))
def test_no_message_that_fits_is_left_out(
    comparisons: list[Comparison], queue: MessageQueue, first: int, times: list[int]
) -> None:
    messages = [Message(queue.topic, queue.queue_id, first + place, time) for place, time in enumerate(times)]
    whole = OffsetRange(first, first + len(times))
    found = Pruning(tuple(comparisons)).part(queue, whole, 0, lambda time: first + bisect.bisect_left(times, time))
    kept = [] if found is None else messages[found.begin - first : found.end - first]
    wanted = fitting(messages, comparisons)
    assert set(wanted) <= set(kept)
    if all(rule.operator != "!=" and len(rule.values) == 1 for rule in comparisons):
        # With only ranges, exactly the fitting messages are kept.
        assert kept == wanted


@st.composite
def disordered(draw: st.DrawFn) -> tuple[list[int], int]:
    """The store times of a queue's messages, and the slack: the most by which a time may be earlier than a time before it."""
    slack = draw(st.integers(1, 3))
    times: list[int] = []
    for time in draw(st.lists(st.integers(0, 8), min_size=4, max_size=12)):
        times.append(max(time, max(times, default=0) - slack))
    return times, slack


@pytest.mark.holds("pushed filters")
@examples(6)
@given(disordered(), st.lists(compared("store_timestamp", st.integers(0, 8)), min_size=1, max_size=2), st.integers(0, 12))
def test_a_clock_that_goes_back_by_no_more_than_the_slack_leaves_no_message_out(
    stored: tuple[list[int], int], comparisons: list[Comparison], hint: int
) -> None:
    times, slack = stored
    messages = [Message("orders", 0, offset, time) for offset, time in enumerate(times)]

    def offset_at(time: int) -> int:
        """The offset that a search over RocketMQ finds, whatever offset the broker suggests as a hint."""
        return find_first(lambda offset: times[offset] >= time, 0, len(times), hint)

    found = Pruning(tuple(comparisons)).part(
        MessageQueue("orders", "broker-a", 0), OffsetRange(0, len(times)), slack, offset_at
    )
    assert set(fitting(messages, comparisons)) <= set(messages[found.begin : found.end] if found else [])


@pytest.mark.parametrize(
    ("sign", "values", "left"),
    [
        ("=", (5,), (5, 6)),
        ("=", (5, 8), (5, 9)),
        ("=", (), (0, 0)),
        ("=", (99,), (0, 0)),
        ("!=", (5,), (0, 10)),
        ("<", (5,), (0, 5)),
        ("<=", (5,), (0, 6)),
        (">", (5,), (6, 10)),
        (">=", (5,), (5, 10)),
        (">", (9,), (0, 0)),
        ("<", (-4,), (0, 0)),
    ],
)
def test_a_comparison_of_offsets_leaves_a_range(sign: Operator, values: tuple[int, ...], left: tuple[int, int]) -> None:
    assert part(Pruning((Comparison("queue_offset", sign, values),))) == (OffsetRange(*left) if left[1] else None)


def part(pruning: Pruning, topic: str = "orders", queue_id: int = 0, at: int | None = None) -> OffsetRange | None:
    return pruning.part(MessageQueue(topic, "broker-a", queue_id), OffsetRange(0, 10), 0, lambda _: at)


def test_a_topic_that_may_show_another_name_is_not_compared() -> None:
    pruning = Pruning((Comparison("topic", "=", ("orders",)), Comparison("queue_id", "<", (2,))))
    assert part(pruning, "%RETRY%billing")
    assert not part(pruning, "%RETRY%billing", 2)
    assert not part(pruning, "payments")
    assert part(pruning)


def test_the_narrowest_of_several_bounds_counts() -> None:
    bounds = [(">", 2), (">=", 4), ("<", 9), ("<=", 6), (">", 1), ("<", 8)]
    assert part(Pruning(tuple(Comparison("queue_offset", sign, (value,)) for sign, value in bounds))) == (4, 7)  # type: ignore[arg-type]


def test_a_time_that_cannot_be_searched_for_leaves_everything() -> None:
    pruning = Pruning((Comparison("store_timestamp", "=", (5,)),))
    assert part(pruning, at=4) is None
    assert part(pruning, at=None) == (0, 10)


def test_without_comparisons_everything_is_kept() -> None:
    assert part(Pruning()) == (0, 10)
