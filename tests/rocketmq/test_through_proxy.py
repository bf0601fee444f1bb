"""RocketMQ's own Proxy before brokers of the newest release: what works through it, and what is refused by name."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import orderedmq
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, consume_orderly
from orderedmq.broker import Broker, SinkBatch
from orderedmq.cli import app
from orderedmq.conditions import RocketMQCondition
from orderedmq.core.filters import Filter
from orderedmq.core.message_trace import TracedCall, TracedMessage
from orderedmq.core.parking import Put, Ticket
from orderedmq.errors import RocketMQError, TopicError
from orderedmq.model import PARKED_PREFIX, MessageQueue
from orderedmq.pulls import pulls
from orderedmq.rocketmq.local.probe import ask, find_free_port
from orderedmq.rocketmq.local.servers import Broker as LocalBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests
from tests.contract.support import locked, rows
from tests.jars import jars_required
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.outbox_world import SHORT_SENDS, World, numbered, spoil
from tests.rocketmq.peers import Peers
from tests.rocketmq.proxy import Connection, Path, Way
from tests.rocketmq.proxy import Proxy as CutProxy
from tests.rocketmq.rocketmq_proxy import ProxyServer
from tests.rocketmq.test_spark import Rig, in_order, rigged, sender
from tests.rocketmq.test_static_and_acting import make_static_topic
from tests.waits import soon, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def proxy(newest: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyServer]:
    made = ProxyServer(tmp_path_factory.mktemp("rocketmq-proxy"), newest)
    with jars_required():
        made.start()
    yield made
    made.stop()


@pytest.fixture
def direct(newest: Cluster) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=newest.address) as broker:
        yield broker


@pytest.fixture
def through(proxy: ProxyServer) -> Iterator[Broker]:
    with orderedmq.connect(namesrv_addr=proxy.address) as broker:
        yield broker


@pytest.fixture
def rig(
    spark: SparkSession, newest: Cluster, proxy: ProxyServer, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    """Queries go through the Proxy; topics are made at the brokers."""
    for made in rigged(spark, newest, tmp_path, request):
        made.address = proxy.address
        yield made


def bodies(broker: Broker, topic: str) -> dict[int, list[str]]:
    """The bodies of each queue of both brokers, in order."""
    out: dict[int, list[str]] = {}
    for number, (queue, at) in enumerate(broker.log.bounds(broker.log.queues(topic)).items()):
        pulled = pulls(broker.log, queue, at.min_offset, at.max_offset, 1000, 1 << 24, ("body",))
        out[number] = [body.decode() for batch in pulled for body in batch.column(0).to_pylist()]
    return out


def test_a_query_reads_and_writes_through_a_proxy_and_goes_on_there_after_a_restart(
    rig: Rig, newest: Cluster, proxy: ProxyServer, peers: Peers
) -> None:
    source, target = rig.topic("in"), rig.topic("out")
    send = sender(peers, newest.address)
    send(source, range(300))
    rig.write(rig.stream(source), target)
    in_order(bodies(rig.broker, target), 300)
    with orderedmq.connect(namesrv_addr=proxy.address) as broker:
        ends = {queue: at.max_offset for queue, at in broker.log.bounds(broker.log.queues(source)).items()}
        assert len({queue.broker_name for queue in ends}) == 2
        assert broker.groups.offsets(rig.group, list(ends)) == ends
    send(source, range(300, 400))
    rig.write(rig.stream(source), target)
    in_order(bodies(rig.broker, target), 400)


def test_a_listener_puts_a_poison_message_aside_through_a_proxy(rig: Rig, direct: Broker) -> None:
    source = rig.topic("in", 2)
    direct.log.append(direct.log.queues(source)[0], rows([b"good", b"poison", b"after"]))

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        if bytes(messages[0].body) == b"poison":
            raise ValueError("poison")
        return ConsumeOrderlyStatus.SUCCESS

    stream = rig.stream(source, includeLockToken="true")
    done = consume_orderly(stream, listener, max_reconsume_times=0)
    query = done.writeStream.format("noop").option("checkpointLocation", str(rig.folder / "ck")).trigger(availableNow=True)
    query.start().awaitTermination()
    assert [texts for texts in bodies(direct, f"%DLQ%{rig.group}").values() if texts] == [["poison"]]


@pytest.mark.slow
def test_a_java_consumer_and_this_package_divide_the_queues_through_a_proxy(
    rig: Rig, newest: Cluster, proxy: ProxyServer, peers: Peers
) -> None:
    source, target = rig.topic("in"), rig.topic("out")
    # A Java producer's messages have keys: a Proxy wants another type of topic for them than for batches.
    send = sender(peers, newest.address)
    java = peers.consumer(proxy.address, rig.group, source, lambda _: True)
    until(lambda: len(java.queues) == 4, "Java has all queues")
    query = rig.write(rig.stream(source, assignment="shared"), target, now=False)
    until(lambda: len(java.queues) == 2, "Java has half of the queues")
    send(source, range(100))
    until(
        lambda: sum(map(len, bodies(rig.broker, target).values())) + len(java.received) == 100, "both have read what is theirs"
    )
    java.stop()
    query.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        lambda at: Path(down=Way(cut_after=at.down)),
        lambda at: Path(down=Way(hold_after=at.down)),
        lambda at: Path(up=Way(cut_after=at.up + 500, reset=True)),
    ],
    ids=["answer lost", "answer held", "request without its body"],
)
def test_a_send_that_is_cut_on_its_way_to_a_proxy_leaves_each_row_once(
    newest: Cluster, proxy: ProxyServer, path: Callable[[Connection], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.codec.encode.TARGET_BYTES", 2000)
    names = numbered(60)
    with World(newest, SHORT_SENDS) as world, CutProxy(proxy.address) as network:
        network.rewrite = {proxy.address.encode(): network.address.encode()}

        def cut() -> None:
            for connection in [one for one in network.connections if not one.closed.is_set()][-1:]:
                connection.alter(path(connection))

        with monkeypatch.context() as patch:
            spoil(patch, dict.fromkeys((1, 3), cut))
            outbox = world.outbox(network.address)
            receipt = world.write(names, outbox=outbox)
        assert world.bodies() == names
        world.write(names, outbox=world.outbox(network.address))
        assert world.bodies() == names
        assert not outbox.publish(world.batch(), [receipt]).replayed


#: What a Proxy does not pass on, or answers without a look at it.
REFUSED: dict[str, Callable[[Broker, str], object]] = {
    "the list of topics": lambda broker, topic: broker.log.topics(),
    "the creation of topic new": lambda broker, topic: broker.admin.create_topic("new", 2),
    "queues": lambda broker, topic: broker.admin.add_queues(topic, 8),
    "the deletion of a topic": lambda broker, topic: broker.admin.delete_topic(topic),
    "the list of groups": lambda broker, topic: broker.admin.groups(),
    "a group": lambda broker, topic: broker.admin.delete_group("refused", force=True),
    "a seek": lambda broker, topic: broker.admin.seek("refused", dict.fromkeys(broker.log.queues(topic), 0)),
    "filterSql": lambda broker, topic: broker.log.require_filter(Filter(sql="a = 1"), [topic]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_proxy_does_not_pass_on_is_refused_by_name_and_changes_nothing(
    what: str, direct: Broker, through: Broker, refused: str
) -> None:
    before = direct.log.topics(), direct.log.queues(refused)
    with pytest.raises(RocketMQError, match=r"Proxy.*nameserver") as error:
        REFUSED[what](through, refused)
    assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
    assert (direct.log.topics(), direct.log.queues(refused)) == before


@pytest.fixture(scope="module")
def refused(newest: Cluster) -> str:
    """A topic."""
    with orderedmq.connect(namesrv_addr=newest.address) as broker:
        broker.admin.create_topic("refused", 2)
    return "refused"


def test_a_topic_whose_type_a_proxy_refuses_batches_for_is_refused_by_name(
    newest: Cluster, direct: Broker, through: Broker
) -> None:
    made = admin_requests.create_topic("typed", 1)
    with Client(newest.address) as client:
        for broker in client.cluster(soon()).brokers.values():
            typed = replace(made, ext={**made.ext, "attributes": "+message.type=FIFO"})
            client.call_address(str(broker.master), typed, soon())
    queue = until(lambda: _queues(direct, "typed"), "the topic is there")[0]
    with pytest.raises(RocketMQError, match=r"Proxy.*message\.type=MIXED") as error:
        through.log.append(queue, rows([b"a", b"b"]))
    assert error.value.sub == RocketMQCondition.MESSAGE_ILLEGAL
    assert direct.log.bounds([queue])[queue].max_offset == 0


def test_a_static_topic_is_refused_by_name_though_a_proxy_does_not_tell(
    newest: Cluster, peers: Peers, direct: Broker, through: Broker
) -> None:
    make_static_topic(peers, newest, "proxied-static", 4)
    queues = until(lambda: _queues(through, "proxied-static"), "the topic is there")
    with pytest.raises(RocketMQError) as error:
        through.log.bounds(queues)
    assert error.value.sub == RocketMQCondition.STATIC_TOPIC
    for queue in queues:
        with pytest.raises(RocketMQError) as error:
            through.log.append(queue, rows([b"a"]))
        assert error.value.sub == RocketMQCondition.STATIC_TOPIC
        staging = through.outbox.open(SinkBatch("a sink", 0, topic="proxied-static"), 0)
        with pytest.raises(RocketMQError) as error:
            staging.add(queue, rows([b"a"]))
        assert error.value.sub == RocketMQCondition.STATIC_TOPIC


def _queues(broker: Broker, topic: str) -> list[MessageQueue]:
    try:
        return broker.log.queues(topic)
    except TopicError:
        return []


def test_the_command_produces_and_peeks_through_a_proxy(direct: Broker, proxy: ProxyServer) -> None:
    direct.admin.create_topic("typed-in", 1)
    run = CliRunner()
    sent = run.invoke(app, ["--namesrv", proxy.address, "produce", "typed-in"], input="a\nb\n")
    assert sent.exit_code == 0, sent.output
    peeked = run.invoke(app, ["--namesrv", proxy.address, "--json", "peek", "typed-in"])
    assert len(peeked.output.splitlines()) == 2, peeked.output


def test_calls_are_traced_through_a_proxy_and_sends_are_not_since_it_wants_no_traces_of_them(
    direct: Broker, through: Broker
) -> None:
    """Its setting traceOn is false by default; Java's producers obey it, too."""
    for topic in ("traced", "its-traces"):
        direct.admin.create_topic(topic, 1)
    traced = through.traced("its-traces")
    traced.log.append(direct.log.queues("traced")[0], rows([b"a"]))
    assert traced.trace is not None
    traced.trace(TracedCall("billing", "DefaultRegion", "REQUEST", 1, (TracedMessage("ID", None, 0),)))
    [trace] = until(lambda: bodies(direct, "its-traces")[0], "the trace is there", 60.0)
    assert trace == "SubBefore\x011\x01DefaultRegion\x01billing\x01REQUEST\x01ID\x010\x01null\x02"


