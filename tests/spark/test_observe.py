"""The lag of real queries: Prometheus metrics, log lines, and the removal of gauges when a query has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pyspark.sql import DataFrame

from ordered_source.lag_listener import LagListener
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


def wait_for_batches(caplog: pytest.LogCaptureFixture, batches: int) -> None:
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
def test_the_lag_of_a_query_is_exported_until_the_query_ends(
    rig: Rig, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("in", 2, rows=60)
    gate = Gate(first=1)
    query = start(rig, rig.stream(topic="in", consumerGroup="g", maxOffsetsPerTrigger=20), gate)
    wait_for_batches(caplog, 1)
    assert scraped(registry, "orderedmq_queue_lag_messages") == {queue(0): 20, queue(1): 20}
    assert scraped(registry, "orderedmq_queue_next_offset") == {queue(0): 10, queue(1): 10}
    assert scraped(registry, "orderedmq_rows_processed_total") == {'{query="lagging"}': 20}

    gate.opened.set()
    wait_for_batches(caplog, 3)
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
