"""Groups over real servers: offsets, members, dead letters, and a Java consumer in the same group.

A group may never have committed, or have committed 0. Members are connections, and a heartbeat replaces the group's topics. Dead letters
are sent through the retry topic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from ordered_source.listener.task_rows import Columns, Rows, write_letters
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OrderedMQError
from orderedmq.listening.engine import Message
from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import allocate
from orderedmq.ownership.membership import Subscription, refuse
from orderedmq.parking import SOURCE_COLUMNS
from orderedmq.rocketmq.append.broker_port import BrokerPort, send_request
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.group.dead_letters import key_of
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.wire import admin_requests, group_requests
from tests.contract.support import letters, read, rows
from tests.live.rocketmq.group_world import World, condition, error_of, granted, refused
from tests.live.rocketmq.peers import Peers
from tests.live.rocketmq.proxy import Connection, Network, Path, Way
from tests.waits import first_good, soon

pytestmark = pytest.mark.usefixtures("unhurried")

UPDATE_BROKER_CONFIG = 25


@pytest.fixture
def world(every_version: Cluster) -> Iterator[World]:
    with World(every_version) as world:
        yield world


@pytest.fixture
def usual(cluster: Cluster) -> Iterator[World]:
    with World(cluster) as world:
        yield world


# -- offsets of every version -----------------------------------------------------------------------------------------------------


def test_an_offset_that_was_never_committed_differs_from_offset_zero(world: World) -> None:
    """Whether a group has never committed or has committed 0, a 4.9 broker answers 0, even for an empty queue."""
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


def test_an_error_names_a_group_that_brokers_may_not_create(world: World) -> None:
    where = world.cluster.broker.address
    ask(where, UPDATE_BROKER_CONFIG, body=b"autoCreateSubscriptionGroup=false\n")
    try:
        me = world.broker.groups.join("me")
        if world.cluster.version.startswith("4."):
            # 4.9 accepts members and commits of groups that it does not know.
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


def test_an_administrator_sees_and_changes_a_group_in_use(usual: World) -> None:
    broker, groups = usual.connect(), usual.broker.groups
    groups.fence_age = 0.0
    admin = broker.admin
    me = groups.join("me")
    groups.heartbeat(usual.group, me, usual.shared())
    tokens = usual.lock(usual.broker, me)
    groups.commit({tokens[0]: 0})
    [member] = admin.members(usual.group)
    assert (member.member.client_id, member.member.subscription) == (me.client_id, usual.shared())
    assert 0 <= member.age < 30
    shown = [(lock.queue, lock.owner, lock.client_id, lock.epoch, lock.held, lock.alive) for lock in admin.locks(usual.group)]
    assert shown == [(token.queue, "me", me.client_id, token.epoch, True, True) for token in tokens]
    for call in (
        lambda: admin.seek(usual.group, {usual.queues[0]: 0}),
        lambda: admin.release(usual.group, usual.queues),
        lambda: admin.delete_group(usual.group),
    ):
        used = error_of(call)
        assert (used.condition, me.client_id in used.message) == ("ORDEREDMQ_GROUP.IN_USE", True)
    assert admin.release(usual.group, usual.queues[:1], force=True) == usual.queues[:1]
    assert groups.stale(tokens) == tokens[:1] == groups.renew(tokens)
    [again] = usual.lock(usual.broker, me, usual.queues[:1])
    assert again.epoch > tokens[0].epoch
    admin.seek(usual.group, {usual.queues[1]: 0}, force=True)
    assert groups.stale(tokens[1:]) == tokens[1:2]
    groups.leave(me)
    admin.seek(usual.group, {usual.queues[1]: 0})
    assert admin.group_offsets(usual.group) == {usual.queues[0]: 0, usual.queues[1]: 0}
    admin.delete_group(usual.group)
    assert condition(lambda: admin.seek(usual.group, {usual.queues[0]: 5})) == "OFFSET.BEYOND_END"


# -- members ----------------------------------------------------------------------------------------------------------------------


def test_a_client_notices_that_its_membership_ended_with_its_connection(usual: World) -> None:
    """The client then also knows that a heartbeat is due, because tasks wait until their driver is a member."""
    with Network.before(usual.cluster) as network, RocketMQBroker(Endpoint(None, network.address)) as broker:
        groups = broker.groups
        me = groups.join("me")
        assert not groups.cut_off(me)
        groups.heartbeat(usual.group, me, usual.shared())
        assert usual.ids(usual.broker) == [me.client_id]
        assert not groups.cut_off(me)
        for connection in list(network.broker.connections):
            connection.reset()
        first_good(lambda: groups.cut_off(me), bool)
        first_good(lambda: usual.ids(usual.broker), lambda ids: ids == [])
        groups.heartbeat(usual.group, me, usual.shared())
        assert usual.ids(usual.broker) == [me.client_id]
        assert not groups.cut_off(me)
        groups.leave(me)
        assert not groups.cut_off(me)


def test_members_are_connections_and_share_the_subscriptions_of_the_group(world: World) -> None:
    """Brokers tell members apart by connection, not only by client id.

    A heartbeat must not remove the retry topic from the group's subscriptions.
    """
    groups = world.broker.groups
    one, two = groups.join("one"), groups.join("two")
    for client in (one, two):
        groups.heartbeat(world.group, client, world.shared())
    assert world.ids(world.connect()) == sorted((one.client_id, two.client_id))
    subscriptions = world.broker._client.call_address(
        world.cluster.broker.address, group_requests.subscriptions(world.group), soon()
    )
    assert {topic: one.expression for topic, one in subscriptions.items()} == {
        world.topic: "*",
        f"%RETRY%{world.group}": "*",
    }
    groups.leave(one)
    assert world.ids(world.connect()) == [two.client_id]


# -- dead letters -----------------------------------------------------------------------------------------------------------------


def test_dead_letters_are_in_the_topic_and_form_of_rocketmqs_tools(world: World) -> None:
    """Each letter is written by a different process."""
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
    assert world.connect().groups.dead_letter(token, letters([3]), [3]) == 0
    more = range(4, 2004)
    assert world.connect().groups.dead_letter(token, letters(more), more) == 2000
    assert world.connect().groups.dead_letter(token, letters(range(3, 2005)), range(3, 2005)) == 1
    log = world.connect().log
    [dead] = log.queues(f"%DLQ%{world.group}")
    at = log.bounds([dead])[dead]
    assert (at.min_offset, at.max_offset) == (0, 2002)
    wanted = ("body", "tags", "keys", "sharding_key", "message_id", "reconsume_times", "properties")
    [first] = log.pull(dead, 0, 1, 1 << 20, wanted).to_pylist()
    assert (first["body"], first["tags"], first["keys"], first["sharding_key"]) == (b"\0\xff", "t", "k", "s")
    assert first["message_id"] == key_of(world.group, queue, 3)
    stored_properties = dict(first["properties"])
    assert {name: stored_properties[name] for name in properties} == properties
    assert (
        stored_properties["RETRY_TOPIC"],
        stored_properties["DLQ_ORIGIN_TOPIC"],
        stored_properties["DLQ_ORIGIN_MESSAGE_ID"],
    ) == (
        world.topic,
        world.topic,
        "ABC",
    )
    bodies: list[bytes] = []
    while len(bodies) < 2002:
        bodies += log.pull(dead, len(bodies), 4096, 1 << 30, ("body",)).column(0).to_pylist()
    assert bodies[1:] == [b"body %d" % offset for offset in range(4, 2005)]


def store(broker: RocketMQBroker, queue: MessageQueue, properties: dict[str, str]) -> OrderedMQError | None:
    """Send a message with any properties, as a Java producer does. Return the broker's error if it refuses the message."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    request = send_request(queue, SendBody(0, 1, memoryview(b"body"), text), "p")
    try:
        broker._client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
    except OrderedMQError as error:
        return error
    return None


