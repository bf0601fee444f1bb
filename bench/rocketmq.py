"""Measures over a real RocketMQ of two brokers on this machine, against a raw loop that decodes nothing and against RocketMQ's Java client.

Messages have bodies of 100 bytes, tags, keys and a sharding key, in 4 queues; brokers have their default limits. All cases share one
cluster, and the messages that they read are sent once, by our own append. Cases with "mixed messages" read messages that all differ. In
cases with a raised limit, the brokers return 1,024 messages per pull instead of 32, also to Java's clients.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from bench import latency
from bench.figures import ROOT, Figure
from bench.measure import Bench, Skipped, interleaved, median, status
from bench.one_task import CHUNK, read_away, whole_queue
from bench.process_cpu import JVM, PYTHON, ProcessCpu
from bench.raw_pull import STEP, raw_pull
from bench.rocketmq_data import messages, mixed_messages, sized_messages
from bench.rocketmq_rig import QUEUES, RAISED, WARM_ROWS, Rig, fill, proxy_before, rig, warm
from bench.throughput import COLUMNS, KEYED
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker, Log, PullSettings
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions
from orderedmq.rocketmq.net.client import Client
from orderedmq.schema import DEFAULT_COLUMNS

MANY: Final = 64
#: Number of micro-batches of a query that writes.
BATCHES: Final = 3
#: Messages in a raw pull under a raised limit: few enough that an answer stays below 256 KiB.
RAISED_STEP: Final = 512


# --- reading


def raw(client: Client, queues: list[MessageQueue], count: int, step: int) -> dict[str, float]:
    def loop() -> None:
        for queue in queues:
            raw_pull(client.address(queue.topic, queue.broker_name, time.monotonic() + 60), queue, count, step)

    return _timed(loop, count * len(queues))


def pulled(log: Log, queues: list[MessageQueue], count: int) -> dict[str, float]:
    def pull_all() -> None:
        for queue in queues:
            at = 0
            while at < count:
                at += log.pull(queue, at, min(CHUNK, count - at), 1 << 40, DEFAULT_COLUMNS, None, count).num_rows

    return _timed(pull_all, count * len(queues))


def _timed(call: Callable[[], None], rows: int) -> dict[str, float]:
    """Return the speed in thousand rows a second, and this process's CPU in µs per row, which other programs disturb less."""
    begin, began = time.perf_counter(), time.process_time()
    call()
    return {
        "speed": rows / (time.perf_counter() - begin) / 1000,
        "cpu": (time.process_time() - began) / rows * 1e6,
    }


def pull(bench: Bench) -> list[Figure]:
    return _pull(bench, rig(bench), "bench", "RocketMQ: pull", aims=(0.6, 3.0))


