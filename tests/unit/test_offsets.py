"""Offsets: the canonical form that Spark compares as text, the ranges between offsets, and how many messages are admitted."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordered_source.admission import Admission
from orderedmq.broker import Log
from orderedmq.errors import OffsetError, aged_out
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint, admit, hold_back, offsets_from_json, offsets_to_json, ranges


def q(number: int, topic: str = "orders", broker: str = "embedded") -> MessageQueue:
    return MessageQueue(topic, broker, number)


def offset(next_: dict[int, int], entered: dict[int, int] | None = None) -> Checkpoint:
    return Checkpoint(
        "me", {q(key): value for key, value in next_.items()}, {q(key): value for key, value in (entered or {}).items()}
    )


QUEUES = st.builds(MessageQueue, st.text(max_size=4), st.text(max_size=3), st.integers(0, 70_000))
MAPS = st.dictionaries(QUEUES, st.integers(0, 2**62), max_size=6)
CHECKPOINTS = st.builds(
    Checkpoint,
    st.text(min_size=1, max_size=5),
    MAPS,
    MAPS,
    MAPS,
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    st.none() | st.text(max_size=4),
)


@given(MAPS)
def test_offsets_come_back_from_their_json(offsets):
    assert offsets_from_json(json.loads(json.dumps(offsets_to_json(offsets))), "here") == offsets


@given(MAPS, st.randoms())
def test_the_json_of_offsets_does_not_depend_on_the_order_in_which_they_were_found(offsets, random):
    items = list(offsets.items())
    random.shuffle(items)
    assert json.dumps(offsets_to_json(dict(items))) == json.dumps(offsets_to_json(offsets))


def test_queues_are_ordered_by_number_not_as_text():
    assert list(offsets_to_json({q(10): 1, q(9): 2, q(2): 3})["orders"]["embedded"]) == ["2", "9", "10"]


@given(CHECKPOINTS)
def test_a_checkpoint_comes_back_from_what_spark_keeps_and_its_text_is_stable(checkpoint):
    text = json.dumps(checkpoint.to_spark())
    again = Checkpoint.from_spark(json.loads(text))
    assert again == checkpoint
    assert json.dumps(again.to_spark()) == text


def test_the_initial_offset_is_the_empty_object():
    assert Checkpoint().to_spark() == {}
    assert Checkpoint.from_spark({}) == Checkpoint()
    assert Checkpoint().fresh
    assert not Checkpoint("me").fresh


def test_a_newer_checkpoint_is_refused_with_what_to_do():
    with pytest.raises(OffsetError, match="Upgrade orderedmq") as caught:
        Checkpoint.from_spark({"v": 2, "owner": "me", "next": "who knows"})
    assert caught.value.sub == "NEWER_FORMAT"


GOOD = replace(offset({0: 5}), topics={"orders": "X"}).to_spark()


@pytest.mark.parametrize(
    "value",
    [
        0,
        5,
        None,
        [],
        "",
        "offset",
        {"orders": {"0": 5}},
        {**GOOD, "v": "1"},
        {**GOOD, "v": True},
        {**GOOD, "owner": None},
        {**GOOD, "next": None},
        {**GOOD, "next": {"orders": 5}},
        {**GOOD, "next": {"orders": {"embedded": [5]}}},
        {**GOOD, "next": {"orders": {"embedded": {"-1": 5}}}},
        {**GOOD, "next": {"orders": {"embedded": {"²": 5}}}},
        {**GOOD, "next": {"orders": {"embedded": {"0": -1}}}},
        {**GOOD, "next": {"orders": {"embedded": {"0": 1.5}}}},
        {**GOOD, "next": {"orders": {"embedded": {"0": True}}}},
        {**GOOD, "entered": 1},
        {**GOOD, "gen": {"a": {"b": {"c": 1}}}},
        {**GOOD, "topics": ["orders"]},
        {**GOOD, "group": 1},
        {**GOOD, "topics": {"orders": 1}},
    ],
)
def test_refuses_an_offset_that_the_source_did_not_write(value):
    with pytest.raises(OffsetError) as caught:
        Checkpoint.from_spark(value)
    assert caught.value.sub == "INVALID"


# -- ranges -----------------------------------------------------------------------------------------------------------------------


def test_the_first_batch_needs_every_queue_entered():
    assert ranges(Checkpoint(), offset({0: 5, 1: 3}, {0: 0, 1: 3})) == {q(0): OffsetRange(0, 5), q(1): OffsetRange(3, 3)}
    with pytest.raises(OffsetError, match="orders/embedded/1") as caught:
        ranges(Checkpoint(), offset({0: 5, 1: 3}, {0: 0}))
    assert caught.value.sub == "INCOMPLETE"


@pytest.mark.parametrize(("start", "end"), [(offset({0: 6}), offset({0: 5})), (offset({0: 1}), offset({0: 5}, {0: 6}))])
def test_a_range_that_begins_after_its_end_is_an_error(start, end):
    with pytest.raises(OffsetError, match="from 6 to 5") as caught:
        ranges(start, end)
    assert caught.value.sub == "BEGIN_AFTER_END"


@given(st.lists(st.dictionaries(st.integers(0, 3), st.integers(0, 5), max_size=4), max_size=6))
def test_ranges_of_consecutive_batches_join_without_a_gap(steps):
    """Queues come and go. Each queue that stays is read from where the previous range ended."""
    start, at = Checkpoint(), dict.fromkeys(range(4), 0)
    for owned in steps:
        entered = {number: at[number] for number in owned if q(number) not in start.next}
        begins = dict(at)
        for number, count in owned.items():
            at[number] += count
        end = offset({number: at[number] for number in owned}, entered)
        assert ranges(start, end) == {q(number): OffsetRange(begins[number], at[number]) for number in sorted(owned)}
        start = end


# -- admission --------------------------------------------------------------------------------------------------------------------

BACKLOGS = st.dictionaries(st.integers(0, 50).map(q), st.integers(0, 10**12), max_size=20)
LIMITS = st.integers(1, 10**13) | st.integers(1, 30)


@given(BACKLOGS, LIMITS, st.integers(0, 100))
def test_admits_messages_up_to_the_limit_or_all_of_them(backlog, limit, turn):
    shares = admit(backlog, limit, turn)
    assert sum(shares.values()) == min(limit, sum(backlog.values()))
    assert all(0 < n <= backlog[queue] for queue, n in shares.items())


@given(BACKLOGS, LIMITS, st.integers(0, 100))
def test_what_is_admitted_is_pro_rata_to_less_than_one_message(backlog, limit, turn):
    total = sum(backlog.values())
    shares = admit(backlog, limit, turn)
    for queue, waiting in backlog.items():
        exact = min(waiting * limit, waiting * total)
        assert abs(shares.get(queue, 0) * total - exact) <= total


@given(st.dictionaries(st.integers(0, 50).map(q), st.integers(1, 10**6), min_size=1, max_size=12), LIMITS, st.integers(0, 100))
def test_every_waiting_queue_is_served_first_once_in_as_many_turns_as_there_are_queues(backlog, limit, first):
    served = [next(iter(admit(backlog, limit, turn))) for turn in range(first, first + len(backlog))]
    assert sorted(served) == sorted(backlog)


@pytest.mark.parametrize(
    ("total", "least", "waited", "held"),
    [(9, 10, 29.9, True), (10, 10, 0.0, False), (9, 10, 30.0, False), (0, None, 0.0, False), (0, 1, 30.0, False)],
)
def test_a_trigger_waits_for_more_messages_but_not_for_ever(total, least, waited, held):
    assert hold_back(total, least, waited, 30.0) is held


def test_messages_that_are_lost_do_not_keep_a_batch_with_a_limit_of_bytes_from_being_planned() -> None:
    """A RocketMQ broker may count messages for a while after it has deleted them."""

    class Half:
        """A log whose first queue has lost its messages. Each message of the other queue has 10 bytes."""

        def pull(self, queue: MessageQueue, offset: int, *_: object) -> pa.RecordBatch:
            if queue == q(0):
                raise aged_out(queue, offset, 100)
            return pa.record_batch({"body": [bytes(10)]})

        def advance(self, queue: MessageQueue, begin: int, end: int, size: int) -> int:
            self.pull(queue, begin)
            return min(end, begin + size // 10)

    given = {"path": "x", "topic": "orders", "consumerGroup": "g", "maxBytesPerTrigger": "100"}
    options = parse(SourceOptions, given, streaming=True)
    admission = Admission(options, 0.0)
    backlog = {q(0): OffsetRange(0, 100), q(1): OffsetRange(0, 100)}
    taken = [admission.count_messages(cast(Log, Half()), backlog, admission.default_limit(), 0.0) for _ in range(2)]
    assert taken == [{q(0): 100, q(1): 5}, {q(0): 100, q(1): 5}]


def test_no_queue_starves_under_both_limits() -> None:
    """Each message is as large as a batch may be, so each batch has the first message of one queue."""
    given = {"path": "x", "topic": "orders", "consumerGroup": "g", "maxOffsetsPerTrigger": "2", "maxBytesPerTrigger": "10"}
    admission = Admission(parse(SourceOptions, given, streaming=True), 0.0)
    log = SimpleNamespace(pull=lambda *_: pa.record_batch({"body": [bytes(10)]}))
    backlog = {q(number): OffsetRange(0, 1000) for number in range(4)}
    taken = [admission.count_messages(cast(Log, log), backlog, admission.default_limit(), 0.0) for _ in backlog]
    assert taken == [{queue: 1} for queue in backlog]
