"""Compares Spark's Kafka source and sink over a real Kafka on this machine with ours on the embedded broker, in one session.

The rows have 100 bytes and a key, in 4 partitions or queues. Each side runs with default settings and tuned, in turn, and the better
result of each side is compared. As usual, Kafka acknowledges the sink's rows when they are in the system's cache; our sink waits
until they are on the disk. In one case, ``flush.messages=1`` makes Kafka also write to the disk at each append.

A small micro-batch has ten rows. For these, the settings of Spark's connector are others; our source has no such settings.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from bench import data
from bench.figures import Figure
from bench.kafka_rig import PLAIN, QUEUES, TUNED, TUNED_READ, TUNED_SMALL, TUNED_WRITE, Rig, rig
from bench.latency import ROWS, producing, ticking
from bench.measure import Bench, disk_speed, interleaved, median
from bench.throughput import COLUMNS, KEYED

#: The columns of Kafka's source that correspond to our five.
_KAFKA_COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp")
#: The measures of a run over many rows: key, label, unit, and whether less is better.
THROUGHPUT: Final = (
    ("micro-batch", "inside the micro-batch", "M rows/s", False),
    ("whole query", "the whole query, start included", "M rows/s", False),
)
CPU: Final = (
    ("JVM", "CPU of Spark's JVM"),
    ("Python", "CPU of Python"),
    ("Kafka", "CPU of Kafka's server"),
    ("together", "CPU of all processes"),
)
Ways = Mapping[str, Callable[[], dict[str, float]]]
#: Our only variant, with default settings.
_OURS: Final = "ours"
_PEER: Final = "Kafka tuned"
#: Seconds for a query's first micro-batch, on a busy machine.
_TIMEOUT: Final = 120.0


def rounds(bench: Bench) -> int:
    """Return the number of rounds, which is small because a run takes some twelve minutes."""
    return 1 if bench.quick else 3


def figures(
    case: str,
    found: Mapping[str, Mapping[str, float]],
    measures: Iterable[tuple[str, str, str, bool]],
    *,
    ours: str = "ours tuned",
    peer: str = "Kafka tuned",
    plain: bool = True,
) -> list[Figure]:
    """Compare the better result of each side: tuned or, with ``plain`` and if it was measured, with default settings."""
    out = []
    for measure, what, unit, low in measures:
        mine, other = found[ours][measure], found[peer][measure]
        mine_plain, other_plain = (found.get(name, {}).get(measure) if plain else None for name in ("ours", "Kafka"))
        best = min if low else max
        left = best(mine, mine if mine_plain is None else mine_plain)
        right = best(other, other if other_plain is None else other_plain)
        # The CPU of a single process is no basis for a comparison.
        alone = measure in ("JVM", "Python", "Kafka")
        out.append(Figure(case, what, mine, unit, other, None if alone else left / right, None, low, mine_plain, other_plain))
    return out


def _per_row() -> list[tuple[str, str, str, bool]]:
    return [*THROUGHPUT, *((name, what, "µs/row", True) for name, what in CPU)]


# --- many rows


def read(bench: Bench) -> list[Figure]:
    made = rig(bench)
    runs: dict[str, Callable[[], DataFrame]] = {
        "ours": lambda: bench.source(None, made.store, PLAIN),
        "Kafka": lambda: made.from_kafka(PLAIN, {}),
        "ours tuned": lambda: bench.source(COLUMNS, made.store, TUNED),
        "Kafka tuned": lambda: made.from_kafka(TUNED, TUNED_READ).select(*_KAFKA_COLUMNS),
    }
    ways = {name: partial(_drained, made, rows, "noop") for name, rows in runs.items()}
    return figures("read", interleaved(rounds(bench), ways), _per_row())


def _drained(made: Rig, rows: Callable[[], DataFrame], sink: str, **options: str) -> dict[str, float]:
    return made.measured(made.rows, lambda: made.bench.drain(rows(), sink, made.rows, **options))


def write(bench: Bench) -> list[Figure]:
    """Measure writing into a new store or topic in each run."""
    made = rig(bench)

    def rows() -> DataFrame:
        return bench.null_source(KEYED, made.rows, QUEUES)

    def ours(compression: str) -> dict[str, float]:
        path = bench.fresh("written")
        with orderedmq.connect(path) as broker:
            broker.admin.create_topic("out", QUEUES, compression=compression)
        try:
            return _drained(made, rows, "orderedmq", path=str(path), topic="out")
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def kafka(options: Mapping[str, str], flush: bool = False) -> dict[str, float]:
        topic = made.create(flush=flush)
        try:
            return _drained(
                made,
                lambda: rows().selectExpr("sharding_key AS key", "body AS value"),
                "kafka",
                **made.to_kafka(topic, options),
            )
        finally:
            made.delete(topic)

    ways: Ways = {
        "ours": partial(ours, "lz4"),
        "Kafka": partial(kafka, {}),
        "ours tuned": partial(ours, "none"),
        "Kafka tuned": partial(kafka, TUNED_WRITE),
        "Kafka flushed": partial(kafka, TUNED_WRITE, flush=True),
    }
    found = interleaved(rounds(bench), ways)
    return [
        *figures("write", found, _per_row()),
        *_flushed("write", found),
        Figure("write", "the disk's synchronous writes of 8 MiB", disk_speed(bench.folder), "MB/s"),
    ]


def _flushed(case: str, found: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    measures = ((name, f"{what}, Kafka with flush.messages=1", unit, low) for name, what, unit, low in THROUGHPUT)
    return figures(case, found, measures, peer="Kafka flushed", plain=False)


def copy(bench: Bench) -> list[Figure]:
    """Measure copying from one topic to another of the same store or server."""
    made = rig(bench)

    def ours(source: str, schema: str | None, compression: str) -> dict[str, float]:
        topic = bench.fresh("copied").name
        with orderedmq.connect(made.store) as broker:
            broker.admin.create_topic(topic, QUEUES, compression=compression)
        try:
            return _drained(
                made,
                lambda: bench.source(schema, made.store, source).select("sharding_key", "body"),
                "orderedmq",
                path=str(made.store),
                topic=topic,
            )
        finally:
            with orderedmq.connect(made.store) as broker:
                broker.admin.delete_topic(topic)

    def kafka(source: str, reading: Mapping[str, str], writing: Mapping[str, str], flush: bool = False) -> dict[str, float]:
        topic = made.create(flush=flush)
        try:
            return _drained(
                made, lambda: made.from_kafka(source, reading).select("key", "value"), "kafka", **made.to_kafka(topic, writing)
            )
        finally:
            made.delete(topic)

    ways: Ways = {
        "ours": partial(ours, PLAIN, None, "lz4"),
        "Kafka": partial(kafka, PLAIN, {}, {}),
        "ours tuned": partial(ours, TUNED, KEYED, "none"),
        "Kafka tuned": partial(kafka, TUNED, TUNED_READ, TUNED_WRITE),
        "Kafka flushed": partial(kafka, TUNED, TUNED_READ, TUNED_WRITE, flush=True),
    }
    found = interleaved(rounds(bench), ways)
    return [*figures("copy", found, _per_row()), *_flushed("copy", found)]


def into(bench: Bench) -> list[Figure]:
    """Measure a query from a Kafka topic to a topic of the embedded broker, both tuned."""
    made = rig(bench)

    def copied() -> dict[str, float]:
        topic = bench.fresh("into").name
        with orderedmq.connect(made.store) as broker:
            broker.admin.create_topic(topic, QUEUES, compression="none")
        try:
            return _drained(
                made,
                lambda: made.from_kafka(TUNED, TUNED_READ).selectExpr("key AS sharding_key", "value AS body"),
                "orderedmq",
                path=str(made.store),
                topic=topic,
            )
        finally:
            with orderedmq.connect(made.store) as broker:
                broker.admin.delete_topic(topic)

    found = interleaved(rounds(bench), {_OURS: copied})
    return [
        Figure("into", f"from Kafka to the embedded broker, {what}", found[_OURS][name], unit)
        for name, what, unit, _ in THROUGHPUT
    ]


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
