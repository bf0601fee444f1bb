"""What a log concludes about queues that a route lacks or forbids to read: they are readable, unreadable, unknown or missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
import pytest

from orderedmq.broker import QueueBounds
from orderedmq.errors import RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.broker_port import packing_for
from orderedmq.rocketmq.codec.encode import Packing
from orderedmq.rocketmq.group.offsets import GroupOffsets
from orderedmq.rocketmq.messages import log as log_module
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net import client as client_module
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.route import BrokerData, QueueData, Route, RouteState, state_of
from tests.unit.rocketmq_peer import Cluster, Link

FIRST, SECOND = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1)


class Topic:
    """The topic T at the broker a: its permission and numbers of queues as the broker has them, not as the route says."""

    def __init__(self, cluster: Cluster, queues: int = 1) -> None:
        self.cluster = cluster
        self.exists = True
        self.read_queues = queues
        self.perm = 6
        self.pulls: list[str] = []
        cluster.counts = (queues, queues)
        self.broker = cluster.scripted("a", self._serve)

    def _serve(self, link: Link) -> None:
        for request in link.requests():
            if request.code == RequestCode.GET_TOPIC_STATS_INFO and self.cluster.fields:
                link.reply(request, 3, remark="a Proxy does not know this request")
                continue
            if request.code != RequestCode.PULL_MESSAGE:
                link.reply(request, body=b'{"offsetTable":{"T@g":{"0":0,"1":0}}}', offset="0")
                continue
            self.pulls.append(request.ext["queueId"])
            number = int(request.ext["queueId"])
            if not self.exists:
                link.reply(request, 17, remark="topic[T] not exist, apply first please!")
            elif not self.perm & 4:
                link.reply(request, 16, remark="the topic[T] pulling message is forbidden")
            elif number >= self.read_queues:
                link.reply(request, 29, remark=f"queueId[{number}] is illegal, topic:[T] topicConfig.readQueueNums:[1]")
            else:
                link.reply(request, 19, nextBeginOffset="0", minOffset="0", maxOffset="0")

    def forbid(self, perm: int = 2) -> None:
        self.perm = self.cluster.perm = perm


@pytest.fixture
def topic(cluster: Cluster) -> Topic:
    return Topic(cluster)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.nameserver().address) as connected:
        yield connected


@pytest.fixture
def log(topic: Topic, client: Client) -> RocketMQLog:
    del topic
    return RocketMQLog(client)


def pull(log: RocketMQLog, queue: MessageQueue) -> int:
    return log.pull(queue, 0, 10, 1000, ("body",)).num_rows


@pytest.mark.parametrize(
    ("read", "write", "perm", "number", "state"),
    [
        (2, 2, 6, 1, RouteState.READABLE),
        (2, 1, 4, 1, RouteState.READABLE),
        (2, 2, 2, 1, RouteState.UNREADABLE),
        (2, 2, 0, 0, RouteState.UNREADABLE),
        (1, 2, 6, 1, RouteState.UNREADABLE),
        (2, 2, 6, 2, RouteState.UNKNOWN),
    ],
)
def test_a_route_shows_a_queue_whatever_its_permission(
    read: int, write: int, perm: int, number: int, state: RouteState
) -> None:
    route = Route("T", {"a": BrokerData("a", "C", {0: "h:1"})}, (QueueData("a", read, write, perm),))
    assert state_of(MessageQueue("T", "a", number), route) is state
    assert state_of(MessageQueue("T", "b", number), route) is RouteState.UNKNOWN
    assert state_of(MessageQueue("T", "a", number), None) is RouteState.UNKNOWN
    assert len(route.reading_list()) == read
    assert len(route.all_queues()) == max(read, write)


def test_a_queue_that_is_newer_than_the_known_route_is_not_missing(log: RocketMQLog, topic: Topic, cluster: Cluster) -> None:
    assert log.queues("T") == [FIRST]
    topic.read_queues, cluster.counts = 2, (2, 2)
    assert list(log.bounds([FIRST, SECOND])) == [FIRST, SECOND]
    assert not topic.pulls, "a new route shows the queue"


def test_a_queue_that_is_newer_than_the_nameservers_route_is_not_missing(log: RocketMQLog, topic: Topic) -> None:
    topic.read_queues = 2
    assert list(log.bounds([FIRST, SECOND])) == [FIRST, SECOND]
    assert pull(log, SECOND) == 0


def test_a_groups_offset_in_a_queue_that_is_newer_than_the_known_route_is_read(
    client: Client, topic: Topic, cluster: Cluster
) -> None:
    assert GroupOffsets(client).read("g", [FIRST]) == {FIRST: 0}
    topic.read_queues, cluster.counts = 2, (2, 2)
    assert GroupOffsets(client).read("g", [FIRST, SECOND]) == {FIRST: 0, SECOND: 0}


def test_a_queue_is_missing_once_its_broker_says_so(log: RocketMQLog) -> None:
    assert list(log.bounds([FIRST, SECOND])) == [FIRST]
    assert log.stored_at({SECOND: 0, SECOND._replace(topic="missing"): 0}) == {}
    with pytest.raises(TopicError, match="NO_SUCH_QUEUE"):
        pull(log, SECOND)


def test_a_queue_of_a_broker_that_does_not_report_is_never_missing(
    log: RocketMQLog, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the nameserver has no route of its topic: a restarted one knows neither the broker nor the topic."""
    monkeypatch.setattr(log_module, "REQUEST_TIMEOUT", 1.0)
    elsewhere = MessageQueue("T", "gone", 0)
    cluster.broker("b", topic="other")
    cluster.reporting = {"a", "b"}
    for queue in (elsewhere, elsewhere._replace(topic="unknown")):
        with pytest.raises(RocketMQUnavailableError, match="NO_BROKER"):
            log.bounds([queue])
    assert log.bounds([FIRST._replace(topic="other", broker_name="b"), SECOND]) != {}


