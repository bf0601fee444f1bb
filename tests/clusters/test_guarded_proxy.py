"""A query from source to sink through a Proxy with TLS and access control, while the Proxy, the broker and the query are killed.

make test-all ARGS="tests/clusters/test_guarded_proxy.py -n0 -s"
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Cluster
from tests import checker
from tests.clusters.accounts import ADMIN, BEHIND_PROXY, PROPERTIES, Accounts, rights
from tests.faults.drivers import Driver, Refused
from tests.jars import jars_required
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.rocketmq_proxy import ProxyServer
from tests.waits import until

pytestmark = pytest.mark.spark

SOURCE, SINK, GROUP = "orders", "invoices", "billing"
QUEUES: Final = 2
#: Messages per queue in each send, and seconds between two sends.
ROW: Final = 10
PAUSE: Final = 0.5
#: Rows that must come through between two faults.
BETWEEN: Final = 60
FAULTS: Final = ("proxy", "broker", "proxy", "query", "proxy", "away", "proxy")


class Rig:
    """A cluster with access control, a Proxy in front of it, and a query through that Proxy in a driver that can be killed."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.admin = RocketMQBroker(cluster.address, credentials=ADMIN)
        for topic in (SOURCE, SINK):
            self.admin.admin.create_topic(topic, QUEUES)
        self.queues = until(lambda: self.admin.log.queues(SOURCE), "the topic is known")
        accounts = Accounts(cluster)
        rows = ("source of", "through a Proxy that", "source through such a Proxy", "sink to `invoices`, `sinkGroup")
        self.account: Credentials = accounts.make(rights(DEFAULT_VERSION, *rows))
        accounts.close()
        (folder / "proxy").mkdir()
        self.proxy = ProxyServer(folder / "proxy", cluster, BEHIND_PROXY, credentials=ADMIN, tls=True)
        self.proxy.start()
        self.drivers = [self._driver()]
        self.failures: list[str] = []
        self._started = False
        self._enough = threading.Event()
        self._producer = threading.Thread(target=self._produce, name="producer")
        self._producer.start()

    def close(self) -> None:
        self.finish()
        self.drivers[-1].close()
        self.proxy.stop()
        self.admin.close()

    def finish(self) -> None:
        self._enough.set()
        self._producer.join()

    def _driver(self) -> Driver:
        return Driver(self.folder / f"driver-{time.monotonic_ns()}")

    def _produce(self) -> None:
        """Send messages of seven keys to each queue. If an answer is lost, the message may be stored, so checks use the topic's content."""
        number = 0
        while not self._enough.wait(PAUSE):
            numbers = range(number, number + ROW)
            for queue in self.queues:
                keys = [f"{queue.queue_id}-{one % 7}" for one in numbers]
                bodies = pa.array([b"%d/%d" % (queue.queue_id, one) for one in numbers], pa.binary())
                with contextlib.suppress(OrderedMQError):
                    self.admin.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": keys})})
            number += ROW

    # -- the query ----------------------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Restart the query if it has failed, as its user would do."""
        if self._started:
            state = self.drivers[-1].state()
            if state["active"]:
                return
            self.failures.append(str(state["failure"]))
            self._started = False
        options = {"accessKey": self.account.access_key, "secretKey": self.account.secret_key}
        options |= {"useTLS": "true", "tlsVerify": "false"}
        spec: dict[str, Any] = {"servers": self.proxy.address, "topic": SOURCE, "group": GROUP, "sink": SINK}
        spec |= {"checkpoint": str(self.folder / "checkpoint"), "trigger": "300 milliseconds"}
        source = {**options, "consumeFromWhere": "first", "maxOffsetsPerTrigger": 400}
        try:
            self.drivers[-1].start(**spec, source=source, target={**options, "sinkGroup": "billing-out"})
            self._started = True
        except Refused as refused:
            self.failures.append(str(refused))

    def wait(self, condition: Any, what: str, timeout: float = 400.0) -> None:
        def tended() -> Any:
            assert self._enough.is_set() or self._producer.is_alive(), "the producer failed"
            self.tend()
            with contextlib.suppress(OrderedMQError):
                return condition()

        began = time.monotonic()
        until(tended, what, timeout)
        print(f"{what} after {time.monotonic() - began:.0f} s", flush=True)

    def count(self, topic: str) -> int:
        return sum(at.max_offset for at in self.admin.log.bounds(self.admin.log.queues(topic)).values())

    def drained(self) -> bool:
        ends = {queue: at.max_offset for queue, at in self.admin.log.bounds(self.queues).items()}
        return self.count(SINK) >= self.count(SOURCE) and self.admin.groups.offsets(GROUP, self.queues) == ends

    # -- faults: kill -9 ----------------------------------------------------------------------------------------------------------

    def fault(self, what: str) -> None:
        match what:
            case "proxy":
                self.proxy.restart()
            case "broker":
                self.cluster.broker.restart()
            case "query":
                self.drivers[-1].kill_all()
                self.drivers[-1].close()
                self.drivers.append(self._driver())
                self._started = False
            case "away":
                self.proxy.kill()
                failed = len(self.failures)
                self.wait(lambda: len(self.failures) > failed, "the query failed")
                self.proxy.start()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    cluster = Cluster(tmp_path / "cluster", DEFAULT_VERSION, properties=PROPERTIES[DEFAULT_VERSION], jvm=QUICK_SERVER)
    with jars_required():
        cluster.start()
    with cluster:
        made = Rig(cluster, tmp_path)
        yield made
        made.close()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_killed_proxy_broker_and_query_lose_repeat_and_reorder_nothing_and_errors_have_names_and_no_secret(rig: Rig) -> None:
    for fault in ("start", *FAULTS):
        rig.fault(fault)
        through = rig.count(SINK)
        rig.wait(lambda: rig.count(SINK) >= through + BETWEEN, f"rows come through after {fault}")  # noqa: B023 (called at once)
    rig.finish()
    rig.wait(rig.drained, "every message is copied")
    rig.drivers[-1].stop()
    history = [*checker.sent(rig.admin, SOURCE), *checker.delivered(rig.admin, SINK)]
    found = checker.judge(history)
    print(rig.count(SOURCE), rig.count(SINK), Counter(FAULTS), len(rig.failures), Counter(one.kind for one in found))
    # If a write failed, Spark names the cause only in its log.
    texts = [*rig.failures, *(driver.errors.read_text() for driver in rig.drivers)]
    assert any("ORDEREDMQ_ROCKETMQ." in text for text in texts)
    for secret in (rig.account.secret_key, ADMIN.secret_key):
        assert not any(secret in text for text in texts)
    assert found == []
