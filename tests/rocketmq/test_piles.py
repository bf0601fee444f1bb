"""What batches leave at brokers: a sink leaves as much after thousands of batches as after 160, and a group as much as after ten.

The long test writes ORDEREDMQ_PILE_BATCHES (3,000) batches and prints several times how much is left.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.endpoint import Endpoint
from orderedmq.java import ensure_java
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.sink.commit_history import SLOTS, WIDTH
from orderedmq.rocketmq.sink.message_stamp import bookmark_group
from orderedmq.rocketmq.wire import admin_requests, group_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from tests.rocketmq import group_world
from tests.rocketmq.outbox_world import QUICK, World, numbered, rows
from tests.rocketmq.proxy import Exchange, Network
from tests.waits import soon, until

BATCHES = int(os.environ.get("ORDEREDMQ_PILE_BATCHES", "3000"))
#: Number of batches after which each queue has been written to.
FEW = 10
#: Number of batches after which the groups and offsets stop growing, because each slot of the commit history is in use.
EVERY_SLOT = SLOTS * WIDTH


class Left(NamedTuple):
    """Counts of what brokers keep. ``locks`` and ``members`` are counts in a broker's heap, or None if there is no JDK to read it."""

    groups: int
    offsets: int
    topics: int
    locks: int | None = None
    members: int | None = None


def left(world: World, *, heap: bool = False) -> Left:
    groups = offsets = 0
    for master in world.masters():
        groups += len(world.client.call_address(master, admin_requests.groups(), soon()))
        found = world.client.call_address(master, group_requests.all_consumer_offsets(), soon())
        offsets += sum(map(len, found.values()))
    return Left(groups, offsets, len(world.client.topics(soon())), *(in_heap(world.cluster) if heap else ()))


def in_heap(cluster: Cluster) -> tuple[int, ...]:
    tool = ensure_java().with_name("jcmd")
    if not tool.exists():
        return ()
    told = subprocess.run(
        [str(tool), str(cluster.broker.pid), "GC.class_histogram"], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in told.stdout.splitlines()]
    return tuple(
        sum(int(words[1]) for words in lines if len(words) > 3 and words[3].endswith(kind))
        for kind in ("RebalanceLockManager$LockEntry", "ConsumerGroupInfo")
    )


def lock_names(exchanges: list[Exchange], code: int) -> set[str]:
    """Return group and queue of every lock in the requests with this code (lock or unlock)."""
    found: set[str] = set()
    for exchange in exchanges:
        if exchange.up and not exchange.response and exchange.code == code:
            said: dict[str, Any] = json.loads(exchange.body)
            found.update(f"{said['consumerGroup']} {json.dumps(queue, sort_keys=True)}" for queue in said["mqSet"])
    return found


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
def test_what_a_sink_leaves_does_not_grow_with_its_batches(usual: World, network: Network) -> None:
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
def test_each_query_leaves_a_group_that_the_command_lists_and_deletes(usual: World) -> None:
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
    for group in sinks():
        command("delete", group)
    assert sinks() == {}
    assert left(usual) == before


@pytest.mark.holds("bounded brokers")
def test_what_a_group_leaves_does_not_grow_with_its_runs_and_commits(cluster: Cluster) -> None:
    with World(cluster) as sink, group_world.World(cluster) as world:
        found = []
        for first in range(3):
            runs(world, f"query-{first}", 10)
            found.append(left(sink))
    assert found[0] == found[1] == found[2]


def runs(world: group_world.World, name: str, count: int, batches: int = 1) -> None:
    """Run a query ``count`` times. Each run joins the group, locks and commits for each batch, and leaves the group."""
    for number in range(count):
        with RocketMQBroker(Endpoint(None, world.cluster.address)) as broker:
            client = broker.groups.join(f"{name}-{number}")
            broker.groups.heartbeat(world.group, client, world.shared())
            for batch in range(batches):
                tokens = world.lock(broker, client)
                broker.groups.commit(dict.fromkeys(tokens, batch))
                broker.groups.unlock(tokens)
            broker.groups.leave(client)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_a_sink_leaves_does_not_grow_with_thousands_of_batches(quick_locks: Cluster) -> None:
    """Some tasks are killed: their connections end, and their locks are not released."""
    with World(quick_locks, replace(QUICK, visible=5.0)) as world:
        outbox = world.outbox()
        began, seen = time.monotonic(), []
        for number in range(BATCHES):
            if number % (BATCHES // 20) == BATCHES // 40:
                kill_a_task(world, number)
                # Make sure that the check notices a lock that is left.
                assert left(world, heap=True).locks != 0
            write(world, outbox, number)
            if number + 1 in (EVERY_SLOT, 1000, BATCHES // 2, BATCHES):
                seen.append(left(world, heap=True))
                each = (time.monotonic() - began) / (number + 1) * 1000
                print(f"\n{number + 1} batches: {seen[-1]}, {each:.0f} ms each", flush=True)
    # The write of a killed task's batch took over that task's locks and released them.
    assert_the_same_is_left(seen)


def assert_the_same_is_left(seen: list[Left]) -> None:
    """Only the number of members may shrink, because members of earlier tests stay until 120 s after their last heartbeat."""
    assert {one._replace(members=None) for one in seen} == {seen[0]._replace(members=None)}
    members = [one.members or 0 for one in seen]
    assert members == sorted(members, reverse=True)


def kill_a_task(world: World, number: int) -> None:
    outbox = world.outbox()
    before = len(world.bodies())
    staging = outbox.open(world.batch(number, f"killed-{number}"), 0)
    staging.add(world.queue, rows(numbered(2)))
    staging.start()
    until(lambda: len(world.bodies()) > before, "the task's rows are written")
    outbox._client.close()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_a_group_leaves_does_not_grow_with_thousands_of_batches(cluster: Cluster) -> None:
    with World(cluster) as sink, group_world.World(cluster) as world:
        seen = []
        for part in range(3):
            runs(world, f"query-{part}", BATCHES // 30, 10)
            seen.append(left(sink, heap=True))
            print(f"\n{(part + 1) * (BATCHES // 30)} runs of 10 batches: {seen[-1]}", flush=True)
    assert_the_same_is_left(seen)
