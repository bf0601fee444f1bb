"""Compares Spark's Kafka source and sink over a real Kafka on this machine with ours on the embedded broker, in one session.

The rows have 100 bytes and a key, in 4 partitions or queues. Each side runs with default settings and tuned, in turn, and the better
result of each side is compared. As usual, Kafka acknowledges the sink's rows when they are in the system's cache; our sink waits
until they are on the disk. In one case, ``flush.messages=1`` makes Kafka also write to the disk at each append.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from pyspark.sql import DataFrame

import orderedmq
from bench.figures import Figure
from bench.kafka_rig import PLAIN, QUEUES, TUNED, TUNED_READ, TUNED_WRITE, Rig, rig
from bench.measure import Bench, disk_speed, interleaved
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
