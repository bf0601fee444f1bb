"""The protocol's client against real servers of each version: the servers understand every request, and the client every answer."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from orderedmq.endpoint import TlsOptions
from orderedmq.errors import GroupError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.stored_message import parse_all
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests as admin
from orderedmq.rocketmq.wire import group_requests as groups
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus, SendStatus
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import user_topics
from orderedmq.rows.filters import Filter
from tests.quick_spark import QUICK_JVM
from tests.rocketmq.group_world import error_of
from tests.stored_messages import inner
from tests.waits import first_good, soon

T = TypeVar("T")


class World:
    """A cluster of one broker, a client for it, and a topic with two queues."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = Client(cluster.address)
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{self.topic}"
        self.masters = {name: str(data.master) for name, data in self.client.cluster(soon()).brokers.items()}
        for master in self.masters.values():
            self.client.call_address(master, admin.create_topic(self.topic, 2), soon())
        self.queues = first_good(self._route, lambda queues: len(queues) == 2)
        self.queue = self.queues[0]

    def _route(self) -> tuple[MessageQueue, ...]:
        try:
            return self.client.route(self.topic, soon(), fresh=True).publish_list()
        except TopicError:
            return ()

    def call(self, request: Request[T], seconds: float = 30.0) -> T:
        return self.client.call(request, soon(seconds), topic=self.topic, broker_name=self.queue.broker_name)

    def send(self, body: bytes, properties: str = "", *, batch: bool = False) -> message_requests.SendResult:
        return self.call(
            message_requests.send(self.queue, body, properties, group="p", born=int(time.time() * 1000), batch=batch)
        )

    def visible(self, count: int) -> None:
        first_good(lambda: self.call(message_requests.max_offset(self.queue)), lambda offset: offset == count)

    def pull(self, offset: int, count: int = 32) -> PullResult:
        return self.call(message_requests.pull(self.queue, self.group, offset, count))


@pytest.fixture
def world(every_version: Cluster) -> Iterator[World]:
    made = World(every_version)
    yield made
    made.client.close()


def held_back(pull: Request[PullResult], seconds: float) -> Request[PullResult]:
    """Return the pull with flags that make the broker hold it back until there is a message (PullSysFlag)."""
    return replace(pull, ext={**pull.ext, "sysFlag": "6", "suspendTimeoutMillis": str(int(seconds * 1000))})


def test_topics_come_and_go(world: World) -> None:
    client = world.client
    assert world.queues == world.client.route(world.topic, soon()).subscribe_set()
    assert world.topic in user_topics(client.topics(soon()), client.cluster(soon()))
    assert not {"TBW102", "broker-a"} & set(user_topics(client.topics(soon()), client.cluster(soon())))
    for master in world.masters.values():
        # With timerWheelEnable=false, 5.x reports an error after it has deleted the topic.
        with contextlib.suppress(RocketMQError):
            client.call_address(master, admin.delete_topic(world.topic), soon())
    for nameserver in client.nameservers:
        client.call_address(nameserver, admin.delete_topic_in_nameserver(world.topic), soon())
    assert error_of(lambda: client.route(world.topic, soon(), fresh=True)).condition == "ORDEREDMQ_TOPIC.MISSING"
    assert error_of(lambda: world.pull(0)).condition == "ORDEREDMQ_TOPIC.MISSING"


def test_messages_one_by_one_and_in_a_batch(world: World) -> None:
    first = world.send(b"one", "TAGS\x01a\x02KEYS\x01k\x02")
    assert (first.status, first.queue_id, first.queue_offset) == (SendStatus.SEND_OK, 0, 0)
    batch = world.send(inner(*((b"%d" % i, b"TAGS\x01b\x02N\x01%d\x02" % i) for i in range(40))), batch=True)
    assert batch.queue_offset == 1
    world.visible(41)
    found = world.pull(0, 1000)
    # The broker returns 32 messages at most, and says at which offset to continue.
    assert (found.status, found.next_begin_offset, found.min_offset, found.max_offset) == (PullStatus.FOUND, 32, 0, 41)
    messages = [*parse_all(bytes(found.body)), *parse_all(bytes(world.pull(32).body))]
    assert [message.queue_offset for message in messages] == list(range(41))
    assert [message.body for message in messages] == [b"one", *(b"%d" % i for i in range(40))]
    stored = messages[0].store_timestamp
    # If several messages were stored in the same millisecond, RocketMQ 4.9 may return the offset of any of them.
    assert messages[world.call(message_requests.search_offset(world.queue, stored))].store_timestamp == stored
    assert 0 <= world.call(message_requests.search_offset(world.queue, stored + 10**7)) <= 41


