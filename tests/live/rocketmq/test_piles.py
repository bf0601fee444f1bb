"""What batches leave at brokers: a sink leaves as much after any number of batches as after 160, and a group as much as after ten."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.endpoint import Endpoint
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.commit_history import SLOTS, WIDTH
from orderedmq.rocketmq.sink.message_stamp import bookmark_group
from orderedmq.rocketmq.wire import admin_requests, group_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from tests.live.rocketmq import group_world
from tests.live.rocketmq.outbox_world import World, numbered, rows
from tests.live.rocketmq.proxy import Exchange, Network
from tests.waits import soon

#: Number of batches after which each queue has been written to.
FEW = 10
#: Number of batches after which the groups and offsets stop growing, because each slot of the commit history is in use.
EVERY_SLOT = SLOTS * WIDTH


class Left(NamedTuple):
    """Counts of what brokers keep."""

    groups: int
    offsets: int
    topics: int


def left(world: World) -> Left:
    groups = offsets = 0
    for master in world.masters():
        groups += len(world.client.call_address(master, admin_requests.groups(), soon()))
        offsets_by_group = world.client.call_address(master, group_requests.all_consumer_offsets(), soon())
        offsets += sum(map(len, offsets_by_group.values()))
    return Left(groups, offsets, len(world.client.topics(soon())))


def lock_names(exchanges: list[Exchange], code: int) -> set[str]:
    """Return group and queue of every lock in the requests with this code (lock or unlock)."""
    names: set[str] = set()
    for exchange in exchanges:
        if exchange.up and not exchange.response and exchange.code == code:
            said: dict[str, Any] = json.loads(exchange.body)
            names.update(f"{said['consumerGroup']} {json.dumps(queue, sort_keys=True)}" for queue in said["mqSet"])
    return names


def write(world: World, outbox: Any, number: int) -> None:
    """Write a batch as a new job of two tasks. Some batches also have a second or an abandoned attempt, or another job."""
    if number % 5 == 1:
        given_up = outbox.open(world.batch(number, f"dead-{number}"), 0)
        given_up.add(world.queue, rows(numbered(2)))
        given_up.abandon()
    job = f"job-{number}"
    receipts = [world.write(numbered(2), number, partition, outbox, job=job) for partition in (0, 1)]
    if number % 5 == 2:
        receipts.append(world.write(numbered(2), number, 0, outbox, job=job))
    outbox.publish(world.batch(number, job), receipts)


@pytest.mark.holds("bounded brokers")
def test_groups_offsets_and_locks_do_not_grow_with_the_batches_of_a_sink(usual: World, network: Network) -> None:
    outbox = usual.outbox(network.address)
    # The commit history of batches has one offset per slot, which the first batch in the slot creates.
    for number in (*range(FEW), *range(WIDTH, EVERY_SLOT, WIDTH)):
        write(usual, outbox, number)
    at_first = left(usual)
    for number in range(EVERY_SLOT, EVERY_SLOT + 40):
        write(usual, outbox, number)
    assert left(usual) == at_first
    # Each lock that a broker granted was released, and a broker forgets released locks.
    taken = lock_names(network.broker.exchanges, RequestCode.LOCK_BATCH_MQ)
    assert len(taken) > 80
    assert taken <= lock_names(network.broker.exchanges, RequestCode.UNLOCK_BATCH_MQ)


@pytest.mark.holds("bounded brokers")
def test_each_query_leaves_a_group_that_is_deleted_by_the_command_or_with_its_topic(usual: World) -> None:
    def command(*arguments: str) -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, ["group", *arguments, "--namesrv", usual.cluster.address])
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    def sinks() -> dict[str, int]:
        return {row["group"]: row["lag"] for row in command("list", "--sinks") if row["topics"] == [usual.topic]}

    before = left(usual)
    for usual.sink in ("former", "latter"):
        usual.outbox().publish(usual.batch(), [usual.write(numbered(20))])
    # The queue has two batches. A bookmark is after the first message of its sink's last batch.
    assert sinks() == {bookmark_group("former", usual.topic): 39, bookmark_group("latter", usual.topic): 19}
    assert not set(sinks()) & {row["group"] for row in command("list")}
    command("delete", bookmark_group("former", usual.topic))
    assert list(sinks()) == [bookmark_group("latter", usual.topic)]
    RocketMQAdmin(usual.client, usual.log).delete_topic(usual.topic)
    assert left(usual).groups == before.groups


@pytest.mark.holds("bounded brokers")
def test_groups_and_offsets_do_not_grow_with_runs_and_commits(cluster: Cluster) -> None:
    with World(cluster) as sink, group_world.World(cluster) as world:
        counts = []
        for first in range(3):
            runs(world, f"query-{first}", 10)
            counts.append(left(sink))
    assert counts[0] == counts[1] == counts[2]


def runs(world: group_world.World, name: str, count: int) -> None:
    """Run a query ``count`` times. Each run joins the group, locks, commits, and leaves the group."""
    for number in range(count):
        with RocketMQBroker(Endpoint(None, world.cluster.address)) as broker:
            client = broker.groups.join(f"{name}-{number}")
            broker.groups.heartbeat(world.group, client, world.shared())
            tokens = world.lock(broker, client)
            broker.groups.commit(dict.fromkeys(tokens, 0))
            broker.groups.unlock(tokens)
            broker.groups.leave(client)
