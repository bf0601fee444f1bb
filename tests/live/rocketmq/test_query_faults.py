"""One query from topic to topic over a real cluster, while servers are killed, paused or cut off and the cluster changes.

All connections of the query go through proxies. After each fault the query drains, and all messages ever sent and delivered are checked:
none lost, none duplicated, each key in order. A query that failed is started again, as a user would do. Each fault begins while rows
are being copied, and the test waits until rows are sent again after it. Faults that last half a minute run only in the long tier.

The query runs in Spark's micro-batch loop without Spark. test_sink.py kills a query in Spark.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.errors import OrderedMQError, TopicError
from orderedmq.model import OffsetRange
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net import client
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from tests import checker, evidence
from tests.grow import grow
from tests.live.rocketmq.proxy import Connection, Network
from tests.loop.conftest import with_origin
from tests.micro_batches import Checkpoint, MicroBatchLoop, end_workers
from tests.waits import soon, until

TRIGGER = 0.1
#: Seconds after which all brokers have reported to a restarted nameserver.
REPORT = 30
#: Seconds to wait on a busy machine for events that follow the end of a lock and the brokers' reports.
PATIENCE = LOCK_LIFE + REPORT + 120
#: Rows that are sent to a queue together.
ROWS = 5


class Flow:
    """The query, its producer, and the final check."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.group, self.source, self.sink = "flow-group", "flow-in", "flow-out"
        self.broker = orderedmq.connect(namesrv_addr=cluster.address)
        for topic in (self.source, self.sink):
            self.create(topic, 0, 4)
        self.network = Network.before(cluster)
        #: The errors with which the query failed.
        self.failures: list[str] = []
        self._acknowledged: list[tuple[str, OffsetRange]] = []
        self._numbers = itertools.count()
        self._quiet = threading.Event()
        self._checkpoint = Checkpoint()
        self._query: MicroBatchLoop | None = None

    def create(self, topic: str, at: int, queues: int) -> None:
        """Create the topic at one broker and wait until the nameserver knows it."""
        with Client(self.cluster.address) as servers:

            def known() -> int:
                with contextlib.suppress(TopicError):
                    return len(servers.route(topic, soon(), fresh=True).subscribe_set())
                return 0

            before = known()
            address = self.cluster.brokers[at].address
            servers.call_address(address, admin_requests.create_topic(topic, queues), soon())
            until(lambda: known() == before + queues, f"the route of {topic} has {queues} queues more")

    def _advance(self) -> None:
        """Run one micro-batch, if there is anything to read. A query that failed is started again."""
        source = {"topic": self.source, "consumerGroup": self.group, "consumeFromWhere": "first", "maxOffsetsPerTrigger": 400}
        at = {"namesrvAddr": self.network.address}
        try:
            self._query = self._query or MicroBatchLoop(
                at | source, at | {"topic": self.sink}, self._checkpoint, rows=with_origin
            )
            while self._query.advance() not in ("committed", "idle"):
                pass
        except OrderedMQError as error:
            self.failures.append(str(error))
            self._query = None

    def _send(self) -> None:
        """Send a few rows to each queue repeatedly, and ignore errors."""
        while not self._quiet.is_set():
            # A send that fails may still have stored its rows, so the check uses the topic's content. Each round uses a new connection,
            # which knows queues that were added.
            with contextlib.suppress(OrderedMQError), orderedmq.connect(namesrv_addr=self.cluster.address) as broker:
                for queue in broker.log.queues(self.source):
                    names = [f"{queue}:{next(self._numbers)}" for _ in range(ROWS)]
                    keys = [f"{queue.queue_id}-{n % 3}" for n in range(ROWS)]
                    rows = pa.record_batch({"body": [name.encode() for name in names], "sharding_key": keys})
                    self._acknowledged.append((str(queue), broker.log.append({queue: rows})[queue]))
            self._quiet.wait(0.2)

    def suffer(self, fault: Callable[[Flow], None]) -> None:
        """Run the fault in a thread while rows are sent and copied. It begins when rows come through. Wait until more are sent after it."""
        self._quiet.clear()
        with ThreadPoolExecutor(2) as pool:
            try:
                sender = pool.submit(self._send)
                before = self.count(self.sink)
                self.wait(lambda: self.count(self.sink) > before, "rows come through")
                over = pool.submit(fault, self)
                self.wait(over.done, "the fault is over")
                over.result()
                acknowledged = len(self._acknowledged)
                # Wait until each queue has more rows, even if the first sends failed.
                queues = len(self.broker.log.queues(self.source))
                self.wait(lambda: len(self._acknowledged) > acknowledged + 2 * queues, "rows are sent")
            finally:
                self._quiet.set()
            sender.result()

    def sent_to(self) -> set[str]:
        """Return the queues to which rows have been sent."""
        return {queue for queue, _ in self._acknowledged}

    def count(self, topic: str) -> int:
        return sum(at.max_offset for at in self.broker.log.bounds(self.broker.log.queues(topic)).values())

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Run the query until the condition is true."""

        def tended() -> bool:
            self._advance()
            time.sleep(TRIGGER)
            return condition()

        try:
            until(tended, what, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}; errors of the query: {self.failures}") from error

    def reported(self) -> bool:
        """Return whether the nameserver knows all brokers. After a restart, this may take up to 30 s."""
        with contextlib.suppress(TopicError), Client(self.cluster.address) as servers:
            return all(servers.route(broker.name, soon(), fresh=True) for broker in self.cluster.brokers)
        return False

    def settle(self) -> None:
        """Wait until every row is copied, then check the history."""
        until(self.reported, "all brokers have reported", 60.0)
        # Open a new connection, because this one may not know queues that were added.
        self.broker.close()
        self.broker = orderedmq.connect(namesrv_addr=self.cluster.address)
        self.wait(lambda: self.count(self.sink) >= self.count(self.source), "every row is copied")
        self.judge()

    def judge(self) -> None:
        history = [*checker.sent(self.broker, self.source), *checker.delivered(self.broker, self.sink)]
        anomalies = checker.judge(history)
        evidence.note_history(self, history, anomalies)
        assert anomalies[:10] == []
        there = {event["queue"]: 0 for event in history if event["event"] == "send"}
        for event in history:
            if event["event"] == "send":
                there[event["queue"]] = max(there[event["queue"]], event["offset"] + 1)
        assert all(span.end <= there[queue] for queue, span in self._acknowledged), "an acknowledged send is lost"

    def close(self) -> None:
        self._quiet.set()
        if self._query is not None:
            self._query.stop()
        end_workers()
        self.network.close()
        self.broker.close()


@pytest.fixture(scope="module")
def flow(two_brokers: Cluster) -> Iterator[Flow]:
    """The topics are at the first broker, which also has the faults. Routes are refreshed more often than every 30 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "ROUTE_AGE", 3.0)
        flow = Flow(two_brokers)
        yield flow
        flow.close()


