"""Filters that Spark pushes down to a batch read over a real cluster: which part of each queue is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds
from pyspark.sql.datasource import Filter

from ordered_source.columns import full_schema
from ordered_source.partition_reader import QueuePartition
from ordered_source.pushed_filters import FilteredReader
from orderedmq.capabilities import ROCKETMQ
from orderedmq.rocketmq import broker as rocketmq_broker
from orderedmq.rocketmq.local.servers import Cluster
from tests.contract.support import rows
from tests.rocketmq.group_world import World

EACH = 40


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    with World(cluster, queues=2) as made:
        yield made


def planned(world: World, *filters: Filter) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Return the ranges that a reader plans with these filters, by queue, and (queue, offset) of the rows that it reads."""
    reader = FilteredReader({"namesrvAddr": world.cluster.address, "topic": world.topic}, full_schema(False))
    assert reader.pushFilters(list(filters)) == list(filters)
    parts = [part for part in reader.partitions() if isinstance(part, QueuePartition)]
    found = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    return (
        {part.queue.queue_id: (part.begin, part.end) for part in parts},
        [(row["queue_id"], row["queue_offset"]) for row in found],
    )


@pytest.mark.holds("pushed filters")
def test_comparisons_of_queues_offsets_and_times_narrow_the_ranges(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(EACH):
        for queue in world.broker.log.queues(world.topic):
            world.broker.log.append({queue: rows([b"%d" % number])})
        time.sleep(0.005)
    first, second = world.broker.log.queues(world.topic)
    columns: Any = ("store_timestamp",)
    stamps = {
        queue: world.broker.log.pull(queue, 0, EACH, 1 << 30, columns).column(0).cast(pa.int64()).to_pylist()
        for queue in (first, second)
    }
    moment = stamps[first][30]
    stored = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment)

    offsets = [ds.EqualTo(("queue_id",), second.queue_id), ds.GreaterThan(("queue_offset",), 35)]
    assert planned(world, *offsets) == ({second.queue_id: (36, EACH)}, [(second.queue_id, at) for at in range(36, EACH)])
    # The messages of this test are seconds apart, but planning allows for a broker's clock that went back by up to a minute.
    since, until = ds.GreaterThanOrEqual(("store_timestamp",), stored), ds.LessThan(("store_timestamp",), stored)
    whole = {first.queue_id: (0, EACH), second.queue_id: (0, EACH)}
    assert planned(world, since)[0] == planned(world, until)[0] == whole
    assert planned(world, ds.LessThan(("store_timestamp",), stored - timedelta(hours=1)))[0] == {}

    exact = replace(ROCKETMQ, store_time_slack=0)
    monkeypatch.setattr(rocketmq_broker, "ROCKETMQ", exact)
    cut = {queue: next(at for at in range(EACH) if times[at] >= moment) for queue, times in stamps.items()}
    assert planned(world, since)[0] == {queue.queue_id: (at, EACH) for queue, at in cut.items()}
    assert planned(world, until)[0] == {queue.queue_id: (0, at) for queue, at in cut.items()}
