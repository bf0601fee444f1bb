"""Runs the queries of `soak` in a Spark application."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import QueryIdleEvent, StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from bench import soak_kinds
from bench.soak_loop import listen
from bench.soak_samples import MIB, memory
from ordered_source import consume_orderly
from orderedmq.broker import Broker

_JVM: Final = "java"
_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_WORKER: Final = "pyspark.worker"
#: Seconds between two checks of a query that is starting.
_LOOK: Final = 0.25

#: A small heap, garbage collection in one thread, and no history of ended jobs, so that memory that grows is not a cache of Spark.
_SETTINGS: Final = {
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Djdk.lang.Process.launchMechanism=VFORK",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.sql.streaming.noDataProgressEventInterval": "0",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "1",
    # Write no checksum files, which would double a checkpoint's files, because Spark starts a process to set each file's permissions.
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
}


class _Idle(StreamingQueryListener):
    """Counts, by query, the triggers that found no new messages."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def onQueryStarted(self, event: object) -> None:
        pass

    def onQueryProgress(self, event: object) -> None:
        pass

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        name = str(event.id)
        self.seen[name] = self.seen.get(name, 0) + 1

    def onQueryTerminated(self, event: object) -> None:
        pass


class Application:
    """A Spark application with the queries of one or several kinds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        builder = SparkSession.builder.master("local[2]").appName("orderedmq-soak")
        for name, value in _SETTINGS.items():
            builder = builder.config(name, value)
        builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        self._spark = orderedmq.tuned(builder).getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._idle = _Idle()
        self._queries: dict[str, list[StreamingQuery]] = {}
        self._runners: dict[str, list[int]] = {}

    def start(self, kind: str, path: Path, broker: Broker) -> None:
        """Start the queries of a kind on its store."""
        del broker
        if kind == "idle":
            self._spark.streams.addListener(self._idle)
        before = set(_by_module().get(_RUNNER, ()))
        self._queries[kind] = []
        for number in range(soak_kinds.KINDS[kind]):
            self._queries[kind].append(self._begun(kind, number, path))
            print(f"{kind}: query {number} runs", file=sys.stderr, flush=True)
        # The runners of a kind are those that started with its queries.
        self._runners[kind] = sorted(set(_by_module().get(_RUNNER, ())) - before)

    def trigger(self, kind: str) -> None:
        """Wait a little, because Spark's queries run by themselves."""
        del kind
        time.sleep(0.005 if list(self._queries) == ["idle"] else _LOOK)

    def done(self, kind: str) -> int:
        """Return the lowest number of micro-batches, or idle triggers, among a kind's queries. Raises RuntimeError if one failed."""
        counts = []
        for query in self._queries[kind]:
            error = query.exception()
            if error is not None:
                raise RuntimeError(f"{kind}: {error}")
            if kind == "idle":
                counts.append(self._idle.seen.get(query.id, 0))
            else:
                # Read the JVM's object, because PySpark would parse the whole progress from JSON.
                progress = query._jsq.lastProgress()
                counts.append(0 if progress is None else int(progress.batchId()) + 1)
        return min(counts)

    def sample(self, kind: str, *, collect: bool) -> dict[str, Any]:
        """Return the memory of the processes; with ``collect``, also the JVM's heap after a garbage collection."""
        modules = _by_module()
        others = (pid for name, pids in modules.items() if name not in (_JVM, _RUNNER, _WORKER) for pid in pids)
        found: dict[str, Any] = {
            "way": "Spark",
            "together": sum(self.done(one) for one in self._queries if one != "idle"),
            "runner": memory(self._runners[kind]),
            # Measure the workers of all kinds together, because Spark gives a task to any free worker.
            "workers": memory(modules.get(_WORKER, ())),
            "others": memory(others),
            "jvm": memory(modules.get(_JVM, ())),
            "checkpoint_files": sum(1 for _ in (self._folder / f"{kind}-0-checkpoint").rglob("*")),
        }
        if collect:
            jvm = self._spark._jvm
            assert jvm is not None
            jvm.java.lang.System.gc()
            runtime = jvm.java.lang.Runtime.getRuntime()
            found["jvm"]["heap"] = round((runtime.totalMemory() - runtime.freeMemory()) / MIB, 2)
        return found

    def close(self) -> None:
        for queries in self._queries.values():
            for query in queries:
                query.stop()
        self._spark.stop()

    def _begun(self, kind: str, number: int, path: Path) -> StreamingQuery:
        """Start a query and wait for its first micro-batch. Try again if its source runner needs more than Spark's 10 s to start."""
        while True:
            query = self._query(kind, number, path)
            while query.isActive:
                if query._jsq.lastProgress() is not None:
                    return query
                time.sleep(_LOOK)
            error = str(query.exception())
            if "failed to connect back" not in error:
                raise RuntimeError(f"{kind}: {error}")

    def _query(self, kind: str, number: int, path: Path) -> StreamingQuery:
        writer = self._rows(kind, path).writeStream
        writer = writer.option("checkpointLocation", str(self._folder / f"{kind}-{number}-checkpoint"))
        if kind == "sink":
            return writer.format("orderedmq").options(**soak_kinds.options(kind, path)).start()
        return writer.format("noop").start()

    def _rows(self, kind: str, path: Path) -> DataFrame:
        if kind == "sink":
            rows = self._spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
            text = "cast(cast(value AS string) AS binary) AS body"
            return rows.selectExpr("cast(value % 100 AS string) AS sharding_key", text)
        rows = self._spark.readStream.format("orderedmq").options(**soak_kinds.options(kind, path)).load()
        order = soak_kinds.order(kind)
        if order is None:
            return rows
        return rows.transform(consume_orderly, listen, order)


def _by_module() -> dict[str, list[int]]:
    """Return the processes of this application by what they run, without the daemons that only fork."""
    found: dict[str, list[int]] = {}
    for process in _below():
        with contextlib.suppress(psutil.NoSuchProcess):
            name, line, parent = process.name(), process.cmdline(), process.parent()
            if name == _JVM:
                found.setdefault(_JVM, []).append(process.pid)
            elif "-m" in line:
                forks = "pyspark.daemon" in line and parent is not None and parent.name() == _JVM
                found.setdefault(f"daemon of {line[-1]}" if forks else line[-1], []).append(process.pid)
    return found


def _below() -> Iterable[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found
