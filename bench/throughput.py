"""Compares the rows per second of source and sink in Spark with the null peers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

import orderedmq
from bench import data
from bench.figures import Figure
from bench.measure import Bench, disk_speed, interleaved

QUEUES = 4
COLUMNS = "queue_id int, queue_offset long, body binary, sharding_key string, store_timestamp timestamp"
KEYED = "sharding_key string, body binary"
ALL = (
    "topic string, broker_name string, queue_id int, queue_offset long, body binary, tags string, keys string, "
    "sharding_key string, message_id string, born_timestamp timestamp, store_timestamp timestamp, reconsume_times int"
)


def _figure(
    case: str, label: str, found: Mapping[str, Mapping[str, float]], target: float | None, ours: str = "ours"
) -> Figure:
    """Return the figure of a variant inside its micro-batches. The whole query includes a second that Spark needs."""
    mine, other = found[ours]["micro-batch"], found["null"]["micro-batch"]
    return Figure(case, f"{label}, micro-batch", mine, "M rows/s", other, mine / other, target)


def filled(bench: Bench) -> Path:
    """Return a store with the rows of all cases, which is made once."""
    path = bench.folder / "source"
    if not path.exists():
        with orderedmq.connect(path) as broker:
            data.fill(broker, "t", QUEUES, bench.rows)
    return path


def source(bench: Bench) -> list[Figure]:
    path = filled(bench)
    out = []
    for label, schema, target in (("5 columns", COLUMNS, 0.85), ("12 columns", ALL, None)):
        found = interleaved(
            bench.rounds,
            {
                "ours": partial(_drained, bench, partial(bench.source, schema, path, "t"), "noop"),
                "null": partial(_drained, bench, partial(bench.null_source, schema, bench.rows, QUEUES), "noop"),
            },
        )
        out.append(_figure("source → noop", label, found, target))
    return out


def _same(rows: DataFrame) -> DataFrame:
    return rows


def _drained(bench: Bench, rows: Callable[[], DataFrame], sink: str) -> dict[str, float]:
    return bench.drain(rows(), sink, bench.rows)


def _into_store(bench: Bench, rows: Callable[[], DataFrame], compression: str) -> dict[str, float]:
    path = bench.fresh("sink")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("out", QUEUES, compression=compression)
    try:
        return bench.drain(rows(), "orderedmq", bench.rows, path=str(path), topic="out")
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sink(bench: Bench) -> list[Figure]:
    out = [Figure("file → sink", "the disk's synchronous writes of 8 MiB", disk_speed(bench.folder), "MB/s")]
    kinds: list[tuple[str, Callable[[int], Any], dict[str, float | None]]] = [
        ("random bodies", data.messages, {"none": 0.9}),
        ("demo bodies", data.demo_messages, {"none": 0.85, "lz4": 0.8}),
    ]
    for label, made, targets in kinds:
        rows = made(bench.rows)
        folder = bench.fresh("files")
        data.write_files(folder, rows, 4)
        del rows
        files = bench.spark.readStream.schema(KEYED).parquet(str(folder))
        ways = {codec: partial(_into_store, bench, partial(_same, files), codec) for codec in targets}
        found = interleaved(bench.rounds, {**ways, "null": partial(_drained, bench, partial(_same, files), "null_sink")})
        for codec, target in targets.items():
            out.append(_figure("file → sink", f"{label}, {codec}", found, target, ours=codec))
        shutil.rmtree(folder)
    return out


def both(bench: Bench) -> list[Figure]:
    path = filled(bench)
    out = []
    for label, schema, target in (("5 columns", COLUMNS, 0.9), ("key and body", KEYED, 0.85)):
        mine = partial(bench.source, schema, path, "t")
        found = interleaved(
            bench.rounds,
            {
                "ours": partial(_into_store, bench, mine, "none"),
                "null": partial(_drained, bench, partial(bench.null_source, schema, bench.rows, QUEUES), "null_sink"),
            },
        )
        out.append(_figure("source → sink", label, found, target))
    return out
