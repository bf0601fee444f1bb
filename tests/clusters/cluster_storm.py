"""A storm of faults over a replicated cluster with two queries, a producer and a Java consumer (the neighbour).

An exclusive query writes each message of ``in`` to ``out`` once. A query with an orderly listener shares a group with an orderly
consumer in Java. All of them reach the cluster through proxies. Faults follow one another in an order drawn from a seed. A query
that failed is started again, as its user would do. Finally the cluster is repaired, the queries drain, and every message is checked.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path as Folder
from typing import Any, Final

import psutil
import pytest
from py4j.protocol import Py4JError

import orderedmq
from orderedmq.errors import OrderedMQError
from tests import checker, event_log
from tests.clusters.replicated import Member, ReplicatedCluster
from tests.clusters.storm_judge import Acknowledged, Handled, Verdict, judge
from tests.faults.drivers import JVM, RUNNER, WORKER, Driver, Refused, send
from tests.faults.key_listener import CALLS
from tests.rocketmq.peers import Consumer, Peers, Producer
from tests.rocketmq.proxy import Connection, Path, Way
from tests.waits import until

IN, OUT, FILLER = "storm-in", "storm-out", "storm-filler"
GROUP, SHARED = "storm-sink", "storm-shared"
QUEUES: Final = 3
KEYS: Final = 40
#: Messages sent without a pause, and the seconds of pause after them.
ROW: Final = 20
PAUSE: Final = 0.1
#: Seconds after which a lasting fault ends by itself.
LASTS: Final = 10.0
#: Seconds in which the queries must drain after the repair: the life of a lock, the brokers' reports to nameservers, two restarts.
DRAIN: Final = 300.0
#: Maximum size of a file on a full disk: larger than the files with settings and offsets, smaller than a file of messages.
NO_ROOM: Final = 256 << 10
#: Seconds before the first fault. Repeats in this time are an error.
CALM: Final = 10.0

End = Callable[[], None]


class Storm:
    """A context manager; see the module."""

    def __init__(self, cluster: ReplicatedCluster, folder: Folder, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.cluster, self.folder, self.seed = cluster, folder, seed
        self.network = cluster.network
        self.draw = random.Random(seed)
        self.broker = orderedmq.connect(namesrv_addr=cluster.address)
        self.calls = folder / "calls"
        self.calls.mkdir()
        patch.setenv(CALLS, str(self.calls))
        self.faults: Counter[str] = Counter()
        self.failures: list[str] = []
        self.unknown = 0
        self.acknowledged: list[Acknowledged] = []
        self._calm = threading.Event()
        self._pool = ThreadPoolExecutor(1, "driver")
        self._driver: Driver | None = None
        self._starting: Future[None] | None = None
        self._paused = False
        self._booting: list[Member] = []
        self._java = self._peers("java-0")
        self._neighbours: list[Consumer] = []
        self._queries: dict[str, bool] = {}

    def __enter__(self) -> Storm:
        for topic, ordered in ((IN, False), (OUT, True), (FILLER, False)):
            self.cluster.topic(topic, QUEUES, ordered=ordered)
        self._producing = self._peers("producer")
        self._neighbour()
        self._sender = threading.Thread(target=self._send, name="producer")
        self._sender.start()
        self._begin_driver()
        return self

    def __exit__(self, *_: object) -> None:
        self._calm.set()
        self._sender.join()
        self._pool.shutdown()
        if self._driver is not None:
            self._driver.close()
        for peers in (self._producing, self._java):
            peers.close()
        self.broker.close()

    # -- the load -----------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send ordered messages, each key to its queue. A message whose send fails may still have been stored."""
        producer: Producer = self._producing.producer(self.network.address, sendMsgTimeout=3000)
        number = 0
        while not self._calm.is_set():
            for _ in range(ROW):
                number += 1
                body, key = f"{number}", f"key-{number % KEYS}"
                try:
                    sent = producer.send(IN, body.encode(), key)
                except Py4JError:
                    self.unknown += 1
                    break
                broker, queue = sent.queue
                self.acknowledged.append(Acknowledged(f"{IN}/{broker}/{queue}", sent.offset, body))
            self._calm.wait(PAUSE)

    def _peers(self, name: str) -> Peers:
        home = self.folder / name
        home.mkdir()
        return Peers(home)

    def _neighbour(self) -> None:
        consumer = self._java.consumer(self.network.address, SHARED, IN, consumeMessageBatchMaxSize=16)
        self._neighbours.append(consumer)

    def _begin_driver(self) -> None:
        """Start a driver with both queries in the background, because that takes some seconds."""

        def begin() -> None:
            self._driver = Driver(self.folder / f"driver-{time.monotonic_ns()}")
            self._queries = dict.fromkeys(("sink", "listener"), False)
            self._tend()

        self._starting = self._pool.submit(begin)

    def _start_query(self, name: str) -> None:
        assert self._driver is not None
        source = {"consumeFromWhere": "first", "maxOffsetsPerTrigger": 2000}
        spec: dict[str, Any] = {
            "servers": self.network.address,
            "topic": IN,
            "checkpoint": str(self.folder / name),
            "trigger": "500 milliseconds",
        }
        if name == "sink":
            spec |= {"group": GROUP, "sink": OUT, "source": source}
        else:
            spec |= {"group": SHARED, "sink": "noop", "source": {**source, "assignment": "shared", "includeLockToken": "true"}}
            spec["listener"] = {"consume_message_batch_max_size": 16, "suspend_current_queue_time_millis": 10}
            spec["listener"] |= {"max_reconsume_times": -1}
        try:
            self._driver.start(name, **spec)
            self._queries[name] = True
        except Refused as refused:
            self.failures.append(f"start of {name}: {_last(str(refused))}")

    def _tend(self) -> None:
        """Restart the queries that failed."""
        assert self._driver is not None
        for name, started in list(self._queries.items()):
            if started:
                state = self._driver.state(name)
                if state["active"]:
                    continue
                self.failures.append(f"{name}: {_last(str(state['failure']))}")
                self._queries[name] = False
            self._start_query(name)

    def tend(self) -> None:
        """Do a user's and an administrator's work: restart queries that failed, and make restarted brokers report."""
        self._booting = [broker for broker in self._booting if broker.running and not broker.ready()]
        if self._starting is not None:
            if not self._starting.done():
                return
            self._starting.result()
            self._starting = None
        if not self._paused:
            self._tend()

    # -- faults: each method causes one and returns a function that ends it -------------------------------------------------------

    def _restart_later(self, server: Any) -> End:
        server.kill()

        def end() -> None:
            server.launch()
            if isinstance(server, Member):
                self._booting.append(server)

        return end

    def master_killed(self) -> End:
        return self._restart_later(self.draw.choice(self.cluster.masters))

    def replica_killed(self) -> End:
        return self._restart_later(self.draw.choice(self.cluster.replicas))

    def nameserver_killed(self) -> End:
        return self._restart_later(self.draw.choice(self.cluster.namesrvs))

    def master_paused(self) -> End:
        master = self.draw.choice(self.cluster.masters)
        master.pause()
        return master.resume

    def worker_killed(self) -> End:
        if self._driver is not None and self._starting is None:
            workers = self._driver.of_kind(WORKER)
            if workers:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    send(self.draw.choice(workers), WORKER, signal.SIGKILL)
        return _nothing

    def driver_killed(self) -> End:
        if self._starting is None and self._driver is not None:
            self._driver.kill_all()
            self._driver.close()
            self._begin_driver()
        return _nothing

    def queries_paused(self) -> End:
        """Pause the JVM, the source runners and the workers with SIGSTOP."""
        driver = self._driver
        if self._starting is not None or driver is None:
            return _nothing
        self._paused = True
        driver.pause(JVM, RUNNER, WORKER)

        def end() -> None:
            driver.resume()
            self._paused = False

        return end

    def neighbour_killed(self) -> End:
        """Kill the Java consumer and replace it immediately."""
        self._java.close()
        self._java = self._peers(f"java-{len(self._neighbours)}")
        self._neighbour()
        return _nothing

    def neighbour_left(self) -> End:
        """Stop the Java consumer in an orderly way. Another one starts when the fault ends."""
        self._neighbours[-1].stop()
        return self._neighbour

    def connections_cut(self) -> End:
        for _ in range(4):
            for proxy in (*self.network.namesrvs, *self.network.brokers):
                proxy.each(Connection.reset)
            time.sleep(0.5)
        return _nothing

    def connections_half_open(self) -> End:
        """Stall the connections to one broker and one nameserver, and for 3 s also new connections to them."""
        spoilt = [self.draw.choice(self.network.brokers), self.draw.choice(self.network.namesrvs)]
        for proxy in spoilt:
            proxy.default = Path(up=Way(hold_after=0), down=Way(hold_after=0))
            proxy.each(Connection.hold)
        time.sleep(3)
        for proxy in spoilt:
            proxy.default = Path()
        return _nothing

    def disk_full(self) -> End:
        """Limit the size of a master's files, and send it messages that nobody reads until it refuses one."""
        master = self.draw.choice(self.cluster.masters)
        resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (NO_ROOM, resource.RLIM_INFINITY))
        taken = self.cluster.fill(master, FILLER)
        assert taken is not None, f"{master.name} accepts messages although its files cannot grow"
        print(f"       {master.name} accepted {taken} more messages, then refused", flush=True)

        def end() -> None:
            # After RocketMQ has failed to create a file, it creates no other file until it is restarted.
            self._restart_later(master)()

        return end

    def queues_changed(self) -> End:
        """Add two queues at a master. When the fault ends, some of the master's queues become read-only."""
        master = self.draw.choice(self.cluster.masters)
        self.cluster.set_queues(master, IN, QUEUES + 2, QUEUES + 2)
        return lambda: self.cluster.set_queues(master, IN, QUEUES + 2, QUEUES - 1)

    def writes_forbidden(self) -> End:
        master = self.draw.choice(self.cluster.masters)
        self.cluster.permit(master, 4)
        return lambda: self.cluster.permit(master, 6)

    FAULTS = (
        master_killed, replica_killed, nameserver_killed, master_paused, worker_killed, driver_killed, queries_paused,
        neighbour_killed, neighbour_left, connections_cut, connections_half_open, disk_full, queues_changed, writes_forbidden,
    )  # fmt: skip

    # -- the run ------------------------------------------------------------------------------------------------------------------

    def plan(self, count: int) -> Iterator[Callable[[Storm], End]]:
        """Yield faults in random order, such that the counts of any two kinds differ by one at most."""
        while count > 0:
            yield from self.draw.sample(self.FAULTS, len(self.FAULTS))[:count]
            count -= len(self.FAULTS)

    def run(self, seconds: float, every: float) -> None:
        """Wait until both queries process messages, then cause a fault every ``every`` seconds, for ``seconds``."""
        self.wait(lambda: self._count(OUT) > 0 and bool(event_log.read(self.calls)), "messages come through")
        self._pass_time(time.monotonic() + CALM)
        began = time.monotonic()
        self._first_fault = time.monotonic_ns()
        for number, fault in enumerate(self.plan(round(seconds / every))):
            self._pass_time(began + number * every)
            at = time.monotonic()
            print(f"{at - began:5.0f} s: {fault.__name__}", flush=True)
            end = fault(self)
            self.faults[fault.__name__] += 1
            self._pass_time(min(at + LASTS, began + (number + 1) * every - 1))
            end()
        self._pass_time(began + seconds)

    def _pass_time(self, until_then: float) -> None:
        while time.monotonic() < until_then:
            self.tend()
            time.sleep(0.2)

    def wait(self, condition: Callable[[], bool], what: str, timeout: float = DRAIN) -> None:
        def tended() -> bool:
            self.tend()
            with contextlib.suppress(OrderedMQError):
                return condition()
            return False

        try:
            until(tended, what, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; failures: {self.failures[-5:]}") from error

    def settle(self) -> Counter[str]:
        """Heal the cluster, let the queries drain, then check the result. Return the counts."""
        for server in self.cluster.servers:
            server.resume()
            if not server.running:
                server.launch()
        self._booting = [*self.cluster.brokers]
        self._calm.set()
        self._sender.join()
        self.broker.close()
        self.broker = orderedmq.connect(namesrv_addr=self.cluster.address)
        began = time.monotonic()
        self.wait(lambda: not self._booting, "the brokers are back")
        self.wait(self._through, "every message is processed")
        drained = time.monotonic() - began
        history = [*checker.sent(self.broker, IN), *checker.delivered(self.broker, OUT)]
        found = checker.judge(history)
        anomalies = Counter(anomaly.kind for anomaly in found)
        verdict, calm = self._judge_group(history)
        counted: Counter[str] = Counter(
            {
                "acknowledged": len(self.acknowledged),
                "unknown": self.unknown,
                "in the queues": sum(event["event"] == "send" for event in history),
                "acknowledged and lost": len(verdict.lost),
                "unhandled": len(verdict.unhandled),
                "out of order": len(verdict.skipped),
                "faults": self.faults.total(),
                "queries that failed": len(self.failures),
                "seconds to drain": round(drained),
            }
        )
        counted.update({f"again by {who}": count for who, count in verdict.repeats.items()})
        counted.update({f"first by {who}": count for who, count in verdict.first.items()})
        counted.update({f"sink: {kind}": count for kind, count in anomalies.items()})
        print(json.dumps({"seed": self.seed, **counted, "by fault": self.faults}), flush=True)
        (self.folder / "failures.txt").write_text("\n".join(self.failures))
        assert found[:5] == []
        assert set(verdict.first) == {"Java", "Spark"}
        assert not calm, f"handled again before the first fault: {calm}"
        assert (verdict.lost[:5], verdict.unhandled[:5], verdict.skipped[:5]) == ([], [], [])
        return counted

    def _through(self) -> bool:
        queues = self.broker.log.queues(IN)
        ends = {queue: at.max_offset for queue, at in self.broker.log.bounds(queues).items() if at.max_offset}
        offsets = self.broker.groups.offsets(SHARED, list(ends))
        return self._count(OUT) >= sum(ends.values()) and offsets == ends

    def _count(self, topic: str) -> int:
        return sum(at.max_offset for at in self.broker.log.bounds(self.broker.log.queues(topic)).values())

    def _judge_group(self, history: list[dict[str, Any]]) -> tuple[Verdict, Counter[str]]:
        """Return the verdict, and the messages that were handled again before the first fault.

        A Java consumer that must release a queue while its listener is running does not commit the messages of that call. The
        next owner receives these messages again (ConsumeMessageOrderlyService.processConsumeResult), which is not an error.
        """
        queues: dict[str, list[str]] = {}
        for event in history:
            if event["event"] == "send":
                queues.setdefault(event["queue"], []).append(event["id"])
        handled = [
            Handled(call["at"], "Spark", call["queue"], offset)
            for call in event_log.read(self.calls)
            if call["ok"]
            for offset in call["offsets"]
        ]
        for neighbour in self._neighbours:
            for one in list(neighbour.received):
                broker, queue = one.queue
                handled.append(Handled(int(one.at * 1e9), "Java", f"{IN}/{broker}/{queue}", one.offset))
        calm = judge({}, (), (one for one in handled if one.at < self._first_fault)).repeats
        early = Counter({who: count for who, count in calm.items() if not who.startswith("Java, then")})
        return judge(queues, self.acknowledged, handled), early


def _nothing() -> None:
    """Do nothing, because the fault has ended by itself."""


def _last(text: str) -> str:
    """Return the line of a failure that says what happened."""
    lines = [line for line in text.splitlines() if "ORDEREDMQ" in line] or text.splitlines() or [""]
    return lines[-1][:400]
