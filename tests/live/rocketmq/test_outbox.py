"""A sink's batches on real servers: each row is written once and a task searches no further back than it must."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from orderedmq.broker import Published, SinkBatch
from orderedmq.errors import GroupError, SinkError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.bookmarks import Bookmarks
from orderedmq.rocketmq.sink.message_stamp import sink_name
from orderedmq.rocketmq.wire import admin_requests, group_requests, registers
from tests.live.rocketmq.outbox_world import World, numbered, rows
from tests.waits import soon, until


@pytest.fixture
def on_two(two_brokers: Cluster) -> Iterator[World]:
    with World(two_brokers) as world:
        yield world


@pytest.mark.holds("out of order")
@pytest.mark.parametrize("forgotten", [False, True], ids=["known", "forgotten"])
def test_a_lower_version_for_another_broker_than_the_highest_ones_is_out_of_order(on_two: World, forgotten: bool) -> None:
    """The version is refused before any row is sent, also if the rows' broker has lost the highest version."""
    world = on_two
    until(lambda: len(world.log.queues(world.topic)) == 6)
    here, there = world.log.queues(world.topic)[0], world.log.queues(world.topic)[-1]
    assert here.broker_name != there.broker_name

    def publish(number: int, queue: MessageQueue, *, skip: bool = False) -> Published:
        batch = SinkBatch(f"txn:{world.sink}", number, job=uuid.uuid4().hex, topic=world.topic)
        staging = world.outbox().open(batch, 0)
        assert queue in staging.targets(world.topic, world.log.targets(world.topic))
        staging.add(queue, rows([f"a{number}", f"b{number}"]))
        return world.outbox().publish(batch, [staging.receipt()], skip_differing_replay=skip)

    assert not publish(3, there).replayed
    assert not publish(10, here).replayed
    if forgotten:
        Bookmarks(world.client, sink_name(f"txn:{world.sink}"), world.topic).move(registers.committed(there), 4)
    for skip in (True, False):
        with pytest.raises(SinkError, match="OUT_OF_ORDER.*version 7 .*above 10"):
            publish(7, there, skip=skip)
    assert world.bodies(there) == ["a3", "b3"]
    assert publish(3, there).replayed
    assert publish(10, here).replayed
    assert not publish(11, there).replayed
    assert world.bodies(here) == ["a10", "b10"]


def fill(world: World, count: int) -> None:
    """Append messages of another producer to the first queue."""
    world.log.append({world.queue: rows(numbered(count))})


def groups_of_sinks(world: World) -> set[str]:
    """Return the consumer groups of sinks that a broker knows from settings, offsets or retry topics."""
    names: set[str] = set()
    for master in world.masters():
        configured = world.client.call_address(master, admin_requests.groups(), soon())
        offsets = world.client.call_address(master, group_requests.all_consumer_offsets(), soon())
        names.update(configured, offsets)
    names.update(world.client.topics(soon()))
    return {name for name in names if "OMQ_SINK" in name}


# --- refusals


def test_a_warning_counts_messages_of_earlier_attempts_that_match_no_row(
    usual: World, caplog: pytest.LogCaptureFixture
) -> None:
    usual.write(["a1", "a2"])
    receipt = usual.write(["a1", "a3"])
    with caplog.at_level(logging.WARNING, "orderedmq"):
        usual.outbox().publish(usual.batch(), [receipt])
    assert "1 messages of batch 0, partition 0" in caplog.text
    assert usual.bodies() == ["a1", "a2", "a3"]


# --- a group given by the user


def in_group(world: World, sink: str, number: int, names: list[str], group: str, publish: bool = True) -> Published | None:
    """Write a batch as another process would, and publish it if ``publish``."""
    batch = SinkBatch(sink, number, None, group)
    outbox = world.outbox()
    staging = outbox.open(batch, 0)
    staging.add(world.queue, rows(names))
    receipt = staging.receipt()
    return outbox.publish(batch, [receipt]) if publish else None


def test_a_sink_keeps_its_bookmarks_in_the_group_that_the_user_named(usual: World) -> None:
    """The group may exist before the sink starts, because it may have to be created by an administrator."""
    group = f"g-{usual.topic}"
    for master in usual.masters():
        usual.client.call_address(master, admin_requests.create_group(group), soon())
    before = groups_of_sinks(usual)
    fill(usual, 100)
    names = numbered(20)
    in_group(usual, "one", 0, names, group, publish=False)
    assert in_group(usual, "one", 0, names, group) == Published(False, {usual.queue: OffsetRange(100, 120)})
    published = in_group(usual, "one", 0, names, group)
    assert published is not None
    assert published.replayed
    in_group(usual, "one", 1, numbered(5, 20), group)
    assert usual.bodies()[100:] == numbered(25)
    assert groups_of_sinks(usual) == before
    assert Bookmarks(usual.client, "one", usual.topic, group).get(usual.queue) == 121


def test_two_queries_with_one_sink_group_are_refused(usual: World) -> None:
    group = f"g-{usual.topic}"
    in_group(usual, "one", 0, numbered(10), group)
    in_group(usual, "one", 1, numbered(10, 10), group, publish=False)
    in_group(usual, "two", 0, numbered(10), group)
    # The first query gets an error that names the conflict. Its rows are already written and are not sent again.
    for _ in range(2):
        with pytest.raises(GroupError, match=f"sinkGroup '{group}' has the bookmarks of another query") as caught:
            in_group(usual, "one", 1, numbered(10, 10), group)
        assert caught.value.condition == "ORDEREDMQ_GROUP.IN_USE"
    in_group(usual, "two", 1, numbered(10, 10), group)
    in_group(usual, "one", 1, numbered(10, 10), f"{group}-2")
    assert Counter(usual.bodies()) == Counter(numbered(20) * 2)
