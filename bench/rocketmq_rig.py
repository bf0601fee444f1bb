"""The RocketMQ of two brokers on this machine that all RocketMQ cases share, its messages, and the CPU time of its brokers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pyarrow as pa

import orderedmq
from bench.java_peers import JavaPeers
from bench.measure import Bench, Skipped
from orderedmq.broker import Broker, SinkBatch
from orderedmq.errors import JavaError, ServersError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from tests.live.rocketmq.rocketmq_proxy import ProxyServer

QUEUES: Final = 4
#: Messages in one append.
STEP: Final = 100_000
#: The value of maxTransferCountOnMessageInMemory in `raised`, and the brokers' default.
RAISED: Final = 1024
_DEFAULT: Final = 32
_UPDATE_BROKER_CONFIG: Final = 25
#: Rows in a small batch, number of batches, and tasks in each. After these, a broker's JVM has compiled its code for a sink.
WARM_ROWS: Final = 16_000
_WARM: Final = 40
_TASKS: Final = 4


@dataclass
class Rig:
    """The cluster, with the topic ``bench`` of ``rows`` messages in 4 queues. Cases write to the topic ``sent``."""

    cluster: Cluster
    broker: Broker
    client: Client
    java: JavaPeers
    rows: int

    @property
    def address(self) -> str:
        return self.cluster.address

    def brokers_cpu(self) -> float:
        """Return the CPU seconds that the brokers have used so far."""
        times = [psutil.Process(server.pid).cpu_times() for server in self.cluster.brokers]
        return sum(each.user + each.system for each in times)

    def with_brokers(self, rows: int, call: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return the result of ``call``, with the brokers' CPU in µs per row."""
        began = self.brokers_cpu()
        return {**call(), "broker": (self.brokers_cpu() - began) / rows * 1e6}

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Make the brokers return up to 1,024 messages, or 256 KiB, per pull."""
        self._set_limit(RAISED)
        try:
            yield
        finally:
            self._set_limit(_DEFAULT)

    def _set_limit(self, count: int) -> None:
        for server in self.cluster.brokers:
            code, _ = ask(server.address, _UPDATE_BROKER_CONFIG, body=b"maxTransferCountOnMessageInMemory=%d\n" % count)
            assert code == 0, f"broker {server.name} refused the setting"


def rig(bench: Bench) -> Rig:
    """Return the rig, which the first case creates and the bench ends. Raises Skipped if the jars cannot be fetched."""
    if "rocketmq" not in bench.shared:
        folder = bench.fresh("rocketmq")
        folder.mkdir()
        cluster = Cluster(folder, brokers=2)
        try:
            bench.closing.enter_context(cluster)
        except (ServersError, JavaError) as error:
            if error.sub not in ("NO_JARS", "MISSING", "TOO_OLD"):
                raise
            raise Skipped(str(error)) from None
        made = Rig(
            cluster,
            bench.closing.enter_context(orderedmq.connect(namesrv_addr=cluster.address)),
            bench.closing.enter_context(Client(cluster.address)),
            bench.closing.enter_context(JavaPeers(cluster.address, folder)),
            100_000 if bench.quick else 1_000_000,
        )
        for name in ("bench", "sent"):
            made.broker.admin.create_topic(name, QUEUES)
        fill(made.broker, "bench", made.rows // QUEUES)
        bench.shared["rocketmq"] = made
    found: Rig = bench.shared["rocketmq"]
    return found


def messages(count: int) -> pa.RecordBatch:
    """Return messages that differ only in their numbers, with bodies of 100 bytes, a tag, a key and a sharding key."""
    return pa.record_batch(
        {
            "body": pa.array([b"%0100d" % number for number in range(count)], pa.binary()),
            "tags": pa.array(["created"] * count),
            "keys": pa.array([f"key-{number}" for number in range(count)]),
            "sharding_key": pa.array([f"account-{number % 1000}" for number in range(count)]),
        }
    )


def sized_messages(size: int, count: int) -> pa.RecordBatch:
    """Return messages as `messages` does, but with random bodies of ``size`` bytes."""
    data = random.Random(7).randbytes(size + count)
    bodies = pa.array([data[number : number + size] for number in range(count)], pa.binary())
    return messages(count).set_column(0, "body", bodies)


@contextlib.contextmanager
def proxy_before(folder: Path, cluster: Cluster) -> Iterator[ProxyServer]:
    """Start a Proxy in front of the cluster. Raises Skipped if its jars cannot be fetched."""
    folder.mkdir()
    # Without TLS, because the Proxy's gRPC on the same port would then need OpenSSL, which its jars lack.
    server = ProxyServer(folder, cluster, {}, jvm=("-Dtls.server.mode=disabled",))
    try:
        server.start()
    except (ServersError, JavaError) as error:
        if error.sub not in ("NO_JARS", "MISSING", "TOO_OLD"):
            raise
        raise Skipped(str(error)) from None
    try:
        yield server
    finally:
        server.stop()


def fill(broker: Broker, topic: str, each: int, make: Callable[[int], pa.RecordBatch] = messages) -> None:
    """Append ``each`` messages to each queue."""
    made = make(min(each, STEP))
    for queue in broker.log.queues(topic):
        for begin in range(0, each, STEP):
            broker.log.append({queue: made.slice(0, min(STEP, each - begin))})


def warm(made: Rig, topic: str) -> list[float]:
    """Write small batches with identity, as a sink does, until the brokers' JVMs have compiled their code for a sink.

    Returns the brokers' CPU seconds of each batch.
    """
    queues = made.broker.log.queues(topic)
    rows = messages(WARM_ROWS // _TASKS // len(queues))
    seconds = []
    for number in range(_WARM):
        began = made.brokers_cpu()
        _write(made.broker, SinkBatch("warm", number, None, None, "", topic), queues, rows)
        seconds.append(made.brokers_cpu() - began)
    return seconds


def _write(broker: Broker, batch: SinkBatch, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> None:
    receipts = []
    for partition in range(_TASKS):
        staging = broker.outbox.open(batch, partition)
        for queue in queues:
            staging.add(queue, rows)
        receipts.append(staging.receipt())
    broker.outbox.publish(batch, receipts)
