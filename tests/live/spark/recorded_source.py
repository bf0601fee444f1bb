"""The data source ``orderedmq`` with a record of every call, registered as ``orderedmq_recorded``.

In subclasses of the real classes, each call in any process adds an event to the folder ``calls`` next to the store.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from ordered_sink.commit import StreamWriter
from ordered_sink.writer import Written
from ordered_source.older_spark import PASSES_START, ReadLimit
from ordered_source.partition_reader import QueuePartition
from ordered_source.stream_reader import StreamReader
from orderedmq.ownership.micro_batch import BATCH, QUERY, RUN
from pyspark_orderedmq import DefaultSource
from tests import event_log

FORMAT = "orderedmq_recorded"


class _Record:
    """Records the calls of one object. ``thing`` is the object's name, which pickled copies keep."""

    def __init__(self, options: Mapping[str, str], kind: str) -> None:
        self.folder = _folder(Path(options["path"]).parent)
        self.thing = f"{kind} {uuid.uuid4().hex}"

    def __call__(self, method: str, **arguments: Any) -> None:
        event_log.write(self.folder, object=self.thing, method=method, **arguments)


def _folder(store_parent: Path) -> Path:
    return store_parent / "calls"


def calls(folder: Path) -> list[dict[str, Any]]:
    """The calls so far of queries whose store is in ``folder``, in order."""
    return event_log.read(_folder(folder))


def _task() -> dict[str, Any]:
    context = TaskContext.get()
    assert context is not None
    properties = {name: context.getLocalProperty(name) for name in (QUERY, BATCH, RUN)}
    return {"task": context.partitionId(), "attempt": context.attemptNumber(), **properties}


class RecordedReader(StreamReader):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.record = _Record(options, "reader")
        self.record("streamReader", schema=schema.simpleString())
        super().__init__(options, schema)

    def getDefaultReadLimit(self) -> ReadLimit:
        self.record("getDefaultReadLimit")
        return super().getDefaultReadLimit()

    def prepareForTriggerAvailableNow(self) -> None:
        self.record("prepareForTriggerAvailableNow")
        super().prepareForTriggerAvailableNow()

    def initialOffset(self) -> dict[str, Any]:
        self.record("initialOffset")
        return super().initialOffset()

    if PASSES_START:

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            end = super().latestOffset(start, limit)
            shown = {"kind": type(limit).__name__, **asdict(limit)}  # type: ignore[call-overload]
            self.record("latestOffset", start=start, limit=shown, result=end)
            return end

    else:

        def latestOffset(self) -> dict[str, Any]:  # type: ignore[misc]
            without_start: Any = super().latestOffset
            end: dict[str, Any] = without_start()
            self.record("latestOffset", result=end)
            return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        self.record("reportLatestOffset")
        return super().reportLatestOffset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self.record("partitions", start=start, end=end)
        return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, QueuePartition)
        self.record("read", queue=str(partition.queue), begin=partition.begin, end=partition.end, **_task())
        return super().read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self.record("commit", end=end)
        super().commit(end)

    def stop(self) -> None:
        super().stop()
        self.record("stop", terminated=self._terminated)


class RecordedWriter(StreamWriter):
    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self.record = _Record(options, "writer")
        self.record("streamWriter", schema=schema.simpleString(), overwrite=overwrite)
        super().__init__(options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self.record("write", **_task())
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.record("commit", batch=batchId, rows=_rows(messages))
        super().commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.record("abort", batch=batchId, rows=_rows(messages))
        super().abort(messages, batchId)


def _rows(messages: Sequence[WriterCommitMessage | None]) -> list[int | None]:
    """The number of rows of each task that ended, and None for the others."""
    return [message.rows if isinstance(message, Written) else None for message in messages]


class RecordedSource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamReader(self, schema: StructType) -> RecordedReader:
        return RecordedReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> RecordedWriter:
        return RecordedWriter(self.options, schema, overwrite)
