"""Static topics, and replicas that act as master, are refused before any read or write, with an error that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.local.jars import VERSIONS, fetch_jars
from orderedmq.rocketmq.local.probe import find_free_port
from orderedmq.rocketmq.local.servers import BrokerServer, Cluster, NameServer
from tests.contract.support import rows
from tests.jars import jars_required
from tests.live.rocketmq.peers import Peers
from tests.quick_spark import QUICK_SERVER
from tests.waits import soon, until

TOPIC = "static-orders"
QUEUE = MessageQueue(TOPIC, "__syslo__global__", 0)


def make_static_topic(peers: Peers, cluster: Cluster, topic: str, queues: int) -> None:
    arguments = ["updateStaticTopic", "-n", cluster.address, "-t", topic, "-qn", str(queues), "-c", cluster.name]
    given = peers.array("String", len(arguments))
    for number, argument in enumerate(arguments):
        given[number] = argument
    peers.rocketmq.tools.command.MQAdminStartup.main0(given, None)


@pytest.fixture(scope="module")
def static_topic(cluster: Cluster, peers: Peers) -> Iterator[Broker]:
    """A broker connection, after the creation of a static topic with two logical queues."""
    make_static_topic(peers, cluster, TOPIC, 2)
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield broker


@pytest.mark.holds("static topics")
@pytest.mark.parametrize(
    "use",
    [
        lambda broker: broker.log.queues(TOPIC),
        lambda broker: broker.log.bounds([QUEUE]),
        lambda broker: broker.log.append({QUEUE: rows([b"a"])}),
        lambda broker: broker.log.pull(QUEUE, 0, 1, 1 << 20, ("body",)),
        lambda broker: broker.groups.lock("static-g", broker.groups.join("me"), [QUEUE]),
    ],
    ids=["list", "bounds", "append", "pull", "lock"],
)
def test_a_static_topic_is_refused_by_name(static_topic: Broker, use: Callable[[Broker], object]) -> None:
    with pytest.raises(RocketMQError, match=TOPIC) as error:
        use(static_topic)
    assert error.value.sub == RocketMQCondition.STATIC_TOPIC


def test_a_static_topic_is_not_listed(static_topic: Broker) -> None:
    assert TOPIC not in [topic.name for topic in static_topic.log.topics()]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_replica_that_acts_as_master_gives_no_locks_and_takes_no_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = NameServer.properties
    monkeypatch.setattr(NameServer, "properties", lambda self: {**settings(self), "supportActingMaster": True})
    both = {"enableSlaveActingMaster": True, "brokerHeartbeatInterval": 500, "registerNameServerPeriod": 1000}
    cluster = Cluster(tmp_path, VERSIONS[-1], properties=both, jvm=QUICK_SERVER)
    with jars_required():
        fetch_jars(VERSIONS[-1])
    with cluster:
        home = tmp_path / "replica" / cluster.broker.name
        home.mkdir(parents=True)
        role = {**both, "brokerId": 1, "brokerRole": "SLAVE", "slaveReadEnable": True}
        replica = BrokerServer(home, VERSIONS[-1], find_free_port(-2, 0, 1), cluster.address, cluster.name, role, QUICK_SERVER)
        try:
            replica.start()
            with orderedmq.connect(namesrv_addr=cluster.address) as broker:
                broker.admin.create_topic("acted", 1)
                [queue] = broker.log.queues("acted")
                broker.log.append({queue: rows([b"a"])})
                me = broker.groups.join("me")
                assert broker.groups.lock("g", me, [queue])
                cluster.broker.kill()

                def acts() -> bool:
                    try:
                        return broker._client.route("acted", soon(), fresh=True).brokers[queue.broker_name].acting  # type: ignore[attr-defined]
                    except OrderedMQError:
                        return False

                until(acts, "the replica acts as master", 120)
                with pytest.raises(RocketMQUnavailableError, match="a replica acts as master"):
                    broker.groups.lock("other", me, [queue])
                with pytest.raises(RocketMQUnavailableError, match="a replica acts as master"):
                    broker.log.append({queue: rows([b"b"])})
        finally:
            replica.kill()
