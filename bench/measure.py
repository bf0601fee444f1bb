"""Medians of interleaved runs, and the Spark session and folder that all cases share."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench import peers
from bench.figures import ROOT
from orderedmq.java import ensure_java


class Skipped(Exception):
    """Raised with the reason why a case cannot be measured on this machine."""


def median(values: list[float]) -> float:
    return statistics.median(values)


def interleaved(
    rounds: int, ways: Mapping[str, Callable[[], Mapping[str, float]]], *, warm: bool = True
) -> dict[str, dict[str, float]]:
    """Run the variants (``ways``) in turn, ``rounds`` times, and return medians per variant and measure. ``warm`` adds a first
    round that does not count.
    """
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for turn in range(0 if warm else 1, rounds + 1):
        for name, run in ways.items():
            for measure, value in run().items():
                if turn:
                    seen[name].setdefault(measure, []).append(value)
    return {name: {measure: median(values) for measure, values in measures.items()} for name, measures in seen.items()}


class Bench:
    """What every case gets: the size and number of its runs, a folder, and Spark."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.rounds = 2 if quick else 5
        self.rows = 400_000 if quick else 4_000_000
        self._number = 0
        #: Jars on the session's class path, and the names of other products that the cases measured.
        self._jars: list[Path] = []
        self.software: str | None = None
        #: Objects that cases share, by name; and objects to close at the end, in reverse order.
        self.shared: dict[str, Any] = {}
        self.closing = contextlib.ExitStack()

    def fresh(self, name: str) -> Path:
        """Return a path that no case has used."""
        self._number += 1
        return self.folder / f"{name}-{self._number}"

    def add_jars(self, jars: Sequence[Path]) -> None:
        """Add jars to the session. Call this before the first use of the session."""
        assert "spark" not in self.__dict__, "the session runs without these jars"
        self._jars += jars

    def renew(self) -> None:
        """End the session, so that its next use starts one with new workers."""
        if "spark" in self.__dict__:
            self.spark.stop()
            del self.spark

    def close(self) -> None:
        self.closing.close()
        if "spark" in self.__dict__:
            self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @cached_property
    def spark(self) -> SparkSession:
        ensure_java()
        # The workers inherit the JVM's environment and import the peers by name.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder
        if self._jars:
            builder = builder.config("spark.jars", ",".join(map(str, self._jars)))
        spark = (
            builder.master("local[2]")
            .appName("orderedmq-bench")
            .config("spark.driver.memory", "2g")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.streaming.numRecentProgressUpdates", "100000")
            .config("spark.sql.warehouse.dir", str(self.folder / "warehouse"))
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(peers.NullSource)
        spark.dataSource.register(peers.NullSink)
        return spark

    def null_source(self, schema: str, rows: int, queues: int, every: float = 0, most: int = 0) -> DataFrame:
        reader = self.spark.readStream.format("null_source").schema(schema)
        return reader.options(rows=str(rows), queues=str(queues), every=str(every), most=str(most)).load()

    def source(self, schema: str | None, path: Path, topic: str, **options: Any) -> DataFrame:
        """Return a stream of a store's topic, for a new group. Without a schema it has all columns."""
        self._number += 1
        reader = self.spark.readStream.format("orderedmq")
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(path=str(path), topic=topic, consumerGroup=f"bench-{self._number}", **options).load()

    def start(self, rows: DataFrame, sink: str, *, available_now: bool = False, **options: Any) -> StreamingQuery:
        writer = rows.writeStream.format(sink).options(checkpointLocation=str(self.fresh("checkpoint")), **options)
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def drain(self, rows: DataFrame, sink: str, expected: int, **options: Any) -> dict[str, float]:
        """Return the speed of a run with availableNow in million rows a second: of all micro-batches, the first, the later ones,
        and the whole query.

        The first micro-batch is slower, because it starts workers and imports modules.
        """
        begin = time.perf_counter()
        query = self.start(rows, sink, available_now=True, **options)
        query.awaitTermination()
        seconds = time.perf_counter() - begin
        batches = [progress for progress in query.recentProgress if progress.numInputRows]
        assert sum(progress.numInputRows for progress in batches) == expected, "a run did not read exactly the planned rows"
        first, *later = [(progress.numInputRows, progress.durationMs["addBatch"] * 1000) for progress in batches]
        found = {"micro-batch": _speed([first, *later]), "first": _speed([first]), "whole query": expected / seconds / 1e6}
        return {**found, "later": _speed(later)} if later else found

    def paced(self, rows: DataFrame, sink: str, batches: int, **options: Any) -> dict[str, float]:
        """Return the median time of a micro-batch with rows in milliseconds, for a query with the default trigger."""
        query = self.start(rows, sink, **options)
        try:
            while True:
                time.sleep(0.2)
                if query.exception() is not None:
                    raise RuntimeError(str(query.exception()))
                seen = [progress.durationMs for progress in query.recentProgress if progress.numInputRows]
                if len(seen) >= batches + 3:
                    break
        finally:
            query.stop()
        # Leave out the first batches, which start workers.
        return {"trigger": median([float(phases["triggerExecution"]) for phases in seen[3:]])}


def _speed(batches: Sequence[tuple[int, int]]) -> float:
    """Return the speed of micro-batches, given as (rows, microseconds), in million rows a second."""
    rows, micros = map(sum, zip(*batches))
    return rows / micros


def status(field: str, pid: int | str = "self") -> int:
    """Return a value from a process's status, in KiB. Raises OSError if the status does not have the value."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/{pid}/status has no {field}")


def disk_speed(folder: Path) -> float:
    """Return MB/s of synchronous writes of 8 MiB, the size of the store's transactions."""
    block = os.urandom(8 << 20)
    path = folder / "disk"
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(15):
            begin = time.perf_counter()
            file.write(block)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    path.unlink()
    return len(block) / 1e6 / median(times)
