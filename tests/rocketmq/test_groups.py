"""Groups over real servers: locks that live 3 s, killed brokers, and a Java consumer as a neighbour.

Traps held: 8 (never committed, or 0), 11 (locks are advisory, and a renewal is no proof), 12 (members are connections, a heartbeat replaces
the group's topics), 19 (dead letters go by way of the retry topic).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from orderedmq.allocate import Allocation, allocate
from orderedmq.errors import OrderedMQError, TopicError
from orderedmq.lock import Client as Identity
from orderedmq.lock import LockToken, Refusal
from orderedmq.membership import Subscription, refuse
from orderedmq.model import MessageQueue
from orderedmq.rocketmq import admin_requests, group_requests
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.dead_letter_topic import key_of
from orderedmq.rocketmq.group_offsets import soon
from orderedmq.rocketmq.probe import ask
from orderedmq.rocketmq.servers import Cluster
from tests.rocketmq.peers import Consumer, Peers

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
UPDATE_BROKER_CONFIG = 25
#: Of locks that live 3 s.
TRUST = 1.5


class World:
    """A cluster, a topic of four queues, and a group that nobody knows yet."""

    def __init__(self, cluster: Cluster, queues: int = 4) -> None:
        self.cluster = cluster
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{self.topic}"
        self._connections: list[RocketMQBroker] = []
        self.broker = self.connect()
        self.broker.admin.create_topic(self.topic, queues)
        self.queues = self.broker.log.queues(self.topic)

    def connect(self, trust: float = 30.0) -> RocketMQBroker:
        made = RocketMQBroker(self.cluster.address)
        made.groups.trust = trust
        self._connections.append(made)
        return made

    def close(self) -> None:
        for broker in self._connections:
            broker.close()

    def send(self, queue: MessageQueue, count: int) -> None:
        self.broker.log.append(queue, pa.record_batch({"body": pa.array([b"%d" % i for i in range(count)])}))

    def lock(self, broker: RocketMQBroker, client: Identity, queues: Sequence[MessageQueue] | None = None) -> list[LockToken]:
        answers = broker.groups.lock(self.group, client, self.queues if queues is None else queues)
        assert all(isinstance(answer, LockToken) for answer in answers.values()), answers
        return [answer for answer in answers.values() if isinstance(answer, LockToken)]

    def shared(self) -> Subscription:
        return Subscription("shared", self.topic, "AVG")

    def ids(self, broker: RocketMQBroker) -> list[str]:
        return [member.client_id for member in broker.groups.members(self.group)]


def until(get: Callable[[], T], good: Callable[[T], bool], seconds: float = 30.0) -> T:
    deadline = time.monotonic() + seconds
    while not good(value := get()):
        assert time.monotonic() < deadline, value
        time.sleep(0.05)
    return value


def error_of(call: Callable[[], object]) -> OrderedMQError:
    with pytest.raises(OrderedMQError) as caught:
        call()
    return caught.value


def condition(call: Callable[[], object]) -> str:
    return error_of(call).condition.removeprefix("ORDEREDMQ_")


def body_of(offsets: Sequence[int]) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([b"body %d" % offset for offset in offsets])})


@pytest.fixture
def world(every_version: Cluster) -> Iterator[World]:
    made = World(every_version)
    yield made
    made.close()


@pytest.fixture
def usual(cluster: Cluster) -> Iterator[World]:
    made = World(cluster)
    yield made
    made.close()


@pytest.fixture
def quick(quick_locks: Cluster) -> Iterator[World]:
    made = World(quick_locks)
    yield made
    made.close()


# -- locks that live 3 s ----------------------------------------------------------------------------------------------------------


def test_a_renewal_that_comes_too_late_is_a_loss_though_the_broker_grants_it(quick: World) -> None:
    """Trap 11: another may have had the queue meanwhile, and have given it back."""
    me = quick.broker.groups.join("me")
    tokens = quick.lock(quick.broker, me, quick.queues[:1])
    quick.broker.groups.trust = TRUST
    for _ in range(3):
        time.sleep(1)
        assert quick.broker.groups.renew(tokens) == []
    time.sleep(TRUST + 0.1)
    assert quick.broker.groups.renew(tokens) == tokens == quick.broker.groups.stale(tokens)
    assert condition(lambda: quick.broker.groups.commit({tokens[0]: 1})) == "LOCK.LOST"
    [again] = quick.lock(quick.broker, me, quick.queues[:1])
    assert again.tenure == again.epoch > tokens[0].epoch, "whoever goes on enters the queue anew"


def test_locks_are_anothers_when_they_were_not_renewed(quick: World) -> None:
    rival = quick.connect()
    tokens = quick.lock(quick.broker, quick.broker.groups.join("me"))
    them = rival.groups.join("them")
    assert all(isinstance(answer, Refusal) for answer in rival.groups.lock(quick.group, them, quick.queues).values())
    began = time.monotonic()
    until(lambda: rival.groups.lock(quick.group, them, quick.queues), lambda out: not refused(out), 10)
    assert 1 < time.monotonic() - began < 8
    # Within the time that it trusts its locks, the loser learns it from the fence.
    assert quick.broker.groups.stale(tokens) == tokens
    assert condition(lambda: quick.broker.groups.commit({tokens[0]: 1})) == "LOCK.LOST"


def refused(answers: dict[MessageQueue, LockToken | Refusal]) -> list[Refusal]:
    return [answer for answer in answers.values() if isinstance(answer, Refusal)]


@pytest.mark.parametrize("how", ["given up", "left"])
def test_a_zombies_look_at_its_lock_does_not_bring_it_back(quick: World, how: str) -> None:
    """A task in another process asks under its driver's name, and a broker would grant it the free queue."""
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
    [theirs] = refusable(other.lock(quick.group, them, [token.queue]))
    assert not task.check(token)
    assert theirs.client_id == them.client_id


