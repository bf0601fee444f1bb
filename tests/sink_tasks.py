"""Runs the tasks of a batch write in Spark and leaves the commit to the test, so that its log lines appear in the test's process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from ordered_sink.commit import BatchWriter
from ordered_sink.writer import Written


def written(df: DataFrame, writer: BatchWriter) -> list[Written]:
    """Run the tasks of the write. Return each task's message for the commit."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"written": [pickle.dumps(writer.write(batches))]})

    return [pickle.loads(row.written) for row in df.mapInArrow(write, "written binary").collect()]
