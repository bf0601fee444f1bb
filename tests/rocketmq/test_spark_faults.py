"""One query from topic to topic over a real cluster, while servers die, stand still or are cut off and the cluster changes.

All goes through proxies. After each fault and its end everything comes through, and the judge looks at all that was ever sent and
delivered: nothing lost, nothing twice, each key in order. A query that failed meanwhile is started again, as a user would. A fault comes
while rows come through, and ends when they are sent again. What lasts for half a minute by itself is for the long tier.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from orderedmq.errors import OrderedMQError, TopicError
from orderedmq.model import OffsetRange
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net import client
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests
from tests import checker
from tests.rocketmq.proxy import Connection, Network
from tests.waits import soon, until

pytestmark = pytest.mark.spark

TRIGGER = 0.3
GROUP = "flow-group"
#: Seconds after which all brokers have reported to a nameserver that was restarted.
REPORT = 30
#: Seconds for what comes after a lock's life and a report at the latest, on a machine that is busy.
PATIENCE = LOCK_LIFE + REPORT + 120
#: Rows that are sent to a queue at a time.
ROWS = 5


class Flow:
    """The query, who sends to it, and the judge."""

    def __init__(self, spark: SparkSession, cluster: Cluster, folder: Path) -> None:
        self.spark, self.cluster, self.folder = spark, cluster, folder
        self.broker = orderedmq.connect(namesrv_addr=cluster.address)
        for topic in ("flow-in", "flow-out"):
            self.create(topic, 0, 4)
        self.network = Network.before(cluster)
        #: What the query failed with, whenever it did.
        self.failures: list[str] = []
        self._queries: list[StreamingQuery] = []
        self._acknowledged: list[tuple[str, OffsetRange]] = []
        self._numbers = itertools.count()
        self._quiet = threading.Event()
        self._sender = threading.Thread(target=self._send)
        self._start()

    def create(self, topic: str, at: int, queues: int) -> None:
        """At one broker, until the nameserver knows."""
        with Client(self.cluster.address) as servers:

            def known() -> int:
                with contextlib.suppress(TopicError):
                    return len(servers.route(topic, soon(), fresh=True).subscribe_set())
                return 0

            before = known()
            address = self.cluster.brokers[at].address
            servers.call_address(address, admin_requests.create_topic(topic, queues), soon())
            until(lambda: known() == before + queues, f"the route of {topic} has {queues} queues more")

    def _start(self) -> None:
        source = (
            self.spark.readStream.format("orderedmq").option("namesrvAddr", self.network.address).option("topic", "flow-in")
        )
        rows = source.options(consumerGroup=GROUP, maxOffsetsPerTrigger="400").load()
        origin = "concat(topic, '/', broker_name, '/', queue_id, ':', queue_offset) AS keys"
        sink = rows.selectExpr("body", "sharding_key", origin).writeStream.format("orderedmq").option("topic", "flow-out")
        sink = sink.options(namesrvAddr=self.network.address, checkpointLocation=str(self.folder / "ck"))
        self._queries.append(sink.trigger(processingTime=f"{TRIGGER} seconds").start())

    def _send(self) -> None:
        """A little to each queue, again and again, whatever happens."""
        while not self._quiet.is_set():
            # A send that fails may have been stored all the same: the judge takes what is in the topic. A connection of its own for each
            # round knows the queues that were added.
            with contextlib.suppress(OrderedMQError), orderedmq.connect(namesrv_addr=self.cluster.address) as broker:
                for queue in broker.log.queues("flow-in"):
                    names = [f"{queue}:{next(self._numbers)}" for _ in range(ROWS)]
                    keys = [f"{queue.queue_id}-{n % 3}" for n in range(ROWS)]
                    rows = pa.record_batch({"body": [name.encode() for name in names], "sharding_key": keys})
                    self._acknowledged.append((str(queue), broker.log.append({queue: rows})[queue]))
            self._quiet.wait(0.2)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Meanwhile messages come in, and come through at the beginning."""
        self._quiet.clear()
        self._sender = threading.Thread(target=self._send)
        self._sender.start()
        try:
            before = self.count("flow-out")
            self.wait(lambda: self.count("flow-out") > before, "rows come through")
            yield
            acknowledged = len(self._acknowledged)
            # Each queue has some more, whatever happened to the first ones.
            queues = len(self.broker.log.queues("flow-in"))
            self.wait(lambda: len(self._acknowledged) > acknowledged + 2 * queues, "rows are sent")
        finally:
            self._quiet.set()
            self._sender.join()

    def sent_to(self) -> set[str]:
        """The queues that have got rows."""
        return {queue for queue, _ in self._acknowledged}

    def count(self, topic: str) -> int:
        return sum(at.max_offset for at in self.broker.log.bounds(self.broker.log.queues(topic)).values())

    @property
    def running(self) -> bool:
        return self._queries[-1].isActive

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until it is true; meanwhile a query that fails is started again."""

        def tended() -> bool:
            if not self.running:
                self.failures.append(str(self._queries[-1].exception()))
                try:
                    self._start()
                except AnalysisException as error:
                    # A nameserver that was restarted knows the brokers that have reported since, for up to 30 s.
                    if "ORDEREDMQ_TOPIC.MISSING" not in str(error):
                        raise
                    time.sleep(1)
            if condition():
                return True
            time.sleep(0.1)
            return False

        try:
            until(tended, what, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}; what the query failed with: {self.failures}") from error

    def reported(self) -> bool:
        """Whether the nameserver knows all brokers: one that was restarted knows those that have reported since, for up to 30 s."""
        with contextlib.suppress(TopicError), Client(self.cluster.address) as servers:
            return all(servers.route(broker.name, soon(), fresh=True) for broker in self.cluster.brokers)
        return False

    def settle(self) -> None:
        """Everything comes through; then the judge."""
        until(self.reported, "all brokers have reported", 60.0)
        # Another connection: this one may not know yet of queues that were added.
        self.broker.close()
        self.broker = orderedmq.connect(namesrv_addr=self.cluster.address)
        self.wait(lambda: self.count("flow-out") >= self.count("flow-in"), "everything is through")
        self.judge()

    def judge(self) -> None:
        history = [*checker.sent(self.broker, "flow-in"), *checker.delivered(self.broker, "flow-out")]
        assert checker.judge(history)[:10] == []
        there = {event["queue"]: 0 for event in history if event["event"] == "send"}
        for event in history:
            if event["event"] == "send":
                there[event["queue"]] = max(there[event["queue"]], event["offset"] + 1)
        assert all(span.end <= there[queue] for queue, span in self._acknowledged), "an acknowledged send is lost"

    def close(self) -> None:
        self._quiet.set()
        for query in self._queries:
            query.stop()
        self.network.close()
        self.broker.close()


@pytest.fixture(scope="module")
def flow(spark: SparkSession, two_brokers: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    """The topics are at the first broker, which is the one that has the faults. Routes are asked for more often than every 30 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "ROUTE_AGE", 3.0)
        made = Flow(spark, two_brokers, tmp_path_factory.mktemp("flow"))
        yield made
        made.close()


