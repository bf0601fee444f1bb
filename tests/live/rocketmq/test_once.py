"""Tables that get each message once over RocketMQ, whose locks are advisory: two runs of a query may overlap."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ordered_sink import once
from orderedmq.rocketmq.local.servers import Cluster
from tests.jars import jars_required
from tests.live.faults.once_storm import OnceStorm
from tests.live.faults.once_tables import COLUMNS
from tests.live.rocketmq.test_key_storm import World
from tests.postgres import Postgres

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with jars_required():
        server = Postgres()
    with server:
        yield server


@pytest.mark.holds("tables once")
def test_two_runs_that_overlap_add_each_message_once(cluster: Cluster, spark: SparkSession, tmp_path: Path) -> None:
    world = World(cluster, tmp_path)
    append = once.sql(lambda: sqlite3.connect(tmp_path / "payments.db"), "payments", columns=["queue_id", "queue_offset"])
    with closing(sqlite3.connect(tmp_path / "payments.db")) as database:
        database.execute("CREATE TABLE payments (queue_id INTEGER, queue_offset BIGINT, sharding_key TEXT)")
    held, go = threading.Event(), threading.Event()

    def late(rows: DataFrame, batch_id: int) -> None:
        """Append as a run that was paused with a micro-batch until another one had its queues."""
        held.set()
        assert go.wait(120)
        append(rows, batch_id)

    def start(group: str, write: Callable[[DataFrame, int], None], most: int) -> StreamingQuery:
        options = {"consumerGroup": group, "consumeFromWhere": "first", "maxOffsetsPerTrigger": str(most)}
        rows = spark.readStream.format("orderedmq").option("namesrvAddr", cluster.address).option("topic", world.topic)
        writer = rows.options(**options).load().select(*COLUMNS).writeStream.foreachBatch(write)
        return writer.option("checkpointLocation", str(tmp_path / group)).trigger(availableNow=True).start()

    try:
        for queue in world.queues:
            bodies = pa.array([b"x"] * 20, pa.binary())
            world.broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": [f"k{queue.queue_id}"] * 20})})
        paused = start(f"{world.group}-paused", late, 45)
        assert held.wait(120)
        # This run has other micro-batches, so that the paused one has rows on both sides of the table's position.
        assert start(world.group, lambda rows, batch: append(rows, batch) if batch == 0 else None, 30).awaitTermination(120)
        go.set()
        assert paused.awaitTermination(120)
        with closing(sqlite3.connect(tmp_path / "payments.db")) as database:
            offsets = database.execute("SELECT queue_id, queue_offset FROM payments ORDER BY queue_id, rowid").fetchall()
        assert offsets == [(queue.queue_id, offset) for queue in world.queues for offset in range(20)]
    finally:
        go.set()
        world.broker.close()


@pytest.mark.holds("tables once")
@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_tables_have_each_message_once_after_kills_pauses_and_take_overs(
    quick_locks: Cluster, tmp_path: Path, postgres: Postgres
) -> None:
    world = World(quick_locks, tmp_path)
    try:
        # The locks of this cluster live 3 s.
        OnceStorm(world, postgres.database, lambda: time.sleep(3)).run(kills=50, take_overs=10, pauses=20)
    finally:
        world.broker.close()
