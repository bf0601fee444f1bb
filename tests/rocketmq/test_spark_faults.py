"""One query from topic to topic over a real cluster, while servers die, stand still or are cut off and the cluster changes.

All goes through proxies. After each fault and its end everything comes through, within a lock's life and the half minute that brokers may
take to report to a nameserver, and the judge looks at all that was ever sent and delivered: nothing lost, nothing twice, each key in order.
A query that failed meanwhile is started again, as a user would.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from orderedmq.errors import OrderedMQError, TopicError
from orderedmq.lock import HOLDER_TRUST, LOCK_LIFE
from orderedmq.model import OffsetRange
from orderedmq.rocketmq import admin_requests
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.servers import Cluster
from tests import checker
from tests.faults.points import until
from tests.rocketmq.proxy import Network

TRIGGER = 0.3
GROUP = "flow-group"
#: Seconds after which all brokers have reported to a nameserver that was restarted.
REPORT = 30
#: Rows that are sent to a queue at a time.
ROWS = 5


class Flow:
    """The query, who sends to it, and the judge."""

    def __init__(self, spark: SparkSession, cluster: Cluster, folder: Path) -> None:
        self.spark, self.cluster, self.folder = spark, cluster, folder
        self.broker = orderedmq.connect(namesrv_addr=cluster.address)
        for topic in ("flow-in", "flow-out"):
            self.create(topic, 0, 4)
        self.network = Network(cluster.address, [broker.address for broker in cluster.brokers])
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
        with Client(self.cluster.address) as client:

            def known() -> int:
                with contextlib.suppress(TopicError):
                    return len(client.route(topic, time.monotonic() + 10, fresh=True).subscribe_set())
                return 0

            before = known()
            address = self.cluster.brokers[at].address
            client.call_address(address, admin_requests.create_topic(topic, queues), time.monotonic() + 10)
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
        with orderedmq.connect(namesrv_addr=self.cluster.address) as broker:
            while not self._quiet.is_set():
                # A send that fails may have been stored all the same: the judge takes what is in the topic.
                with contextlib.suppress(OrderedMQError):
                    for queue in broker.log.queues("flow-in"):
                        names = [f"{queue}:{next(self._numbers)}" for _ in range(ROWS)]
                        keys = [f"{queue.queue_id}-{n % 3}" for n in range(ROWS)]
                        rows = pa.record_batch({"body": [name.encode() for name in names], "sharding_key": keys})
                        self._acknowledged.append((str(queue), broker.log.append(queue, rows)))
                self._quiet.wait(0.1)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Meanwhile messages come in."""
        self._quiet.clear()
        self._sender = threading.Thread(target=self._send)
        self._sender.start()
        try:
            time.sleep(1.0)
            yield
            time.sleep(1.0)
        finally:
            self._quiet.set()
            self._sender.join()

    def count(self, topic: str) -> int:
        return sum(at.max_offset for at in self.broker.log.bounds(self.broker.log.queues(topic)).values())

    def settle(self) -> None:
        """Everything comes through, in time; then the judge."""

        def through() -> bool:
            query = self._queries[-1]
            if not query.isActive:
                self.failures.append(str(query.exception()))
                try:
                    self._start()
                except AnalysisException as error:
                    # A nameserver that was restarted knows the brokers that have reported since, for up to 30 s.
                    if "ORDEREDMQ_TOPIC.MISSING" not in str(error):
                        raise
                    time.sleep(1)
            return self.count("flow-out") >= self.count("flow-in")

        # Where tasks were killed with their query, the next one waits for their locks. Spark needs some seconds to start it.
        try:
            until(through, "everything is through", LOCK_LIFE + REPORT + 2 * TRIGGER + 15)
        except AssertionError as error:
            raise AssertionError(f"{error}; what the query failed with: {self.failures}") from error
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
    """The topics are at the first broker, which is the one that has the faults."""
    made = Flow(spark, two_brokers, tmp_path_factory.mktemp("flow"))
    yield made
    made.close()


def broker_killed(flow: Flow) -> None:
    flow.cluster.broker.kill()
    time.sleep(3)
    flow.cluster.broker.start()


def broker_paused(flow: Flow) -> None:
    flow.cluster.broker.pause()
    time.sleep(8)
    flow.cluster.broker.resume()


def broker_paused_for_longer_than_a_lock_is_trusted(flow: Flow) -> None:
    flow.cluster.broker.pause()
    time.sleep(HOLDER_TRUST + 1)
    flow.cluster.broker.resume()


def nameserver_away(flow: Flow) -> None:
    flow.cluster.namesrv.kill()
    time.sleep(5)
    flow.cluster.namesrv.start()


def connections_cut(flow: Flow) -> None:
    for _ in range(6):
        for proxy in (flow.network.namesrv, flow.network.broker):
            for connection in list(proxy.connections):
                connection.reset()
        time.sleep(0.4)


def connections_half_open(flow: Flow) -> None:
    for connection in list(flow.network.broker.connections):
        connection.hold()
    time.sleep(4)


def queues_added(flow: Flow) -> None:
    flow.broker.admin.add_queues("flow-in", 6)
    time.sleep(2)


def broker_added(flow: Flow) -> None:
    """Until then it had none of the topic's queues."""
    flow.create("flow-in", 1, 2)
    time.sleep(2)


def group_deleted(flow: Flow) -> None:
    flow.broker.admin.delete_group(GROUP, force=True)
    time.sleep(2)


FAULTS: list[Callable[[Flow], None]] = [
    connections_cut,
    connections_half_open,
    broker_killed,
    broker_paused,
    broker_paused_for_longer_than_a_lock_is_trusted,
    broker_added,
    queues_added,
    nameserver_away,
    group_deleted,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_query_goes_on_without_loss_or_repeat_when_it_is_over(flow: Flow, fault: Callable[[Flow], None]) -> None:
    with flow.sending():
        fault(flow)
    flow.settle()
