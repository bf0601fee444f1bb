"""A real RocketMQ of two brokers on this machine, against a raw loop that decodes nothing and against RocketMQ's Java client.

Bodies of 100 bytes with tags, keys and a sharding key, in 4 queues, brokers with their default limits. One cluster serves all cases; what
is read is sent once, by our own append.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker
from orderedmq.endpoint import Endpoint
from orderedmq.errors import JavaError, ServersError
from orderedmq.model import DEFAULT_COLUMNS, MessageQueue
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from tests.bench import latency
from tests.bench.java_peers import JavaPeers
from tests.bench.measure import ROOT, Bench, Figure, Skipped, interleaved, median, status
from tests.bench.one_task import CHUNK, read_away, whole_queue
from tests.bench.raw_pull import cpu_seconds, raw_pull
from tests.bench.throughput import COLUMNS, KEYED

QUEUES: Final = 4
MANY: Final = 64
#: Messages of one request to append.
STEP: Final = 100_000


def messages(count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": pa.array([b"%0100d" % number for number in range(count)], pa.binary()),
            "tags": pa.array(["created"] * count),
            "keys": pa.array([f"key-{number}" for number in range(count)]),
            "sharding_key": pa.array([f"account-{number % 1000}" for number in range(count)]),
        }
    )


@dataclass
class Rig:
    """The cluster, with a topic ``bench`` of ``rows`` messages in 4 queues. ``sent`` is for what is written.

    ``brokers``: their processes.
    """

    address: str
    broker: Broker
    client: Client
    java: JavaPeers
    rows: int
    brokers: list[int]

    @property
    def note(self) -> str:
        return "" if self.java.measured else " (recorded: this Java has no compiler)"


def rig(bench: Bench) -> Rig:
    """Made for the first case, ended with the bench. Raises Skipped where the jars cannot be had."""
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
        broker = bench.closing.enter_context(orderedmq.connect(namesrv_addr=cluster.address))
        made = Rig(
            cluster.address,
            broker,
            bench.closing.enter_context(Client(cluster.address)),
            bench.closing.enter_context(JavaPeers(cluster.address, folder)),
            100_000 if bench.quick else 1_000_000,
            [server.pid for server in cluster.brokers],
        )
        for name in ("bench", "sent"):
            broker.admin.create_topic(name, QUEUES)
        fill(broker, "bench", made.rows // QUEUES)
        bench.shared["rocketmq"] = made
    found: Rig = bench.shared["rocketmq"]
    return found


def fill(broker: Broker, topic: str, each: int) -> None:
    """Append ``each`` messages to each queue."""
    made = messages(min(each, STEP))
    for queue in broker.log.queues(topic):
        for begin in range(0, each, STEP):
            broker.log.append(queue, made.slice(0, min(STEP, each - begin)))


# --- reading


def raw(client: Client, queues: list[MessageQueue], count: int) -> None:
    for queue in queues:
        raw_pull(client.address(queue.topic, queue.broker_name, time.monotonic() + 60), queue, count)


def pulled(broker: Broker, queues: list[MessageQueue], count: int) -> None:
    for queue in queues:
        at = 0
        while at < count:
            at += broker.log.pull(queue, at, min(CHUNK, count - at), 1 << 40, DEFAULT_COLUMNS, None, count).num_rows


def _with_brokers(made: Rig, rows: int, call: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What ``call`` returns, and the microseconds of the brokers' CPU per row."""
    began = cpu_seconds(made.brokers)
    return {**call(), "broker": (cpu_seconds(made.brokers) - began) / rows * 1e6}


def _timed(call: Callable[[], None], rows: int) -> dict[str, float]:
    """Thousand rows a second of wall time, and microseconds of this process's CPU per row, which other programs disturb less."""
    begin, began = time.perf_counter(), time.process_time()
    call()
    return {
        "speed": rows / (time.perf_counter() - begin) / 1000,
        "cpu": (time.process_time() - began) / rows * 1e6,
    }