def test_where_a_pull_says_to_go_on(world: World) -> None:
    empty = world.pull(0)
    assert (empty.status, empty.next_begin_offset) == (PullStatus.NO_NEW_MESSAGE, 0)
    assert world.pull(5).status is PullStatus.OFFSET_ILLEGAL
    assert world.call(message_requests.min_offset(world.queue)) == 0
    world.send(b"x", "TAGS\x01a\x02")
    world.visible(1)
    assert world.pull(1).status is PullStatus.NO_NEW_MESSAGE
    beyond = world.pull(9)
    assert (beyond.status, beyond.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, 1)
    other = world.call(message_requests.pull(world.queue, world.group, 0, 32, matching=Filter(tags=("b",))))
    assert (other.status, other.next_begin_offset) == (PullStatus.NO_MATCHED_MESSAGE, 1)
    wrong = error_of(lambda: world.call(message_requests.pull(world.queue._replace(queue_id=9), world.group, 0, 32)))
    assert wrong.condition in ("ORDEREDMQ_ROCKETMQ.SERVER_ERROR", "ORDEREDMQ_ROCKETMQ.INVALID_PARAMETER")


def test_a_pull_waits_for_a_message_next_to_other_requests(world: World) -> None:
    connection = world.client.connection(world.masters[world.queue.broker_name], soon())
    held = connection.send(held_back(message_requests.pull(world.queue, world.group, 0, 32), 60), soon(90))
    for _ in range(3):
        assert connection.call(message_requests.max_offset(world.queue), soon()) == 0
    assert not held.done
    world.send(b"x")
    assert held.result().status is PullStatus.FOUND
    begin = time.monotonic()
    short = held_back(message_requests.pull(world.queue, world.group, 1, 32), 0.5)
    assert world.call(short).status is PullStatus.NO_NEW_MESSAGE
    assert time.monotonic() - begin > 0.4


def test_many_pulls_on_their_way(world: World) -> None:
    for _ in range(4):
        world.send(inner(*((b"%d" % i, b"") for i in range(500))), batch=True)
    world.visible(2000)
    connection = world.client.connection(world.masters[world.queue.broker_name], soon())
    pending = [
        connection.send(message_requests.pull(world.queue, world.group, offset, 32), soon()) for offset in range(0, 2000, 8)
    ]
    for offset, one in zip(range(0, 2000, 8), pending):
        messages = list(parse_all(bytes(one.result().body)))
        assert [message.queue_offset for message in messages] == list(range(offset, min(offset + 32, 2000)))


def test_offsets_of_a_group(world: World) -> None:
    old = world.cluster.version.startswith("4")
    assert world.call(groups.consumer_offset(world.group, world.queue)) == (0 if old else None)
    commit = groups.update_consumer_offset(world.group, world.queue, 5)
    if old:
        assert world.call(commit)
    else:
        assert isinstance(error_of(lambda: world.call(commit)), GroupError)
        for master in world.masters.values():
            world.client.call_address(master, admin.create_group(world.group), soon())
        assert world.call(commit)
    assert world.call(groups.consumer_offset(world.group, world.queue)) == 5
    for master in world.masters.values():
        world.client.call_address(master, admin.create_group(world.group), soon())
        assert world.group in world.client.call_address(master, admin.groups(), soon())
        world.client.call_address(master, admin.delete_group(world.group), soon())
        assert world.group not in world.client.call_address(master, admin.groups(), soon())