def broker_killed(flow: Flow) -> None:
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
    """The restarted nameserver knows no broker at first, then the second one, then both."""
    flow.cluster.namesrv.restart()
    for broker in reversed(flow.cluster.brokers):
        time.sleep(1.5)
        until(broker.ready, f"{broker.name} has reported", 60.0)


def connections_cut(flow: Flow) -> None:
    """Cut all connections, each time just after the query has sent rows, before it has all answers or commits."""

    def sends() -> int:
        return len(flow.network.broker.requests(RequestCode.SEND_BATCH_MESSAGE))

    for _ in range(10):
        before = sends()
        until(lambda: sends() > before, "the query sends rows")  # noqa: B023 (called at once)
        for proxy in (flow.network.namesrv, flow.network.broker):
            proxy.each(Connection.reset)


def connections_half_open(flow: Flow) -> None:
    flow.network.broker.each(Connection.hold)
    time.sleep(2)


def queues_and_a_broker_added(flow: Flow) -> None:
    """Until this fault, the second broker has no queues of the topic."""
    flow.create(flow.source, 1, 2)
    grow(flow.broker, flow.source, 10)
    until(lambda: len(flow.sent_to()) == 10, "rows are in all queues", PATIENCE)


def group_deleted(flow: Flow) -> None:
    failures = len(flow.failures)
    flow.broker.admin.delete_group(flow.group, force=True)
    noticed = "the query notices the deletion"
    until(lambda: flow.group in flow.broker.admin.groups() or len(flow.failures) > failures, noticed, 60.0)


#: Slow faults run in the long tier. In the fast tier, test_log.py and test_groups.py test single calls during such faults, and
#: test_locks.py tests a renewal that is too late.
FAULTS: list[Any] = [
    pytest.param(connections_cut, marks=pytest.mark.fault("network")),
    pytest.param(connections_half_open, marks=[pytest.mark.fault("network"), pytest.mark.nightly]),
    pytest.param(broker_killed, marks=pytest.mark.fault("killed process")),
    pytest.param(broker_paused, marks=pytest.mark.fault("paused process")),
    pytest.param(
        broker_paused_for_longer_than_a_lock_is_trusted, marks=[pytest.mark.fault("paused process"), pytest.mark.nightly]
    ),
    pytest.param(queues_and_a_broker_added, marks=[pytest.mark.fault("topology"), pytest.mark.nightly]),
    pytest.param(nameserver_away, marks=[pytest.mark.fault("topology"), pytest.mark.nightly]),
    pytest.param(group_deleted, marks=pytest.mark.fault("topology")),
]


@pytest.mark.holds("no overtaking")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_query_continues_without_loss_or_repeat_after_a_fault(flow: Flow, fault: Callable[[Flow], None]) -> None:
    flow.suffer(fault)
    flow.settle()
