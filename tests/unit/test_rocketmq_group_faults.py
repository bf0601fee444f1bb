"""Members, locks and offsets of a group while brokers move, topics are deleted and clocks differ.

The brokers are on loopback and keep members, locks and offsets as real ones do. A member's connection is its membership.

This module is long because its faults need the same brokers, clients and clocks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest

from orderedmq.broker import PROGRESS_INTERVAL, Progress
from orderedmq.conditions import LockCondition
from orderedmq.errors import GroupError, LockError, RocketMQUnavailableError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import ClientIdentity, LockToken, Refusal
from orderedmq.ownership.membership import Subscription
from orderedmq.ownership.offsets import Checkpoint
from orderedmq.ownership.owner import Owner, Policy
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.group import groups, lock_rules, membership
from orderedmq.rocketmq.group.groups import RocketMQGroups
from orderedmq.rocketmq.group.locks import HeldLock
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.fan_out import lock_queues
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from tests.unit.rocketmq_peer import Cluster, Link, Peer
from tests.waits import until

QUEUE = MessageQueue("T", "a", 0)


class Broker:
    """A broker's members, locks and numbers. ``deleted``: topics for which it takes no offset, as from 5.3 on.

    ``reset``: queues of which it takes no offset until a pull accepts the reset by RocketMQ's own tools.
    """

    def __init__(self, numbers: Mapping[tuple[str, str], str] = {}) -> None:
        """``numbers``: those that the broker wrote to disk before a restart."""
        self.members: dict[str, Link] = {}
        self.locks: dict[str, str] = {}
        self.numbers = dict(numbers)
        self.deleted: set[str] = set()
        self.reset: set[tuple[str, str]] = set()
        self.requests: list[RemotingCommand] = []

    def forget(self, *queues: MessageQueue) -> None:
        """Forget these numbers, as a killed broker forgets those of its last 5 s."""
        for queue in queues:
            del self.numbers[queue.topic, str(queue.queue_id)]

    def script(self, link: Link) -> None:
        try:
            for request in link.requests():
                self.answer(link, request)
        finally:
            self.members = {name: one for name, one in self.members.items() if one is not link}

    def answer(self, link: Link, request: RemotingCommand) -> None:
        place = request.ext.get("topic", ""), request.ext.get("queueId", "")
        self.requests.append(request)
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
            case RequestCode.UPDATE_CONSUMER_OFFSET if place in self.reset:
                link.reply(request, remark="Offset has been previously reset")
            case RequestCode.PULL_MESSAGE:
                self.reset.discard(place)
                link.reply(request, ResponseCode.PULL_NOT_FOUND, nextBeginOffset="0", minOffset="0", maxOffset="0")
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

    def lock(self, *queues: MessageQueue, tenures: Mapping[MessageQueue, int] | None = None) -> list[LockToken]:
        answers = self.groups.lock("g", self.me, queues, tenures)
        return [answer for answer in answers.values() if isinstance(answer, LockToken)]

    def owner(self) -> Owner:
        """An Owner of this query, as of a run that begins."""
        return Owner(self.me.owner, policy=Policy.HAND_OVER, lineage=False)

    def held(self, token: LockToken) -> HeldLock:
        held = self.groups._held_locks.own(token)
        assert held is not None
        return held

    def member_client(self) -> Any:
        return self.groups._member_clients[self.me.client_id]

    def close(self) -> None:
        for member in self.groups._member_clients.values():
            member._client.close()
        self.client.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.routes["T"] = {}
        yield cluster


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
        with pytest.raises(LockError) as caught:
            query.groups.commit({token: 60})
        assert caught.value.sub == LockCondition.LOST
        assert query.groups.stale([token]) == [token], "a refused commit must be known immediately"
        assert query.groups.offsets("g", [QUEUE]) == {QUEUE: 10 if how == "seek" else 50}
        assert query.groups.renew([token]) == [token]


@pytest.mark.holds("newer format")
@pytest.mark.parametrize("use", ["lock", "seek"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_group_with_numbers_of_a_newer_version_is_refused_before_a_number_changes(
    cluster: Cluster, use: str, owned: bool
) -> None:
    broker = Broker({("T", str(registers.fence(QUEUE).queue_id)): str(1 << 62 | 6 | owned), ("T", "0"): "5"})
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        admin, before = RocketMQAdmin(query.client, query.log), dict(broker.numbers)
        uses: dict[str, Callable[[], object]] = {
            "lock": lambda: query.lock(QUEUE),
            "seek": lambda: admin.seek("g", {QUEUE: 1}, force=True),
        }
        with pytest.raises(GroupError) as caught:
            uses[use]()
        assert caught.value.condition == "ORDEREDMQ_GROUP.NEWER_FORMAT"
        assert "group 'g'" in caught.value.message
        assert (broker.numbers, broker.locks) == (before, {})


def test_a_query_whose_queue_a_newer_version_has_taken_loses_its_lock(cluster: Cluster) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        broker.numbers["T", str(registers.fence(QUEUE).queue_id)] = str(1 << 62 | 7)
        with pytest.raises(LockError) as caught:
            query.groups.commit({token: 5})
        assert caught.value.sub == LockCondition.LOST


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


def test_a_topic_that_is_being_deleted_does_not_stop_the_grant_and_the_unlock_of_other_topics(cluster: Cluster) -> None:
    """A query locks queues that it has listed a moment ago. It finds out which messages are lost when it reads the queues."""
    broker = Broker()
    queues = [MessageQueue(topic, "a", number) for topic in ("gone", "T") for number in range(2)]
    for topic in ("gone", "T"):
        cluster.scripted("a", broker.script, topic=topic)
    broker.deleted = {"gone"}
    with contextlib.closing(Query(cluster.nameserver(), "q", "T,gone", "exclusive")) as query:
        tokens = query.lock(*queues)
        assert [token.queue for token in tokens] == queues
        granted = query.groups._offsets.fences("g", queues)
        assert [fence > 0 for fence in granted.values()] == [False, False, True, True]
        assert query.groups.stale(tokens) == []
        query.groups.unlock(tokens)
        unlocked = query.groups._offsets.fences("g", queues)
        assert [unlocked[queue] > granted[queue] for queue in queues] == [False, False, True, True]


def test_a_topic_that_is_being_deleted_does_not_keep_the_tenures_of_other_topics(cluster: Cluster) -> None:
    broker = Broker()
    queues = [MessageQueue(topic, "a", number) for topic in ("gone", "T") for number in range(2)]
    for topic in ("gone", "T"):
        cluster.scripted("a", broker.script, topic=topic)
    with contextlib.closing(Query(cluster.nameserver(), "q", "T,gone", "exclusive")) as query:
        tokens = query.lock(*queues)
        broker.deleted = {"gone"}
        query.groups.end_tenures("g", {token.queue: token.tenure for token in tokens})
        assert list(query.groups._offsets.tenures("g", queues[2:]).values()) == [0, 0]


def test_a_broker_that_the_nameserver_did_not_know_when_the_query_joined_has_the_member_when_it_grants_a_lock(
    cluster: Cluster,
) -> None:
    """Otherwise tasks would wait for their driver's membership there, and call the lock lost before the driver's next heartbeat."""
    brokers = {name: Broker() for name in "ab"}
    for name in "ab":
        cluster.scripted(name, brokers[name].script)
    cluster.reporting = {"a", "b"}
    late = cluster.routes["T"].pop("a")
    with contextlib.closing(Query(names := cluster.nameserver(), "q", assignment="exclusive")) as query:
        # Both of the query's clients keep this route.
        assert query.lock(MessageQueue("T", "b", 0))
        cluster.routes["T"]["a"] = late
        [token] = query.lock(QUEUE)
        assert query.me.client_id in brokers["a"].members
        with contextlib.closing(Query(names, "task")) as task:
            assert task.groups.check(token)


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


@pytest.mark.holds("late renewal")
@pytest.mark.parametrize("meanwhile", ["nobody", "another query", "a Java consumer", "another owner now"])
def test_a_lock_that_was_not_renewed_in_time_is_lost_only_if_another_had_the_queue(cluster: Cluster, meanwhile: str) -> None:
    """Its broker or this process was paused. The lock lives 60 s at the broker, and is trusted for 30 s."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(names := cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.groups.commit({token: 50})
        query.held(token).confirmed -= 61
        if meanwhile != "nobody":
            broker.locks.clear()
        if meanwhile == "a Java consumer":
            broker.numbers["T", "0"] = "60"
        if meanwhile.startswith("another"):
            with contextlib.closing(Query(names, "other")) as other:
                other.groups.trust = 0.0
                theirs = other.lock(QUEUE)
                if meanwhile == "another query":
                    other.groups.unlock(theirs)
        lost = [] if meanwhile == "nobody" else [token]
        assert query.groups.stale([token]) == query.groups.renew([token]) == lost
        if lost:
            with pytest.raises(LockError):
                query.groups.commit({token: 70})
        else:
            query.groups.commit({token: 70})
            assert query.groups.offsets("g", [QUEUE]) == {QUEUE: 70}
            query.held(token).confirmed -= 61
            assert query.lock(QUEUE) == [token]


