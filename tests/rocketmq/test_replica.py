"""A broker with a replica: where the master says to read from the replica, that is where pulls go, and nothing is missed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq import requests
from orderedmq.rocketmq.codes import RequestCode
from orderedmq.rocketmq.connection import Connection
from orderedmq.rocketmq.jars import DEFAULT_VERSION
from orderedmq.rocketmq.probe import free_port
from orderedmq.rocketmq.rights import TOOLS_GROUP
from orderedmq.rocketmq.servers import Broker as BrokerServer
from orderedmq.rocketmq.servers import Cluster
from tests.faults.points import until
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.proxy import Network

ROWS = 5000


@pytest.fixture
def readable(request: pytest.FixtureRequest) -> bool:
    """Whether the replica lets itself be read from."""
    return bool(request.param)


@pytest.fixture
def network(cluster: Cluster, tmp_path: Path, readable: bool) -> Iterator[Network]:
    """A master, which has no message in memory if one asks it, and a replica."""
    properties = {"slaveReadEnable": True, "accessMessageInMemoryMaxRatio": 0}
    with Cluster(tmp_path, properties=properties, jvm=QUICK_SERVER) as servers:
        # The folder's name is the broker's, and that is the master's.
        home = tmp_path / "replica" / servers.broker.name
        home.parent.mkdir()
        role = {"brokerId": 1, "brokerRole": "SLAVE", "slaveReadEnable": readable}
        replica = BrokerServer(home, DEFAULT_VERSION, free_port(-2, 0, 1), servers.address, servers.name, role, QUICK_SERVER)
        try:
            replica.start()
            with Network(servers.address, [servers.broker.address, replica.address]) as made:
                yield made
        finally:
            replica.kill()


def pulls(network: Network) -> list[int]:
    """How many were asked of the master and of the replica."""
    return [len(proxy.requests(RequestCode.PULL_MESSAGE)) for proxy in network.brokers]


def gives(address: str, queue: MessageQueue) -> bool:
    """Whether a replica has copied topic and messages: topics every 10 s."""
    connection = Connection.open(address, time.monotonic() + 5)
    try:
        connection.call(requests.pull(queue, TOOLS_GROUP, 0, 1), time.monotonic() + 5)
    except OrderedMQError:
        return False
    finally:
        connection.close()
    return True


class Topic:
    """Of one queue."""

    def __init__(self, broker: Broker) -> None:
        self.log = broker.log
        broker.admin.create_topic("t", 1)
        [self.queue] = broker.log.queues("t")
        self.bodies = [b"%d" % number for number in range(ROWS)]
        broker.log.append(self.queue, pa.record_batch({"body": pa.array(self.bodies)}))

    def read(self) -> list[bytes]:
        out: list[bytes] = []
        while len(out) < ROWS:
            out += self.log.pull(self.queue, len(out), 1000, 1 << 24, ("body",)).column("body").to_pylist()
        return out


@pytest.mark.parametrize("readable", [True], indirect=True)
def test_a_pull_goes_to_the_replica_where_the_master_says_so(network: Network) -> None:
    with orderedmq.connect(namesrv_addr=network.address) as broker:
        topic = Topic(broker)
        # The replica does not know the topic yet, and says that there is none.
        assert topic.read() == topic.read() == topic.bodies
        until(lambda: gives(network.brokers[1].target, topic.queue), "the replica has the topic", 60.0)
    # Who was refused does not ask again for a while.
    with orderedmq.connect(namesrv_addr=network.address) as broker:
        topic.log = broker.log
        until(lambda: topic.read() == topic.bodies and pulls(network)[1] > 50, "pulls go to the replica", 60.0)
        before = pulls(network)[1]
        assert topic.read() == topic.bodies
        # Its answers name the master again, and that one names it.
        assert pulls(network)[1] - before > 50
        network.brokers[1].close()
        assert topic.read() == topic.bodies, "it is gone, and the master is asked"


@pytest.mark.parametrize("readable", [False], indirect=True)
def test_a_replica_that_may_not_be_read_from_costs_a_moment(network: Network) -> None:
    """Its master names it all the same."""
    with orderedmq.connect(namesrv_addr=network.address) as broker:
        topic = Topic(broker)
        until(lambda: topic.read() == topic.bodies and pulls(network)[1] > 0, "a pull went to the replica", 60.0)
        refused = pulls(network)[1]
        assert topic.read() == topic.bodies
        assert pulls(network)[1] == refused
