"""A storm of changes to the queues and brokers of two topics, while a query copies one to the other and is killed and paused.

The changes come between the attempts of a micro-batch and within them: brokers become read-only or write-only, are killed, paused and
added; topics get more queues, read queues before write queues, or fewer write queues; nameservers and the Proxy are restarted; accounts are
renewed. The query runs without Spark in its own process (topology_query.py). A query that failed is started again, as its user would do.
Finally everything is repaired, the query drains, and each message is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import pyarrow as pa

from orderedmq.broker import Broker
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OrderedMQError
from orderedmq.pulls import pulls
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import BrokerServer, Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request, ignore_answer
from orderedmq.tools.producer import Producer
from tests import evidence
from tests.live.clusters.accounts import ADMIN, Accounts, Right
from tests.live.clusters.topology_judge import Copied, judge
from tests.live.rocketmq.rocketmq_proxy import ProxyServer
from tests.waits import soon, until

IN, OUT, GROUP = "topology-in", "topology-out", "topology"
QUEUES: Final = 3
#: The maximum number of queues of a topic at one broker.
MOST_QUEUES: Final = 12
KEYS: Final = 60
#: Messages of one send, and seconds between two sends.
ROW: Final = 20
PAUSE: Final = 0.1
#: Seconds in which the query must drain after the repair: the life of a lock, the reports to the nameserver, some restarts.
DRAIN: Final = 420.0
#: Errors that no fault of the storm justifies. A message that still exists may not be called lost, nor a topic deleted.
WRONG: Final = re.compile(
    r"ORDEREDMQ_DATA_LOSS\.|SINK\.REPLAY_DIFFERS|SINK\.OUT_OF_ORDER|NO_SUCH_QUEUE|SERVER_ERROR|NOT_SUPPORTED|NO_PERMISSION"
)

End = Callable[[], None]
Fault = Callable[[random.Random], End]


class Place(Protocol):
    """Where the topics are. ``faults``: functions that cause a fault and return a function that ends it."""

    options: dict[str, str]
    faults: dict[str, Fault]

    def connect(self) -> Broker: ...

    def repair(self) -> None: ...


def nothing() -> None:
    """Do nothing, because the fault has ended by itself."""


class Servers:
    """A cluster with access control whose last broker has none of the topics at first. Clients may reach it through a Proxy."""

    def __init__(self, cluster: Cluster, folder: Path, proxy: ProxyServer | None = None) -> None:
        self.cluster, self.proxy = cluster, proxy
        self._admin = Client(cluster.address, credentials=ADMIN)
        self._accounts = Accounts(cluster)
        self._account = self._new_account()
        self._file = folder / "account.json"
        self._write_account()
        self.options = {
            "namesrvAddr": cluster.address if proxy is None else proxy.address,
            "credentialsFile": str(self._file),
        }
        #: Read and write queues of each topic by broker.
        self._queues: dict[str, dict[BrokerServer, tuple[int, int]]] = {}
        for topic in (IN, OUT):
            self._queues[topic] = {}
            for broker in cluster.brokers[:-1]:
                self._set_queues(broker, topic, QUEUES, QUEUES)
        self.faults: dict[str, Fault] = {
            "read-only": lambda draw: self._permit(draw, 4),
            "write-only": lambda draw: self._permit(draw, 2),
            "broker killed": lambda draw: self._restart_later(draw.choice(self.cluster.brokers)),
            "broker paused": self._paused,
            "nameserver killed": lambda draw: self._restart_later(self.cluster.namesrv),
            "queues added": self._queues_added,
            "read queues first": self._read_queues_first,
            "fewer write queues": self._fewer_write_queues,
            "broker added": self._broker_added,
            "account renewed": self._account_renewed,
        }
        if proxy is not None:
            self.faults["proxy killed"] = lambda draw: self._restart_later(self.proxy)

    def connect(self) -> Broker:
        return RocketMQBroker(Endpoint(None, self.cluster.address, credentials=ADMIN))

    def close(self) -> None:
        self._accounts.close()
        self._admin.close()

    def repair(self) -> None:
        servers = [*self.cluster.servers, *([self.proxy] if self.proxy is not None else [])]
        for server in servers:
            server.resume()
            server.launch()
        for server in servers:
            server.wait()
        for broker in self.cluster.brokers:
            self._set_permission(broker, 6)
        for topic, brokers in self._queues.items():
            for broker, (read, _) in list(brokers.items()):
                self._set_queues(broker, topic, read, read)

    # -- actions of an administrator ----------------------------------------------------------------------------------------------

    def _ask(self, broker: BrokerServer, code: RequestCode, ext: Mapping[str, str], body: bytes = b"") -> None:
        request = Request(code, "an administrator's change", broker.name, ignore_answer, ext, body)
        self._admin.call_address(broker.address, request, soon())

    def _set_queues(self, broker: BrokerServer, topic: str, read: int, write: int) -> None:
        fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(read), "writeQueueNums": str(write)}
        fields |= {"perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
        self._ask(broker, RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
        self._queues[topic][broker] = (read, write)

    def _set_permission(self, broker: BrokerServer, permission: int) -> None:
        """Set a broker's permission: 6 is read and write, 4 is read, 2 is write. The broker reports it to the nameserver immediately."""
        self._ask(broker, cast(RequestCode, 25), {}, b"brokerPermission=%d\n" % permission)

    def _new_account(self) -> Any:
        return self._accounts.make([Right(f"{kind}:*", action) for kind, actions in _RIGHTS.items() for action in actions])

    def _write_account(self) -> None:
        draft = self._file.with_suffix(".draft")
        draft.touch(0o600)
        draft.write_text(json.dumps({"accessKey": self._account.access_key, "secretKey": self._account.secret_key}))
        os.replace(draft, self._file)

    # -- faults -------------------------------------------------------------------------------------------------------------------

    def _permit(self, draw: random.Random, permission: int) -> End:
        broker = self._running(draw)
        self._set_permission(broker, permission)
        return lambda: self._set_permission(broker, 6)

    def _running(self, draw: random.Random, topic: str = IN) -> BrokerServer:
        return draw.choice([broker for broker in self._queues[topic] if not broker.broken])

    def _restart_later(self, server: Any) -> End:
        server.kill()

        def end() -> None:
            server.start()

        return end

    def _paused(self, draw: random.Random) -> End:
        broker = draw.choice(self.cluster.brokers)
        broker.pause()
        return broker.resume

    def _queues_added(self, draw: random.Random) -> End:
        topic = draw.choice([IN, OUT])
        broker = self._running(draw, topic)
        read, write = self._queues[topic][broker]
        if read < MOST_QUEUES:
            self._set_queues(broker, topic, read + 1, write + 1)
        return nothing

    def _read_queues_first(self, draw: random.Random) -> End:
        """Add queues as RocketMQ's documents advise: consumers get them before producers do."""
        topic = draw.choice([IN, OUT])
        broker = self._running(draw, topic)
        read, write = self._queues[topic][broker]
        if read >= MOST_QUEUES:
            return nothing
        self._set_queues(broker, topic, read + 1, write)
        return lambda: self._set_queues(broker, topic, read + 1, write + 1)

    def _fewer_write_queues(self, draw: random.Random) -> End:
        topic = draw.choice([IN, OUT])
        broker = self._running(draw, topic)
        read, write = self._queues[topic][broker]
        self._set_queues(broker, topic, read, write - 1)
        return lambda: self._set_queues(broker, topic, read, write)

    def _broker_added(self, draw: random.Random) -> End:
        """Create one of the topics at the last broker."""
        topic = draw.choice([IN, OUT])
        broker = self.cluster.brokers[-1]
        if broker not in self._queues[topic]:
            self._set_queues(broker, topic, QUEUES, QUEUES)
        return nothing

    def _account_renewed(self, draw: random.Random) -> End:
        """Write a new account into the file, and end the old one a moment later."""
        if any(broker.broken for broker in self.cluster.brokers):
            return nothing
        former, self._account = self._account, self._new_account()
        self._write_account()
        return lambda: self._accounts.end(former)


