"""Members, locks and offsets of a group while brokers move, topics are deleted and clocks differ.

The brokers are on loopback and keep members, locks and offsets as real ones do. A member's connection is its membership.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

from orderedmq.conditions import LockCondition
from orderedmq.errors import LockError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.group import groups, lock_rules, membership
from orderedmq.rocketmq.group.groups import RocketMQGroups
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.fan_out import lock_queues
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from tests.unit.rocketmq_peer import Cluster, Link, Peer
from tests.waits import until

QUEUE = MessageQueue("T", "a", 0)


class Broker:
    """A broker's members, locks and numbers. ``deleted``: topics for which it takes no offset, as from 5.3 on."""

    def __init__(self) -> None:
        self.members: dict[str, Link] = {}
        self.locks: dict[str, str] = {}
        self.numbers: dict[tuple[str, str], str] = {}
        self.deleted: set[str] = set()

    def script(self, link: Link) -> None:
        try:
            for request in link.requests():
                self.answer(link, request)
        finally:
            self.members = {name: one for name, one in self.members.items() if one is not link}

    def answer(self, link: Link, request: RemotingCommand) -> None:
        place = request.ext.get("topic", ""), request.ext.get("queueId", "")
        match request.code:
            case RequestCode.HEART_BEAT:
                self.members[json.loads(bytes(request.body))["clientID"]] = link
                link.reply(request)
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                link.reply(request, body=json.dumps({"consumerIdList": sorted(self.members)}).encode())
            case RequestCode.LOCK_BATCH_MQ | RequestCode.UNLOCK_BATCH_MQ:
                asked = json.loads(bytes(request.body))
                keys = {json.dumps(queue, sort_keys=True): queue for queue in asked["mqSet"]}
                if request.code == RequestCode.UNLOCK_BATCH_MQ:
                    self.locks = {key: name for key, name in self.locks.items() if key not in keys or name != asked["clientId"]}
                granted = [queue for key, queue in keys.items() if self.locks.get(key, asked["clientId"]) == asked["clientId"]]
                if request.code == RequestCode.LOCK_BATCH_MQ:
                    self.locks.update({key: asked["clientId"] for key, queue in keys.items() if queue in granted})
                link.reply(request, body=json.dumps({"lockOKMQSet": granted}).encode())
            case RequestCode.QUERY_CONSUMER_OFFSET if place not in self.numbers:
                link.reply(request, ResponseCode.QUERY_NOT_FOUND)
            case RequestCode.QUERY_CONSUMER_OFFSET:
                link.reply(request, offset=self.numbers[place])
            case RequestCode.UPDATE_CONSUMER_OFFSET if place[0] in self.deleted:
                link.reply(request, ResponseCode.TOPIC_NOT_EXIST, remark="topic not exist")
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                self.numbers[place] = request.ext["commitOffset"]
                link.reply(request)
            case RequestCode.GET_CONSUMER_RUNNING_INFO:
                link.reply(request, ResponseCode.CONSUMER_NOT_ONLINE)
            case RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                link.reply(request, body=b'{"subscriptionGroupTable":{"g":{}}}')
            case RequestCode.GET_ALL_CONSUMER_OFFSET:
                link.reply(request, body=b'{"offsetTable":{}}')
            case RequestCode.GET_MAX_OFFSET:
                link.reply(request, offset="100")
            case _:
                link.reply(request, offset="0")


class Query:
    """A query of group g with its own client."""

    def __init__(self, nameserver: Peer, name: str, topics: str = "T", assignment: str = "shared") -> None:
        self.client = Client(nameserver.address)
        self.log = RocketMQLog(self.client)
        self.groups = RocketMQGroups(self.client, self.log)
        self.subscription = Subscription(assignment, topics, "AVG" if assignment == "shared" else None)
        self.me: ClientIdentity = self.groups.join(name)
        self.beat()

    def beat(self) -> list[str]:
        return [member.client_id for member in self.groups.heartbeat("g", self.me, self.subscription)]

    def lock(self, *queues: MessageQueue) -> list[LockToken]:
        answers = self.groups.lock("g", self.me, queues)
        return [answer for answer in answers.values() if isinstance(answer, LockToken)]

    def member_client(self) -> Any:
        return self.groups._member_clients[self.me.client_id]

    def close(self) -> None:
        for member in self.groups._member_clients.values():
            member._client.close()
        self.client.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        made.routes["T"] = {}
        yield made


