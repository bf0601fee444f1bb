"""The lag of real queries: Prometheus metrics, log lines, and the removal of gauges when a query has ended."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.listener import QueryProgressEvent, QueryTerminatedEvent

from ordered_source.lag_listener import LagListener
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking.rules import HELD, Put, Ticket
from tests.spark.conftest import Rig
from tests.waits import until


def scraped(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Return the values of a metric in a scrape, by the labels of each series as text."""
    out: dict[str, float] = {}
    for line in generate_latest(registry).decode().splitlines():
        series, _, value = line.rpartition(" ")
        if series.startswith(f"{name}{{"):
            out[series.removeprefix(name)] = float(value)
    return out


def queue(number: int, query: str = "lagging") -> str:
    return f'{{broker="embedded",query="{query}",queue="{number}",topic="in"}}'


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "orderedmq.lag"]


def told(caplog: pytest.LogCaptureFixture, batches: int) -> None:
    """Wait until the listener has logged this number of batches. It logs a batch after setting its metrics."""
    until(lambda: len(lines(caplog)) >= batches, f"{batches} batches are logged")


class Gate:
    """A function for foreachBatch that either holds every batch from ``first`` on until the gate is opened, or makes it fail."""

    def __init__(self, first: int, fail: bool = False) -> None:
        self.first = first
        self.fail = fail
        self.opened = threading.Event()

    def __call__(self, df: DataFrame, batch: int) -> None:
        df.count()
        if batch >= self.first:
            if self.fail:
                raise ValueError("the sink fails")
            self.opened.wait(150)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def listener(rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> Iterator[LagListener]:
    caplog.set_level(logging.INFO, logger="orderedmq.lag")
    # Wait for events of an earlier test's query, which may still be on their way.
    rig.spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    listener = LagListener(registry=registry)
    rig.spark.streams.addListener(listener)
    yield listener
    for query in rig.spark.streams.active:
        query.stop()
    rig.spark.streams.removeListener(listener)


def start(rig: Rig, df: DataFrame, sink: Gate, name: str | None = "lagging") -> Any:
    writer = df.writeStream.foreachBatch(sink).option("checkpointLocation", str(rig.folder / "ck"))
    writer = writer.trigger(processingTime="100 milliseconds")
    return (writer.queryName(name) if name else writer).start()


@pytest.mark.usefixtures("listener")
def test_a_lag_is_seen_while_there_is_one_then_zero_then_nothing(
    rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=60)
    gate = Gate(first=1)
    query = start(rig, rig.stream(topic="in", consumerGroup="g", maxOffsetsPerTrigger=20), gate)
    told(caplog, 1)
    assert scraped(registry, "orderedmq_queue_lag_messages") == {queue(0): 20, queue(1): 20}
    assert scraped(registry, "orderedmq_queue_next_offset") == {queue(0): 10, queue(1): 10}
    assert scraped(registry, "orderedmq_rows_processed_total") == {'{query="lagging"}': 20}

    gate.opened.set()
    told(caplog, 3)
    assert scraped(registry, "orderedmq_batches_total") == {'{query="lagging"}': 3}
    assert scraped(registry, "orderedmq_queue_lag_messages") == {queue(0): 0, queue(1): 0}
    assert scraped(registry, "orderedmq_queue_next_offset") == {queue(0): 30, queue(1): 30}
    assert scraped(registry, "orderedmq_rows_processed_total") == {'{query="lagging"}': 60}
    assert scraped(registry, "orderedmq_batch_seconds_count") == {'{query="lagging"}': 3}
    assert 0 < scraped(registry, "orderedmq_batch_seconds_sum")['{query="lagging"}'] < 120

    query.stop()
    until(lambda: not scraped(registry, "orderedmq_queue_lag_messages"), "the gauges of the stopped query are removed")
    assert scraped(registry, "orderedmq_queue_next_offset") == {}
    assert scraped(registry, "orderedmq_rows_processed_total") == {'{query="lagging"}': 60}
    # An idle query must not log further lines.
    assert lines(caplog) == [
        "query lagging, batch 0: lag 40 messages in 2 queues, worst in/embedded/0 with 20",
        "query lagging, batch 1: lag 20 messages in 2 queues, worst in/embedded/0 with 10",
        "query lagging, batch 2: lag 0 messages in 2 queues",
    ]


@pytest.mark.usefixtures("listener")
def test_a_batch_that_is_repeated_after_a_restart_has_no_known_lag(
    rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=60)
    options: dict[str, Any] = {"topic": "in", "consumerGroup": "g", "maxOffsetsPerTrigger": 20}
    failed = start(rig, rig.stream(**options), Gate(first=1, fail=True), name=None)
    told(caplog, 1)
    until(lambda: failed.exception() is not None, "the query has failed")
    until(lambda: not scraped(registry, "orderedmq_queue_next_offset"), "the gauges of the failed query are removed")
    gate = Gate(first=2)
    again = start(rig, rig.stream(**options), gate, name=None)
    assert again.id == failed.id
    told(caplog, 2)
    named = str(again.id)
    assert scraped(registry, "orderedmq_queue_next_offset") == {queue(0, named): 20, queue(1, named): 20}
    assert scraped(registry, "orderedmq_queue_lag_messages") == {}
    gate.opened.set()
    told(caplog, 3)
    assert scraped(registry, "orderedmq_queue_lag_messages") == {queue(0, named): 0, queue(1, named): 0}
    assert f"query {named}, batch 1: lag of 2 queues is unknown" in lines(caplog)


@pytest.mark.usefixtures("listener")
def test_other_sources_are_ignored_also_beside_ours(
    rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=10)
    rate = rig.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    alone = rate.writeStream.format("noop").option("checkpointLocation", str(rig.folder / "alone")).start()
    both = rig.stream(topic="in", consumerGroup="g").selectExpr("queue_offset AS value").union(rate.select("value"))
    gate = Gate(first=1)
    start(rig, both, gate)
    until(lambda: alone.lastProgress is not None, "the other query has made progress")
    told(caplog, 1)
    assert scraped(registry, "orderedmq_queue_lag_messages") == {queue(0): 0, queue(1): 0}
    assert scraped(registry, "orderedmq_rows_processed_total") == {'{query="lagging"}': 10}
    gate.opened.set()
    assert all(line.startswith("query lagging, ") for line in lines(caplog))


@pytest.mark.usefixtures("listener")
def test_what_a_query_has_parked_is_seen(rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    rig.topic("in", 1, rows=10)
    source = MessageQueue("in", "embedded", 0)
    earlier = rig.broker.groups.join("earlier")
    [token] = rig.broker.groups.lock("g", earlier, [source]).values()
    assert isinstance(token, LockToken)
    rig.broker.groups.park(token, [Put(source, offset, Ticket(offset, 3, 1, HELD)) for offset in (0, 1, 5)])
    rig.broker.groups.commit({token: 6})
    rig.broker.groups.unlock([token])
    rig.broker.groups.leave(earlier)
    start(rig, rig.stream(topic="in", consumerGroup="g", parkingLot="true"), Gate(first=1))
    told(caplog, 1)
    assert scraped(registry, "orderedmq_parked_messages") == {'{query="lagging"}': 3}
    assert scraped(registry, "orderedmq_parked_keys") == {'{query="lagging"}': 2}
    assert scraped(registry, "orderedmq_parked_retries") == {'{query="lagging"}': 6}
    assert 0 <= scraped(registry, "orderedmq_parked_oldest_age_seconds")['{query="lagging"}'] < 600
    assert lines(caplog) == ["query lagging, batch 0: lag 0 messages in 1 queues, parked 3 messages of 2 keys"]


class _Broken:
    """An event that raises an error for each attribute."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_an_error_in_the_listener_is_logged_once_per_kind_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    listener = LagListener(prometheus=True, registry=CollectorRegistry())
    for _ in range(3):
        listener.onQueryProgress(cast(QueryProgressEvent, _Broken()))
        listener.onQueryTerminated(cast(QueryTerminatedEvent, _Broken()))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "lag is not exported because handling a query's progress failed (logged once): 'progress'"),
        ("WARNING", "lag is not exported because handling a query's end failed (logged once): 'runId'"),
    ]


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match=r"\[ORDEREDMQ_OPTION.MISSING\].*pip install 'orderedmq\[metrics\]'"):
        LagListener()
    LagListener(prometheus=False)


def test_a_registry_has_room_for_one_listener_at_a_time(registry: CollectorRegistry) -> None:
    first = LagListener(registry=registry)
    with pytest.raises(OptionError, match=r"\[ORDEREDMQ_OPTION.CONFLICT\].*another LagListener"):
        LagListener(registry=registry)
    first.close()
    first.close()
    assert generate_latest(registry) == b""
    LagListener(registry=registry)