def refusable(answers: dict[MessageQueue, LockToken | Refusal]) -> list[LockToken]:
    assert not refused(answers), answers
    return [answer for answer in answers.values() if isinstance(answer, LockToken)]


def test_a_tasks_look_keeps_the_lock_of_a_driver_that_lives(quick: World) -> None:
    task = quick.connect().groups
    me = quick.broker.groups.join("me")
    quick.broker.groups.heartbeat(quick.group, me, quick.shared())
    [token] = quick.lock(quick.broker, me, quick.queues[:1])
    for _ in range(4):
        time.sleep(1)
        assert task.check(token)
    assert task.stale([token]) == []
    # A dead letter is put aside by a task, too.
    assert task.dead_letter(token, body_of([3]), [3]) == 1


def test_a_lingering_lock_lives_on_for_strangers_and_not_for_its_own_query(quick: World) -> None:
    """RocketMQ's unlockDelay: it is not given back, and its life ends it."""
    groups, rival = quick.broker.groups, quick.connect().groups
    me, them = groups.join("me"), rival.join("them")
    first, second = quick.lock(quick.broker, me, quick.queues[:2])
    groups.unlock([first, second], 20.0)
    groups.leave(me)
    assert groups.stale([first, second]) == [first, second]
    assert len(refused(rival.lock(quick.group, them, quick.queues[:2]))) == 2
    [again] = quick.lock(quick.broker, groups.join("me"), quick.queues[:1])
    assert again.epoch > first.epoch
    until(lambda: rival.lock(quick.group, them, [second.queue]), lambda out: not refused(out), 10)


# -- runs of one query ------------------------------------------------------------------------------------------------------------

