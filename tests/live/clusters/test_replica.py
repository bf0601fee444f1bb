"""A broker with a replica: when the master tells clients to read from the replica, pulls go there and no message is missed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, fetch_jars
from orderedmq.rocketmq.local.probe import ask, find_free_port
from orderedmq.rocketmq.local.servers import BrokerServer, Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import max_offset
from tests.jars import jars_required
from tests.live.rocketmq.proxy import Network
from tests.quick_spark import QUICK_SERVER
from tests.waits import soon, until

ROWS = 5000
UPDATE_BROKER_CONFIG = 25


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, BrokerServer]]:
    """A master that claims to have no messages in memory, and a replica that knows the topic ``t`` from the beginning.

    The topic's settings are copied here because the replica would copy them from its master only a minute after its start.
    """
    with jars_required():
        fetch_jars(DEFAULT_VERSION)
    folder = tmp_path_factory.mktemp("replicated")
    # An acknowledged message is on disk and, while the replica runs, also at the replica.
    synchronous = {"brokerRole": "SYNC_MASTER", "flushDiskType": "SYNC_FLUSH"}
    properties = {**synchronous, "slaveReadEnable": True, "accessMessageInMemoryMaxRatio": 0}
    with Cluster(folder, properties=properties, jvm=QUICK_SERVER) as servers:
        with orderedmq.connect(namesrv_addr=servers.address) as broker:
            broker.admin.create_topic("t", 1)
        # The folder's name is the broker's name, which a replica shares with its master.
        home = folder / "replica" / servers.broker.name
        (home / "store" / "config").mkdir(parents=True)
        shutil.copy(servers.broker.home / "store" / "config" / "topics.json", home / "store" / "config")
        role = {"brokerId": 1, "brokerRole": "SLAVE", "slaveReadEnable": True}
        replica = BrokerServer(
            home, DEFAULT_VERSION, find_free_port(-2, 0, 1), servers.address, servers.name, role, QUICK_SERVER
        )
        try:
            replica.start()
            yield servers, replica
        finally:
            replica.kill()


@pytest.fixture
def network(replicated: tuple[Cluster, BrokerServer]) -> Iterator[Network]:
    servers, replica = replicated
    with Network(servers.address, [servers.broker.address, replica.address]) as network:
        yield network


def pulls(network: Network) -> list[int]:
    """Return how many pulls the master and the replica received."""
    return [len(proxy.requests(RequestCode.PULL_MESSAGE)) for proxy in network.brokers]


class Topic:
    """A topic with one queue."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.log = broker.log
        [self.queue] = broker.log.queues(name)
        self.bodies = [b"%d" % number for number in range(ROWS)]
        if not broker.log.bounds([self.queue])[self.queue].max_offset:
            broker.log.append({self.queue: pa.record_batch({"body": pa.array(self.bodies)})})

    def read(self) -> list[bytes]:
        out: list[bytes] = []
        while len(out) < ROWS:
            out += self.log.pull(self.queue, len(out), 1000, 1 << 24, ("body",)).column("body").to_pylist()
        return out


@pytest.mark.nightly
def test_a_pull_goes_to_the_replica_where_the_master_says_so(network: Network) -> None:
    with orderedmq.connect(namesrv_addr=network.address) as broker:
        broker.admin.create_topic("young", 1)
        young = Topic(broker, "young")
        # The replica does not know this topic yet, and answers that it does not exist.
        assert young.read() == young.read() == young.bodies
        assert pulls(network)[1] > 0
        topic = Topic(broker, "t")
        until(lambda: topic.read() == topic.bodies and pulls(network)[1] > 50, "pulls go to the replica")
        before = pulls(network)[1]
        assert topic.read() == topic.bodies
        # Each answer of the replica names the master for the next pull, and the master's answer names the replica again.
        assert pulls(network)[1] - before > 50
        network.brokers[1].close()
        assert topic.read() == topic.bodies, "after the replica is gone, the master must serve the pulls"


@pytest.mark.nightly
def test_a_replica_that_may_not_be_read_from_costs_a_moment(replicated: tuple[Cluster, BrokerServer], network: Network) -> None:
    """The master names the replica although the replica refuses reads."""
    _, replica = replicated
    ask(replica.address, UPDATE_BROKER_CONFIG, body=b"slaveReadEnable=false\n")
    try:
        with orderedmq.connect(namesrv_addr=network.address) as broker:
            topic = Topic(broker, "t")
            until(lambda: topic.read() == topic.bodies and pulls(network)[1] > 0, "a pull went to the replica")
            refused = pulls(network)[1]
            assert topic.read() == topic.bodies
            assert pulls(network)[1] == refused
    finally:
        ask(replica.address, UPDATE_BROKER_CONFIG, body=b"slaveReadEnable=true\n")


@pytest.mark.holds("kill -9")
@pytest.mark.nightly
def test_messages_acknowledged_by_a_killed_master_are_read_from_its_replica(
    replicated: tuple[Cluster, BrokerServer], network: Network
) -> None:
    """The master has SYNC_MASTER and SYNC_FLUSH."""
    servers, replica = replicated
    with orderedmq.connect(namesrv_addr=network.address) as broker, Client(servers.address) as client:
        topic = Topic(broker, "t")
        # A new replica connects to its master some seconds after its start. Until then, the master does not wait for the replica.
        end = max_offset(topic.queue)
        until(lambda: client.call_address(replica.address, end, soon()) == ROWS, "the replica has all messages")
        identity = broker.identity
        servers.broker.kill()
        before = pulls(network)[1]
        assert topic.read() == topic.bodies
        assert pulls(network)[1] > before
        with orderedmq.connect(namesrv_addr=network.address, identity=identity) as worker:
            assert worker.log.queues("t") == [topic.queue]
        servers.broker.start()
        assert topic.read() == topic.bodies
