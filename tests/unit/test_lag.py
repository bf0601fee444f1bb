"""Lag per queue from the JSON of a source's progress, in the forms in which PySpark gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.core.lag import QueueLag, describe, is_ours, lag_of, lag_of_query
from orderedmq.core.offsets import Checkpoint, offsets_to_json
from orderedmq.errors import OffsetError
from orderedmq.model import MessageQueue


def q(number: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "embedded", number)


def source(end: dict[int, int] | None, latest: dict[int, int] | None, *, text: bool = True) -> dict[str, Any]:
    """A source's progress: ``end`` and ``latest`` are offsets per queue."""
    checkpoint = Checkpoint() if end is None else Checkpoint("me", {q(number): offset for number, offset in end.items()})
    reported = None if latest is None else {"next": offsets_to_json({q(number): offset for number, offset in latest.items()})}
    offsets = {"startOffset": {}, "endOffset": checkpoint.to_spark(), "latestOffset": reported}
    return {"description": "orderedmq", "numInputRows": 1} | {
        name: json.dumps(value) if text else value for name, value in offsets.items()
    }


FOREIGN = [
    pytest.param({"endOffset": "17", "latestOffset": "20"}, id="rate"),
    pytest.param({"endOffset": '{"logOffset":3}', "latestOffset": "null"}, id="file"),
    pytest.param({"endOffset": '{"orders":{"0":23}}', "latestOffset": '{"orders":{"0":30}}'}, id="kafka"),
    pytest.param({"endOffset": '{"next":{},"v":1}', "latestOffset": "null"}, id="alike"),
    pytest.param({"endOffset": "[0]", "latestOffset": "[3]"}, id="socket"),
    pytest.param({"endOffset": "no json", "latestOffset": "None"}, id="text"),
    pytest.param({"endOffset": None, "latestOffset": None}, id="nothing"),
    pytest.param({"endOffset": "None", "latestOffset": "None"}, id="java-null"),
    pytest.param({}, id="empty"),
]


@pytest.mark.parametrize("text", [True, False])
def test_lag_is_what_is_there_less_what_is_done(text: bool) -> None:
    found = lag_of(source({0: 10, 1: 7}, {0: 25, 1: 7}, text=text))
    assert found == {q(0): QueueLag(10, 25), q(1): QueueLag(7, 7)}
    assert [lag.messages for lag in found.values()] == [15, 0]


@pytest.mark.parametrize("other", FOREIGN)
def test_a_source_of_another_kind_has_no_lag(other: dict[str, Any]) -> None:
    assert not is_ours(other)
    assert lag_of(other) == {}
    assert lag_of_query([other, source({0: 1}, {0: 3}), other]) == {q(0): QueueLag(1, 3)}


@pytest.mark.parametrize("text", [True, False])
def test_a_fresh_query_has_no_lag(text: bool) -> None:
    assert lag_of(source(None, {0: 5}, text=text)) == {}
    assert lag_of(source(None, None, text=text)) == {}


@pytest.mark.parametrize("missing", [None, "None", "null", ""])
def test_without_a_latest_offset_the_lag_is_not_known_rather_than_zero(missing: str | None) -> None:
    found = lag_of(source({0: 10}, {}) | {"latestOffset": missing})
    assert found == {q(0): QueueLag(10, None)}
    assert found[q(0)].messages is None
    assert describe(found) == "lag of 1 queues not known"


def test_a_queue_on_one_side_only_has_no_lag() -> None:
    assert lag_of(source({0: 10, 1: 4}, {0: 12, 2: 9})) == {q(0): QueueLag(10, 12)}


def test_lag_is_never_negative() -> None:
    # The topic was created again, or the store replaced by an older copy.
    assert lag_of(source({0: 10}, {0: 3}))[q(0)].messages == 0


def test_a_queue_that_two_sources_read_counts_as_the_one_further_behind() -> None:
    sources = [source({0: 8, 1: 2}, {0: 10, 1: 5}), source({0: 3, 1: 4}, {0: 10, 1: 5})]
    assert lag_of_query(sources) == lag_of_query(sources[::-1]) == {q(0): QueueLag(3, 10), q(1): QueueLag(2, 5)}


@pytest.mark.parametrize("latest", ['{"other": 1}', "17", "no json", '{"next": {"orders": 3}}'])
def test_a_latest_offset_that_makes_no_sense_is_said(latest: str) -> None:
    with pytest.raises(OffsetError, match="progress"):
        lag_of(source({0: 10}, {}) | {"latestOffset": latest})


def test_an_offset_of_a_newer_version_is_said() -> None:
    newer = {"endOffset": json.dumps({"v": 99, "owner": "me", "next": {}}), "latestOffset": None}
    with pytest.raises(OffsetError, match="NEWER_FORMAT"):
        lag_of(newer)


OFFSETS = st.dictionaries(st.integers(0, 20), st.integers(0, 2**62), max_size=8)


@given(OFFSETS, OFFSETS)
def test_whatever_the_offsets_each_queue_of_both_sides_has_one_lag(end: dict[int, int], latest: dict[int, int]) -> None:
    found = lag_of(source(end, latest))
    assert found == lag_of(source(end, latest, text=False))
    assert set(found) == {q(number) for number in end.keys() & latest.keys()}
    assert all(lag.messages is not None and lag.messages >= 0 for lag in found.values())


def test_a_line_has_the_total_and_the_worst_queue() -> None:
    assert describe({q(0): QueueLag(0, 5), q(1): QueueLag(1, 8), q(2): QueueLag(0, 7)}) == (
        "lag 19 messages in 3 queues, worst orders/embedded/1 with 7"
    )
    assert describe({q(0): QueueLag(5, 5)}) == "lag 0 messages in 1 queues"
    assert describe({}) == "lag of 0 queues not known"
