"""A broker that loses messages with its machine, deletes them by age, or has no room for more: what the sink and the source make of it.

Each test has a cluster of its own, whose files are small.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.broker import Broker
from orderedmq.errors import DataLossError, OrderedMQError
from orderedmq.rocketmq.probe import ask
from orderedmq.rocketmq.queue_place import Timing
from orderedmq.rocketmq.servers import Cluster
from tests.faults.points import until
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.test_outbox import World, numbered

DELETE_EXPIRED_COMMITLOG = 329
#: A minute is long for a test that waits for a broker that has no room.
IMPATIENT = Timing(patience=5.0)
SMALL = {"mappedFileSizeCommitLog": 4 << 20, "mappedFileSizeConsumeQueue": 2000}


@pytest.fixture
def own(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster to be spoiled; the usual one says whether there are jars at all."""
    made = Cluster(
        tmp_path / "own",
        cluster.version,
        properties={**SMALL, "fileReservedTime": 0, "cleanResourceInterval": 500},
        jvm=QUICK_SERVER,
    )
    (tmp_path / "own").mkdir()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def world(own: Cluster) -> Iterator[World]:
    made = World(own, IMPATIENT)
    yield made
    made.close()


def test_rows_that_a_broker_lost_with_its_machine_are_not_sent_again_and_nothing_is_there_twice(
    own: Cluster, world: World
) -> None:
    """ASYNC_FLUSH: what was acknowledged may be gone. An older copy of its files is what such a machine comes back with."""
    first, second, third = numbered(20), numbered(20, 20), numbered(20, 40)
    world.outbox().publish(world.batch(0), [world.write(first)])
    own.broker.shut_down()
    store = own.broker.home / "store"
    shutil.copytree(store, own.broker.home / "copy")
    own.broker.start()
    world.outbox().publish(world.batch(1), [world.write(second, 1)])
    assert world.bodies() == first + second
    own.broker.kill()
    shutil.rmtree(store)
    (own.broker.home / "copy").rename(store)
    own.broker.start()
    assert world.bodies() == first
    # A source that has read further is told.
    with pytest.raises(DataLossError) as caught:
        world.log.pull(world.queue, 40, 10, 1 << 20, ("body",))
    assert caught.value.sub == "BEYOND_END"
    # Spark goes on with the next batch: what it committed before is its own no more.
    world.outbox().publish(world.batch(2), [world.write(third, 2)])
    assert world.bodies() == first + third
    # Had Spark not committed the lost batch, it would send it again.
    published = world.outbox().publish(world.batch(2), [world.write(third, 2)])
    assert published.replayed
    assert world.bodies() == first + third


def test_a_lost_batch_that_spark_had_not_committed_is_sent_again(own: Cluster, world: World) -> None:
    first, second = numbered(20), numbered(20, 20)
    world.outbox().publish(world.batch(0), [world.write(first)])
    own.broker.shut_down()
    store = own.broker.home / "store"
    shutil.copytree(store, own.broker.home / "copy")
    own.broker.start()
    world.write(second, 1)
    own.broker.kill()
    shutil.rmtree(store)
    (own.broker.home / "copy").rename(store)
    own.broker.start()
    world.outbox().publish(world.batch(1), [world.write(second, 1)])
    assert world.bodies() == first + second


def test_a_broker_without_room_refuses_and_what_is_missing_comes_when_there_is_some(own: Cluster, world: World) -> None:
    """The system refuses it larger files, as a full disk would; the files that it has go on."""
    names = numbered(400)
    unlimited = resource.prlimit(own.broker.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(OrderedMQError) as caught:
        world.write(names, size=50_000)
    assert caught.value.condition.startswith("ORDEREDMQ_ROCKETMQ."), caught.value
    assert own.broker.address in str(caught.value)
    stored = world.bodies()
    assert stored == names[: len(stored)]
    assert len(stored) < len(names)
    resource.prlimit(own.broker.pid, resource.RLIMIT_FSIZE, unlimited)
    # RocketMQ makes no file after one has failed until it is started again.
    own.broker.restart()
    world.outbox().publish(world.batch(), [world.write(names, size=50_000)])
    assert world.bodies() == names


def fill(broker: Broker, topic: str, count: int) -> None:
    bodies = [b"%d" % number for number in range(count)]
    broker.log.append(
        broker.log.queues(topic)[0], pa.record_batch({"body": pa.array([b.ljust(50_000) for b in bodies], pa.binary())})
    )


def test_messages_that_were_deleted_by_age_under_a_query_are_a_named_error_or_counted(
    own: Cluster, spark: SparkSession, tmp_path: Path
) -> None:
    def run(**options: str) -> list[int]:
        reader = spark.readStream.format("orderedmq").options(
            namesrvAddr=own.address, topic="aging", consumerGroup="g", **options
        )
        rows = reader.option("consumeFromWhere", "first").schema("queue_offset long").load()
        table = str(tmp_path / "table")
        writer = rows.writeStream.format("parquet").option("path", table).option("checkpointLocation", str(tmp_path / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return sorted(row.queue_offset for row in spark.read.schema("queue_offset long").parquet(table).collect())

    with ExitStack() as stack:
        broker = stack.enter_context(orderedmq.connect(namesrv_addr=own.address))
        broker.admin.create_topic("aging", 1)
        [queue] = broker.log.queues("aging")
        fill(broker, "aging", 10)
        assert run() == list(range(10))
        for _ in range(5):
            fill(broker, "aging", 40)

        def deleted() -> bool:
            ask(own.broker.address, DELETE_EXPIRED_COMMITLOG)
            return broker.log.bounds([queue])[queue].min_offset > 20

        until(deleted, "files with messages that were not read are deleted", 60.0)
        with pytest.raises(PySparkException, match=r"ORDEREDMQ_DATA_LOSS.AGED_OUT") as caught:
            run()
        read = run(failOnDataLoss="false")
        assert read[:10] == list(range(10))
        rest = read[10:]
        assert rest == list(range(rest[0], 210))
        assert rest[0] > 20
        assert f"messages 10 to {rest[0] - 1} ({rest[0] - 10}) of queue aging/broker-a/0" in str(caught.value)
