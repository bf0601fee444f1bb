"""Measures over a real RocketMQ of two brokers on this machine, against a raw loop that decodes nothing and against RocketMQ's Java client.

Messages have bodies of 100 bytes, tags, keys and a sharding key, in 4 queues; brokers have their default limits. All cases share one
cluster, and the messages that they read are sent once, by our own append. With a raised limit, the brokers return 1,024 messages per
pull instead of 32, also to Java's clients.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from pyspark.sql import DataFrame

import orderedmq
from bench.figures import Figure
from bench.measure import Bench, interleaved
from bench.process_cpu import JVM, PYTHON, ProcessCpu
from bench.raw_pull import STEP, raw_pull
from bench.rocketmq_rig import QUEUES, RAISED, WARM_ROWS, Rig, fill, proxy_before, rig, sized_messages, warm
from bench.throughput import COLUMNS, KEYED
from orderedmq.broker import Log, PullSettings
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.client import Client
from orderedmq.schema import DEFAULT_COLUMNS

#: Messages in one call of `Log.pull`: the default of pullBatchSize.
CHUNK: Final = 16_384
#: Number of micro-batches of a query that writes.
BATCHES: Final = 3


# --- reading


def raw(client: Client, queues: list[MessageQueue], count: int) -> dict[str, float]:
    def loop() -> None:
        for queue in queues:
            raw_pull(client.address(queue.topic, queue.broker_name, time.monotonic() + 60), queue, count)

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
        figures.append(_cpu("CPU of the process, against without it", mine["cpu"], least["cpu"], case))
    return figures


def pull(bench: Bench) -> list[Figure]:
    """Pull messages and decode them into RecordBatches of all columns, in this process without Spark."""
    made, case = rig(bench), "RocketMQ: pull"
    queues = made.broker.log.queues("bench")
    each, java = made.rows // QUEUES, made.rows // 2
    found = interleaved(
        bench.rounds,
        {
            "ours": partial(made.with_brokers, made.rows, partial(pulled, made.broker.log, queues, each)),
            "raw": partial(made.with_brokers, made.rows, partial(raw, made.client, queues, each)),
            "java": partial(made.with_brokers, java, partial(made.java.speed, "pull", "bench", java)),
        },
    )
    mine, least, lite = found["ours"], found["raw"], found["java"]
    cores = os.cpu_count() or 1
    allowed = cores / (mine["cpu"] + mine["broker"]) * 1000
    return [
        _against(mine["speed"], least["speed"], "12 columns, against a raw loop that decodes nothing", 0.6, case),
        _against(mine["speed"], lite["speed"], "12 columns, against Java's lite pull", 3.0, case),
        _against(mine["speed"], allowed, f"12 columns, against what the CPU of {cores} cores allows", None, case),
        _cpu("CPU of the process, against the raw loop", mine["cpu"], least["cpu"], case),
        _cpu("CPU of the brokers, against the raw loop", mine["broker"], least["broker"], case),
        _cpu("CPU of the brokers, against Java's lite pull", mine["broker"], lite["broker"], case),
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
    made = rig(bench)
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
    lite, orderly = "against Java's lite pull", "against Java's orderly push"
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
    batches, sends = "against Java's batches of 1000, 4 threads", "against Java's ordered send, 8 threads"
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


def _spark_cpu(made: Rig, run: Callable[[], object]) -> float:
    """Return the CPU seconds that Spark's JVM and Python's processes use in a run, without the servers."""
    with ProcessCpu({server.pid: "servers" for server in made.cluster.servers}) as cpu:
        before = cpu.now()
        run()
        used = cpu.since(before)
    return used[JVM] + used[PYTHON]
