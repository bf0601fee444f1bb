"""Measures the time and the CPU of small micro-batches, starts and restarts over Kafka and over the embedded broker.

A micro-batch has ten rows. Spark's connector runs with default settings and with settings for small batches. Our source has no
such settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from bench import data
from bench.figures import Figure
from bench.kafka import Ways, figures, rounds
from bench.kafka_rig import QUEUES, TUNED_SMALL, Rig, rig
from bench.latency import ROWS, producing, ticking
from bench.measure import Bench, interleaved, median

#: Our only variant, with default settings.
_OURS: Final = "ours"
_PEER: Final = "Kafka tuned"
#: Seconds for a query's first micro-batch, on a busy machine.
_TIMEOUT: Final = 120.0


def _batches(query: StreamingQuery) -> list[Mapping[str, int]]:
    """Return the times of the micro-batches with rows so far, in ms by phase. Raises RuntimeError if the query failed."""
    error = query.exception()
    if error is not None:
        raise RuntimeError(str(error))
    return [progress.durationMs for progress in query.recentProgress if progress.numInputRows]


def _wait(query: StreamingQuery, count: int, step: float) -> list[Mapping[str, int]]:
    """Wait until ``count`` micro-batches had rows, and return their times. Raises TimeoutError."""
    deadline = time.monotonic() + _TIMEOUT
    while len(seen := _batches(query)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(seen)} of {count} micro-batches after {_TIMEOUT:.0f} s")
        time.sleep(step)
    return seen


# --- small micro-batches


def small_batches(bench: Bench) -> list[Figure]:
    """Send ten rows every 0.5 s, so that the query waits in between, and every 0.1 s, so that it does not wait."""
    made = rig(bench)
    out = []
    for pace, every, batches in (("20 rows/s", 0.5, 8), ("100 rows/s", 0.1, 20)):
        for label in ("source → noop", "source → sink"):
            count = 2 if bench.quick else batches
            to_sink = label == "source → sink"
            ways: Ways = {
                "ours": partial(_ours_small, made, every, count, to_sink),
                "Kafka": partial(_kafka_small, made, every, count, to_sink, {}),
                "Kafka tuned": partial(_kafka_small, made, every, count, to_sink, TUNED_SMALL),
            }
            found = interleaved(rounds(bench), ways, warm=False)
            measures = [
                ("triggerExecution", f"a micro-batch, {label}, {pace}", "ms", True),
                ("together", f"CPU of all processes, a micro-batch, {label}, {pace}", "ms", True),
            ]
            out += figures("small batches", found, measures, ours=_OURS, peer=_PEER)
    return out


def _ours_small(made: Rig, every: float, count: int, to_sink: bool) -> dict[str, float]:
    bench = made.bench
    path = bench.fresh("small")
    with orderedmq.connect(path) as broker:
        for topic in ("in", "out"):
            broker.admin.create_topic(topic, 1)
    rows = bench.source(None, path, "in")
    with producing(partial(orderedmq.connect, path), "in", every):
        if not to_sink:
            return _steady(made, bench.start(rows, "noop"), count)
        return _steady(made, bench.start(rows.select("sharding_key", "body"), "orderedmq", path=str(path), topic="out"), count)


def _kafka_small(made: Rig, every: float, count: int, to_sink: bool, options: Mapping[str, str]) -> dict[str, float]:
    topic, target = made.create(1), made.create(1)
    rows = made.from_kafka(topic, options)
    try:
        with ticking(partial(made.send, topic, 0), every):
            if not to_sink:
                return _steady(made, made.bench.start(rows, "noop"), count)
            return _steady(
                made,
                made.bench.start(rows.select("key", "value"), "kafka", available_now=False, **made.to_kafka(target, {})),
                count,
            )
    finally:
        made.delete(topic)
        made.delete(target)


def _steady(made: Rig, query: StreamingQuery, count: int) -> dict[str, float]:
    """Return the median time and the mean CPU of a micro-batch in ms, without the first three micro-batches, which start workers."""
    try:
        first = len(_wait(query, 3, 0.1))
        before = made.cpu.now()
        seen = _wait(query, first + count, 0.1)
        used = made.cpu.since(before)
    finally:
        query.stop()
    times = [float(one["triggerExecution"]) for one in seen[first:]]
    return {"triggerExecution": median(times), "together": used["together"] / len(times) * 1000}


# --- starts


def start(bench: Bench) -> list[Figure]:
    """Measure a new query over 40 rows until its first micro-batch is done, and with availableNow until it has ended."""
    made = rig(bench)
    ways: Ways = {name: partial(_started, made, side) for name, side in _sides(made).items()}
    measures = [
        ("first", "start() until the first micro-batch is done", "ms", True),
        ("together", "CPU of all processes until then", "ms", True),
        ("run", "a whole run with availableNow over 40 rows", "ms", True),
    ]
    return figures("start", interleaved(rounds(bench), ways), measures, ours=_OURS, peer=_PEER)


def restart(bench: Bench) -> list[Figure]:
    """Measure a query that resumes from its checkpoint after a stop, with ten new rows."""
    made = rig(bench)
    ways: Ways = {name: partial(_restarted, made, side) for name, side in _sides(made).items()}
    measures = [
        ("first", "start() from a checkpoint until the next micro-batch is done", "ms", True),
        ("together", "CPU of all processes until then", "ms", True),
    ]
    return figures("restart", interleaved(rounds(bench), ways), measures, ours=_OURS, peer=_PEER)


class _Side(NamedTuple):
    """Functions of one side: the stream of a new query, and sending ten rows to its topic."""

    rows: Callable[[], DataFrame]
    send: Callable[[], object]


def _sides(made: Rig) -> dict[str, _Side]:
    """Create a topic of 40 rows on each side, in 4 queues or partitions."""
    bench = made.bench
    path = bench.fresh("few")
    connect = partial(orderedmq.connect, path)
    with connect() as broker:
        data.fill(broker, "few", QUEUES, QUEUES * ROWS)
    topic = made.create()
    for partition in range(QUEUES):
        made.send(topic, partition)

    def send_ours() -> None:
        with connect() as broker:
            broker.log.append({broker.log.queues("few")[0]: data.messages(ROWS)})

    send = partial(made.send, topic, 0)
    return {
        "ours": _Side(partial(bench.source, None, path, "few"), send_ours),
        "Kafka": _Side(partial(made.from_kafka, topic, {}), send),
        "Kafka tuned": _Side(partial(made.from_kafka, topic, TUNED_SMALL), send),
    }


def _started(made: Rig, side: _Side) -> dict[str, float]:
    found = _first(made, side.rows(), made.bench.fresh("checkpoint"))
    begin = time.perf_counter()
    made.bench.start(side.rows(), "noop", available_now=True).awaitTermination()
    return {**found, "run": (time.perf_counter() - begin) * 1000}


def _restarted(made: Rig, side: _Side) -> dict[str, float]:
    rows, checkpoint = side.rows(), made.bench.fresh("checkpoint")
    _first(made, rows, checkpoint)
    side.send()
    return _first(made, rows, checkpoint)


def _first(made: Rig, rows: DataFrame, checkpoint: Path) -> dict[str, float]:
    """Run a query until its first micro-batch is done, and return the time and the CPU until then, in ms."""
    before, begin = made.cpu.now(), time.perf_counter()
    query = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        _wait(query, 1, 0.01)
        seconds = time.perf_counter() - begin
        used = made.cpu.since(before)
    finally:
        query.stop()
    return {"first": seconds * 1000, "together": used["together"] * 1000}