def broker_killed(flow: Flow) -> None:
    """It takes some seconds to boot."""
    flow.cluster.broker.restart()


def broker_paused(flow: Flow) -> None:
    flow.cluster.broker.pause()
    time.sleep(5)
    flow.cluster.broker.resume()


def broker_paused_for_longer_than_a_lock_is_trusted(flow: Flow) -> None:
    flow.cluster.broker.pause()
    time.sleep(HOLDER_TRUST + 1)
    flow.cluster.broker.resume()


def nameserver_away(flow: Flow) -> None:
    """When it is back, it knows nobody, then the second broker, then both."""
    flow.cluster.namesrv.restart()
    for broker in reversed(flow.cluster.brokers):
        time.sleep(1.5)
        until(broker.ready, f"{broker.name} has reported", 60.0)


def nameserver_away_until_brokers_report(flow: Flow) -> None:
    """By themselves."""
    flow.cluster.namesrv.kill()
    time.sleep(5)
    flow.cluster.namesrv.start()


def connections_cut(flow: Flow) -> None:
    for _ in range(6):
        for proxy in (flow.network.namesrv, flow.network.broker):
            proxy.each(Connection.reset)
        time.sleep(0.4)


def connections_half_open(flow: Flow) -> None:
    flow.network.broker.each(Connection.hold)
    time.sleep(2)


def queues_and_a_broker_added(flow: Flow) -> None:
    """Until then the second broker had none of the topic's queues."""
    flow.create("flow-in", 1, 2)
    flow.broker.admin.add_queues("flow-in", 10)
    flow.wait(lambda: len(flow.sent_to()) == 10, "rows are in all queues")


def group_deleted(flow: Flow) -> None:
    flow.broker.admin.delete_group(GROUP, force=True)
    until(lambda: GROUP in flow.broker.admin.groups() or not flow.running, "the query has noticed", 60.0)


#: The long tier has the faults that take long. Single calls meet them in test_log.py and test_groups.py, and a renewal that comes too
#: late is in test_locks.py.
FAULTS: list[Any] = [
    connections_cut,
    pytest.param(connections_half_open, marks=pytest.mark.nightly),
    broker_killed,
    broker_paused,
    pytest.param(broker_paused_for_longer_than_a_lock_is_trusted, marks=pytest.mark.nightly),
    pytest.param(queues_and_a_broker_added, marks=pytest.mark.nightly),
    pytest.param(nameserver_away, marks=pytest.mark.nightly),
    pytest.param(nameserver_away_until_brokers_report, marks=pytest.mark.nightly),
    group_deleted,
]


@pytest.mark.holds("no overtaking")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_query_goes_on_without_loss_or_repeat_when_it_is_over(flow: Flow, fault: Callable[[Flow], None]) -> None:
    with flow.sending():
        fault(flow)
    flow.settle()