_RIGHTS: Final = {
    "Topic": ("Pub", "Sub", "Create", "Update", "List", "Get"),
    "Group": ("Sub", "Create", "Update", "List", "Get"),
    "Cluster": ("Get", "List"),
}


class Query:
    """The query's processes. The test may start a run while an earlier one is paused."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self.folder = folder
        folder.mkdir()
        source = {**options, "topic": IN, "consumerGroup": GROUP, "consumeFromWhere": "first", "maxOffsetsPerTrigger": 600}
        # When the source's topic has got queues, messages of a key are in two of them.
        sink = {**options, "topic": OUT, "onKeyConflict": "ignore"}
        query = {"id": str(uuid.uuid4()), "source": source, "sink": sink}
        (folder / "query.json").write_text(json.dumps(query))
        self._runs: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._paused: list[subprocess.Popen[bytes]] = []
        self.failures: list[str] = []

    @property
    def running(self) -> bool:
        """Whether a run exists that is not paused."""
        return any(process.poll() is None and process not in self._paused for process, _ in self._runs)

    def tend(self) -> None:
        """Start the query again if no run is left. Keep the errors of the runs that ended."""
        for process, log in list(self._runs):
            if process.poll() is not None:
                self._end(process, log)
                lines = log.read_text(errors="replace").strip().splitlines()
                if process.returncode not in (0, -signal.SIGKILL) and lines:
                    self.failures.append(next((line for line in reversed(lines) if "ORDEREDMQ" in line), lines[-1])[:500])
        if not self._runs:
            self.start()

    def start(self) -> None:
        log = self.folder / f"run-{time.monotonic_ns()}.log"
        with open(log, "wb") as output:
            command = [sys.executable, "-m", "tests.live.clusters.topology_query", str(self.folder)]
            self._runs.append((subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output), log))

    def kill(self) -> None:
        for process, log in list(self._runs):
            process.kill()
            self._end(process, log)

    def _end(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._runs.remove((process, log))
        if process in self._paused:
            self._paused.remove(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    def pause(self) -> End:
        """Pause the present runs. The function that is returned resumes them."""
        paused = [process for process, _ in self._runs if process.poll() is None]
        for process in paused:
            process.send_signal(signal.SIGSTOP)
        self._paused += paused

        def end() -> None:
            for process in paused:
                process.send_signal(signal.SIGCONT)
                if process in self._paused:
                    self._paused.remove(process)

        return end


class Storm:
    """A context manager; see the module."""

    def __init__(self, place: Place, folder: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.draw = random.Random(seed)
        self.query = Query(folder / "query", place.options)
        self.acknowledged: list[bytes] = []
        self.refusals: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._calm = threading.Event()
        self._broker = place.connect()
        self._sender = threading.Thread(target=self._send, name="producer")
        self._kinds: dict[str, Fault] = {
            **place.faults,
            "query killed": lambda draw: self._killed(),
            "query paused": lambda draw: self.query.pause(),
            "second run": lambda draw: self._second_run(),
        }

    def __enter__(self) -> Storm:
        self._sender.start()
        self.query.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calm.set()
        self._sender.join()
        self.query.kill()
        self._broker.close()

    def _send(self) -> None:
        """Send messages whose bodies are their numbers. A message whose send fails may still have been stored."""
        number = 0
        broker: Broker | None = None
        producer: Producer | None = None
        while not self._calm.wait(PAUSE):
            numbers = range(number, number + ROW)
            number += ROW
            bodies = [b"%d" % value for value in numbers]
            rows = pa.record_batch({"body": bodies, "sharding_key": [f"key-{value % KEYS}" for value in numbers]})
            try:
                broker = broker or self.place.connect()
                producer = producer or Producer(broker.log, IN)
                producer.send(rows)
                self.acknowledged += bodies
            except OrderedMQError as error:
                self.refusals[str(error).partition("]")[0].lstrip("[")] += 1
        if broker is not None:
            broker.close()

    def _killed(self) -> End:
        self.query.kill()
        return nothing

    def _second_run(self) -> End:
        """Pause the query and start another run of it. The first run continues when the fault ends."""
        end = self.query.pause()
        self.query.start()
        return end

    def run(self, seconds: float) -> None:
        """Wait until messages come through, then cause one fault after the other for ``seconds``."""
        self.wait(lambda: self._count(OUT) > 0, "messages come through")
        began = time.monotonic()
        for kind in self._plan():
            if time.monotonic() - began > seconds:
                break
            lasts = self.draw.choice([0.5, 2.0, 5.0, 10.0, 10.0, 38.0])
            print(f"{time.monotonic() - began:5.0f} s: {kind} for {lasts} s", flush=True)
            end = self._kinds[kind](self.draw)
            self.faults[kind] += 1
            if self.draw.random() < 0.5:
                # The attempt ends soon after the change, and the next one sees the changed topics.
                self._pass(self.draw.uniform(0.0, 1.5))
                self.query.kill()
                self.faults["killed after a change"] += 1
            self._pass(lasts)
            end()
            self._pass(self.draw.uniform(0.5, 4.0))

    def _plan(self) -> Iterator[str]:
        while True:
            yield from self.draw.sample(sorted(self._kinds), len(self._kinds))

    def _pass(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.query.tend()
            time.sleep(0.1)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def tended() -> bool:
            self.query.tend()
            with contextlib.suppress(OrderedMQError):
                return condition()
            return False

        try:
            until(tended, what, DRAIN)
        except AssertionError as error:
            raise AssertionError(f"{error}; errors of the query: {self.query.failures[-5:]}") from error

    def settle(self) -> None:
        """Repair everything, let the query drain, and check each message."""
        self.place.repair()
        self._calm.set()
        self._sender.join()
        self._broker.close()
        self._broker = self.place.connect()
        began = time.monotonic()
        self.wait(self._drained, "every message is copied")
        drained = time.monotonic() - began
        self.query.kill()
        originals = {(queue, offset): body for queue, offset, body, *_ in self._messages(IN)}
        copies: dict[str, list[Copied]] = {}
        for queue, _, _, key, origin, batch in self._messages(OUT):
            source, _, offset = origin.rpartition(":")
            copies.setdefault(queue, []).append(Copied(batch, key, source, int(offset)))
        verdict = judge(originals, copies)
        lost = set(self.acknowledged) - set(originals.values())
        counts = {name: len(places) for name, places in verdict._asdict().items()}
        evidence.note(
            runs=self.faults.total(),
            acknowledged=len(self.acknowledged),
            lost=len(lost) + len(verdict.missing),
            twice=len(verdict.twice),
            disordered=len(verdict.disordered) + len(verdict.split),
            wrong=len(verdict.unsent),
        )
        wrong = [failure for failure in self.query.failures if WRONG.search(failure) or "ORDEREDMQ" not in failure]
        wrong += [condition for condition in self.refusals if WRONG.search(condition)]
        conditions = Counter(
            match[0] for failure in self.query.failures for match in [re.search(r"ORDEREDMQ_[A-Z_.]+", failure)] if match
        )
        summary: dict[str, object] = {
            "seed": self.seed,
            "messages": len(originals),
            "acknowledged": len(self.acknowledged),
            "lost": len(lost),
            **counts,
        }
        summary |= {"faults": self.faults.total(), "seconds to drain": round(drained), "by fault": self.faults}
        print(json.dumps(summary | {"errors of the query": conditions, "errors of the producer": self.refusals}), flush=True)
        print("\n".join(wrong), flush=True)
        assert not lost
        assert verdict == ([], [], [], [], []), counts
        assert wrong == []

    def _drained(self) -> bool:
        """Return whether the group has processed every message, whatever the copy contains."""
        queues = self._broker.log.queues(IN)
        ends = {queue: bounds.max_offset for queue, bounds in self._broker.log.bounds(queues).items() if bounds.max_offset}
        return {queue: offset for queue, offset in self._broker.groups.offsets(GROUP, queues).items() if offset} == ends

    def _count(self, topic: str) -> int:
        return sum(bounds.max_offset for bounds in self._broker.log.bounds(self._broker.log.queues(topic)).values())

    def _messages(self, topic: str) -> Iterator[tuple[str, int, bytes, str, str, str]]:
        """Yield queue, offset, body, sharding key, keys and tags of each message."""
        columns = ("queue_offset", "body", "sharding_key", "keys", "tags")
        for queue, bounds in self._broker.log.bounds(self._broker.log.queues(topic)).items():
            for rows in pulls(self._broker.log, queue, bounds.min_offset, bounds.max_offset, 10_000, 1 << 24, columns):
                for values in zip(*(rows.column(name).to_pylist() for name in columns), strict=True):
                    yield (str(queue), *values)
