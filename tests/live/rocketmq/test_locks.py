"""Queue locks of real servers: locks that live 3 s, several runs of one query, and killed brokers.

Locks are advisory, and a successful renewal does not prove ownership.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ordered_source.columns import full_schema
from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.offsets import Checkpoint, ranges
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.wire import registers
from orderedmq.tools.seek import copy_offsets
from tests.contract.support import letters
from tests.live.rocketmq.group_world import World, condition, granted, refused
from tests.stopped_readers import stopped
from tests.waits import first_good, until

pytestmark = pytest.mark.usefixtures("unhurried")

ROOT = Path(__file__).parents[3]
#: Seconds that a lock of ``quick`` lives without a renewal.
LIFE = 3.0


@pytest.fixture
def usual(cluster: Cluster) -> Iterator[World]:
    with World(cluster) as world:
        yield world


@pytest.fixture
def quick(quick_locks: Cluster) -> Iterator[World]:
    with World(quick_locks) as world:
        yield world


# -- locks that live 3 s ----------------------------------------------------------------------------------------------------------


@pytest.mark.holds("one owner", "late renewal")
def test_a_late_renewal_loses_a_lock_only_if_another_client_had_the_queue(quick: World) -> None:
    """The broker grants both renewals. Only the fence shows that another client has taken and released one of the queues."""
    groups, rival = quick.broker.groups, quick.connect().groups
    me, them = groups.join("me"), rival.join("them")
    taken, kept = tokens = quick.lock(quick.broker, me, quick.queues[:2])
    # No renewal comes in time.
    groups.trust = 0.0
    for _ in range(3):
        assert groups.renew(tokens) == groups.stale(tokens) == []
    theirs = first_good(lambda: rival.lock(quick.group, them, [taken.queue]), lambda out: not refused(out))
    rival.unlock(granted(theirs))
    assert groups.renew(tokens) == groups.stale(tokens) == [taken]
    assert condition(lambda: groups.commit({taken: 1})) == "LOCK.LOST"
    groups.commit({kept: 1})
    [again] = quick.lock(quick.broker, me, [taken.queue])
    assert again.tenure == again.epoch > taken.epoch, "the next grant must begin a new tenure"


@pytest.mark.holds("shared take-over")
def test_another_client_gets_locks_that_were_not_renewed(quick: World) -> None:
    rival = quick.connect()
    began = time.monotonic()
    tokens = quick.lock(quick.broker, quick.broker.groups.join("me"))
    them = rival.groups.join("them")
    first_good(lambda: rival.groups.lock(quick.group, them, quick.queues), lambda out: not refused(out))
    assert time.monotonic() - began > LIFE - 0.1, "no other client may get the locks while they live"
    # The loser still trusts its locks at this time, so it learns of the loss only from the fence.
    assert quick.broker.groups.stale(tokens) == tokens
    assert condition(lambda: quick.broker.groups.commit({tokens[0]: 1})) == "LOCK.LOST"


@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
def test_a_restart_next_to_a_paused_former_run_skips_no_message(quick: World, assignment: str) -> None:
    """The former run logged a batch, holds the locks and does nothing more. Spark commits the restarted run's version of the batch."""
    queue = quick.queues[0]
    quick.send(queue, 20)
    options = {"namesrvAddr": quick.cluster.address, "topic": quick.topic, "consumerGroup": quick.group, "lockTimeout": "30s"}
    options |= {"assignment": assignment, "consumeFromWhere": "first"}
    former, again = (StreamReader(options, full_schema()) for _ in range(2))
    with stopped(former, again):
        batch = former.latestOffset(former.initialOffset(), ReadAllAvailable())
        assert Checkpoint.from_spark(batch).next[queue] == 20
        spans = [
            (partition.begin, partition.end)
            for partition in again.partitions({}, batch)
            if isinstance(partition, QueuePartition)
        ]
        if assignment == "exclusive":
            assert spans == [(0, 20)], "the restarted run must wait for the locks and repeat the batch"
            assert again.latestOffset(batch, ReadAllAvailable()) == batch
            assert quick.broker.groups.offsets(quick.group, [queue]) == {queue: 20}
        else:
            assert spans == []
            # The former run is still a member and keeps its share of the queues until it ends.
            former.stop()
            following = first_good(lambda: again.latestOffset(batch, ReadAllAvailable()), lambda offset: offset != batch, 60)
            span = ranges(Checkpoint.from_spark(batch), Checkpoint.from_spark(following))[queue]
            assert (span.begin, span.end) == (0, 20), (
                "the query must enter the queue at the group's offset, not after the batch"
            )