RUN = """
import sys, time
from orderedmq.membership import Subscription
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.client import Client
address, group, topic = sys.argv[1:]
broker = RocketMQBroker(address)
client = broker.groups.join("query")
broker.groups.heartbeat(group, client, Subscription("shared", topic, "AVG"))
tokens = broker.groups.lock(group, client, broker.log.queues(topic))
print(client.client_id, *(type(token).__name__ for token in tokens.values()), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(usual: World) -> Iterator[subprocess.Popen[str]]:
    """Another process with a run of the query ``query``, which has all queues."""
    command = [sys.executable, "-c", RUN, usual.cluster.address, usual.group, usual.topic]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_a_restart_after_a_kill_has_its_queues_at_once_and_two_runs_exclude_each_other(
    usual: World, run: subprocess.Popen[str]
) -> None:
    """Locks that live 60 s: nobody else gets them that soon."""
    assert run.stdout is not None
    first, *granted = run.stdout.readline().split()
    assert granted == ["LockToken"] * 4
    groups = usual.broker.groups
    again, other = groups.join("query"), groups.join("other")
    for client in (again, other):
        refusals = refused(groups.lock(usual.group, client, usual.queues))
        # Who has them says so itself.
        assert {(one.owner, one.client_id, one.alive) for one in refusals} == {("query", first, True)}
        assert len(refusals) == 4
    assert usual.ids(usual.broker) == [first]
    run.kill()
    until(lambda: usual.ids(usual.broker), lambda ids: ids == [])
    assert len(refused(groups.lock(usual.group, other, usual.queues))) == 4
    tokens = usual.lock(usual.broker, again)
    assert {token.epoch % 2 for token in tokens} == {0}, "under the query's name"
    assert all(token.tenure == token.epoch for token in tokens), "the group's offset is where it goes on"


def test_a_run_whose_predecessor_is_stuck_waits_for_the_locks_to_end(quick: World) -> None:
    old, new = quick.broker.groups, quick.connect().groups
    first, second = old.join("query"), new.join("query")
    old.heartbeat(quick.group, first, quick.shared())
    [token] = quick.lock(quick.broker, first, quick.queues[:1])
    new.heartbeat(quick.group, second, quick.shared())
    assert refused(new.lock(quick.group, second, [token.queue]))
    [taken] = refusable(until(lambda: new.lock(quick.group, second, [token.queue]), lambda out: not refused(out), 10))
    assert taken.epoch % 2 == 1, "under its own name"
    # The first one is a member still, and yet its tasks and itself see that it is lost.
    assert first.client_id in quick.ids(quick.broker)
    assert not quick.connect().groups.check(token)
    assert old.renew([token]) == [token]
    assert new.renew([taken]) == []


# -- brokers that are killed ------------------------------------------------------------------------------------------------------


def test_a_killed_broker_forgets_locks_and_offsets_and_a_renewal_brings_them_back(usual: World) -> None:
    me = usual.broker.groups.join("me")
    usual.broker.groups.heartbeat(usual.group, me, usual.shared())
    usual.send(usual.queues[0], 9)
    tokens = usual.lock(usual.broker, me)
    # However long a server takes to boot here.
    usual.broker.groups.trust = 120
    usual.broker.groups.commit({tokens[0]: 2, tokens[1]: 0})
    # On disk within 5 s.
    time.sleep(6)
    usual.broker.groups.commit({tokens[0]: 7})
    usual.cluster.broker.restart()
    seen = usual.connect().groups.offsets(usual.group, usual.queues)
    # A broker writes offsets every 5 s, from 10 s after it booted on.
    assert seen.get(usual.queues[0]) in (None, 2, 7)
    assert usual.broker.groups.renew(tokens) == []
    assert usual.connect().groups.offsets(usual.group, usual.queues) == {usual.queues[0]: 7, usual.queues[1]: 0}
    rival = usual.connect().groups
    assert len(refused(rival.lock(usual.group, rival.join("them"), usual.queues))) == 4
    # It is a member again with its next heartbeat; a task that looks meanwhile waits for that.
    assert usual.ids(usual.connect()) == []
    task = usual.connect().groups
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(task.check, tokens[0])
        time.sleep(1)
        usual.broker.groups.heartbeat(usual.group, me, usual.shared())
        assert looking.result()
    assert usual.ids(usual.connect()) == [me.client_id]


def test_a_renewal_never_takes_back_what_is_committed_beside_it(usual: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the broker behind, and is held up before it writes: whoever takes the queue then must not begin there."""
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
        assert looked.wait(10.0)
        groups.commit({token: 5})
        committed.set()
        assert renewed.result() == []
    assert groups.offsets(usual.group, [queue]) == {queue: 5}


def test_a_lock_that_another_got_while_the_broker_was_anew_is_lost(usual: World) -> None:
    me = usual.broker.groups.join("me")
    tokens = usual.lock(usual.broker, me)
    usual.broker.groups.trust = 120
    usual.cluster.broker.restart()
    rival = usual.connect()
    usual.lock(rival, rival.groups.join("them"), usual.queues[:1])
    assert usual.broker.groups.renew(tokens) == tokens[:1]
    assert usual.broker.groups.stale(tokens) == tokens[:1]


def test_a_broker_that_is_away_costs_no_lock_until_the_trust_is_over(usual: World) -> None:
    me = usual.broker.groups.join("me")
    tokens = usual.lock(usual.broker, me)
    usual.cluster.broker.kill()
    assert error_of(lambda: usual.broker.groups.renew(tokens)).condition.startswith("ORDEREDMQ_ROCKETMQ.")
    usual.broker.groups.trust = 0.0
    assert usual.broker.groups.renew(tokens) == tokens