def test_members_are_connections(world: World) -> None:
    assert world.call(groups.consumer_list(world.group)) == ()
    assert world.call(groups.consumer_connections(world.group)).members == ()
    told = threading.Event()

    def pushed(command: RemotingCommand) -> None:
        if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED and command.ext["consumerGroup"] == world.group:
            told.set()

    with Client(world.cluster.address, on_push=pushed) as one, Client(world.cluster.address) as two:
        for name, member in (("one", one), ("two", two)):
            beat = groups.heartbeat(name, world.group, [TopicSubscription(world.topic, "TagA || TagB")], version=1)
            member.call(beat, soon(), topic=world.topic, broker_name=world.queue.broker_name)
        assert world.call(groups.consumer_list(world.group)) == ("one", "two")
        assert told.wait(60)
        found = world.call(groups.consumer_connections(world.group))
        assert [(member.client_id, member.language, member.version) for member in found.members] == [
            ("one", "PYTHON", 409),
            ("two", "PYTHON", 409),
        ]
        assert found.subscriptions[world.topic] == TopicSubscription(world.topic, "TagA || TagB")
        two.call(groups.unregister("two", world.group), soon(), topic=world.topic, broker_name=world.queue.broker_name)
        assert world.call(groups.consumer_list(world.group)) == ("one",)
    first_good(lambda: world.call(groups.consumer_list(world.group)), lambda members: members == ())


def test_locks(world: World) -> None:
    assert world.call(groups.lock(world.group, "one", world.queues)) == set(world.queues)
    assert world.call(groups.lock(world.group, "two", world.queues)) == frozenset()
    world.call(groups.unlock(world.group, "two", world.queues))
    assert world.call(groups.lock(world.group, "two", world.queues)) == frozenset()
    world.call(groups.unlock(world.group, "one", world.queues[:1]))
    assert world.call(groups.lock(world.group, "two", world.queues)) == set(world.queues[:1])


def test_filters_are_checked_by_the_broker(world: World) -> None:
    def check(expression: str, kind: str) -> None:
        world.call(groups.check_client_config("me", world.group, TopicSubscription(world.topic, expression, kind)))

    check("a || b", "TAG")
    wrong = error_of(lambda: check("a ><", "SQL92"))
    assert wrong.condition in ("ORDEREDMQ_ROCKETMQ.FILTER", "ORDEREDMQ_ROCKETMQ.SERVER_ERROR")


def test_a_message_that_is_too_large(world: World) -> None:
    wrong = error_of(lambda: world.send(bytes(5 * 1024 * 1024)))
    assert wrong.condition == "ORDEREDMQ_ROCKETMQ.MESSAGE_ILLEGAL"
    assert world.send(b"x").queue_offset == 0


def test_tls_with_a_certificate_that_the_server_made_up(cluster: Cluster, tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, cluster.version, jvm=QUICK_JVM) as with_tls,
        Client(with_tls.address, tls=TlsOptions(verify=False)) as client,
    ):
        world = World(with_tls)
        body = bytes(range(256)) * 4096
        request = message_requests.send(world.queue, body, "", group="p", born=0)
        assert client.call(request, soon(), topic=world.topic, broker_name=world.queue.broker_name).queue_offset == 0
        first_good(
            lambda: client.call_address(
                world.masters[world.queue.broker_name], message_requests.max_offset(world.queue), soon()
            ),
            lambda n: n == 1,
        )
        address = world.masters[world.queue.broker_name]
        pulled = client.call_address(address, message_requests.pull(world.queue, world.group, 0, 32), soon())
        assert [message.body for message in parse_all(bytes(pulled.body))] == [body]
        with Client(world.cluster.address, tls=TlsOptions()) as careful:
            error = error_of(lambda: careful.cluster(soon()))
            assert (error.condition, "Set tlsTrustCertPath to" in error.message) == ("ORDEREDMQ_ROCKETMQ.TLS", True)
        world.client.close()


def test_a_broker_that_is_killed_and_comes_back(world: World) -> None:
    world.send(b"x")
    world.cluster.broker.kill()
    with pytest.raises(RocketMQUnavailableError):
        world.call(message_requests.max_offset(world.queue), 1.0)
    back = threading.Thread(target=world.cluster.broker.restart)
    back.start()
    try:
        assert world.call(message_requests.max_offset(world.queue), 60.0) == 1
    finally:
        back.join()


def test_a_broker_that_is_paused_is_a_timeout(world: World) -> None:
    assert world.call(message_requests.max_offset(world.queue)) == 0
    world.cluster.broker.pause()
    try:
        with pytest.raises(RocketMQUnavailableError) as caught:
            world.call(message_requests.max_offset(world.queue), 1.0)
        assert caught.value.sub == "TIMEOUT"
    finally:
        world.cluster.broker.resume()
    assert world.call(message_requests.max_offset(world.queue)) == 0