@pytest.mark.parametrize("how", ["given up", "left"])
def test_a_check_by_a_late_task_does_not_take_the_lock_again(quick: World, how: str) -> None:
    """A task in another process checks its lock under its driver's name. The queue is free, so a broker would grant the lock."""
    driver, task, other = quick.broker.groups, quick.connect().groups, quick.connect().groups
    me = driver.join("me")
    driver.heartbeat(quick.group, me, quick.shared())
    [token] = quick.lock(quick.broker, me, quick.queues[:1])
    assert task.check(token)
    if how == "given up":
        driver.unlock([token])
    else:
        driver.leave(me)
    assert not task.check(token)
    them = other.join("them")
    [theirs] = granted(other.lock(quick.group, them, [token.queue]))
    assert not task.check(token)
    assert theirs.client_id == them.client_id


def test_the_check_of_a_task_renews_the_lock_of_its_driver(quick: World) -> None:
    task, rival = quick.connect().groups, quick.connect().groups
    me, them = quick.broker.groups.join("me"), rival.join("them")
    quick.broker.groups.heartbeat(quick.group, me, quick.shared())
    looks = [time.monotonic()]
    [token] = quick.lock(quick.broker, me, quick.queues[:1])
    while looks[-1] < looks[0] + LIFE + 0.5:
        time.sleep(0.5)
        looks.append(time.monotonic())
        assert task.check(token)
    held = refused(rival.lock(quick.group, them, [token.queue]))
    looks.append(time.monotonic())
    if max(later - look for look, later in zip(looks, looks[2:])) > LIFE:
        pytest.skip("the machine paused for longer than a lock lives")
    assert held
    assert task.stale([token]) == []
    # A task can also write a dead letter.
    assert task.dead_letter(token, letters([3]), [3]) == 1


@pytest.mark.holds("stop during a call")
def test_a_lingering_lock_excludes_other_queries_but_not_its_own(usual: World, quick: World) -> None:
    """As with RocketMQ's unlockDelay, the lock is not released but ends after its lifetime (60 s or 3 s)."""
    for world in (usual, quick):
        groups, rival = world.broker.groups, world.connect().groups
        me, them = groups.join("me"), rival.join("them")
        began = time.monotonic()
        first, second = world.lock(world.broker, me, world.queues[:2])
        groups.unlock([first, second], 20.0)
        groups.leave(me)
        assert groups.stale([first, second]) == [first, second]
        if world is usual:
            assert len(refused(rival.lock(world.group, them, world.queues[:2]))) == 2
            [again] = world.lock(world.broker, groups.join("me"), world.queues[:1])
            assert again.epoch > first.epoch
        else:
            first_good(lambda: rival.lock(world.group, them, [second.queue]), lambda out: not refused(out))  # noqa: B023 (called at once)
            assert time.monotonic() - began > LIFE - 0.1


# -- runs of one query ------------------------------------------------------------------------------------------------------------