def test_the_queues_of_a_topic_that_may_not_be_read_are_listed_with_their_bounds(log: RocketMQLog, topic: Topic) -> None:
    topic.forbid()
    assert log.queues("T") == [FIRST]
    assert log.readable("T") == []
    assert log.topic("T").queues == 1
    assert log.bounds([FIRST]) == {FIRST: QueueBounds(0, 0)}
    assert log.anchor("T", {FIRST: 1}) == ""
    assert not log.is_another("T", "a/0/0@80")
    assert log.stored_at({FIRST: 0}) == {}


@pytest.mark.parametrize(
    "read", [lambda log: pull(log, FIRST), lambda log: log.advance(FIRST, 0, 10, 5)], ids=["pull", "advance"]
)
def test_a_pull_waits_until_its_queue_may_be_read(log: RocketMQLog, topic: Topic, read: Callable[[RocketMQLog], int]) -> None:
    topic.forbid()
    timer = threading.Timer(0.3, partial(topic.forbid, 6))
    timer.start()
    assert read(log) == 0
    timer.join()
    assert len(topic.pulls) > 1


@pytest.mark.parametrize("change", ["permission", "numbers"])
def test_a_queue_that_may_not_be_read_is_not_said_to_be_deleted(
    log: RocketMQLog, topic: Topic, cluster: Cluster, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "READABLE_PATIENCE", 0.3)
    cluster.counts = (1, 2)
    if change == "permission":
        topic.forbid()
    with pytest.raises(RocketMQUnavailableError, match="NOT_READABLE") as caught:
        pull(log, FIRST if change == "permission" else SECOND)
    assert "failOnDataLoss" not in caught.value.message
    assert len(topic.pulls) > 1, "the pull must be tried again"


def test_a_topic_that_has_only_queues_for_writing_is_not_empty(log: RocketMQLog, cluster: Cluster) -> None:
    cluster.counts = (0, 2)
    with pytest.raises(RocketMQUnavailableError, match="NOT_READABLE"):
        log.queues("T")
    assert log.targets("T") == [FIRST, SECOND]


# -- through a Proxy