def pull_mixed(bench: Bench) -> list[Figure]:
    made = rig(bench)
    fill(made.broker, "mixed", made.rows // QUEUES, mixed_messages)
    return _pull(bench, made, "mixed", "RocketMQ: pull of mixed messages")


def pull_verified(bench: Bench) -> list[Figure]:
    """Measure the cost of the option verifyBodyCrc, by the size of bodies."""
    made, figures = rig(bench), []
    for size, share in ((100, 1), (1_000, 4), (10_000, 40)):
        topic, each = f"sized-{size}", made.rows // share // QUEUES
        made.broker.admin.create_topic(topic, QUEUES)
        fill(made.broker, topic, each, partial(sized_messages, size))
        queues = made.broker.log.queues(topic)
        ways = {
            name: partial(made.with_brokers, each * QUEUES, partial(pulled, made.broker.log.reading(settings), queues, each))
            for name, settings in (("with", PullSettings(verify_body_crc=True)), ("without", PullSettings()))
        }
        found = interleaved(bench.rounds, ways)
        mine, least = found["with"], found["without"]
        case = f"RocketMQ: verifyBodyCrc, bodies of {size:,} bytes"
        figures += [
            _against(mine["speed"], least["speed"], "pull, 12 columns, against without it", None, case),
            _cpu("CPU of the process, against without it", mine["cpu"], least["cpu"], case),
        ]
    return figures


def pull_raised(bench: Bench) -> list[Figure]:
    made = _with_java(rig(bench))
    with made.raised():
        return _pull(bench, made, "bench", "RocketMQ: pull, limit raised", step=RAISED_STEP, batch=RAISED)


def _with_java(made: Rig) -> Rig:
    """Return ``made``. Raises Skipped without a Java compiler, because speeds are recorded only for the default limit."""
    if not made.java.measured:
        raise Skipped("this Java has no compiler, so Java's clients cannot be measured under a raised limit")
    return made


def _pull(
    bench: Bench,
    made: Rig,
    topic: str,
    case: str,
    aims: tuple[float | None, float | None] = (None, None),
    step: int = STEP,
    batch: int = STEP,
) -> list[Figure]:
    """Pull messages and decode them into RecordBatches of all columns, in this process without Spark."""
    queues = made.broker.log.queues(topic)
    each, java = made.rows // QUEUES, made.rows // 2
    found = interleaved(
        bench.rounds,
        {
            "ours": partial(made.with_brokers, made.rows, partial(pulled, made.broker.log, queues, each)),
            "raw": partial(made.with_brokers, made.rows, partial(raw, made.client, queues, each, step)),
            "java": partial(made.with_brokers, java, partial(made.java.speed, "pull", topic, java, batch)),
        },
    )
    mine, least, lite = found["ours"], found["raw"], found["java"]
    cores = os.cpu_count() or 1
    allowed = cores / (mine["cpu"] + mine["broker"]) * 1000
    return [
        _against(mine["speed"], least["speed"], "12 columns, against a raw loop that decodes nothing", aims[0], case),
        _against(mine["speed"], lite["speed"], f"12 columns, against Java's lite pull{made.note}", aims[1], case),
        _against(mine["speed"], allowed, f"12 columns, against what the CPU of {cores} cores allows", None, case),
        _cpu("CPU of the process, against the raw loop", mine["cpu"], least["cpu"], case),
        _cpu("CPU of the brokers, against the raw loop", mine["broker"], least["broker"], case),
        _cpu(f"CPU of the brokers, against Java's lite pull{made.note}", mine["broker"], lite["broker"], case),
    ]


def _cpu(what: str, mine: float, peer: float | None, case: str) -> Figure:
    return Figure(case, what, mine, "µs/row", peer, mine / peer if peer else None)


def _against(mine: float, peer: float, what: str, target: float | None, case: str) -> Figure:
    return Figure(case, what, mine, "k rows/s", peer, mine / peer, target)


def stream(bench: Bench, made: Rig, schema: str, topic: str) -> DataFrame:
    reader = bench.spark.readStream.format("orderedmq").schema(schema)
    group = bench.fresh("group").name
    return reader.options(namesrvAddr=made.address, topic=topic, consumerGroup=group).load()


def source(bench: Bench) -> list[Figure]:
    return _source(bench, rig(bench), "RocketMQ: source → noop", 2.5)


def source_raised(bench: Bench) -> list[Figure]:
    made = _with_java(rig(bench))
    with made.raised():
        return _source(bench, made, "RocketMQ: source → noop, limit raised", None, RAISED)


def _source(bench: Bench, made: Rig, case: str, aim: float | None, batch: int = STEP) -> list[Figure]:
    # Java's clients read only half of the messages, because they wait at the end of a queue that they have begun late.
    java = made.rows // 2
    found = interleaved(
        bench.rounds,
        {
            "ours": lambda: made.with_brokers(
                made.rows, lambda: bench.drain(stream(bench, made, COLUMNS, "bench"), "noop", made.rows)
            ),
            "pull": lambda: made.with_brokers(java, lambda: made.java.speed("pull", "bench", java, batch)),
            "push": lambda: made.with_brokers(java, lambda: made.java.speed("push", "bench", java, batch)),
        },
    )
    inside, whole = (1000 * found["ours"][measure] for measure in ("micro-batch", "whole query"))
    broker, pull, push = found["ours"]["broker"], found["pull"], found["push"]
    lite, orderly = f"against Java's lite pull{made.note}", f"against Java's orderly push{made.note}"
    return [
        _against(inside, pull["speed"], f"5 columns, micro-batch, {lite}", aim, case),
        _against(inside, push["speed"], f"5 columns, micro-batch, {orderly}", aim, case),
        _against(whole, pull["speed"], f"5 columns, whole query, {lite}", None, case),
        _cpu(f"CPU of the brokers, {lite}", broker, pull["broker"], case),
        _cpu(f"CPU of the brokers, {orderly}", broker, push["broker"], case),
    ]


# --- through a Proxy


def proxy(bench: Bench) -> list[Figure]:
    """Compare reading through a RocketMQ Proxy in front of the same brokers with reading from the brokers directly."""
    made = rig(bench)
    server = bench.closing.enter_context(proxy_before(bench.fresh("proxy"), made.cluster))
    with orderedmq.connect(namesrv_addr=server.address) as broker:
        queues = broker.log.queues("bench")
        found = interleaved(
            bench.rounds,
            {
                "through": partial(pulled, broker.log, queues, made.rows // QUEUES),
                "direct": partial(pulled, made.broker.log, queues, made.rows // QUEUES),
                "read through": partial(_read, bench, server.address, made.rows),
                "read direct": partial(_read, bench, made.address, made.rows),
            },
        )
    case = "RocketMQ: through a Proxy"
    return [
        _against(
            found["through"]["speed"], found["direct"]["speed"], "pull, 12 columns, against the brokers directly", None, case
        ),
        _cpu(
            "pull, CPU of the process, against the brokers directly",
            found["through"]["cpu"],
            found["direct"]["cpu"],
            case,
        ),
        _against(
            found["read through"]["speed"],
            found["read direct"]["speed"],
            "spark.read, 5 columns, against the brokers directly",
            None,
            case,
        ),
    ]


def _read(bench: Bench, address: str, rows: int) -> dict[str, float]:
    """Return thousand rows a second of a batch read of the whole topic."""
    begin = time.perf_counter()
    read = bench.spark.read.format("orderedmq").schema(COLUMNS).options(namesrvAddr=address, topic="bench").load()
    read.write.format("noop").mode("overwrite").save()
    return {"speed": rows / (time.perf_counter() - begin) / 1000}


# --- writing


def sink(bench: Bench) -> list[Figure]:
    """Measure the first micro-batch of a query and the later ones, over brokers that are warm."""
    made = rig(bench)
    rows = 100_000 if bench.quick else 1_000_000
    cold = warm(made, "sent")

    def written() -> dict[str, float]:
        every = BATCHES * rows
        return bench.drain(_given(bench, every, rows), "orderedmq", every, namesrvAddr=made.address, topic="sent")

    def dropped() -> dict[str, float]:
        """Return the CPU in µs per row of a sink that drops rows, without the query's start: the cost of additional rows."""
        used = [
            _spark_cpu(made, partial(bench.drain, _given(bench, count), "null_sink", count)) for count in (rows // 10, rows)
        ]
        return {"cpu": (used[1] - used[0]) / (rows - rows // 10) * 1e6}

    found = interleaved(
        bench.rounds,
        {
            "ours": partial(made.with_brokers, BATCHES * rows, written),
            "batch": partial(made.with_brokers, rows, partial(made.java.speed, "batch", "sent", rows)),
            "ordered": partial(made.with_brokers, rows // 25, partial(made.java.speed, "ordered", "sent", rows // 25)),
            "null": dropped,
        },
    )
    case = "RocketMQ: sink"
    cores, spark = os.cpu_count() or 1, found["null"]["cpu"]
    later, first, whole = (1000 * found["ours"][measure] for measure in ("later", "first", "whole query"))
    broker, batch, ordered = found["ours"]["broker"], found["batch"], found["ordered"]
    batches, sends = (
        f"against Java's batches of 1000, 4 threads{made.note}",
        f"against Java's ordered send, 8 threads{made.note}",
    )
    allowed = cores / (spark + broker) * 1000
    return [
        _against(later, batch["speed"], f"with a sharding key, later micro-batches, {batches}", 0.9, case),
        _against(later, ordered["speed"], f"with a sharding key, later micro-batches, {sends}", 20.0, case),
        _against(first, batch["speed"], f"with a sharding key, first micro-batch, {batches}", None, case),
        _against(later, allowed, f"later micro-batches, against what the CPU of {cores} cores allows a free sink", None, case),
        _against(whole, batch["speed"], f"whole query, {batches}", None, case),
        _cpu("CPU of Spark for a sink that drops rows", spark, None, case),
        _cpu(f"CPU of the brokers, {batches}", broker, batch["broker"], case),
        _cpu(f"CPU of the brokers, {sends}", broker, ordered["broker"], case),
        Figure(
            case,
            f"CPU of new brokers for a batch of {WARM_ROWS:,} rows, the first against the {len(cold)}th",
            cold[0],
            "s",
            cold[-1],
            cold[0] / cold[-1],
        ),
    ]


def _given(bench: Bench, rows: int, most: int = 0) -> DataFrame:
    """Return rows with a tag, a key and a sharding key, at most ``most`` in a micro-batch; with 0, all in one."""
    source = bench.null_source(KEYED, rows, QUEUES, most=most)
    return source.selectExpr("*", "'created' AS tags", "sharding_key AS keys")


def trace(bench: Bench) -> list[Figure]:
    """Compare the sink at full speed with RocketMQ's message trace and without it."""
    made = rig(bench)
    rows, topic = 100_000 if bench.quick else 400_000, bench.fresh("traces").name
    made.broker.admin.create_topic(topic, QUEUES)
    queues = made.broker.log.queues(topic)

    def ends() -> dict[MessageQueue, int]:
        return {queue: bounds.max_offset for queue, bounds in made.broker.log.bounds(queues).items()}

    def written(**options: Any) -> dict[str, float]:
        before, began, found = ends(), made.brokers_cpu(), dict[str, float]()

        def run() -> None:
            sent = {"namesrvAddr": made.address, "topic": "sent", **options}
            found.update(bench.drain(_given(bench, rows), "orderedmq", rows, **sent))
            # Wait for all traces, which are sent during the query and after it.
            last = None
            while last != (last := ends()):
                time.sleep(1.0)

        found["cpu"] = _spark_cpu(made, run) / rows * 1e6
        found["broker"] = (made.brokers_cpu() - began) / rows * 1e6
        found["traces"] = sum(_count_traces(made.broker, queue, before[queue], end) for queue, end in ends().items())
        return found

    traced = partial(written, enableMsgTrace=True, customizedTraceTopic=topic)
    found = interleaved(bench.rounds, {"with": traced, "without": written})
    mine, peer = found["with"], found["without"]
    case = "RocketMQ: message trace"
    return [
        _against(1000 * mine["micro-batch"], 1000 * peer["micro-batch"], "the sink, against the sink without it", None, case),
        Figure(case, "traces written, of the rows sent at that speed", mine["traces"], "rows", rows, mine["traces"] / rows),
        _cpu("CPU of Spark, our process included, against without it", mine["cpu"], peer["cpu"], case),
        _cpu("CPU of the brokers, against without it", mine["broker"], peer["broker"], case),
    ]


def _count_traces(broker: Broker, queue: MessageQueue, at: int, end: int) -> int:
    """Return how many traces the messages of a range have. A control character ends each trace."""
    count = 0
    while at < end:
        bodies = broker.log.pull(queue, at, min(CHUNK, end - at), 1 << 40, ("body",)).column(0).to_pylist()
        count += sum(body.count(b"\x02") for body in bodies)
        at += len(bodies)
    return count


def _spark_cpu(made: Rig, run: Callable[[], object]) -> float:
    """Return the CPU seconds that Spark's JVM and Python's processes use in a run, without the servers."""
    with ProcessCpu({server.pid: "servers" for server in made.cluster.servers}) as cpu:
        before = cpu.now()
        run()
        used = cpu.since(before)
    return used[JVM] + used[PYTHON]


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
        case = "RocketMQ: 10-row micro-batch"
        begin, began = time.perf_counter(), made.brokers_cpu()
        out += latency.against_null(bench, case, ours, connect, topic, ways, pace, every, batches, 1.25)
        share = (made.brokers_cpu() - began) / (time.perf_counter() - begin)
        out.append(Figure(case, f"{pace}, CPU of the brokers, seconds a second", share, "CPU"))
    return out


def many_queues(bench: Bench) -> list[Figure]:
    """Measure the reader's driver side in this process: 64 queues on two brokers, and one queue has a new message."""
    made = rig(bench)
    topic = bench.fresh("wide").name
    made.broker.admin.create_topic(topic, MANY)
    queues = made.broker.log.queues(topic)
    one = messages(1)
    times: dict[str, list[float]] = {"something new": [], "nothing new": []}
    cpu: dict[str, list[float]] = {what: [] for what in times}
    brokers = 0.0
    options = {"namesrvAddr": made.address, "topic": topic, "consumerGroup": bench.fresh("group").name}
    reader = StreamReader(options, full_schema(False))
    try:
        for queue in queues:
            made.broker.log.append({queue: one})
        start: dict[str, Any] = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        for number in range(10 if bench.quick else 60):
            made.broker.log.append({queues[number % MANY]: one})
            for what in times:
                # Leave as much time between two calls as between busy triggers.
                time.sleep(0.1)
                begin, began, theirs = time.perf_counter(), time.process_time(), made.brokers_cpu()
                end = reader.latestOffset(start, ReadAllAvailable())
                times[what].append((time.perf_counter() - begin) * 1000)
                cpu[what].append((time.process_time() - began) * 1000)
                brokers += made.brokers_cpu() - theirs
                reader.partitions(start, end)
                start = end
    finally:
        reader.stop()
    case = f"RocketMQ: {MANY} queues, 2 brokers"
    return [
        Figure(case, f"latestOffset, {what}", median(values), "ms", 30.0, median(values) / 30.0, 1.0, low=True)
        for what, values in times.items()
    ] + [
        *(Figure(case, f"latestOffset, {what}, CPU of the process", median(values), "ms") for what, values in cpu.items()),
        Figure(case, "latestOffset, CPU of the brokers, mean", brokers / sum(map(len, times.values())) * 1000, "ms"),
    ]


def memory(bench: Bench) -> list[Figure]:
    """Measure the peak RSS of a process that reads one queue as an executor's worker does."""
    made = rig(bench)
    large, small = (500_000, 50_000) if bench.quick else (5_000_000, 500_000)
    topic = bench.fresh("backlog").name
    made.broker.admin.create_topic(topic, 1)
    fill(made.broker, topic, large)
    peaks: dict[int, float] = {}
    began = made.brokers_cpu()
    for rows in (small, large):
        program = f"from bench import rocketmq; rocketmq.read_all({made.address!r}, {topic!r}, {rows})"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        peaks[rows] = int(done.stdout) / 1024
    broker = (made.brokers_cpu() - began) / (large + small) * 1e6
    case, what = "RocketMQ: memory", f"peak RSS of a task, {large:,} messages against {small:,}"
    return [
        Figure(case, what, peaks[large], "MB", peaks[small], peaks[large] / peaks[small], 1.1, low=True),
        _cpu("CPU of the brokers", broker, None, case),
    ]


def read_all(address: str, topic: str, rows: int) -> None:
    """Read a queue and print the peak of RSS, in KiB. Runs in a separate process."""
    with orderedmq.connect(namesrv_addr=address) as broker:
        partition = whole_queue(broker, topic, rows)
    read_away(partition, SourceOptions(namesrv_addr=address))
    print(status("VmHWM"))