RUN = """
import sys, time
from orderedmq.endpoint import Endpoint
from orderedmq.ownership.membership import Subscription
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.net.client import Client
address, group, topic = sys.argv[1:]
broker = RocketMQBroker(Endpoint(None, address))
client = broker.groups.join("query")
broker.groups.heartbeat(group, client, Subscription("shared", topic, "AVG"))
tokens = broker.groups.lock(group, client, broker.log.queues(topic))
print(client.client_id, *(type(token).__name__ for token in tokens.values()), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(usual: World) -> Iterator[subprocess.Popen[str]]:
    """Another process with a run of the query ``query``, which owns all queues."""
    command = [sys.executable, "-c", RUN, usual.cluster.address, usual.group, usual.topic]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.holds("killed owner")
def test_a_restart_after_a_kill_gets_its_queues_and_two_runs_exclude_each_other(
    usual: World, run: subprocess.Popen[str]
) -> None:
    """The locks live 60 s, so another query could not get them immediately."""
    assert run.stdout is not None
    first, *granted = run.stdout.readline().split()
    assert granted == ["LockToken"] * 4
    groups = usual.broker.groups
    again, other = groups.join("query"), groups.join("other")
    for client in (again, other):
        refusals = refused(groups.lock(usual.group, client, usual.queues))
        # The owner itself answers that it is alive.
        assert {(refusal.owner, refusal.client_id, refusal.alive) for refusal in refusals} == {("query", first, True)}
        assert len(refusals) == 4
    assert usual.ids(usual.broker) == [first]
    run.kill()
    first_good(lambda: usual.ids(usual.broker), lambda ids: ids == [])
    assert len(refused(groups.lock(usual.group, other, usual.queues))) == 4
    tokens = usual.lock(usual.broker, again)
    assert all(token.only_run for token in tokens), "the locks must be held under the query's name"
    assert all(token.tenure == token.epoch for token in tokens), "the query must resume at the group's offset"


def test_a_run_waits_until_the_locks_of_a_stuck_former_run_end(quick: World) -> None:
    old, new = quick.broker.groups, quick.connect().groups
    first, second = old.join("query"), new.join("query")
    old.heartbeat(quick.group, first, quick.shared())
    began = time.monotonic()
    [token] = quick.lock(quick.broker, first, quick.queues[:1])
    new.heartbeat(quick.group, second, quick.shared())
    [taken] = granted(first_good(lambda: new.lock(quick.group, second, [token.queue]), lambda out: not refused(out)))
    assert time.monotonic() - began > LIFE - 0.1
    assert not taken.only_run, "the lock must be held under the run's own name"
    # The first run is still a member, but it and its tasks must notice that the lock is lost.
    assert first.client_id in quick.ids(quick.broker)
    assert not quick.connect().groups.check(token)
    assert old.renew([token]) == [token]
    assert new.renew([taken]) == []


# -- brokers that are killed ------------------------------------------------------------------------------------------------------


@pytest.mark.holds("group offset")
def test_a_killed_broker_forgets_locks_and_offsets_and_a_renewal_brings_them_back(
    usual: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = usual.broker.groups.join("me")
    usual.broker.groups.heartbeat(usual.group, me, usual.shared())
    usual.send(usual.queues[0], 9)
    tokens = usual.lock(usual.broker, me)
    # Trust the locks long enough for a slow start of the server.
    usual.broker.groups.trust = 120
    usual.broker.groups.commit({tokens[0]: 2, tokens[1]: 0})
    usual.broker.groups.commit({tokens[0]: 7})
    usual.cluster.broker.restart()
    seen = usual.connect().groups.offsets(usual.group, usual.queues)
    # A broker writes its offsets every 5 s, but not in the first 10 s after its start.
    assert seen.get(usual.queues[0]) in (None, 2, 7)
    assert usual.broker.groups.renew(tokens) == []
    assert usual.connect().groups.offsets(usual.group, usual.queues) == {usual.queues[0]: 7, usual.queues[1]: 0}
    rival = usual.connect().groups
    assert len(refused(rival.lock(usual.group, rival.join("them"), usual.queues))) == 4
    # The client becomes a member again with its next heartbeat. A task that checks its lock before then waits for this heartbeat.
    assert usual.ids(usual.connect()) == []
    task = usual.connect().groups
    task.patience = 120
    looks = threading.Event()
    is_member = task._is_member

    def seen_to_look(token: LockToken, deadline: float) -> bool:
        looks.set()
        return is_member(token, deadline)

    monkeypatch.setattr(task, "_is_member", seen_to_look)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(task.check, tokens[0])
        assert looks.wait(60)
        usual.broker.groups.heartbeat(usual.group, me, usual.shared())
        assert looking.result()
    assert usual.ids(usual.connect()) == [me.client_id]


def test_a_renewal_does_not_overwrite_a_concurrent_commit(usual: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renewal finds the broker's offset too low, and is delayed before it writes. It must not undo a commit made in between."""
    groups, [queue] = usual.broker.groups, usual.queues[:1]
    [token] = usual.lock(usual.broker, groups.join("me"), [queue])
    groups.commit({token: 4})
    real = groups._offsets.write
    real(usual.group, {queue: 1})
    looked, committed = threading.Event(), threading.Event()

    def held_up(group: str, offsets: Mapping[MessageQueue, int], seconds: float = 25.0) -> None:
        if offsets == {queue: 4}:
            looked.set()
            committed.wait(1.0)
        real(group, offsets, seconds)

    monkeypatch.setattr(groups._offsets, "write", held_up)
    with ThreadPoolExecutor(1) as pool:
        renewed = pool.submit(groups.renew, [token])
        assert looked.wait(60.0)
        groups.commit({token: 5})
        committed.set()
        assert renewed.result() == []
    assert groups.offsets(usual.group, [queue]) == {queue: 5}