def pull(bench: Bench) -> list[Figure]:
    """In this process, without Spark: pulled and decoded into RecordBatches of all columns."""
    made = rig(bench)
    queues = made.broker.log.queues("bench")
    each = made.rows // QUEUES
    ours = partial(_timed, partial(pulled, made.broker, queues, each), made.rows)
    loop = partial(_timed, partial(raw, made.client, queues, each), made.rows)
    java = partial(made.java.speed, "pull", "bench", made.rows // 2)
    found = interleaved(
        bench.rounds,
        {
            "ours": partial(_with_brokers, made, made.rows, ours),
            "raw": partial(_with_brokers, made, made.rows, loop),
            "java": partial(_with_brokers, made, made.rows // 2, java),
        },
    )
    mine, least = found["ours"], found["raw"]
    return [
        _against(mine["speed"], least["speed"], "12 columns, against a raw loop that decodes nothing", 0.6),
        _against(mine["speed"], found["java"]["speed"], f"12 columns, against Java's lite pull{made.note}", 3.0),
        _cpu("CPU of the process, against the raw loop", mine["cpu"], least["cpu"]),
        _cpu("CPU of the brokers, against the raw loop", mine["broker"], least["broker"]),
        _cpu(f"CPU of the brokers, against Java's lite pull{made.note}", mine["broker"], found["java"]["broker"]),
    ]


def _cpu(what: str, mine: float, peer: float, case: str = "RocketMQ: pull") -> Figure:
    return Figure(case, what, mine, "µs/row", peer, mine / peer if peer else None)


def _against(mine: float, peer: float, what: str, target: float | None, case: str = "RocketMQ: pull") -> Figure:
    return Figure(case, what, mine, "k rows/s", peer, mine / peer, target)


def stream(bench: Bench, made: Rig, schema: str, topic: str) -> DataFrame:
    reader = bench.spark.readStream.format("orderedmq").schema(schema)
    group = bench.fresh("group").name
    return reader.options(namesrvAddr=made.address, topic=topic, consumerGroup=group).load()


def source(bench: Bench) -> list[Figure]:
    made = rig(bench)
    # A queue that it comes to late keeps Java from the last messages for a while: half of them is steady.
    java = made.rows // 2
    found = interleaved(
        bench.rounds,
        {
            "ours": lambda: _with_brokers(
                made, made.rows, lambda: bench.drain(stream(bench, made, COLUMNS, "bench"), "noop", made.rows)
            ),
            "pull": lambda: _with_brokers(made, java, lambda: made.java.speed("pull", "bench", java)),
            "push": lambda: _with_brokers(made, java, lambda: made.java.speed("push", "bench", java)),
        },
    )
    case = "RocketMQ: source → noop"
    mine = {measure: 1000 * value for measure, value in found["ours"].items()}
    return [
        _against(
            mine["micro-batch"],
            found["pull"]["speed"],
            f"5 columns, micro-batch, against Java's lite pull{made.note}",
            2.5,
            case,
        ),
        _against(
            mine["micro-batch"],
            found["push"]["speed"],
            f"5 columns, micro-batch, against Java's orderly push{made.note}",
            2.5,
            case,
        ),
        _against(
            mine["whole query"],
            found["pull"]["speed"],
            f"5 columns, whole query, against Java's lite pull{made.note}",
            None,
            case,
        ),
        _cpu(
            f"CPU of the brokers, against Java's lite pull{made.note}", found["ours"]["broker"], found["pull"]["broker"], case
        ),
        _cpu(
            f"CPU of the brokers, against Java's orderly push{made.note}",
            found["ours"]["broker"],
            found["push"]["broker"],
            case,
        ),
    ]


# --- writing


def sink(bench: Bench) -> list[Figure]:
    made = rig(bench)
    rows = 100_000 if bench.quick else 1_000_000

    def written() -> dict[str, float]:
        given = bench.null_source(KEYED, rows, QUEUES).selectExpr("*", "'created' AS tags", "sharding_key AS keys")
        return bench.drain(given, "orderedmq", rows, namesrvAddr=made.address, topic="sent")

    found = interleaved(
        bench.rounds,
        {
            "ours": lambda: _with_brokers(made, rows, written),
            "batch": lambda: _with_brokers(made, rows // 2, lambda: made.java.speed("batch", "sent", rows // 2)),
            "ordered": lambda: made.java.speed("ordered", "sent", rows // 25),
        },
    )
    case = "RocketMQ: sink"
    mine = {measure: 1000 * value for measure, value in found["ours"].items()}
    batch, ordered = found["batch"]["speed"], found["ordered"]["speed"]
    return [
        _against(
            mine["micro-batch"], batch, f"with a sharding key, against Java's batches of 1000, 4 threads{made.note}", 0.9, case
        ),
        _against(
            mine["micro-batch"], ordered, f"with a sharding key, against Java's ordered send, 8 threads{made.note}", 20.0, case
        ),
        _against(mine["whole query"], batch, f"whole query, against Java's batches of 1000{made.note}", None, case),
        _cpu(
            f"CPU of the brokers, against Java's batches of 1000{made.note}",
            found["ours"]["broker"],
            found["batch"]["broker"],
            case,
        ),
    ]


# --- small and many


def micro_batch(bench: Bench) -> list[Figure]:
    made = rig(bench)
    out = []
    for pace, every, batches in (("10 rows/s", 1.0, 8), ("100 rows/s", 0.1, 40)):
        topic, target = bench.fresh("in").name, bench.fresh("out").name
        for name in (topic, target):
            made.broker.admin.create_topic(name, 1)
        ways: list[latency.Way] = [
            ("to noop", "noop", "noop", {}),
            ("to sink", "orderedmq", "null_sink", {"namesrvAddr": made.address, "topic": target}),
        ]
        ours = partial(stream, bench, made, COLUMNS, topic)
        connect = partial(orderedmq.connect, namesrv_addr=made.address)
        out += latency.against_null(
            bench, "RocketMQ: 10-row micro-batch", ours, connect, topic, ways, pace, every, batches, 1.25
        )
    return out


def many_queues(bench: Bench) -> list[Figure]:
    """The reader's driver side in this process, 64 queues over two brokers, one new message in each of some."""
    made = rig(bench)
    topic = bench.fresh("wide").name
    made.broker.admin.create_topic(topic, MANY)
    queues = made.broker.log.queues(topic)
    one = messages(1)
    times: dict[str, list[float]] = {"something new": [], "nothing new": []}
    cpu: dict[str, list[float]] = {what: [] for what in times}
    options = {"namesrvAddr": made.address, "topic": topic, "consumerGroup": bench.fresh("group").name}
    reader = StreamReader(options, full_schema(False))
    try:
        for queue in queues:
            made.broker.log.append(queue, one)
        start: dict[str, Any] = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        for number in range(10 if bench.quick else 60):
            made.broker.log.append(queues[number % MANY], one)
            for what in times:
                # As far apart as triggers that have something to do.
                time.sleep(0.1)
                begin, began = time.perf_counter(), time.process_time()
                end = reader.latestOffset(start, ReadAllAvailable())
                times[what].append((time.perf_counter() - begin) * 1000)
                cpu[what].append((time.process_time() - began) * 1000)
                reader.partitions(start, end)
                start = end
    finally:
        reader.stop()
    case = f"RocketMQ: {MANY} queues, 2 brokers"
    return [
        Figure(case, f"latestOffset, {what}", median(values), "ms", 30.0, median(values) / 30.0, 1.0, low=True)
        for what, values in times.items()
    ] + [Figure(case, f"latestOffset, {what}, CPU of the process", median(values), "ms") for what, values in cpu.items()]


def memory(bench: Bench) -> list[Figure]:
    """Peak RSS of a process that reads one queue as an executor's worker does."""
    made = rig(bench)
    large, small = (500_000, 50_000) if bench.quick else (5_000_000, 500_000)
    topic = bench.fresh("backlog").name
    made.broker.admin.create_topic(topic, 1)
    fill(made.broker, topic, large)
    peaks: dict[int, float] = {}
    for rows in (small, large):
        program = f"from tests.bench import rocketmq; rocketmq.read_all({made.address!r}, {topic!r}, {rows})"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        peaks[rows] = int(done.stdout) / 1024
    what = f"peak RSS of a task, {large:,} messages against {small:,}"
    return [Figure("RocketMQ: memory", what, peaks[large], "MB", peaks[small], peaks[large] / peaks[small], 1.1, low=True)]


def read_all(address: str, topic: str, rows: int) -> None:
    """In a process of its own: read a queue and print the peak of RSS, in KiB."""
    with orderedmq.connect(namesrv_addr=address) as broker:
        partition = whole_queue(broker, Endpoint(namesrv_addr=address), topic, rows)
    read_away(partition)
    print(status("VmHWM"))