def test_a_message_is_not_parked_where_the_parking_lot_cannot_be_made(direct: Broker, through: Broker) -> None:
    direct.admin.create_topic("parks", 2)
    queue = direct.log.queues("parks")[0]
    direct.log.append(queue, rows([b"a", b"b"]))
    [token] = locked(through, "parker", through.groups.join("me"), [queue])
    with pytest.raises(RocketMQError, match=r"Proxy.*nameserver") as error:
        through.groups.park(token, [Put(queue, 0, Ticket(0, 1, 1, 0))])
    assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
    assert [topic.name for topic in direct.log.topics() if topic.name.startswith(PARKED_PREFIX)] == []


def test_a_reset_is_known_to_every_broker_behind_a_proxy(direct: Broker, through: Broker) -> None:
    direct.admin.create_topic("resets", 4)
    queues = direct.log.queues("resets")
    for queue in queues:
        direct.log.append(queue, rows([b"a", b"b"]))
    tokens = locked(through, "resetter", through.groups.join("me"), queues)
    through.groups.commit(dict.fromkeys(tokens, 2))
    assert through.groups.reset(dict.fromkeys(tokens, 1)) == 1
    assert through.groups.offsets("resetter", queues) == dict.fromkeys(queues, 1)
    assert through.groups.reset_number("resetter") == direct.groups.reset_number("resetter") == 1


@pytest.mark.slow
def test_a_proxy_in_local_mode_is_refused_by_name(newest: Cluster, tmp_path: pathlib.Path) -> None:
    cluster = Cluster(tmp_path, newest.version, brokers=0, jvm=QUICK_SERVER)
    inside = LocalBroker(tmp_path / "inside", newest.version, find_free_port(-2, 0, 1), cluster.address, cluster.name)
    inside.home.mkdir()
    (tmp_path / "proxy").mkdir()
    local = ProxyServer(tmp_path / "proxy", cluster, proxyMode="LOCAL", brokerConfigPath=inside.configure()[1])
    with cluster:
        local.launch()
        try:
            until(lambda: _has_route(local.address), "the Proxy serves", 60)
            with orderedmq.connect(namesrv_addr=local.address) as broker, pytest.raises(RocketMQError, match="local mode"):
                print(broker.identity)
        finally:
            local.stop()


def _has_route(address: str) -> bool:
    try:
        return ask(address, 105, {"topic": "SELF_TEST_TOPIC"})[0] == 0
    except OSError:
        return False