# -- offsets of every version -----------------------------------------------------------------------------------------------------


def test_never_committed_is_not_the_same_as_zero(world: World) -> None:
    """Trap 8: a 4.9 broker answers 0 to both, of a queue with messages and of an empty one."""
    groups = world.broker.groups
    with_messages, empty, _, _ = world.queues
    world.send(with_messages, 3)
    assert groups.offsets(world.group, world.queues) == {}
    tokens = world.lock(world.broker, groups.join("me"))
    assert groups.offsets(world.group, world.queues) == {}
    groups.commit({tokens[0]: 0})
    assert world.connect().groups.offsets(world.group, world.queues) == {with_messages: 0}
    groups.commit({tokens[1]: 0})
    assert world.connect().groups.offsets(world.group, world.queues) == {with_messages: 0, empty: 0}
    assert world.broker.admin.group_offsets(world.group) == {with_messages: 0, empty: 0}


def test_a_group_is_made_before_something_is_committed(world: World) -> None:
    """From 5.3 on a broker answers a commit of a group that it does not know with 26."""
    assert world.group not in world.broker.admin.groups()
    [token, *_] = world.lock(world.broker, world.broker.groups.join("me"))
    world.broker.groups.commit({token: 0})
    assert world.group in world.broker.admin.groups()
    assert world.broker.admin.seek(f"{world.group}-2", {world.queues[0]: 0}) == 1
    assert world.broker.admin.group_offsets(f"{world.group}-2") == {world.queues[0]: 0}


def test_a_group_that_brokers_may_not_make_is_named(world: World) -> None:
    where = world.cluster.broker.address
    ask(where, UPDATE_BROKER_CONFIG, body=b"autoCreateSubscriptionGroup=false\n")
    try:
        me = world.broker.groups.join("me")
        if world.cluster.version.startswith("4."):
            # It takes members and commits of groups that it does not know.
            world.broker.groups.heartbeat(world.group, me, world.shared())
            world.broker.groups.commit({world.lock(world.broker, me)[0]: 0})
            assert world.group in world.broker.admin.groups()
            return
        missing = error_of(lambda: world.broker.groups.heartbeat(world.group, me, world.shared()))
        assert missing.condition == "ORDEREDMQ_GROUP.MISSING"
        assert "mqadmin updateSubGroup" in missing.message
        assert condition(lambda: world.lock(world.broker, me)) == "GROUP.MISSING"
        client = world.broker._client
        client.call_address(where, admin_requests.create_group(world.group), soon())
        world.broker.groups.heartbeat(world.group, me, world.shared())
        world.broker.groups.commit({world.lock(world.broker, me)[0]: 0})
    finally:
        ask(where, UPDATE_BROKER_CONFIG, body=b"autoCreateSubscriptionGroup=true\n")


def test_a_group_from_outside(world: World) -> None:
    broker, groups = world.connect(), world.broker.groups
    groups.believed = 0.0
    admin = broker.admin
    me = groups.join("me")
    groups.heartbeat(world.group, me, world.shared(), "room-1")
    tokens = world.lock(world.broker, me)
    groups.commit({tokens[0]: 0})
    [member] = admin.members(world.group)
    assert (member.member.client_id, member.member.subscription, member.member.room) == (me.client_id, world.shared(), "room-1")
    assert 0 <= member.age < 30
    shown = [(lock.queue, lock.owner, lock.client_id, lock.epoch, lock.held, lock.alive) for lock in admin.locks(world.group)]
    assert shown == [(token.queue, "me", me.client_id, token.epoch, True, True) for token in tokens]
    for call in (
        lambda: admin.seek(world.group, {world.queues[0]: 0}),
        lambda: admin.release(world.group, world.queues),
        lambda: admin.delete_group(world.group),
    ):
        used = error_of(call)
        assert (used.condition, me.client_id in used.message) == ("ORDEREDMQ_GROUP.IN_USE", True)
    assert admin.release(world.group, world.queues[:1], force=True) == world.queues[:1]
    assert groups.stale(tokens) == tokens[:1] == groups.renew(tokens)
    [again] = world.lock(world.broker, me, world.queues[:1])
    assert again.epoch > tokens[0].epoch
    assert admin.seek(world.group, {world.queues[1]: 0}, force=True) == 1 == groups.reset_number(world.group)
    assert groups.stale(tokens[1:]) == tokens[1:2]
    groups.leave(me)
    assert admin.seek(world.group, {world.queues[1]: 0}) == 2
    assert admin.group_offsets(world.group) == {world.queues[0]: 0, world.queues[1]: 0}
    admin.delete_group(world.group)
    assert condition(lambda: admin.seek(world.group, {world.queues[0]: 5})) == "OFFSET.BEYOND_END"