@pytest.mark.holds("orderly listener")
def test_a_message_has_a_dead_letter_whatever_its_properties_are(usual: World) -> None:
    """RocketMQ stores up to 32,767 bytes of properties, including those that the broker adds. A letter has further ones."""
    usual.broker.admin.create_topic(topic := f"{usual.topic}-{'t' * 110}", 1)
    [queue] = usual.broker.log.queues(topic)
    parts = {f"p{number:02}": "x" * 995 for number in range(31)}
    sent = [{**parts, "last": "x" * room} for room in range(1900, 1500, -1)]
    largest = next(number for number, properties in enumerate(sent) if store(usual.broker, queue, properties) is None)
    several = {**parts, "KEYS": "k" * 1000, "__SHARDINGKEY": "s" * 500, "TAGS": "t" * 100}
    messages = [
        sent[largest],
        {**parts, "last": "x" * 1185},
        several,
        {"KEYS": "k" * 30_000, "own": "x"},
        {"KEYS": "k" * 32_300},
    ]
    for properties in messages[1:]:
        assert store(usual.broker, queue, properties) is None
    me = usual.broker.groups.join("me")
    usual.broker.groups.heartbeat(usual.group, me, Subscription("shared", topic, "AVG"))
    [token] = usual.lock(usual.broker, me, [queue])
    assert usual.broker.log.bounds([queue])[queue].max_offset == len(messages)
    columns = Columns(usual.broker.log.pull(queue, 0, len(messages), 1 << 30, SOURCE_COLUMNS))

    def give_up(number: int) -> None:
        write_letters(usual.broker, token, [Message(number, None, Rows(columns, 0), number)], ["e" * 9000])

    for number in range(4):
        # The first letter is sent through the retry topic.
        give_up(number)
    refusal = error_of(lambda: give_up(4))
    assert refusal.condition == "ORDEREDMQ_MESSAGE.PROPERTIES_TOO_LARGE"
    assert f"message 4 of queue {queue} cannot become a dead letter" in refusal.message
    [dead] = usual.broker.log.queues(f"%DLQ%{usual.group}")
    letters = read(usual.broker, dead, 0, ("keys", "sharding_key", "tags", "properties"))
    assert len(letters) == 4
    for letter, message, most_lost in zip(letters, messages, (3, 2, 3, 0), strict=False):
        properties = dict(letter["properties"])
        lost = [name for name in message if name in (*parts, "last", "own") and name not in properties]
        assert (0 < len(lost) <= most_lost) if most_lost else not lost
        error = properties["ORDEREDMQ_ERROR"]
        assert not lost or error.startswith("there was no room for the properties ")
        assert all(name in error for name in lost)
        texts = [len(letter[name] or "") for name in ("keys", "sharding_key", "tags")]
        assert texts == [len(message.get(name, "")) for name in ("KEYS", "__SHARDINGKEY", "TAGS")]


