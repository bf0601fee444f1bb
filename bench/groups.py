"""Consumer groups: a shared query against an exclusive one, how soon queues change hands, and the orderly listener against mapInArrow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame

import orderedmq
from bench import data
from bench.figures import Figure
from bench.measure import Bench, interleaved, median
from bench.throughput import COLUMNS, QUEUES, filled
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerQueue, consume_orderly

#: Seconds between two triggers of the queries that hand queues over.
TRIGGER: Final = 0.5
HANDED: Final = 8
#: Messages in one call of the listener.
BATCH: Final = 32
#: Cores of the bench's Spark.
CORES: Final = 2


def shared(bench: Bench) -> list[Figure]:
    """Compare the only query of a shared group with an exclusive query."""
    path = filled(bench)
    found = interleaved(
        bench.rounds,
        {
            how: partial(lambda how: bench.drain(bench.source(COLUMNS, path, "t", assignment=how), "noop", bench.rows), how)
            for how in ("shared", "exclusive")
        },
    )
    return [
        Figure("shared group", f"source → noop, {measure}", mine, "M rows/s", peer, mine / peer, target)
        for measure, target in (("micro-batch", None), ("whole query", 0.97))
        for mine, peer in ((found["shared"][measure], found["exclusive"][measure]),)
    ]


def hand_over(bench: Bench) -> list[Figure]:
    """Measure, with two idle queries, how soon every queue has its owner after one query stops or starts."""
    path = bench.fresh("store")
    seen: dict[str, list[float]] = {"stops": [], "comes": []}
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("t", HANDED)

        def until(shares: Sequence[int]) -> float:
            begin = time.perf_counter()
            while True:
                owners: dict[str, int] = {}
                for lock in broker.admin.locks("bench"):
                    if lock.held:
                        owners[lock.client_id] = owners.get(lock.client_id, 0) + 1
                if sorted(owners.values()) == list(shares):
                    return time.perf_counter() - begin
                time.sleep(0.005)

        def start() -> Any:
            rows = bench.spark.readStream.format("orderedmq").schema(COLUMNS)
            rows = rows.options(path=str(path), topic="t", consumerGroup="bench", assignment="shared", lockTimeout="60s")
            writer = rows.load().writeStream.format("noop").option("checkpointLocation", str(bench.fresh("checkpoint")))
            return writer.trigger(processingTime=f"{int(TRIGGER * 1000)} milliseconds").start()

        stays = start()
        until([HANDED])
        for _ in range(1 if bench.quick else 5):
            goes = start()
            # Do not measure the start of the query's processes.
            while not any(member.age < 1 for member in broker.admin.members("bench")[1:]):
                time.sleep(0.005)
            seen["comes"].append(until([HANDED // 2, HANDED // 2]))
            time.sleep(2 * TRIGGER)
            goes.stop()
            seen["stops"].append(until([HANDED]))
        stays.stop()
    return [
        Figure(
            "hand-over",
            f"another {what}: {HANDED} queues have their owners",
            took,
            "s",
            TRIGGER,
            took / TRIGGER,
            target,
            low=True,
        )
        for what, target in (("stops", 2.0), ("comes", None))
        for took in (median(seen[what]),)
    ]


def _heard(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    return ConsumeOrderlyStatus.SUCCESS


def _counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"rows": pa.array([batch.num_rows])})


def listener(bench: Bench) -> list[Figure]:
    """Measure messages per second and core through a listener that does nothing, and through a mapInArrow that counts rows."""
    path = bench.fresh("store")
    rows = bench.rows // 4
    with orderedmq.connect(path) as broker:
        data.fill(broker, "t", QUEUES, rows)

    def read() -> DataFrame:
        return bench.source(f"{COLUMNS}, topic string, broker_name string, lock_token string", path, "t")

    def through_listener() -> dict[str, float]:
        heard = read().transform(consume_orderly, _heard, OrderPerQueue(BATCH))
        return bench.drain(heard, "noop", rows)

    def through_map() -> dict[str, float]:
        return bench.drain(read().mapInArrow(_counted, "rows long"), "noop", rows)

    found = interleaved(bench.rounds, {"listener": through_listener, "map": through_map})
    mine, peer = (1e3 * found[name]["micro-batch"] / CORES for name in ("listener", "map"))
    return [
        Figure(
            "orderly listener", f"batches of {BATCH}, per core, against 100 k", mine, "k messages/s", 100.0, mine / 100, 1.0
        ),
        Figure("orderly listener", "against a mapInArrow that counts rows, per core", mine, "k messages/s", peer, mine / peer),
    ]