@pytest.mark.holds("one owner", "group offset")
def test_a_member_that_joins_while_a_broker_restarts_gets_a_queue_with_its_offset_once_it_is_given_back(usual: World) -> None:
    """The broker has forgotten the owner, its lock and its last offset, and the new member has never seen the owner."""
    owner, new = usual.broker.groups, usual.connect().groups
    me, them = owner.join("me"), new.join("them")
    owner.heartbeat(usual.group, me, usual.shared())
    tokens = usual.lock(usual.broker, me, usual.queues[:2])
    usual.send(usual.queues[0], 9)
    disk = usual.cluster.broker.home / "store" / "config" / "consumerOffset.json"
    fences = [str(lock_rules.fence_of(token.epoch)) for token in tokens]
    stored = "the broker has stored the fences"
    until(lambda: disk.exists() and all(fence in disk.read_text() for fence in fences), stored, 60.0)
    owner.commit({tokens[0]: 7})
    owner.trust = 120
    usual.cluster.broker.restart()
    new.heartbeat(usual.group, them, usual.shared())
    assert usual.ids(usual.connect()) == [them.client_id], "the broker must have lost the owner"
    answers = new.lock(usual.group, them, usual.queues)
    assert [answer.queue for answer in refused(answers)] == usual.queues[:2]
    assert owner.stale(tokens) == []
    # This comes before the owner's next renewal.
    owner.unlock(tokens)
    assert len(granted(new.lock(usual.group, them, usual.queues[:2]))) == 2
    assert new.offsets(usual.group, usual.queues[:1]) == {usual.queues[0]: 7}


# -- actions of other clients ----------------------------------------------------------------------------------------------------


@pytest.mark.holds("newer format")
def test_a_queue_of_a_newer_version_is_refused_and_its_offsets_can_be_copied(usual: World) -> None:
    groups, restarted = usual.broker.groups, usual.connect().groups
    [token] = usual.lock(usual.broker, groups.join("me"), [usual.queue])
    usual.send(usual.queue, 3)
    groups.commit({token: 2})
    # A newer version raises the fence like this when it takes the queue.
    groups._offsets.fence(usual.group, {usual.queue: registers.NEWER | token.epoch})
    assert condition(lambda: groups.commit({token: 3})) == "LOCK.LOST"
    assert condition(lambda: restarted.lock(usual.group, restarted.join("me"), [usual.queue])) == "GROUP.NEWER_FORMAT"
    # The group's offsets can be used in another group.
    copy_offsets(usual.broker, usual.group, other := f"{usual.group}-earlier")
    assert groups.offsets(other, [usual.queue]) == groups.offsets(usual.group, [usual.queue]) == {usual.queue: 2}


def test_a_lock_whose_owner_is_not_a_member_cannot_be_released(usual: World) -> None:
    groups, admin = usual.broker.groups, usual.connect().admin
    me = groups.join("me")
    [token] = usual.lock(usual.broker, me, usual.queues[:1])
    assert condition(lambda: admin.seek(usual.group, {token.queue: 0})) == "GROUP.IN_USE"
    assert condition(lambda: admin.release(usual.group, usual.queues, force=True)) == "LOCK.HELD_BY_OTHER"
    groups.leave(me)
    assert admin.release(usual.group, usual.queues) == []
    admin.seek(usual.group, {token.queue: 0})