@pytest.mark.holds("dead letter by condition")
@pytest.mark.parametrize(("lost", "number"), [("answer", 1), ("request", 3)])
def test_a_dead_letter_is_stored_once_when_an_answer_or_a_request_is_lost(
    cluster: Cluster, lost: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request goes through the retry topic. Later requests carry two letters each."""
    paths: dict[str, Callable[[Connection], Path]] = {
        "answer": lambda connection: Path(down=Way(cut_after=connection.down)),
        "request": lambda connection: Path(up=Way(cut_after=connection.up + 300, reset=True)),
    }
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 1700)
    send, sent = BrokerPort.send, 0
    with Network.before(cluster) as network, World(cluster) as world, RocketMQBroker(Endpoint(None, network.address)) as task:

        def spoilt(self: BrokerPort, body: SendBody) -> Callable[[], int]:
            nonlocal sent
            sent += 1
            if sent == number:
                network.broker.spoil_sends(paths[lost])
            return send(self, body)

        monkeypatch.setattr(BrokerPort, "send", spoilt)
        me = world.broker.groups.join("me")
        world.broker.groups.heartbeat(world.group, me, world.shared())
        [token] = world.lock(world.broker, me, [world.queue])
        texts = [f"{offset:0400}" for offset in range(5)]
        assert task.groups.dead_letter(token, rows(texts), range(5)) == 5
        assert sent == (3 if lost == "answer" else 4)
        dead = MessageQueue(f"%DLQ%{world.group}", world.queue.broker_name, 0)
        assert [row["body"].decode() for row in read(world.broker, dead, 0, ("body",))] == texts
        assert world.broker.groups.dead_letter(token, rows(texts), range(5)) == 0


# -- a Java consumer as a neighbour -----------------------------------------------------------------------------------------------


def test_a_java_consumer_and_a_query_share_a_group(usual: World, peers: Peers) -> None:
    java = peers.consumer(usual.cluster.address, usual.group, usual.topic)
    groups = usual.broker.groups
    try:
        first_good(lambda: java.queues, lambda queues: len(queues) == 4)
        everything = [("broker-a", number) for number in range(4)]
        exclusive = groups.join("greedy")
        # Both subscriptions must be refused before a heartbeat changes anything for the Java consumer.
        refusal = error_of(lambda: groups.heartbeat(usual.group, exclusive, Subscription("exclusive", usual.topic)))
        assert (refusal.condition, java.id in refusal.message) == ("ORDEREDMQ_GROUP.DISAGREES", True)
        usual.broker.admin.create_topic(f"{usual.topic}-2", 1)
        both = Subscription("shared", f"{usual.topic},{usual.topic}-2", "AVG")
        refusal = error_of(lambda: groups.heartbeat(usual.group, exclusive, both))
        assert (refusal.condition, java.id in refusal.message) == ("ORDEREDMQ_GROUP.DISAGREES", True)
        assert java.queues == everything

        me = groups.join("me")
        members = groups.heartbeat(usual.group, me, usual.shared())
        assert [member.client_id for member in members] == sorted((java.id, me.client_id))
        # The Java consumer itself reports this strategy and these topics.
        assert {member.subscription for member in members} == {usual.shared()}
        refuse(usual.group, me, members)
        mine = allocate("AVG", me.client_id, usual.queues, {member.client_id for member in members})
        theirs = [(queue.broker_name, queue.queue_id) for queue in usual.queues if queue not in mine]
        assert len(mine) == len(theirs) == 2
        # Request code 40 makes the Java consumer rebalance: it gives up our half of the queues and keeps its own half.
        first_good(lambda: java.queues, lambda queues: queues == theirs)
        tokens = granted(first_good(lambda: groups.lock(usual.group, me, mine), lambda out: not refused(out)))
        [other, _] = [queue for queue in usual.queues if queue not in mine]
        # On a busy machine the Java consumer may report its queues too late. The client asks it again after 30 s.
        [refusing] = first_good(
            lambda: refused(groups.lock(usual.group, me, [other])), lambda found: found[0].alive is not None
        )
        assert (refusing.client_id, refusing.alive) == (java.id, True)
        assert {lock.client_id for lock in usual.connect().admin.locks(usual.group)} == {java.id, me.client_id}

        # Each queue's messages are read by one of the two members, and both see the same group offsets.
        for queue in usual.queues:
            usual.send(queue, 5)
        java.wait(10)
        assert {message.queue for message in java.received} == set(theirs)
        groups.commit(dict.fromkeys(tokens, 5))
        admin = peers.admin(usual.cluster.address)
        first_good(lambda: admin.offsets(usual.group, usual.topic), lambda found: found == dict.fromkeys(everything, 5))
        assert admin.members(usual.group) == sorted((java.id, me.client_id))

        # This is what RocketMQ's own tool shows about this client.
        shown = admin.client.getConsumerRunningInfo(usual.group, me.client_id, False)
        held = sorted((str(queue.getBrokerName()), int(queue.getQueueId())) for queue in shown.getMqTable().keySet())
        assert held == [(queue.broker_name, queue.queue_id) for queue in sorted(mine)]

        groups.leave(me)
        first_good(lambda: java.queues, lambda queues: queues == everything, 60)
    finally:
        java.stop()


@pytest.mark.holds("agreement")
def test_a_query_is_refused_while_its_group_has_a_concurrent_java_consumer(usual: World, peers: Peers) -> None:
    java = peers.concurrent_consumer(usual.cluster.address, usual.group, usual.topic)
    try:
        first_good(lambda: java.has(usual.topic), lambda queues: len(queues) == 4)
        me = usual.broker.groups.join("me")
        members = usual.broker.groups.heartbeat(usual.group, me, usual.shared())
        refusal = error_of(lambda: refuse(usual.group, me, members))
        assert refusal.condition == "ORDEREDMQ_GROUP.DISAGREES"
        assert "assignment 'shared', not 'concurrent'" in refusal.message
    finally:
        java.stop()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_query_continues_at_the_offset_that_rocketmqs_tool_has_reset(usual: World, peers: Peers, ahead: bool) -> None:
    """The broker stores the resets and accepts no commits until a client has read them once (useServerSideResetOffset)."""
    groups = usual.broker.groups
    queues = usual.queues[:3]
    for queue in queues:
        usual.send(queue, 10)
    me = groups.join("me")
    groups.heartbeat(usual.group, me, usual.shared())
    tokens = usual.lock(usual.broker, me, queues)
    groups.commit(dict.fromkeys(tokens, 4))
    client = peers.admin(usual.cluster.address).client
    client.resetOffsetByTimestamp(usual.topic, usual.group, int(time.time() * 1000) + 10_000 if ahead else 0, True)
    reset = dict.fromkeys(queues, 10 if ahead else 0)
    assert usual.connect().groups.offsets(usual.group, queues) == reset
    lost = error_of(lambda: groups.commit({tokens[1]: 6}))
    assert lost.condition == "ORDEREDMQ_LOCK.LOST"
    assert all(str(queue) in lost.message for queue in queues), lost.message
    assert usual.connect().groups.offsets(usual.group, queues) == reset
    resets = groups._offsets.resets(usual.group, queues)
    assert all(resets[token.queue] >= token.epoch for token in tokens), "an older checkpoint must not be followed"
    tokens = usual.lock(usual.broker, me, queues)
    groups.commit(dict.fromkeys(tokens, 10))
    assert usual.connect().groups.offsets(usual.group, queues) == dict.fromkeys(queues, 10)