def test_a_lock_of_nobody_who_is_known_is_in_use_and_cannot_be_taken_away(world: World) -> None:
    groups, admin = world.broker.groups, world.connect().admin
    me = groups.join("me")
    [token] = world.lock(world.broker, me, world.queues[:1])
    assert condition(lambda: admin.seek(world.group, {token.queue: 0})) == "GROUP.IN_USE"
    assert condition(lambda: admin.release(world.group, world.queues, force=True)) == "LOCK.HELD_BY_OTHER"
    groups.leave(me)
    assert admin.release(world.group, world.queues) == []
    assert admin.seek(world.group, {token.queue: 0}) == 1


# -- members ----------------------------------------------------------------------------------------------------------------------


def test_a_broker_that_comes_into_the_route_knows_the_member_before_its_locks(two_brokers: Cluster) -> None:
    """Not only with the next renewal: a task looks whether its driver is a member there."""
    world = World(two_brokers)
    try:
        topic = f"{world.topic}-grows"
        me = world.broker.groups.join("me")
        with Client(two_brokers.address) as client:
            for broker in two_brokers.brokers:
                client.call_address(broker.address, admin_requests.create_topic(topic, 1), soon(10))
                [here] = until(lambda: _queues(world.broker, topic, broker.name), bool, 60)  # noqa: B023 (called at once)
                if broker is two_brokers.broker:
                    world.broker.groups.heartbeat(world.group, me, Subscription("shared", topic, "AVG"))
                world.lock(world.broker, me, [here])
                at_broker = client.call_address(broker.address, group_requests.consumer_list(world.group), soon(10))
                assert at_broker == (me.client_id,)
    finally:
        world.close()


def _queues(broker: RocketMQBroker, topic: str, name: str) -> list[MessageQueue]:
    try:
        return [queue for queue in broker.log.queues(topic) if queue.broker_name == name]
    except TopicError:
        return []


def test_members_are_connections_and_what_they_read_is_the_groups(world: World) -> None:
    """Trap 12: a client id is not enough to be told apart; and the retry topic stays what the group reads."""
    groups = world.broker.groups
    one, two = groups.join("one"), groups.join("two")
    for client in (one, two):
        groups.heartbeat(world.group, client, world.shared())
    assert world.ids(world.connect()) == sorted((one.client_id, two.client_id))
    table = world.broker._client.call_address(
        world.cluster.broker.address, group_requests.consumer_connections(world.group), soon()
    )
    assert {topic: one.expression for topic, one in table.subscriptions.items()} == {
        world.topic: "*",
        f"%RETRY%{world.group}": "*",
    }
    assert [member.client_id for member in table.members] == sorted((one.client_id, two.client_id))
    groups.leave(one)
    assert world.ids(world.connect()) == [two.client_id]


# -- dead letters -----------------------------------------------------------------------------------------------------------------


