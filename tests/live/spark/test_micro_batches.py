"""The loop of tests/micro_batches.py calls source, tasks and sink as Spark does: a scenario runs in both, and the calls are equal.

    python -m tests.live.spark.test_micro_batches FOLDER

compares them in another release of Spark, whose environment has no pytest.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import orderedmq
from ordered_source.older_spark import PASSES_START
from orderedmq.broker import Broker
from orderedmq.errors import OrderedMQError
from tests.live.spark.recorded_source import FORMAT, RecordedSource, calls
from tests.micro_batches import Checkpoint, MicroBatchLoop
from tests.waits import until

#: A body that the scenario's query turns into null, which the sink refuses.
BAD = b"bad"


class Place(Protocol):
    """A place in which the scenario can run: Spark or the loop."""

    def run(self, name: str, source: dict[str, str], sink: dict[str, str], *, available_now: bool, fails: bool) -> None:
        """Run the query ``name`` until there is nothing to read or it fails, and stop it."""


class InSpark:
    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        spark.dataSource.register(RecordedSource)

    def run(self, name: str, source: dict[str, str], sink: dict[str, str], *, available_now: bool, fails: bool) -> None:
        stops = self.stops()
        df = self.spark.readStream.format(FORMAT).options(**source).load()
        df = df.selectExpr("nullif(body, cast('bad' as binary)) body", "sharding_key")
        writer = df.writeStream.format(FORMAT).options(**sink).option("checkpointLocation", str(self.folder / name))
        trigger: dict[str, Any] = {"availableNow": True} if available_now else {"processingTime": "100 milliseconds"}
        query = writer.trigger(**trigger).start()
        try:
            if available_now:
                query.awaitTermination()
            else:
                query.processAllAvailable()
            assert not fails
        except StreamingQueryException as error:
            # On a busy machine, Spark may fail to start the source. That is not the failure of the scenario.
            if not fails or "ORDEREDMQ_" not in str(error):
                raise
        query.stop()
        # Spark does not wait until the process of the source has ended.
        try:
            until(lambda: self.stops() == stops + 1, "the source has stopped")
        except AssertionError as error:
            error.add_note("\n".join(map(json.dumps, calls(self.folder)[-12:])))
            raise

    def stops(self) -> int:
        return sum(call["method"] == "stop" for call in calls(self.folder))


class InLoop:
    def __init__(self) -> None:
        self.checkpoints: dict[str, Checkpoint] = {}

    def run(self, name: str, source: dict[str, str], sink: dict[str, str], *, available_now: bool, fails: bool) -> None:
        checkpoint = self.checkpoints.setdefault(name, Checkpoint())
        run = MicroBatchLoop(source, sink, checkpoint, rows=_columns, available_now=available_now, format=RecordedSource)
        try:
            run.process_all_available()
            assert not fails
        except OrderedMQError:
            assert fails
        run.stop()


def _columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    body = rows.column("body")
    body = pc.if_else(pc.equal(body, BAD), pa.scalar(None, pa.binary()), body)
    return pa.RecordBatch.from_arrays([body, rows.column("sharding_key")], names=["body", "sharding_key"])


def scenario(place: Place, broker: Broker, path: str) -> None:
    """First batch, batches with a limit, an idle trigger, stops, failed commits and tasks, repeated batches, and availableNow."""
    broker.admin.create_topic("in", 2)
    broker.admin.create_topic("out", 2)
    first, second = broker.log.queues("in")

    def fill(*bodies: bytes) -> None:
        for queue in (first, second):
            keys = [f"{queue.queue_id}-{place}" for place in range(len(bodies))]
            broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary()), "sharding_key": keys})})

    def run(
        name: str = "one",
        topic: str = "in",
        *,
        available_now: bool = False,
        fails: bool = False,
        limit: str | None = "4",
        **sink: str,
    ) -> None:
        source = {"path": path, "topic": topic, "consumerGroup": name}
        if limit is not None:
            source["maxOffsetsPerTrigger"] = limit
        place.run(name, source, {"path": path, "topic": "out", **sink}, available_now=available_now, fails=fails)

    fill(b"a", b"b", b"c", b"d", b"e")
    run()
    # Both tasks of this batch have the same key, so the commit is refused, and the batch stays in the offset log.
    for queue in (first, second):
        broker.log.append({queue: pa.record_batch({"body": pa.array([b"f"], pa.binary()), "sharding_key": ["same"]})})
    run(fails=True)
    run(onKeyConflict="ignore")
    fill(b"g", b"h", b"i")
    run(available_now=True)
    if not PASSES_START:
        # In Spark 4.0 and 4.1, the first run had one micro-batch.
        run(available_now=True)
    # A task fails. Only one queue has messages, so that the batch has one task, because Spark runs several at the same time.
    broker.log.append({first: pa.record_batch({"body": pa.array([BAD], pa.binary()), "sharding_key": ["k"]})})
    run(available_now=True, fails=True)
    # Batch 0 fails and is repeated, without a limit.
    broker.admin.create_topic("other", 1)
    rows = {"body": pa.array([b"a", BAD], pa.binary()), "sharding_key": ["k", "k"]}
    broker.log.append({broker.log.queues("other")[0]: pa.record_batch(rows)})
    run("two", "other", fails=True, limit=None)
    run("two", "other", fails=True, limit=None, available_now=True)
    # A batch without partitions only records where the query begins.
    broker.admin.create_topic("empty", 1)
    run("three", "empty", limit=None, available_now=True)


def normalised(folder: Path) -> list[str]:
    """Return the calls without the differences that any two runs of the scenario have.

    - Ids of objects, queries, runs, owners and topics are numbered in the order in which they first appear.
    - Calls of the tasks of a batch are sorted, because Spark runs the tasks at the same time.
    - Repeated calls with the same answer are left out, because Spark calls an idle source repeatedly.
    - Times and process ids are left out. The loop has only one process.
    """
    events = calls(folder)
    events = [call for part in _by_task(events) for call in part]
    out: list[str] = []
    last = ""
    skipped = False
    for call in events:
        del call["at"], call["pid"]
        line = json.dumps(call)
        if call["method"] == "latestOffset":
            skipped = line == last
            last = line
        elif call["method"] != "reportLatestOffset":
            skipped = False
        if not skipped:
            out.append(line)
    ids: dict[str, str] = {}
    pattern = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9A-F]{16}")
    return [pattern.sub(lambda match: ids.setdefault(match.group(), f"<{len(ids)}>"), line) for line in out]


def _by_task(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for in_task, part in groupby(events, key=lambda call: "task" in call):
        if in_task:
            yield sorted(part, key=lambda call: (call["streaming.sql.batchId"], call["task"], call["method"] == "read"))
        else:
            yield list(part)


def compare(spark: SparkSession, folder: Path) -> None:
    folders = {name: folder / name for name in ("spark", "loop")}
    places: dict[str, Place] = {"spark": InSpark(spark, folders["spark"]), "loop": InLoop()}
    for name, place in places.items():
        folders[name].mkdir()
        path = str(folders[name] / "store")
        with orderedmq.connect(path) as broker:
            scenario(place, broker, path)
    assert normalised(folders["loop"]) == normalised(folders["spark"])


def test_the_loop_calls_source_tasks_and_sink_as_spark_does(spark: SparkSession, tmp_path: Path) -> None:
    compare(spark, tmp_path)


if __name__ == "__main__":
    orderedmq.prepare_spark()
    settings = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2", "spark.sql.session.timeZone": "UTC"}
    builder = SparkSession.builder.master("local[2]")
    for setting, value in settings.items():
        builder = builder.config(setting, value)
    compare(builder.getOrCreate(), Path(sys.argv[1]))
