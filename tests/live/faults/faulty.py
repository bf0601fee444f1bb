"""The data source ``orderedmq`` with points at which tests can stop it, registered as ``orderedmq_faulty``.

Subclasses of the real classes pass points, which tests control in the folder ``points`` next to the store. Each of Spark's Python
processes imports this module, so it imports little.

    initial    source runner: initialOffset was called
    boundary   source runner: latestOffset was called, and nothing is committed yet
    planned    source runner: a new offset was computed, and Spark has not logged it
    logged     source runner: the batch is in Spark's offset log, and nothing was read
    read       executor: at each RecordBatch that is read from a queue; counts rows
    write      executor: at each RecordBatch that the writer gets; counts rows
    staged     executor: all rows are staged, and Spark does not know it yet
    publish    driver: all tasks have ended, and nothing is published; also reached as "publish of QUERY_ID"
    published  driver: the batch is published, and Spark has not committed it
    appended   driver: foreachBatch has appended to a Parquet table
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from ordered_sink.commit import StreamWriter
from ordered_sink.writer import Written
from ordered_source import group_session as group_module
from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from ordered_source.topic_watch import TopicWatch
from orderedmq.broker import Broker
from orderedmq.embedded.store import transaction
from orderedmq.errors import OrderedMQError
from orderedmq.ownership.micro_batch import run_of
from pyspark_orderedmq import DefaultSource
from tests.live.faults.points import Points

FORMAT = "orderedmq_faulty"


def points_of(path: str) -> Points:
    """Return the points of a store. From now on, this process logs its warnings to a file next to them."""
    points = Points(Path(path).parent / "points")
    file = points.folder / "log.txt"
    log = logging.getLogger("orderedmq")
    if not any(isinstance(handler, logging.FileHandler) and handler.baseFilename == str(file) for handler in log.handlers):
        points.folder.mkdir(exist_ok=True)
        # Remove the handlers of earlier stores, because Spark's workers outlive a test and its store.
        for handler in list(log.handlers):
            log.removeHandler(handler)
            handler.close()
        log.addHandler(logging.FileHandler(file))
    return points


class FaultyReader(StreamReader):
    """A StreamReader that passes points."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.points = points_of(options["path"])
        super().__init__(options, schema)

    def initialOffset(self) -> dict[str, Any]:
        self.points.tell("initial")
        self.points.reach("initial")
        return super().initialOffset()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self.points.reach("boundary")
        first, began = self._connected is None, time.monotonic()
        end = super().latestOffset(start, limit)
        if first:
            self.points.tell("entered", seconds=time.monotonic() - began)
        if end != start:
            self.points.reach("planned")
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start != end:
            self.points.reach("logged")
        planned = super().partitions(start, end)
        if (self.points.folder / "elsewhere").exists():
            # Simulate an executor on another machine, which finds another store or none.
            return [replace(partition, identity="0" * 32) for partition in planned if isinstance(partition, QueuePartition)]
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueuePartition)
        points = points_of(str(self.options.endpoint))
        context = TaskContext.get()
        run = run_of(context.getLocalProperty) if context is not None else None
        if run is not None:
            token = partition.token
            points.tell(
                "read", query=run.query_id, run=run.run_id, batch=run.batch_id, queue=str(partition.queue),
                group=token.group if token else None, epoch=token.epoch if token else 0, begin=partition.begin, end=partition.end,
            )  # fmt: skip
        count = 0
        for batch in super().read(partition):
            points.reach("read", count)
            yield batch
            count += batch.num_rows
        points.reach("read", count)

    def _connect(self) -> tuple[Broker, TopicWatch]:
        """Connect. If the test called `lives`, set the lives of locks that it chose."""
        fresh = self._connected is None
        connected = super()._connect()
        lives = self.points.folder / "lives.json"
        if fresh and lives.exists():
            connected[0].groups.life = json.loads(lives.read_text())["life"]  # type: ignore[attr-defined]
            setattr(group_module, "RENEW_INTERVAL", 1000.0)  # noqa: B010
        return connected


class FaultyWriter(StreamWriter):
    """A StreamWriter that passes points."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self.path = str(self._planned.options.endpoint)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        points = points_of(self.path)

        def watched() -> Iterator[pa.RecordBatch]:
            count = 0
            for batch in iterator:
                points.reach("write", count)
                yield batch
                count += batch.num_rows
            points.reach("write", count)

        # Stage the rows of every attempt in a segment file, however few they are.
        inline, transaction.INLINE_BYTES = transaction.INLINE_BYTES, 0  # type: ignore[misc]
        try:
            message = super().write(watched())
        finally:
            transaction.INLINE_BYTES = inline  # type: ignore[misc]
        points.reach("staged")
        points.tell("staged")
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        points = points_of(self.path)
        points.reach("publish")
        run = next((message.batch.run for message in messages if isinstance(message, Written)), None)
        facts: dict[str, Any] = {"began": time.monotonic_ns(), "batch": batchId}
        if run is not None:
            facts |= {"query": run.query_id, "run": run.run_id}
            points.reach(f"publish of {run.query_id}")
        try:
            outcome = self._planned.publish(messages)
        except OrderedMQError as error:
            points.tell("publish", accepted=False, error=str(error), **facts)
            raise
        points.tell("publish", accepted=True, replayed=outcome is not None and outcome.replayed, **facts)
        points.reach("published")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        super().abort(messages, batchId)
        points_of(self.path).tell("abort", batch=batchId, receipts=sum(message is not None for message in messages))


class FaultySource(DefaultSource):
    """A DefaultSource whose stream readers and writers pass points."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamReader(self, schema: StructType) -> FaultyReader:
        return FaultyReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> FaultyWriter:
        return FaultyWriter(self.options, schema, overwrite)
