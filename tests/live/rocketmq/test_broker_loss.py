"""What the sink and the source do when a broker loses messages because its machine crashed, or when its disk is full.

The tests use a separate cluster with small files.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Callable, Iterator

import pytest

from orderedmq.errors import DataLossError, OrderedMQError
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from tests.live.rocketmq.conftest import AGING
from tests.live.rocketmq.outbox_world import World, numbered
from tests.quick_spark import QUICK_SERVER

#: Shorter than the default of a minute and a half, so that the test with a full disk is quick.
IMPATIENT = LockTiming(patience=2.0)


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that the tests may damage. ``cluster`` is requested so that the tests are skipped if there are no jars."""
    with Cluster(tmp_path_factory.mktemp("own"), cluster.version, properties=AGING, jvm=QUICK_SERVER) as made:
        yield made


@pytest.fixture
def make_world(own: Cluster) -> Iterator[Callable[[], World]]:
    """A function that creates a topic with a sink."""
    with contextlib.ExitStack() as worlds:
        yield lambda: worlds.enter_context(World(own))


@pytest.mark.nightly
def test_lost_rows_are_sent_again_only_if_spark_has_not_committed_their_batch(
    own: Cluster, make_world: Callable[[], World]
) -> None:
    """With ASYNC_FLUSH, acknowledged messages may be lost. The test restores an older copy of the broker's files, as after a crash."""
    first, second, third = numbered(20), numbered(20, 20), numbered(20, 40)
    committed, sent = make_world(), make_world()
    for world in (committed, sent):
        world.outbox().publish(world.batch(0), [world.write(first)])
    store = own.broker.home / "store"
    # The broker must be paused during the copy. An orderly stop would take 10 s.
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
        # A source that has read further gets an error.
        with pytest.raises(DataLossError) as caught:
            world.log.pull(world.queue, 40, 10, 1 << 20, ("body",))
        assert caught.value.sub == "BEYOND_END"
    # Spark continues with the next batch. The sink does not send the lost batch again, and no row is written twice.
    committed.outbox().publish(committed.batch(2), [committed.write(third, 2)])
    assert committed.bodies() == first + third
    published = committed.outbox().publish(committed.batch(2), [committed.write(third, 2)])
    assert published.replayed
    assert committed.bodies() == first + third
    # A batch that Spark had not committed is sent again.
    sent.outbox().publish(sent.batch(1), [sent.write(second, 1)])
    assert sent.bodies() == first + second


@pytest.mark.nightly
def test_missing_rows_are_sent_once_a_full_broker_has_room(own: Cluster, make_world: Callable[[], World]) -> None:
    """The broker's files cannot grow, as on a full disk. Writes within its existing files still work."""
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
    # After RocketMQ has failed to create a file, it creates no other file until it is restarted.
    own.broker.restart()
    world.outbox().publish(world.batch(), [world.write(names, size=50_000)])
    assert world.bodies() == names