def test_dead_letters_are_where_rocketmq_looks_for_them(world: World) -> None:
    """Trap 19. Each by another process than the one before."""
    queue = world.queues[1]
    me = world.broker.groups.join("me")
    world.broker.groups.heartbeat(world.group, me, world.shared())
    [token] = world.lock(world.broker, me, [queue])
    properties = {"own": "x", "REAL_TOPIC": world.topic, "REAL_QID": "1", "ORIGIN_MESSAGE_ID": "ABC", "RECONSUME_TIME": "16"}
    columns = {
        "body": pa.array([b"\0\xff"]), "tags": pa.array(["t"]), "keys": pa.array(["k"]), "sharding_key": pa.array(["s"]),
        "properties": pa.array([list(properties.items())], pa.map_(pa.string(), pa.string())),
    }  # fmt: skip
    assert world.connect().groups.dead_letter(token, pa.record_batch(columns), [3]) == 1
    assert world.connect().groups.dead_letter(token, body_of([3]), [3]) == 0
    more = range(4, 2004)
    assert world.connect().groups.dead_letter(token, body_of(more), more) == 2000
    assert world.connect().groups.dead_letter(token, body_of(range(3, 2005)), range(3, 2005)) == 1
    log = world.connect().log
    [letters] = log.queues(f"%DLQ%{world.group}")
    at = log.bounds([letters])[letters]
    assert (at.min_offset, at.max_offset) == (0, 2002)
    wanted = ("body", "tags", "keys", "sharding_key", "message_id", "reconsume_times", "properties")
    [first] = log.pull(letters, 0, 1, 1 << 20, wanted).to_pylist()
    assert (first["body"], first["tags"], first["keys"], first["sharding_key"]) == (b"\0\xff", "t", "k", "s")
    assert first["message_id"] == key_of(world.group, queue, 3)
    found = dict(first["properties"])
    assert {name: found[name] for name in properties} == properties
    assert (found["RETRY_TOPIC"], found["DLQ_ORIGIN_TOPIC"], found["DLQ_ORIGIN_MESSAGE_ID"]) == (
        world.topic,
        world.topic,
        "ABC",
    )
    bodies: list[bytes] = []
    while len(bodies) < 2002:
        bodies += log.pull(letters, len(bodies), 4096, 1 << 30, ("body",)).column(0).to_pylist()
    assert bodies[1:] == [b"body %d" % offset for offset in range(4, 2005)]


# -- a Java consumer as a neighbour -----------------------------------------------------------------------------------------------


def owned(java: Consumer, topic: str) -> list[tuple[str, int]]:
    """The queues of the topic that a Java consumer has and holds the locks of; that of its retries is not asked for."""
    table = java.client.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
    entries = [(entry.getKey(), entry.getValue()) for entry in table.entrySet()]
    locked = [queue for queue, process in entries if process.isLocked() and str(queue.getTopic()) == topic]
    return sorted((str(queue.getBrokerName()), int(queue.getQueueId())) for queue in locked)


def test_a_java_consumer_and_a_query_share_a_group(usual: World, peers: Peers) -> None:
    java = peers.consumer(usual.cluster.address, usual.group, usual.topic)
    groups = usual.broker.groups
    try:
        until(lambda: owned(java, usual.topic), lambda queues: len(queues) == 4)
        everything = [("broker-a", number) for number in range(4)]
        exclusive = groups.join("greedy")
        # Before a heartbeat changed anything for the Java consumer.
        refusal = error_of(lambda: groups.heartbeat(usual.group, exclusive, Subscription("exclusive", usual.topic)))
        assert (refusal.condition, java.id in refusal.message) == ("ORDEREDMQ_GROUP.DISAGREES", True)
        usual.broker.admin.create_topic(f"{usual.topic}-2", 1)
        both = Subscription("shared", f"{usual.topic},{usual.topic}-2", "AVG")
        refusal = error_of(lambda: groups.heartbeat(usual.group, exclusive, both))
        assert (refusal.condition, java.id in refusal.message) == ("ORDEREDMQ_GROUP.DISAGREES", True)
        assert owned(java, usual.topic) == everything

        me = groups.join("me")
        members = groups.heartbeat(usual.group, me, usual.shared())
        assert [member.client_id for member in members] == sorted((java.id, me.client_id))
        # The strategy and the topics are what the Java consumer itself says.
        assert {member.subscription for member in members} == {usual.shared()}
        refuse(usual.group, me, members)
        mine = allocate(Allocation("AVG"), me.client_id, usual.queues, {member.client_id: member.room for member in members})
        theirs = [(queue.broker_name, queue.queue_id) for queue in usual.queues if queue not in mine]
        assert len(mine) == len(theirs) == 2
        # Code 40 makes it rebalance: it gives our half up, and keeps its own.
        until(lambda: owned(java, usual.topic), lambda queues: queues == theirs)
        tokens = refusable(until(lambda: groups.lock(usual.group, me, mine), lambda out: not refused(out)))
        [other, _] = [queue for queue in usual.queues if queue not in mine]
        [refusing] = refused(groups.lock(usual.group, me, [other]))
        assert (refusing.client_id, refusing.alive) == (java.id, True)
        assert {lock.client_id for lock in usual.connect().admin.locks(usual.group)} == {java.id, me.client_id}

        # Messages of all queues: each is somebody's, and its offsets are the group's for everyone.
        for queue in usual.queues:
            usual.send(queue, 5)
        java.wait(10)
        assert {message.queue for message in java.received} == set(theirs)
        groups.commit(dict.fromkeys(tokens, 5))
        admin = peers.admin(usual.cluster.address)
        until(lambda: admin.offsets(usual.group, usual.topic), lambda found: found == dict.fromkeys(everything, 5))
        assert admin.members(usual.group) == sorted((java.id, me.client_id))

        # What RocketMQ's own tool shows of us.
        shown = admin.client.getConsumerRunningInfo(usual.group, me.client_id, False)
        held = sorted((str(queue.getBrokerName()), int(queue.getQueueId())) for queue in shown.getMqTable().keySet())
        assert held == [(queue.broker_name, queue.queue_id) for queue in sorted(mine)]

        groups.leave(me)
        until(lambda: owned(java, usual.topic), lambda queues: queues == everything, 60)
    finally:
        java.stop()


