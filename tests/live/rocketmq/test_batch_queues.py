"""Attempts of a batch at two real brokers spread its rows over the same queues, although the topic's queues change between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from orderedmq.broker import Receipt
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from orderedmq.rocketmq.wire import admin_requests
from tests.live.rocketmq.outbox_world import World, rows
from tests.waits import soon, until

KEYS = "abcdefghijklmnop"
NAMES = [f"{key}{number}" for number in range(3) for key in KEYS]


@pytest.fixture
def world(two_brokers: Cluster) -> Iterator[World]:
    with World(two_brokers, LockTiming(patience=2.0)) as world:
        until(lambda: len(targets(world)) == 6, "both brokers have the topic")
        yield world


def targets(world: World) -> list[MessageQueue]:
    """Return the queues that a driver chooses now."""
    with Client(world.cluster.address) as client:
        return RocketMQLog(client).targets(world.topic)


def write(world: World, names: list[str], batch: int = 0, job: str = "job") -> Receipt:
    """Run an attempt of a new job."""
    staging = world.outbox().open(world.batch(batch, job), 0)
    try:
        queues = staging.targets(world.topic, targets(world))
        for key in KEYS:
            if of_key := [name for name in names if name[0] == key]:
                staging.add(queues[ord(key) % len(queues)], rows(of_key))
        return staging.receipt()
    except SinkError:
        staging.abandon()
        raise


def settings(world: World, broker: int, queues: int, perm: int = 6) -> None:
    """Set the topic's queues and permission at a broker."""
    address = world.cluster.brokers[broker].address
    world.client.call_address(address, admin_requests.create_topic(world.topic, queues, perm=perm), soon())


def messages(world: World) -> dict[MessageQueue, list[str]]:
    return {queue: world.bodies(queue) for queue in RocketMQLog(world.client).queues(world.topic)}


def require_once_in_order(world: World, names: list[str]) -> None:
    there = messages(world)
    assert Counter(name for queue in there.values() for name in queue) == Counter(names)
    for key in KEYS:
        of_key = [[name for name in queue if name[0] == key] for queue in there.values()]
        assert [queue for queue in of_key if queue] == [[name for name in names if name[0] == key]]


def read_only(world: World) -> Callable[[], None]:
    settings(world, 1, 3, perm=4)
    until(lambda: len(targets(world)) == 3, "the second broker is read-only")
    return lambda: settings(world, 1, 3)


def away(world: World) -> Callable[[], None]:
    """Kill a broker. It has stored the record less than 5 s ago, so it forgets it."""
    world.cluster.brokers[1].kill()
    until(lambda: len(targets(world)) == 3, "the second broker is away")
    return world.cluster.brokers[1].start


@pytest.mark.holds("sink once")
@pytest.mark.holds("same key, same queue")
@pytest.mark.parametrize("change", [read_only, away])
def test_a_batch_waits_for_a_broker_that_took_rows_of_its_first_attempt(
    world: World, change: Callable[[World], Callable[[], None]]
) -> None:
    write(world, NAMES[: len(NAMES) // 2], job="dead")
    undo = change(world)
    try:
        before = messages(world) if change is read_only else None
        for _ in range(2):
            with pytest.raises(SinkError, match="QUEUES_AWAY"):
                write(world, NAMES)
        assert before is None or messages(world) == before
        # With another group, the sink no longer has the record.
        staging = world.outbox().open(replace(world.batch(), group=f"{world.topic}-g"), 0)
        assert staging.targets(world.topic, targets(world)) == targets(world)
    finally:
        undo()
    until(lambda: len(targets(world)) == 6, "the second broker takes rows")
    world.timing = replace(world.timing, patience=60.0)
    assert not world.outbox().publish(world.batch(), [write(world, NAMES)]).replayed
    require_once_in_order(world, NAMES)


@pytest.mark.holds("changed replay")
def test_a_batch_that_was_committed_without_a_broker_is_the_same_with_it(world: World) -> None:
    undo = read_only(world)
    world.outbox().publish(world.batch(), [write(world, NAMES)])
    undo()
    until(lambda: len(targets(world)) == 6, "the second broker takes rows")
    assert world.outbox().publish(world.batch(), [write(world, NAMES, job="again")]).replayed
    require_once_in_order(world, NAMES)
    # The broker has got the record of the commit, so a row that the batch did not have is not sent there either.
    with pytest.raises(SinkError, match="REPLAY_DIFFERS"):
        world.outbox().publish(world.batch(), [write(world, [*NAMES, "a9", "b9"], job="other")])
    require_once_in_order(world, NAMES)
