"""Measures small micro-batches and idle queries."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame

import orderedmq
from bench import data
from bench.figures import Figure
from bench.measure import Bench, interleaved
from bench.process_cpu import JVM, PYTHON, ProcessCpu
from bench.throughput import COLUMNS
from orderedmq.broker import Broker

ROWS = 10


@contextlib.contextmanager
def ticking(call: Callable[[], object], every: float) -> Iterator[None]:
    """Call ``call`` every ``every`` seconds, in a thread."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(every):
            call()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def producing(connect: Callable[[], Broker], topic: str, every: float) -> Iterator[None]:
    """Append ten rows to the only queue of a topic every ``every`` seconds."""
    made = data.messages(ROWS)
    with connect() as broker:
        (queue,) = broker.log.queues(topic)
        with ticking(lambda: broker.log.append({queue: made}), every):
            yield


def _store(bench: Bench, topic: str = "t") -> Path:
    path = bench.fresh("store")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic(topic, 1)
    return path


def micro_batch(bench: Bench) -> list[Figure]:
    """Compare micro-batches of ten rows with the null peers. The producer also runs with the null source, because it uses CPU time."""
    path, target = _store(bench), _store(bench, "out")
    figures = []
    for label, sink, null_sink, options, aim in (
        ("to noop", "noop", "noop", {}, 1.15),
        ("to sink", "orderedmq", "null_sink", {"path": str(target), "topic": "out"}, None),
    ):
        count = 2 if bench.quick else 8
        ours = partial(_paced, bench, partial(bench.source, COLUMNS, path, "t"), sink, count, options)
        null = partial(_paced, bench, partial(bench.null_source, COLUMNS, ROWS, 1, 1.0), null_sink, count, {})
        with producing(partial(orderedmq.connect, path), "t", 1.0):
            found = interleaved(1 if bench.quick else 3, {"ours": ours, "null": null}, warm=False)
        mine, other = found["ours"]["trigger"], found["null"]["trigger"]
        figures.append(Figure("10-row micro-batch", f"{label}, 10 rows/s", mine, "ms", other, mine / other, aim, low=True))
    return figures


def _paced(
    bench: Bench, rows: Callable[[], DataFrame], sink: str, batches: int, options: Mapping[str, str]
) -> dict[str, float]:
    return bench.paced(rows(), sink, batches, **options)


def idle(bench: Bench) -> list[Figure]:
    """Measure CPU seconds per second of a query with the default trigger whose source has nothing new."""
    path = _store(bench)
    with orderedmq.connect(path) as broker:
        broker.log.append({broker.log.queues("t")[0]: data.messages(ROWS)})
    seconds = 3 if bench.quick else 10

    def run() -> dict[str, float]:
        query = bench.start(bench.source(COLUMNS, path, "t"), "noop")
        try:
            while not any(progress.numInputRows for progress in query.recentProgress):
                time.sleep(0.1)
            time.sleep(2)
            with ProcessCpu({}) as cpu:
                before = cpu.now()
                time.sleep(seconds)
                used = cpu.since(before)
        finally:
            query.stop()
        return {name: used[name] / seconds for name in (JVM, PYTHON)}

    used = interleaved(1 if bench.quick else 3, {"ours": run}, warm=False)["ours"]
    return [Figure("idle query", f"{name}, CPU seconds a second", mine, "CPU") for name, mine in used.items()]
