"""A broker that loses messages with its machine, or has no room for more: what the sink and the source make of it.

They have a cluster of their own, whose files are small.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator

import pytest

from orderedmq.errors import DataLossError, OrderedMQError
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.broker_queue import LockTiming
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.conftest import AGING
from tests.rocketmq.outbox_world import World, numbered

#: A minute and a half are long for a test that waits for a broker that has no room.
IMPATIENT = LockTiming(patience=2.0)


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster to be spoiled; the usual one says whether there are jars at all."""
    with Cluster(tmp_path_factory.mktemp("own"), cluster.version, properties=AGING, jvm=QUICK_SERVER) as made:
        yield made


@pytest.fixture
def make_world(own: Cluster) -> Iterator[Callable[[], World]]:
    """Makes topics, each with a sink."""
    with contextlib.ExitStack() as made:
        yield lambda: made.enter_context(World(own))


@pytest.mark.nightly
def test_rows_that_a_broker_lost_with_its_machine_are_sent_again_only_if_spark_had_not_committed_them(
    own: Cluster, make_world: Callable[[], World]
) -> None:
    """ASYNC_FLUSH: what was acknowledged may be gone. An older copy of its files is what such a machine comes back with."""
    first, second, third = numbered(20), numbered(20, 20), numbered(20, 40)
    committed, sent = make_world(), make_world()
    for world in (committed, sent):
        world.outbox().publish(world.batch(0), [world.write(first)])
    store = own.broker.home / "store"
    # It stands still meanwhile. An end in order would take 10 s.
    own.broker.pause()
    shutil.copytree(store, own.broker.home / "copy")
    own.broker.resume()
    committed.outbox().publish(committed.batch(1), [committed.write(second, 1)])
    sent.write(second, 1)
    for world in (committed, sent):
        assert world.bodies() == first + second
    own.broker.kill()
    shutil.rmtree(store)
    (own.broker.home / "copy").rename(store)
    own.broker.start()
    for world in (committed, sent):
        assert world.bodies() == first
        # A source that has read further is told.
        with pytest.raises(DataLossError) as caught:
            world.log.pull(world.queue, 40, 10, 1 << 20, ("body",))
        assert caught.value.sub == "BEYOND_END"
    # Spark continues with the next batch: what it committed before is its own no more, and nothing is there twice.
    committed.outbox().publish(committed.batch(2), [committed.write(third, 2)])
    assert committed.bodies() == first + third
    published = committed.outbox().publish(committed.batch(2), [committed.write(third, 2)])
    assert published.replayed
    assert committed.bodies() == first + third
    # A batch that it had not committed it sends again.
    sent.outbox().publish(sent.batch(1), [sent.write(second, 1)])
    assert sent.bodies() == first + second


@pytest.mark.nightly
def test_a_broker_without_room_refuses_and_what_is_missing_comes_when_there_is_some(
    own: Cluster, make_world: Callable[[], World]
) -> None:
    """The system refuses it larger files, as a full disk would; the files that it has go on."""
    names, world = numbered(300), make_world()
    unlimited = resource.prlimit(own.broker.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with pytest.raises(OrderedMQError) as caught:
        world.write(names, outbox=world.outbox(timing=IMPATIENT), size=50_000)
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
