"""Tables that get each message once over RocketMQ, whose locks are advisory: two runs of a query may overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ordered_sink import once
from ordered_sink.once.targets import append
from orderedmq.rocketmq.local.servers import Cluster
from tests.jars import jars_required
from tests.live.faults.drivers import Driver
from tests.live.faults.once_loop import LoopDriver
from tests.live.faults.once_storm import OnceStorm
from tests.live.faults.once_tables import COLUMNS, TableBatch
from tests.live.rocketmq.test_key_storm import World
from tests.micro_batches import MicroBatchLoop
from tests.postgres import Postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with jars_required():
        server = Postgres()
    with server:
        yield server


@pytest.mark.holds("tables once")
def test_two_runs_that_overlap_add_each_message_once(cluster: Cluster, tmp_path: Path) -> None:
    world = World(cluster, tmp_path)
    write = once.delta(tmp_path / "payments")

    def append_to_table(rows: pa.Table, batch_id: int) -> None:
        if rows.num_rows:
            append(write.target, TableBatch(rows.to_batches(), COLUMNS))

    def query(group: str, most: int, sink: Callable[[pa.Table, int], None]) -> MicroBatchLoop:
        options = {"namesrvAddr": cluster.address, "topic": world.topic, "consumerGroup": group, "maxOffsetsPerTrigger": most}
        return MicroBatchLoop(options, sink, rows=lambda batch: batch.select(COLUMNS))

    try:
        for queue in world.queues:
            bodies = pa.array([b"x"] * 20, pa.binary())
            world.broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": [f"k{queue.queue_id}"] * 20})})
        paused = query(f"{world.group}-paused", 45, append_to_table)
        paused.advance("written")
        # While the first run has a micro-batch, another one appends a part of its rows, in smaller micro-batches.
        other = query(world.group, 30, append_to_table)
        other.advance("published")
        paused.process_all_available()
        other.process_all_available()
        rows = (
            DeltaTable(tmp_path / "payments")
            .to_pyarrow_table()
            .sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])
        )
        queues = [(queue.queue_id, offset) for queue in world.queues for offset in range(20)]
        assert list(zip(rows["queue_id"].to_pylist(), rows["queue_offset"].to_pylist(), strict=True)) == queues
        for run in (paused, other):
            run.stop()
    finally:
        world.broker.close()


@pytest.mark.holds("tables once")
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("driver", [pytest.param(Driver, marks=pytest.mark.spark), LoopDriver])
def test_tables_have_each_message_once_after_kills_pauses_and_take_overs(
    driver: type[Driver] | type[LoopDriver], quick_locks: Cluster, tmp_path: Path, postgres: Postgres
) -> None:
    world = World(quick_locks, tmp_path)
    try:
        # The locks of this cluster live 3 s.
        OnceStorm(world, postgres.database, lambda: time.sleep(3), driver).run()
    finally:
        world.broker.close()
