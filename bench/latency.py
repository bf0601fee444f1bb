"""Measures small micro-batches and idle queries."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame

import orderedmq
from bench import data
from bench.figures import Figure
from bench.measure import Bench, interleaved
from bench.process_cpu import JVM, PYTHON, ProcessCpu
from bench.throughput import COLUMNS
from orderedmq.broker import Broker

ROWS = 10


#: A label, our sink, the null peer's sink, and our sink's options.
Way: TypeAlias = tuple[str, str, str, dict[str, str]]


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
    out = []
    for pace, every, batches in (("10 rows/s", 1.0, 8), ("100 rows/s", 0.1, 40)):
        path, target = _store(bench), _store(bench, "out")
        ways: list[Way] = [
            ("to noop", "noop", "noop", {}),
            ("to sink", "orderedmq", "null_sink", {"path": str(target), "topic": "out"}),
        ]
        ours = partial(bench.source, COLUMNS, path, "t")
        out += against_null(
            bench, "10-row micro-batch", ours, partial(orderedmq.connect, path), "t", ways, pace, every, batches, 1.15
        )
    return out


def against_null(
    bench: Bench,
    case: str,
    ours: Callable[[], DataFrame],
    connect: Callable[[], Broker],
    topic: str,
    ways: Sequence[Way],
    pace: str,
    every: float,
    batches: int,
    target: float,
) -> list[Figure]:
    """Compare micro-batches of ten rows with the null peers. The producer also runs with the null source, because it uses CPU time."""
    out = []
    for label, sink, null_sink, options in ways:
        null = partial(bench.null_source, COLUMNS, ROWS, 1, every)
        count = batches // 4 if bench.quick else batches
        with producing(connect, topic, every):
            found = interleaved(
                1 if bench.quick else 3,
                {
                    "ours": partial(_paced, bench, ours, sink, count, options),
                    "null": partial(_paced, bench, null, null_sink, count, {}),
                },
                warm=False,
            )
        for phase, mine in found["ours"].items():
            other = found["null"][phase]
            judged = target if phase == "triggerExecution" and label == "to noop" else None
            ratio = mine / other if other else None
            out.append(Figure(case, f"{label}, {pace}, {phase}", mine, "ms", other, ratio, judged, low=True))
    return out


def _paced(bench: Bench, rows: Callable[[], DataFrame], sink: str, batches: int, options: dict[str, str]) -> dict[str, float]:
    return bench.paced(rows(), sink, batches, **options)


def idle(bench: Bench) -> list[Figure]:
    """Measure CPU seconds per second of a query with the default trigger whose source has nothing new."""
    path = _store(bench)
    with orderedmq.connect(path) as broker:
        broker.log.append({broker.log.queues("t")[0]: data.messages(ROWS)})
    seconds = 3 if bench.quick else 10

    def run(null: bool) -> dict[str, float]:
        rows = bench.null_source(COLUMNS, ROWS, 1) if null else bench.source(COLUMNS, path, "t")
        query = bench.start(rows, "noop")
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

    found = interleaved(1 if bench.quick else 3, {"ours": lambda: run(False), "null": lambda: run(True)}, warm=False)
    return [
        Figure("idle query", f"{name}, CPU seconds a second", mine, "CPU", found["null"][name], mine / found["null"][name])
        for name, mine in found["ours"].items()
        if found["null"][name]
    ]
