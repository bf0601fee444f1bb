"""A client of a cluster whose nameservers and brokers stop, restart, move, and are busy.

A commit for a group that does not exist must be an error. Members are connections, so each client has separate connections. Requests must
reach every nameserver.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orderedmq.endpoint import parse_nameservers
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net import client as client_module
from orderedmq.rocketmq.net import endpoints
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.wire.admin_requests import delete_topic_in_nameserver
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import max_offset, send
from tests.unit.rocketmq_peer import Cluster, Link, Peer, Script
from tests.waits import soon, until

QUEUE = MessageQueue("T", "a", 0)


@pytest.fixture
def to() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def client(*nameservers: Peer, **more: Any) -> Client:
        clients.append(Client(";".join(peer.address for peer in nameservers), **more))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


def refused_port() -> int:
    peer = Peer(lambda link: None)
    peer.close()
    return int(peer.port)


def ask(client: Client, seconds: float = 10.0, **more: Any) -> int:
    return client.call(max_offset(QUEUE), soon(seconds), topic="T", broker_name="a", **more)


# --- a connection that the network dropped silently


def test_a_repeatable_request_is_repeated_over_another_connection(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ATTEMPT_TIMEOUT", 0.3)
    monkeypatch.setattr(Connection.__init__, "__kwdefaults__", {**(Connection.__init__.__kwdefaults__ or {}), "silence": 0.1})

    def script(link: Link) -> None:
        for request in link.requests():
            if link.peer.accepted > 1:
                link.reply(request, offset="7", queueId="0", queueOffset="7")

    peer = cluster.scripted("a", script)
    client = to(cluster.nameserver())
    assert ask(client) == 7
    assert peer.accepted == 2


def test_a_request_that_is_not_repeatable_waits_until_its_deadline(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ATTEMPT_TIMEOUT", 0.1)
    peer = cluster.scripted("a", lambda link: link.wait_for_end())
    client = to(cluster.nameserver())
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError) as caught:
        client.call(send(QUEUE, b"body", "", group="g", born=0), soon(0.6), topic="T", broker_name="a")
    assert caught.value.sub == "TIMEOUT"
    assert time.monotonic() - begin >= 0.5
    assert peer.accepted == 1


# --- nameservers


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ("a:1",)),
        (" a:1 ; b:2;a:1; ", ("a:1", "b:2")),
        ("a:1,b:2", ("a:1", "b:2")),
        ("[::1]:1", ("[::1]:1",)),
        ("http://a:1", ("a:1",)),
        (" http://a:1; HTTP://b:2;a:1", ("a:1", "b:2")),
    ],
)
def test_nameserver_addresses_are_parsed(text: str, addresses: tuple[str, ...]) -> None:
    assert parse_nameservers(text) == addresses


@pytest.mark.parametrize("text", ["", " ; ", "a", "a:1;b", "a:x", "http://a", "a:1;https://b:2"])
def test_invalid_nameserver_addresses_are_refused(text: str) -> None:
    with pytest.raises(RocketMQError) as caught:
        Client(text)
    assert caught.value.sub == "ADDRESS"


def test_routes_brokers_and_topics_come_from_the_nameserver(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    peer = cluster.broker("a")
    assert client.route("T", soon()).publish_list() == (QUEUE,)
    assert client.cluster(soon()).brokers["a"].master == peer.address
    assert client.topics(soon()) == ("T",)
    with pytest.raises(TopicError) as caught:
        client.route("absent", soon())
    assert caught.value.sub == "MISSING"


def test_a_nameserver_that_knows_no_broker_says_nothing_about_topics(to: Callable[..., Client]) -> None:
    answers = [0]
    route = {"brokerDatas": [{"brokerName": "a", "cluster": "C", "brokerAddrs": {"0": "h:1"}}], "queueDatas": []}

    def script(link: Link) -> None:
        for request in link.requests():
            if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                answers[0] += 1
                if answers[0] < 4:
                    link.reply(request, 17, remark="No topic route info")
                else:
                    link.reply(request, body=json.dumps(route).encode())
            else:
                link.reply(request, body=b'{"brokerAddrTable":{},"clusterAddrTable":{}}')

    peer = Peer(script)
    client = to(peer)
    assert list(client.route("T", soon()).brokers) == ["a"]
    answers[0] = -(10**6)
    with pytest.raises(RocketMQUnavailableError, match="knows no broker") as caught:
        client.route("other", soon(2.0))
    assert caught.value.sub == "NO_BROKER"
    peer.close()


@pytest.mark.parametrize("turn", [0, 1])
def test_a_route_comes_from_another_nameserver_while_one_restarts(
    cluster: Cluster, to: Callable[..., Client], turn: int
) -> None:
    """One broker has reported to the restarted nameserver, but the broker of the topic has not."""
    anew = Cluster()
    cluster.broker("a", value=5)
    client = to(anew.nameserver(), cluster.nameserver())
    client._turn = turn
    assert ask(client) == 5
    with pytest.raises(TopicError, match="absent"):
        client.route("absent", soon())
    anew.peers[0].close()
    with pytest.raises(TopicError, match="absent"):
        client.route("absent", soon())


@pytest.mark.parametrize("turn", [0, 1])
def test_brokers_that_a_restarted_nameserver_does_not_know_yet_are_asked_of_another(
    cluster: Cluster, to: Callable[..., Client], turn: int
) -> None:
    anew = Cluster()
    anew.reporting = {"b"}
    client = to(anew.nameserver(), cluster.nameserver())
    client._turn = turn
    assert sorted(client.whole_cluster(soon()).brokers) == ["a", "b"]
    assert len(client.whole_cluster(soon(), lambda found: True).brokers) == 1
    anew.peers[0].close()
    assert list(client.whole_cluster(soon()).brokers) == ["a"]


def test_brokers_are_waited_for_while_no_nameserver_knows_any(cluster: Cluster, to: Callable[..., Client]) -> None:
    cluster.reporting.clear()
    client = to(cluster.nameserver())
    assert not client.known_cluster(soon(0.5), bool).brokers
    timer = threading.Timer(0.3, lambda: cluster.reporting.add("a"))
    timer.start()
    assert list(client.known_cluster(soon(), bool).brokers) == ["a"]
    timer.join()


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_nameserver_that_is_down_or_silent_is_passed_over(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    monkeypatch.setattr(client_module, "NAMESERVER_TIMEOUT", 0.3)
    silent = cluster.serve(lambda link: link.wait_for_end())
    good = cluster.nameserver()
    cluster.broker("a", value=5)
    client = Client(f"127.0.0.1:{refused_port()};{silent.address};{good.address}")
    client._turn = turn
    begin = time.monotonic()
    assert ask(client) == 5
    assert time.monotonic() - begin < 3
    client.doubt("T")
    assert ask(client) == 5
    # From then on, the nameserver that answered is asked first.
    assert silent.accepted <= 1
    client.close()


def test_no_nameserver_answers_until_the_deadline(to: Callable[..., Client]) -> None:
    client = Client(f"127.0.0.1:{refused_port()};127.0.0.1:{refused_port()}")
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError) as caught:
        client.route("T", soon(0.5))
    assert caught.value.sub == "UNREACHABLE"
    assert 0.1 < time.monotonic() - begin < 1.5
    client.close()


def test_waits_for_a_nameserver_that_returns_and_warns_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    port = refused_port()
    cluster.broker("a", value=3)
    client = Client(f"127.0.0.1:{port}")

    def answers() -> None:
        # The user learns at once what the client waits for.
        until(lambda: "Connection refused" in caplog.text and "Trying again for" in caplog.text, "the log warns", 3)
        cluster.nameserver(port)

    thread = threading.Thread(target=answers)
    thread.start()
    assert ask(client) == 3
    thread.join()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    client.close()


def test_trap_20_each_nameserver_can_be_told(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver(), cluster.nameserver())
    for address in client.nameservers:
        client.call_address(address, delete_topic_in_nameserver("T"), soon())
    assert {port for port, request in cluster.asked if request.code == 216} == {peer.port for peer in cluster.peers}


# --- routes


def test_a_route_is_asked_for_once_until_it_is_old(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = to(cluster.nameserver())
    cluster.broker("a", value=1)
    for _ in range(5):
        assert ask(client) == 1
    assert cluster.lookups() == 1
    assert client.route("T", soon(), fresh=True)
    assert cluster.lookups() == 2
    monkeypatch.setattr(client_module, "ROUTE_AGE", 0.0)
    ask(client)
    assert cluster.lookups() == 3


def test_the_last_route_holds_while_no_nameserver_has_one(cluster: Cluster, to: Callable[..., Client]) -> None:
    nameserver = cluster.nameserver()
    client = to(nameserver)
    cluster.broker("a", value=1)
    assert ask(client) == 1
    kept = cluster.routes.pop("T")
    client.doubt("T")
    assert ask(client) == 1, "the old route must hold while a restarted nameserver has none"
    with pytest.raises(TopicError):
        client.route("T", soon(), fresh=True)
    cluster.routes["T"] = kept
    nameserver.close()
    client.doubt("T")
    assert ask(client) == 1


def queues_at(client: Client, *, fresh: bool = False) -> list[str]:
    return [queue.broker_name for queue in client.route("T", soon(), fresh=fresh).publish_list()]


def knowing_two(cluster: Cluster, to: Callable[..., Client]) -> Client:
    """A client with a route of T to the brokers a, which answers 1, and b."""
    client = to(cluster.nameserver())
    for value, name in enumerate("ab", 1):
        cluster.broker(name, value=value)
    cluster.reporting = {"a", "b"}
    assert queues_at(client) == ["a", "b"]
    return client


@pytest.mark.parametrize("fresh", [False, True])
def test_a_broker_that_has_not_reported_to_a_restarted_nameserver_yet_keeps_its_queues(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    client = knowing_two(cluster, to)
    kept = cluster.routes["T"].pop("a")
    cluster.reporting = {"b"}
    client.doubt("T")
    assert queues_at(client, fresh=fresh) == ["a", "b"]
    assert ask(client) == 1, "requests must still go to a broker that has not reported yet"
    # The route is kept for as long as a broker may take to report.
    monkeypatch.setattr(client_module, "UNKNOWN_BROKER_LIFE", 0.0)
    client.doubt("T")
    assert queues_at(client, fresh=fresh) == ["b"]
    cluster.routes["T"]["a"] = kept
    client.doubt("T")
    assert queues_at(client, fresh=fresh) == ["a", "b"]


def test_a_broker_that_reports_and_is_not_in_the_route_has_the_topic_no_more(
    cluster: Cluster, to: Callable[..., Client]
) -> None:
    client = knowing_two(cluster, to)
    del cluster.routes["T"]["a"]
    assert queues_at(client, fresh=True) == ["b"]


def test_a_broker_that_reports_while_the_nameserver_is_asked_is_not_taken_for_one_without_the_topic(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = knowing_two(cluster, to)
    kept = cluster.routes["T"].pop("a")
    before = client.cluster

    def cluster_info(deadline: float) -> Any:
        cluster.routes["T"]["a"] = kept
        return before(deadline)

    monkeypatch.setattr(client, "cluster", cluster_info)
    assert queues_at(client, fresh=True) == ["a", "b"]
    assert client._routes["T"].unknown == {}


def test_a_broker_that_moved_is_found_within_the_deadline(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    old = cluster.broker("a", value=1)
    assert ask(client) == 1
    old.close()
    cluster.broker("a", value=2)
    assert ask(client) == 2
    assert cluster.lookups() == 2


def test_a_broker_that_is_restarted_is_found_again(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    first = cluster.broker("a", value=1)
    assert ask(client) == 1
    first.close()
    timer = threading.Timer(0.5, lambda: cluster.broker("a", value=2, port=first.port))
    timer.start()
    assert ask(client) == 2
    timer.join()


def test_requests_go_to_the_named_replica_or_to_any(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    cluster.broker("a", value=1)
    cluster.broker("a", value=2, broker_id=1)
    assert [ask(client, broker_id=i) for i in (0, 1)] == [1, 2]
    assert ask(client, broker_id=7, any_replica=True) == 1
    del cluster.routes["T"]["a"]["0"]
    client.doubt("T")
    assert ask(client, any_replica=True) == 2
    with pytest.raises(RocketMQUnavailableError) as caught:
        ask(client, 0.2)
    assert caught.value.sub == "NO_BROKER"
    assert "master" in caught.value.message
    timer = threading.Timer(0.3, lambda: cluster.broker("a", value=3))
    timer.start()
    assert ask(client) == 3
    timer.join()


# --- retries


def answers(*codes: int) -> Script:
    """A broker that answers with these codes in turn, over all connections, and then with 0."""
    left = list(codes)

    def script(link: Link) -> None:
        for request in link.requests():
            code = left.pop(0) if left else 0
            if code < 0:
                return
            link.reply(request, code, offset="9", queueId="0", queueOffset="9")

    return script


@pytest.mark.parametrize("codes", [(2,), (2, 2, 215), (14, 2), (1500,), (-1,), (-1, 2, -1, 14)])
def test_a_passing_error_is_retried(cluster: Cluster, to: Callable[..., Client], codes: tuple[int, ...]) -> None:
    client = to(cluster.nameserver())
    cluster.scripted("a", answers(*codes))
    assert ask(client) == 9


def test_a_busy_broker_is_an_error_at_the_deadline(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    cluster.scripted("a", answers(*[2] * 1000))
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError) as caught:
        ask(client, 0.4)
    assert caught.value.sub == "BUSY"
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("code", [1, 16, 17, 26, 29])
def test_a_permanent_error_is_not_retried(cluster: Cluster, to: Callable[..., Client], code: int) -> None:
    client = to(cluster.nameserver())
    cluster.scripted("a", answers(code))
    with pytest.raises(OrderedMQError) as caught:
        ask(client)
    assert not caught.value.retriable


def test_a_send_without_an_answer_is_not_sent_again(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    peer = cluster.scripted("a", answers(-1))
    message = send(QUEUE, b"x", "", group="g", born=0)
    with pytest.raises(RocketMQUnavailableError) as caught:
        client.call(message, soon(), topic="T", broker_name="a")
    assert caught.value.outcome_unknown
    assert peer.accepted == 1
    assert client.call(message, soon(), topic="T", broker_name="a").queue_offset == 9


def test_a_send_that_was_refused_for_now_is_sent_again(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    cluster.scripted("a", answers(2))
    assert client.call(send(QUEUE, b"x", "", group="g", born=0), soon(), topic="T", broker_name="a").queue_offset == 9


def test_an_unknown_outcome_stays_unknown_after_later_attempts(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())

    def script(link: Link) -> None:
        link.read()
        link.peer.deafen()

    peer = cluster.scripted("a", script)
    with pytest.raises(RocketMQUnavailableError) as caught:
        ask(client, 0.5)
    assert caught.value.outcome_unknown
    assert peer.accepted == 1


# --- connections


def test_threads_share_the_connection_of_a_client(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    peer = cluster.broker("a", value=4)
    client.route("T", soon())
    ends: list[int] = []
    threads = [threading.Thread(target=lambda: ends.append(ask(client))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [4] * 16
    assert peer.accepted == 1


def test_an_idle_connection_is_replaced_before_the_server_ends_it(
    cluster: Cluster, to: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = to(cluster.nameserver())
    peer = cluster.broker("a", value=4)
    ask(client)
    first = client.connection(peer.address, soon())
    monkeypatch.setattr(endpoints, "MAX_IDLE", 0.0)
    time.sleep(0.01)
    second = client.connection(peer.address, soon())
    assert first.closed
    assert second is not first
    assert ask(client) == 4


def test_connecting_waits_longer_after_each_failure(to: Callable[..., Client]) -> None:
    address = f"127.0.0.1:{refused_port()}"
    client = Client(address)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        with pytest.raises(RocketMQUnavailableError, match="cannot connect"):
            client.connection(address, deadline)
        time.sleep(0.001)
    # Pauses of 50, 100, 200 and 400 ms, each randomly shortened by at most half.
    assert 2 <= client._endpoints.by_address[address].failures <= 7
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError):
        client.connection(address, soon(), wait=False)
    assert time.monotonic() - begin < 0.5
    client.close()


def test_close_ends_waiting_and_everything_after(cluster: Cluster, to: Callable[..., Client]) -> None:
    client = to(cluster.nameserver())
    cluster.scripted("a", lambda link: link.wait_for_end())
    errors: list[OrderedMQError] = []

    def waiting(broker: str) -> None:
        with pytest.raises(RocketMQError) as caught:
            client.call(max_offset(QUEUE), soon(60), topic="T", broker_name=broker)
        errors.append(caught.value)

    threads = [threading.Thread(target=waiting, args=(broker,)) for broker in ("a", "away")]
    for thread in threads:
        thread.start()
    endpoints_by_address = client._endpoints.by_address
    until(
        lambda: any(endpoint.connection and endpoint.connection.in_flight for endpoint in list(endpoints_by_address.values()))
    )
    time.sleep(0.2)
    begin = time.monotonic()
    client.close()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 3
    assert {error.sub for error in errors} <= {"CLOSED", "CONNECTION_LOST"}
    with pytest.raises(RocketMQError) as caught:
        ask(client)
    assert caught.value.sub == "CLOSED"
    client.close()


def test_secrets_are_in_no_repr() -> None:
    from orderedmq.endpoint import Credentials

    with Client("h:1", credentials=Credentials("ak", "my-secret")) as client:
        assert "my-secret" not in repr(client)