def test_a_java_consumer_takes_over_where_a_query_has_committed(usual: World, peers: Peers) -> None:
    groups = usual.broker.groups
    usual.send(usual.queues[0], 10)
    me = groups.join("me")
    groups.heartbeat(usual.group, me, usual.shared())
    tokens = usual.lock(usual.broker, me)
    groups.commit({tokens[0]: 7} | dict.fromkeys(tokens[1:], 0))
    groups.unlock(tokens)
    groups.leave(me)
    java = peers.consumer(usual.cluster.address, usual.group, usual.topic)
    try:
        assert [message.offset for message in java.wait(3)] == [7, 8, 9]
    finally:
        java.stop()
    assert usual.connect().groups.offsets(usual.group, usual.queues[:1]) == {usual.queues[0]: 10}


@pytest.mark.parametrize("ahead", [True, False])
def test_what_rocketmqs_own_tool_resets_is_where_a_query_goes_on(usual: World, peers: Peers, ahead: bool) -> None:
    """The broker keeps the reset, and takes no commits until somebody has noticed it (useServerSideResetOffset)."""
    groups = usual.broker.groups
    queue = usual.queues[0]
    usual.send(queue, 10)
    me = groups.join("me")
    groups.heartbeat(usual.group, me, usual.shared())
    [token] = usual.lock(usual.broker, me, [queue])
    groups.commit({token: 4})
    client = peers.admin(usual.cluster.address).client
    client.resetOffsetByTimestamp(usual.topic, usual.group, int(time.time() * 1000) + 10_000 if ahead else 0, True)
    reset = usual.connect().groups.offsets(usual.group, [queue])[queue]
    assert reset == (10 if ahead else 0)
    assert condition(lambda: groups.commit({token: 6})) == "LOCK.LOST"
    assert usual.connect().groups.offsets(usual.group, [queue]) == {queue: reset}
    [token] = usual.lock(usual.broker, me, [queue])
    groups.commit({token: 10})
    assert usual.connect().groups.offsets(usual.group, [queue]) == {queue: 10}


def test_what_others_do_is_known_after_a_second_and_to_a_commit_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query asks between any two batches; a round trip each time would be most of what an idle one does."""
    groups, admin = world.broker.groups, world.connect().admin
    me = groups.join("me")
    groups.heartbeat(world.group, me, world.shared())
    tokens = world.lock(world.broker, me)
    asked: list[int] = []
    fenced = type(groups)._fenced

    def spy(*arguments: Any, **more: Any) -> list[LockToken]:
        asked.append(len(arguments[1]))
        return fenced(*arguments, **more)

    monkeypatch.setattr(type(groups), "_fenced", spy)
    for _ in range(50):
        assert groups.stale(tokens) == []
    assert [count for count in asked if count] == [len(tokens)]
    admin.seek(world.group, {tokens[0].queue: 0}, force=True)
    assert condition(lambda: groups.commit({tokens[0]: 0})) == "LOCK.LOST"
    assert groups.stale(tokens) == tokens[:1], "a commit that was refused is known at once"
    admin.seek(world.group, {tokens[1].queue: 0}, force=True)
    assert not groups.check(tokens[1])
    began = time.monotonic()
    admin.seek(world.group, {tokens[2].queue: 0}, force=True)
    until(lambda: groups.stale(tokens), lambda gone: tokens[2] in gone, 10)
    assert time.monotonic() - began < 3
