"""How fast messages come from and go to a real RocketMQ: ``python -m tests.bench.rocketmq [messages per queue] [rounds]``.

Bodies of 100 bytes with tags, keys and a sharding key, in 4 queues of a cluster on this machine. The ceiling is a puller that throws away
what it gets. The ways run in turn; medians of wall time, and of this process's CPU time (which other programs disturb less).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

import orderedmq
from orderedmq.broker import Broker
from orderedmq.model import DEFAULT_COLUMNS, MessageQueue
from orderedmq.rocketmq import requests
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.servers import Cluster

QUEUES = 4
CHUNK = 16_384
Way = Callable[[], int]


def messages(count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": pa.array([b"%0100d" % number for number in range(count)], pa.binary()),
            "tags": pa.array(["created"] * count),
            "keys": pa.array([f"key-{number}" for number in range(count)]),
            "sharding_key": pa.array([f"account-{number % 1000}" for number in range(count)]),
        }
    )


def raw(client: Client, queues: list[MessageQueue], count: int, in_flight: int) -> int:
    """Pulls of 32, answers in order, nothing decoded."""
    deadline = time.monotonic() + 600
    for queue in queues:
        connection = client.connection(client.address(queue.topic, queue.broker_name, deadline), deadline)
        pending = deque(
            connection.send(requests.pull(queue, "TOOLS_CONSUMER", 32 * number, 32), deadline) for number in range(in_flight)
        )
        asked = in_flight
        while pending:
            found = pending.popleft().result().next_begin_offset
            if 32 * asked < count:
                pending.append(connection.send(requests.pull(queue, "TOOLS_CONSUMER", 32 * asked, 32), deadline))
                asked += 1
        assert found >= count - 32
    return count * len(queues)


def pulled(broker: Broker, queues: list[MessageQueue], count: int, columns: tuple[str, ...]) -> int:
    for queue in queues:
        at = 0
        while at < count:
            at += broker.log.pull(queue, at, min(CHUNK, count - at), 1 << 40, columns).num_rows
    return count * len(queues)


def appended(broker: Broker, topic: str, count: int) -> int:
    rows = messages(count)
    for queue in broker.log.queues(topic):
        broker.log.append(queue, rows)
    return count * QUEUES


def bounds_of(broker: Broker, queues: list[MessageQueue]) -> int:
    assert len(broker.log.bounds(queues)) == len(queues)
    return 1


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    folder = tempfile.TemporaryDirectory(prefix="orderedmq-bench-")
    with (
        folder,
        Cluster(Path(folder.name), brokers=2) as cluster,
        Client(cluster.address) as client,
        orderedmq.connect(namesrv_addr=cluster.address) as broker,
    ):
        for name, width in (("bench", QUEUES), ("sent", QUEUES), ("wide", 64)):
            broker.admin.create_topic(name, width)
        appended(broker, "bench", count)
        _report(_ways(client, broker, count), rounds)


def _ways(client: Client, broker: Broker, count: int) -> dict[str, Way]:
    queues = broker.log.queues("bench")
    return {
        "raw, 1 in flight": partial(raw, client, queues, count, 1),
        "raw, 32 in flight": partial(raw, client, queues, count, 32),
        "pull, body and offset": partial(pulled, broker, queues, count, ("body", "queue_offset")),
        "pull, all columns": partial(pulled, broker, queues, count, DEFAULT_COLUMNS),
        "append": partial(appended, broker, "sent", count // 4),
        "bounds of 64 queues": partial(bounds_of, broker, broker.log.queues("wide")),
    }


def _report(ways: dict[str, Way], rounds: int) -> None:
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin, began = time.perf_counter(), time.process_time()
            number = way()
            wall[name].append((time.perf_counter() - begin) / number)
            cpu[name].append((time.process_time() - began) / number)
    print(f"{'':<24} {'thousand/s':>12} {'µs wall':>10} {'µs CPU':>10}")
    for name in ways:
        seconds, busy = statistics.median(wall[name]), statistics.median(cpu[name])
        print(f"{name:<24} {1e-3 / seconds:>12,.1f} {seconds * 1e6:>10,.2f} {busy * 1e6:>10,.2f}")


if __name__ == "__main__":
    main()