@pytest.fixture
def clock_ahead(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds by which this machine's clock is ahead when it grants locks."""
    ahead, real = SimpleNamespace(seconds=0), time.time_ns
    monkeypatch.setattr(lock_rules, "time", SimpleNamespace(time_ns=lambda: real() + ahead.seconds * 10**9))
    return ahead


@pytest.mark.parametrize("how", ["seek", "release", "new grant"])
def test_a_lock_that_was_granted_by_a_clock_that_was_ahead_can_be_taken(
    cluster: Cluster, clock_ahead: SimpleNamespace, how: str
) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(names := cluster.nameserver(), "q", assignment="exclusive")) as query:
        clock_ahead.seconds = 600
        [token] = query.lock(QUEUE)
        query.groups.commit({token: 50})
        clock_ahead.seconds = 0
        if how == "new grant":
            # A restarted run of the query gets the lock of the killed one.
            with contextlib.closing(Query(names, "q", assignment="exclusive")) as again:
                broker.locks.clear()
                assert again.lock(QUEUE)[0].epoch > token.epoch
        else:
            admin = RocketMQAdmin(query.client, query.log)
            if how == "seek":
                admin.seek("g", {QUEUE: 10}, force=True)
            else:
                assert admin.release("g", [QUEUE], force=True) == [QUEUE]
        query.groups.fence_age = 0.0
        assert query.groups.stale([token]) == [token]
        with pytest.raises(LockError) as caught:
            query.groups.commit({token: 60})
        assert caught.value.sub == LockCondition.LOST
        assert query.groups.offsets("g", [QUEUE]) == {QUEUE: 10 if how == "seek" else 50}
        assert query.groups.renew([token]) == [token]


def test_a_deleted_topic_does_not_stop_the_renewal_of_locks_at_other_brokers(cluster: Cluster) -> None:
    """A 5.3 broker deletes the offsets of a topic with it, and takes no new ones."""
    brokers = {name: Broker() for name in "ab"}
    for name, topic in (("a", "gone"), ("a", "T"), ("b", "there")):
        cluster.scripted(name, brokers[name].script, topic=topic)
    queues = [MessageQueue("gone", "a", 0), QUEUE, MessageQueue("there", "b", 0)]
    with contextlib.closing(Query(cluster.nameserver(), "q", "T,gone,there", "exclusive")) as query:
        tokens = query.lock(*queues)
        query.groups.commit(dict.fromkeys(tokens, 5))
        brokers["a"].deleted = {"gone"}
        # The broker has also forgotten the last offset of the other topic.
        brokers["a"].numbers = {place: at for place, at in brokers["a"].numbers.items() if int(place[1])}
        for held in query.groups._held_locks.of_client(query.me.client_id):
            held.confirmed = before = held.confirmed - 5
        for _ in range(2):
            assert query.groups.renew(tokens) == []
        assert all(held.confirmed > before + 4 for held in query.groups._held_locks.of_client(query.me.client_id))
        assert brokers["a"].numbers["T", "0"] == "5"
        assert ("gone", "0") not in brokers["a"].numbers


def test_a_renewal_under_way_does_not_lock_a_queue_again_that_is_given_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal has read the fence when the query gives the queue back, and then sends its lock request."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query, ThreadPoolExecutor(1) as threads:
        [token] = query.lock(QUEUE)
        unlocks: list[Future[None]] = []

        def overtaken(client: Client, group: str, names: Mapping[MessageQueue, str], seconds: float) -> set[MessageQueue]:
            unlocks.append(threads.submit(query.groups.unlock, [token]))
            # The unlock may wait for the renewal, so this wait may end without it.
            wait(unlocks, 1.0)
            return lock_queues(client, group, names, seconds)

        monkeypatch.setattr("orderedmq.rocketmq.group.groups.lock_queues", overtaken)
        query.groups.renew([token])
        unlocks[0].result()
        assert broker.locks == {}
        assert query.groups.renew([token]) == [token]
        assert broker.locks == {}


@pytest.mark.holds("one owner")
@pytest.mark.parametrize("moves", [False, True], ids=["same address", "another address"])
def test_a_broker_that_restarts_does_not_grant_a_queue_that_its_owner_trusts(cluster: Cluster, moves: bool) -> None:
    """The first query has found the broker again. The second one has not yet, and still trusts its lock."""
    peer, names = cluster.scripted("a", Broker().script), cluster.nameserver()
    queues = [QUEUE, QUEUE._replace(queue_id=1)]
    with contextlib.closing(Query(names, "first")) as first, contextlib.closing(Query(names, "second")) as second:
        [[mine], [others]] = [query.lock(queue) for query, queue in zip((first, second), queues)]
        members = first.beat()
        assert len(members) == 2
        peer.close()
        cluster.scripted("a", Broker().script, port=0 if moves else peer.port)
        for client in (first.client, first.member_client()._client):
            client.doubt("T")
        assert first.groups.renew([mine]) == []
        assert first.beat() == members
        assert first.lock(queues[1]) == []
        held = second.groups._held_locks.own(others)
        assert held is not None
        assert held.trusted(time.monotonic())


def test_a_query_finds_a_broker_that_came_back_at_another_address(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat finds the new address, also for a boundary that already waits for the broker."""
    monkeypatch.setattr(membership, "LIST_TIMEOUT", 0.05)
    monkeypatch.setattr(membership, "_BEAT_TIMEOUT", 0.05)
    monkeypatch.setattr(groups, "GROUP_TIMEOUT", 20.0)
    peer = cluster.scripted("a", Broker().script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query, ThreadPoolExecutor(1) as threads:
        peer.close()
        boundary = threads.submit(query.groups.members, "g")
        cluster.scripted("a", Broker().script)

        def beats() -> bool:
            with contextlib.suppress(RocketMQUnavailableError):
                query.beat()
                return True
            return False

        began = time.monotonic()
        assert not beats()
        until(beats, "a heartbeat reaches the broker")
        assert [member.client_id for member in boundary.result()] == [query.me.client_id]
        assert time.monotonic() - began < 10
