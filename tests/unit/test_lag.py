"""Lag per queue from the JSON of a source's progress, in all forms that PySpark uses."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ordered_source.lag_listener import LagListener
from orderedmq.errors import OffsetError, OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lag import ParkedCounts, QueueLag, describe, is_ours, lag_of, lag_of_query, parked_of_query
from orderedmq.ownership.offsets import Checkpoint, offsets_to_json


def q(number: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "embedded", number)


def source(end: dict[int, int] | None, latest: dict[int, int] | None, *, text: bool = True) -> dict[str, Any]:
    """A source's progress. ``end`` and ``latest`` are offsets by queue number."""
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
    assert describe(found) == "lag of 1 queues is unknown"


def test_a_queue_on_one_side_only_has_no_lag() -> None:
    assert lag_of(source({0: 10, 1: 4}, {0: 12, 2: 9})) == {q(0): QueueLag(10, 12)}


def test_lag_is_never_negative() -> None:
    # The topic was created again, or an older copy replaced the store.
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
    assert describe({}) == "lag of 0 queues is unknown"


# Parked messages.


def with_lot(parked: Any, *, text: bool = True) -> dict[str, Any]:
    """The progress of a source with a parking lot."""
    made = source({0: 10}, {0: 12}, text=False)
    made["latestOffset"]["parked"] = parked
    return made | {name: json.dumps(made[name]) for name in ("endOffset", "latestOffset") if text}


def counts(messages: int, keys: int, oldest: int | None, retries: int) -> dict[str, Any]:
    return ParkedCounts(messages, keys, oldest, retries)._asdict()


@pytest.mark.parametrize("text", [True, False])
def test_what_is_parked_is_the_sum_over_the_sources_with_a_parking_lot(text: bool) -> None:
    sources = [
        with_lot(counts(3, 2, 7000, 5), text=text),
        source({0: 1}, {0: 2}, text=text),
        with_lot(counts(1, 1, 4000, 2), text=text),
        with_lot(counts(0, 0, None, 0), text=text),
    ]
    assert parked_of_query(sources) == (4, 3, 4000, 7)
    assert parked_of_query(sources[3:]) == (0, 0, None, 0)
    assert lag_of_query(sources[:1]) == {q(0): QueueLag(10, 12)}


def test_without_a_parking_lot_nothing_is_said_of_one() -> None:
    assert parked_of_query([source({0: 1}, {0: 2})]) is None
    # This batch is repeated after a restart.
    assert parked_of_query([with_lot(counts(3, 2, 7000, 5)) | {"latestOffset": "null"}]) is None
    assert parked_of_query([other.values[0] for other in FOREIGN]) is None  # type: ignore[misc]


@pytest.mark.parametrize("parked", [3, {"messages": 3}, {**counts(1, 1, 1, 1), "more": 1}])
def test_parked_messages_that_make_no_sense_are_said(parked: Any) -> None:
    with pytest.raises(OffsetError, match="progress"):
        parked_of_query([with_lot(parked)])


def test_a_line_says_what_is_parked() -> None:
    lags = {q(0): QueueLag(5, 5)}
    assert describe(lags, ParkedCounts(1200, 3, 7000, 9)) == "lag 0 messages in 1 queues, parked 1200 messages of 3 keys"
    assert describe(lags, ParkedCounts(0, 0, None, 0)) == describe(lags, None) == describe(lags)


class Source(dict[str, Any]):
    """A source's progress, as Spark passes it to a listener."""

    numInputRows = 1


def progress(*sources: dict[str, Any], name: str = "billing", run: int = 1) -> Any:
    found = [Source(one) for one in sources]
    made = SimpleNamespace(sources=found, name=name, id=UUID(int=9), runId=UUID(int=run), batchId=0, batchDuration=10)
    return SimpleNamespace(progress=made)


def gauges(registry: CollectorRegistry) -> dict[str, float]:
    """The gauges of parked messages, without the common prefix of their names."""
    found = (sample for metric in registry.collect() for sample in metric.samples if "_parked_" in sample.name)
    return {sample.name.removeprefix("orderedmq_parked_") + "/" + sample.labels["query"]: sample.value for sample in found}


def test_gauges_show_what_is_parked_by_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 10.0)
    registry = CollectorRegistry()
    listener = LagListener(registry=registry, log=False)
    listener.onQueryProgress(progress(with_lot(counts(3, 2, 7500, 5)), source({0: 1}, {0: 2})))
    listener.onQueryProgress(progress(with_lot(counts(1, 1, 9000, 2)), name="other", run=2))
    billing = {"messages/billing": 3, "keys/billing": 2, "oldest_age_seconds/billing": 2.5, "retries/billing": 5}
    other = {"messages/other": 1, "keys/other": 1, "oldest_age_seconds/other": 1.0, "retries/other": 2}
    assert gauges(registry) == billing | other
    listener.onQueryTerminated(SimpleNamespace(runId=UUID(int=2)))  # type: ignore[arg-type]
    assert gauges(registry) == billing
    listener.onQueryProgress(progress(with_lot(counts(0, 0, None, 0))))
    assert gauges(registry) == {"messages/billing": 0, "keys/billing": 0, "retries/billing": 0}
    # The latest offset of a repeated batch is not known.
    listener.onQueryProgress(progress(with_lot(counts(3, 2, 7500, 5)) | {"latestOffset": None}))
    assert gauges(registry) == {}
    listener.close()
    assert list(registry.collect()) == []


def test_a_query_without_a_parking_lot_has_no_gauges_of_one() -> None:
    registry = CollectorRegistry()
    listener = LagListener(registry=registry, log=False)
    listener.onQueryProgress(progress(source({0: 1}, {0: 2})))
    assert gauges(registry) == {}
    assert registry.get_sample_value("orderedmq_batches_total", {"query": "billing"}) == 1


class BrokenEvent:
    """An event that raises an error for each attribute."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_an_error_in_the_listener_is_logged_once_per_kind_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    listener = LagListener(prometheus=True, registry=CollectorRegistry())
    for _ in range(3):
        listener.onQueryProgress(BrokenEvent())  # type: ignore[arg-type]
        listener.onQueryTerminated(BrokenEvent())  # type: ignore[arg-type]
    assert [(record.levelname, record.getMessage().rpartition(" ")[2]) for record in caplog.records] == [
        ("WARNING", "'progress'"),
        ("WARNING", "'runId'"),
    ]


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match=r"OPTION.MISSING.*orderedmq\[metrics\]"):
        LagListener()
    LagListener(prometheus=False)


def test_a_registry_has_room_for_one_listener_at_a_time() -> None:
    registry = CollectorRegistry()
    first = LagListener(registry=registry)
    with pytest.raises(OptionError, match="OPTION.CONFLICT"):
        LagListener(registry=registry)
    first.close()
    first.close()
    assert list(registry.collect()) == []
    LagListener(registry=registry)
