"""The ceilings: a source that yields ready-made rows and a sink that drops rows, through the same Spark interfaces as ours."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from bench import data
from ordered_source.columns import full_schema

#: Rows in one RecordBatch, as many as the store's chunks have.
BATCH_ROWS: Final = 16384


@dataclass
class _Span(InputPartition):
    queue: int
    begin: int
    end: int


class NullSource(DataSource):
    """Yields ``rows`` rows in ``queues`` partitions, or with ``every`` (seconds) ``rows`` more in each interval.

    The option ``most`` limits the rows of a micro-batch; 0 means no limit.
    """

    @classmethod
    def name(cls) -> str:
        return "null_source"

    def schema(self) -> Any:
        return full_schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _NullReader(self.options, schema)


class _NullReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Any, schema: StructType) -> None:
        self._rows = int(options["rows"])
        self._queues = int(options["queues"])
        self._every = float(options.get("every", 0))
        self._most = int(options.get("most", 0))
        self._since = time.monotonic()
        self._schema = schema

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Do nothing, because the rows are known."""

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        there = self._rows
        if self._every:
            there *= int((time.monotonic() - self._since) / self._every)
        share = there // self._queues
        if self._most:
            share = min(share, start.get("0", 0) + self._most // self._queues)
        return {str(queue): share for queue in range(self._queues)} if share else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        spans = [_Span(int(queue), start.get(queue, 0), stop) for queue, stop in end.items()]
        return [span for span in spans if span.end > span.begin]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Span)
        left = partition.end - partition.begin
        ready = _ready(partition.queue, min(left, BATCH_ROWS), to_arrow_schema(self._schema, timezone="UTC"))
        while left > 0:
            yield ready if left >= ready.num_rows else ready.slice(0, left)
            left -= ready.num_rows


def _ready(queue: int, rows: int, schema: pa.Schema) -> pa.RecordBatch:
    made = data.messages(rows, queue)
    known = {
        "topic": lambda: pa.repeat("t", rows),
        "broker_name": lambda: pa.repeat("embedded", rows),
        "queue_id": lambda: pa.repeat(pa.scalar(queue, pa.int32()), rows),
        "queue_offset": lambda: pa.array(np.arange(rows)),
        "body": lambda: made.column("body"),
        "sharding_key": lambda: made.column("sharding_key"),
        "message_id": lambda: pa.repeat("0" * 32, rows),
        "reconsume_times": lambda: pa.repeat(pa.scalar(0, pa.int32()), rows),
        "born_timestamp": lambda: pa.repeat(pa.scalar(0, pa.timestamp("us", tz="UTC")), rows),
        "store_timestamp": lambda: pa.repeat(pa.scalar(0, pa.timestamp("us", tz="UTC")), rows),
    }
    columns = [known[field.name]() if field.name in known else pa.nulls(rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class NullSink(DataSource):
    """Takes Arrow batches and drops them."""

    @classmethod
    def name(cls) -> str:
        return "null_sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return _NullWriter()


class _NullWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to publish."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to discard."""