@pytest.fixture
def proxied(cluster: Cluster, topic: Topic, client: Client) -> RocketMQLog:
    """A log of a Proxy, whose routes name the Proxy itself."""
    cluster.fields = {"MSG_REGION": "region"}
    cluster.routes["SELF_TEST_TOPIC"] = cluster.routes["T"]
    client._proxied = True
    return RocketMQLog(client)


def test_a_topic_exists_while_its_broker_has_it_although_a_proxy_has_no_route(proxied: RocketMQLog, cluster: Cluster) -> None:
    assert proxied.queues("T") == [FIRST]
    del cluster.routes["T"]
    assert proxied.queues("T") == [FIRST]
    assert list(proxied.bounds([FIRST])) == [FIRST]


def test_a_proxy_without_any_broker_is_waited_for(
    proxied: RocketMQLog, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "REQUEST_TIMEOUT", 1.0)
    monkeypatch.setattr(log_module, "NAMESERVER_TIMEOUT", 1.0)
    del cluster.routes["T"], cluster.routes["SELF_TEST_TOPIC"]
    with pytest.raises(RocketMQUnavailableError, match="NO_BROKER"):
        proxied.queues("T")


def test_a_new_process_waits_for_a_route_that_a_proxy_does_not_know_yet(proxied: RocketMQLog, cluster: Cluster) -> None:
    kept = cluster.routes.pop("T")
    timer = threading.Timer(0.3, partial(cluster.routes.__setitem__, "T", kept))
    timer.start()
    assert proxied.queues("T") == [FIRST]
    timer.join()


@pytest.mark.parametrize("known", [True, False])
def test_a_topic_is_missing_behind_a_proxy_once_its_brokers_say_so(
    proxied: RocketMQLog, topic: Topic, cluster: Cluster, known: bool
) -> None:
    if known:
        assert proxied.queues("T") == [FIRST]
    topic.exists = False
    del cluster.routes["T"]
    with pytest.raises(TopicError, match="MISSING"):
        proxied.queues("T")
    assert proxied.bounds([FIRST]) == {}


def test_a_broker_that_is_away_behind_a_proxy_is_not_said_to_lack_its_queues(
    proxied: RocketMQLog, topic: Topic, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Proxy keeps the broker in the route of another topic, and answers no request for the broker."""
    monkeypatch.setattr(client_module, "ATTEMPT_TIMEOUT", 0.1)
    monkeypatch.setattr(log_module, "REQUEST_TIMEOUT", 1.0)
    assert proxied.queues("T") == [FIRST]
    cluster.broker("b", topic="T")
    del cluster.routes["T"]["a"]
    cluster.routes["SELF_TEST_TOPIC"] = {"a": {"0": topic.broker.address}}
    topic.broker.close()
    proxied.forget("T")
    with pytest.raises(RocketMQUnavailableError):
        proxied.bounds([FIRST])


def test_rows_are_not_packed_for_a_topic_whose_type_a_proxy_cannot_get_yet(cluster: Cluster, client: Client) -> None:
    """While the topic's broker is away, a Proxy says that its type is UNSPECIFIED. The topic has the type FIFO."""
    types = ["UNSPECIFIED", "FIFO"]

    def script(link: Link) -> None:
        for request in link.requests():
            if request.code == RequestCode.SEND_MESSAGE_V2:
                kind = types.pop(0) if len(types) > 1 else types[0]
                remark = f"TopicMessageType validate failed, the expected type is {kind}, but actual type is NORMAL"
                link.reply(request, 13, remark=remark)
            else:
                link.offset(request, 0)

    cluster.scripted("a", script)
    client._proxied = True
    rows = pa.record_batch({"body": [b"x"], "sharding_key": ["k"]})
    assert packing_for(client, FIRST, rows, "here", 5.0) is not Packing.BATCH
    types[:] = ["UNSPECIFIED"]
    client.packings.clear()
    with pytest.raises(RocketMQUnavailableError, match="UNAVAILABLE"):
        packing_for(client, FIRST, rows, "here", 0.3)
