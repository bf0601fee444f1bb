"""A broker that loses messages with its machine, or has no room for more: what the sink and the source make of it.

Each test has a cluster of its own, whose files are small.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq.errors import DataLossError, OrderedMQError
from orderedmq.rocketmq.queue_place import Timing
from orderedmq.rocketmq.servers import Cluster
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.outbox_world import World, numbered

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
