"""Measures how long queues are without an owner: when a member leaves, and when a query stops in the middle of its tasks."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from bench.figures import Figure
from bench.measure import Bench, median
from bench.rocketmq_rig import rig
from ordered_source import stop_at_boundary
from orderedmq.broker import Broker

#: Seconds between two triggers, and seconds that the task of a queue takes. Two cores work on the four queues of each query.
TRIGGER: Final = 0.5
WORK: Final = 0.25
QUEUES: Final = 8
GROUP: Final = "bench"


def _rows(bench: Bench, endpoint: dict[str, str]) -> DataFrame:
    reader = bench.spark.readStream.format("orderedmq")
    return reader.options(**endpoint, topic="owned", consumerGroup=GROUP, assignment="shared", lockTimeout="60s").load()


def _start(bench: Bench, rows: DataFrame) -> StreamingQuery:
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(bench.fresh("checkpoint")))
    return writer.trigger(processingTime=f"{int(TRIGGER * 1000)} milliseconds").start()


def _until_owners(broker: Broker, count: int) -> None:
    """Wait until ``count`` queries own all queues, in equal shares."""
    while True:
        owners = [lock.client_id for lock in broker.admin.locks(GROUP) if lock.held]
        shares = {owners.count(owner) for owner in owners}
        if len(owners) == QUEUES and shares == {QUEUES // count}:
            return
        time.sleep(0.005)


def leaving(bench: Bench) -> list[Figure]:
    """Measure, with two idle queries, how soon the other one owns every queue after one has stopped."""
    path = bench.fresh("store")
    seconds = []
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("owned", QUEUES)
        stays = _start(bench, _rows(bench, {"path": str(path)}))
        for _ in range(1 if bench.quick else 5):
            goes = _start(bench, _rows(bench, {"path": str(path)}))
            _until_owners(broker, 2)
            time.sleep(2 * TRIGGER)
            goes.stop()
            begin = time.perf_counter()
            _until_owners(broker, 1)
            seconds.append(time.perf_counter() - begin)
        stays.stop()
    took, what = median(seconds), f"another stops: {QUEUES} queues have their owners"
    return [Figure("hand-over", what, took, "s", TRIGGER, took / TRIGGER, 2.0, low=True)]


def embedded(bench: Bench) -> list[Figure]:
    path = bench.fresh("store")
    with orderedmq.connect(path) as broker:
        return _stopping(bench, broker, {"path": str(path)}, "rollout, embedded broker")


def rocketmq(bench: Bench) -> list[Figure]:
    made = rig(bench)
    return _stopping(bench, made.broker, {"namesrvAddr": made.address}, "rollout, RocketMQ")


def _stopping(bench: Bench, broker: Broker, endpoint: dict[str, str], case: str) -> list[Figure]:
    """Measure how long the next owner waits after a query stops while its tasks run: at a boundary, and by ``query.stop()``."""
    broker.admin.create_topic("owned", QUEUES)
    queues = broker.log.queues("owned")

    def start() -> tuple[StreamingQuery, Path]:
        """Start a query, and return it with the folder in which each of its tasks makes a file when it begins."""
        began = bench.fresh("began")
        began.mkdir()

        def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            (began / uuid.uuid4().hex).touch()
            time.sleep(WORK)
            yield from batches

        return _start(bench, _rows(bench, endpoint).select("body").mapInArrow(work, "body binary")), began

    def taken(stop: Callable[[StreamingQuery], Any]) -> float:
        """Stop one of two queries while its tasks run, and return the seconds until the other query owns all queues."""
        (stays, _), (goes, began) = start(), start()
        _until_owners(broker, 2)
        before = len(list(began.iterdir()))
        while len(list(began.iterdir())) == before:
            time.sleep(0.01)
        begin = time.perf_counter()
        stop(goes)
        _until_owners(broker, 1)
        took = time.perf_counter() - begin
        stop_at_boundary(stays)
        return took

    ended = threading.Event()

    def send() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            broker.log.append({queue: pa.record_batch({"body": pa.array([str(number).encode()])}) for queue in queues})

    sender = threading.Thread(target=send)
    sender.start()
    try:
        boundary = median([taken(stop_at_boundary) for _ in range(1 if bench.quick else 3)])
        cut = taken(lambda query: query.stop())
    finally:
        ended.set()
        sender.join()
    what = f"stop while tasks of {WORK:g} s run, triggers each {TRIGGER:g} s: {QUEUES} queues have their next owner"
    return [Figure(case, f"{what}, stop_at_boundary against query.stop()", boundary, "s", cut, boundary / cut, 0.5, low=True)]