def test_an_owner_that_came_between_the_fence_and_the_lock_of_a_late_renewal_is_noticed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(names := cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.held(token).confirmed -= 61
        broker.locks.clear()

        def overtaken(
            client: Client, group: str, names_by_queue: Mapping[MessageQueue, str], seconds: float
        ) -> set[MessageQueue]:
            monkeypatch.undo()
            with contextlib.closing(Query(names, "other")) as other:
                other.groups.trust = 0.0
                other.groups.unlock(other.lock(QUEUE))
            return lock_queues(client, group, names_by_queue, seconds)

        monkeypatch.setattr("orderedmq.rocketmq.group.groups.lock_queues", overtaken)
        assert query.groups.renew([token]) == [token]


@pytest.mark.holds("late renewal")
def test_a_broker_that_is_away_for_long_costs_no_lock(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RENEW_TIMEOUT", "GROUP_TIMEOUT"):
        monkeypatch.setattr(groups, name, 0.2)
    peer = cluster.scripted("a", (before := Broker()).script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        peer.close()
        query.held(token).confirmed -= 35
        for call in (query.groups.renew, query.groups.stale):
            with pytest.raises(RocketMQUnavailableError):
                call([token])
        cluster.scripted("a", Broker(before.numbers).script, port=peer.port)
        monkeypatch.setattr(groups, "GROUP_TIMEOUT", 25.0)
        assert query.groups.stale([token]) == []
        assert query.held(token).trusted(time.monotonic())


@pytest.mark.holds("group offset")
def test_offsets_that_a_killed_broker_forgot_are_committed_again_before_an_unlock(cluster: Cluster) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        for linger in (0.0, 20.0):
            [token] = query.lock(QUEUE)
            query.groups.commit({token: 50})
            broker.forget(QUEUE)
            broker.requests.clear()
            query.groups.unlock([token], linger)
            codes = [request.code for request in broker.requests]
            assert broker.numbers["T", "0"] == "50"
            assert (RequestCode.UNLOCK_BATCH_MQ in codes) == (not linger)
            if not linger:
                unlock = codes.index(RequestCode.UNLOCK_BATCH_MQ)
                assert RequestCode.UPDATE_CONSUMER_OFFSET in codes[:unlock]
                # The fence is raised before as well, or a task that checks its lock afterwards would take the queue again.
                assert RequestCode.UPDATE_CONSUMER_OFFSET not in codes[unlock:]


@pytest.mark.holds("group offset")
def test_a_reset_is_not_undone_by_an_unlock(cluster: Cluster) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.groups.commit({token: 50})
        RocketMQAdmin(query.client, query.log).seek("g", {QUEUE: 10}, force=True)
        query.groups.unlock([token])
        assert broker.numbers["T", "0"] == "10"


@pytest.mark.holds("group offset")
def test_a_reset_by_rocketmqs_tools_is_recorded_before_it_is_accepted(cluster: Cluster) -> None:
    """If the query is killed in between, the next run must not follow its checkpoint."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        broker.reset.add(("T", "0"))
        with pytest.raises(LockError) as caught:
            query.groups.commit({token: 50})
        assert caught.value.sub == LockCondition.LOST
        requests = [(request.code, request.ext.get("queueId")) for request in broker.requests]
        record = RequestCode.UPDATE_CONSUMER_OFFSET, str(registers.reset(QUEUE).queue_id)
        assert requests.index(record) < requests.index((RequestCode.PULL_MESSAGE, "0"))
        assert not broker.reset


BOOK = "consume_orderly books.book"


def test_progress_that_is_recorded_late_does_not_count_after_a_seek(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task is paused between its check of the lock and the request that records."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        offsets = query.groups._offsets
        write = offsets.write

        def pause(group: str, numbers: Mapping[MessageQueue, int], seconds: float = 1.0) -> list[MessageQueue]:
            monkeypatch.setattr(offsets, "write", write)
            offsets.record_resets(group, offsets.next_epochs(group, [QUEUE]))
            return write(group, numbers, seconds)

        monkeypatch.setattr(offsets, "write", pause)
        query.groups.record_progress(token, Progress(7), BOOK)
        assert broker.numbers["T", str(registers.progress(QUEUE).queue_id)] != "0"
        assert query.groups.progress(token, BOOK) == Progress()


def test_progress_does_not_count_with_the_lot_of_a_former_record(cluster: Cluster) -> None:
    """The group has passed the former one since. The lot was deleted, and is filled again."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.groups.record_progress(token, Progress(9, 3), BOOK)
        query.groups._offsets.forget_progress("g", {QUEUE: Progress(9, 3)})
        query.groups.record_progress(token, Progress(12), BOOK)
        assert query.groups.progress(token, BOOK) == Progress(12)


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_progress_counts_with_the_lot_for_which_it_was_recorded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """A process is killed between the requests that record an offset in the queue and one in its lot."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.groups.record_progress(token, Progress(9, 3), BOOK)
        offsets = query.groups._offsets
        write, requests = offsets.write, iter(range(writes))

        def killed(group: str, numbers: Mapping[MessageQueue, int], seconds: float = 1.0) -> list[MessageQueue]:
            next(requests)
            return write(group, numbers, seconds)

        monkeypatch.setattr(offsets, "write", killed)
        with contextlib.suppress(StopIteration):
            query.groups.record_progress(token, Progress(5, 8), BOOK)
        counts = {0: Progress(9, 3), 3: Progress(5, 8)}
        assert query.groups.progress(token, BOOK) == counts.get(writes, Progress())


def test_progress_that_the_group_has_passed_does_not_count_again_after_a_reset_by_rocketmqs_tools(cluster: Cluster) -> None:
    """Tools that set an offset back while no query runs leave no other trace."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        query.groups.record_progress(token, Progress(80), BOOK)
        for offset, progress in ((50, Progress(80)), (80, Progress())):
            query.held(token).moved -= PROGRESS_INTERVAL
            query.groups.commit({token: offset})
            assert query.groups.progress(token, BOOK) == progress
        query.groups.record_progress(token, Progress(90, 4), BOOK)
        query.held(token).moved -= PROGRESS_INTERVAL
        query.groups.commit({token: 90})
        assert query.groups.progress(token, BOOK) == Progress(90, 4), (
            "the group has not passed the parking lot's messages below 4"
        )


@pytest.mark.holds("wall clock")
def test_a_queue_that_a_clock_ahead_has_reset_is_not_reset_again_after_its_next_grant(
    cluster: Cluster, clock_ahead: SimpleNamespace
) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        clock_ahead.seconds = 600
        offsets = query.groups._offsets
        offsets.record_resets("g", offsets.next_epochs("g", [QUEUE]))
        clock_ahead.seconds = 0
        [token] = query.lock(QUEUE)
        owner = query.owner()
        owner.locked([token])
        assert not owner.reset_since(QUEUE, Checkpoint("q", {QUEUE: 5}, gen={QUEUE: token.tenure}))


def test_a_renewal_stores_a_fence_again_that_a_killed_broker_forgot(cluster: Cluster) -> None:
    """Otherwise a restarted query could not see that the queue has had another owner."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query:
        [token] = query.lock(QUEUE)
        fences = query.groups._offsets.fences("g", [QUEUE])
        broker.forget(registers.fence(QUEUE))
        assert query.groups.renew([token]) == []
        assert query.groups._offsets.fences("g", [QUEUE]) == fences


@pytest.mark.holds("one owner")
@pytest.mark.parametrize("returns", [True, False], ids=["the owner returns", "the owner is dead"])
def test_a_member_that_joins_while_a_broker_restarts_gets_no_queue_of_a_living_owner(cluster: Cluster, returns: bool) -> None:
    """The broker knows neither the owner nor its lock before the owner's next heartbeat, and the new member has never seen the owner."""
    peer, names = cluster.scripted("a", (before := Broker()).script), cluster.nameserver()
    free = QUEUE._replace(queue_id=1)
    with contextlib.closing(Query(names, "owner")) as owner:
        token, given_back = owner.lock(QUEUE, free)
        owner.groups.unlock([given_back])
        peer.close()
        cluster.scripted("a", Broker(before.numbers).script, port=peer.port)
        with contextlib.closing(Query(names, "new")) as new:
            answers = new.groups.lock("g", new.me, [QUEUE, free])
            assert isinstance(answers[free], LockToken), "a queue that was given back may be taken"
            refusal = answers[QUEUE]
            assert isinstance(refusal, Refusal)
            assert refusal.unsure
            if returns:
                assert owner.groups.renew([token]) == []
                assert len(owner.beat()) == 2
                assert new.lock(QUEUE) == []
                owner.groups.unlock([token])
            else:
                new.groups.trust = 0.0
            assert [one.queue for one in new.lock(QUEUE)] == [QUEUE]


def test_a_new_member_gets_the_queues_of_a_query_that_stopped_within_a_batch_when_their_locks_expire(cluster: Cluster) -> None:
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(names := cluster.nameserver(), "owner")) as owner:
        [token] = owner.lock(QUEUE)
        owner.groups.unlock([token], 20.0)
        assert owner.groups._offsets.fences("g", [QUEUE])[QUEUE] < token.epoch, "tasks may still work under the token"
        with contextlib.closing(Query(names, "new")) as new:
            assert new.lock(QUEUE) == []
            broker.locks.clear()
            [others] = new.lock(QUEUE)
            assert others.epoch > token.epoch


@pytest.mark.holds("killed owner")
def test_a_restarted_query_gets_its_queues_at_once_from_a_broker_that_restarted_too(cluster: Cluster) -> None:
    peer, names = cluster.scripted("a", (before := Broker()).script), cluster.nameserver()
    with contextlib.closing(Query(names, "q")) as killed:
        assert len(killed.lock(QUEUE)) == 1
        peer.close()
    cluster.scripted("a", Broker(before.numbers).script, port=peer.port)
    with contextlib.closing(Query(names, "q")) as again:
        assert len(again.lock(QUEUE)) == 1


@pytest.mark.holds("shared source to sink")
@pytest.mark.parametrize("meanwhile", ["killed", "killed twice", "gave back", "another query", "a Java consumer", "seek"])
def test_a_restarted_query_of_a_shared_group_repeats_its_batch_if_nobody_else_had_the_queue(
    cluster: Cluster, meanwhile: str
) -> None:
    """Its last batch was logged, but the group's offset is that of the batch before."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    with contextlib.closing(Query(names := cluster.nameserver(), "q")) as former:
        [token] = former.lock(QUEUE)
        former.groups.commit({token: 10})
        tenures = {QUEUE: token.tenure}
        if meanwhile != "killed":
            former.groups.unlock([token])
    match meanwhile:
        case "killed twice":
            with contextlib.closing(Query(names, "q")) as again:
                again.lock(QUEUE, tenures=tenures)
        case "another query":
            with contextlib.closing(Query(names, "other")) as other:
                other.groups.unlock(other.lock(QUEUE))
        case "a Java consumer":
            broker.numbers["T", "0"] = "20"
    with contextlib.closing(Query(names, "q")) as again:
        if meanwhile == "seek":
            RocketMQAdmin(again.client, again.log).seek("g", {QUEUE: 5}, force=True)
        owner = again.owner()
        owner.locked(again.lock(QUEUE, tenures=tenures))
        start, end = (Checkpoint("q", {QUEUE: at}, {}, tenures) for at in (10, 20))
        owner.replay(start, end, again.groups.offsets("g", [QUEUE]))
        same = meanwhile in ("killed", "killed twice", "gave back")
        assert owner.in_flight() == ({QUEUE: OffsetRange(10, 20)} if same else {})


@pytest.mark.holds("former run")
def test_a_queue_that_a_repeated_batch_leaves_out_is_entered_at_the_groups_offset(cluster: Cluster) -> None:
    """A Java consumer holds the queue while the batch is repeated, and ends without a commit. Spark has committed the batch."""
    broker = Broker()
    cluster.scripted("a", broker.script)
    names = cluster.nameserver()
    with contextlib.closing(Query(names, "q")) as former:
        [token] = former.lock(QUEUE)
        former.groups.commit({token: 10})
    end = Checkpoint("q", {QUEUE: 20}, {}, {QUEUE: token.tenure})
    with contextlib.closing(Query(names, "q")) as repeating:
        repeating.groups.end_tenures("g", end.gen)
    with contextlib.closing(Query(names, "q")) as again:
        owner = again.owner()
        owner.locked(again.lock(QUEUE, tenures=end.gen))
        owner.enter(end, again.groups.offsets("g", [QUEUE]), {})
        assert owner.owned[QUEUE].position == 10


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
        assert first.lock(queues[1]) == [], "a boundary may come before the next heartbeat"
        assert first.groups.renew([mine]) == []
        assert first.beat() == members
        assert first.lock(queues[1]) == []
        held = second.groups._held_locks.own(others)
        assert held is not None
        assert held.trusted(time.monotonic())


def test_members_locks_and_joins_wait_for_a_broker_that_is_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each single request for members or locks times out long before the broker is back."""
    for name in ("LIST_TIMEOUT", "_BEAT_TIMEOUT"):
        monkeypatch.setattr(membership, name, 0.05)
    peer = cluster.scripted("a", Broker().script)
    with contextlib.closing(Query(cluster.nameserver(), "q")) as query, ThreadPoolExecutor(3) as threads:
        joining = query.groups.join("joining")
        peer.close()
        listed = threads.submit(query.groups.members, "g")
        locked = threads.submit(query.groups.lock, "g", query.me, [QUEUE])
        joined = threads.submit(query.groups.heartbeat, "g", joining, query.subscription)
        time.sleep(0.2)
        assert not any(call.done() for call in (listed, locked, joined))
        cluster.scripted("a", Broker().script, port=peer.port)
        assert isinstance(locked.result()[QUEUE], LockToken)
        assert joining.client_id in [member.client_id for member in joined.result()]
        assert listed.result()


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
