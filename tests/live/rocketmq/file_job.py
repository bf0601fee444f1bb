"""A separate Spark driver that writes a folder of JSON lines to a topic, with one task per core.

    python -m tests.live.rocketmq.file_job CORES NAMESERVER TOPIC FOLDER

While the file FOLDER/hold exists, all tasks except the first stop half-way with their rows sent, and create FOLDER/reached.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from ordered_sink import writer
from ordered_sink.commit import StreamWriter
from orderedmq.java import ensure_java
from orderedmq.rocketmq.sink import staging
from pyspark_orderedmq import DefaultSource

FORMAT = "orderedmq_held"
#: Makes Spark split files by the number of cores.
SPLITS: Final = {"spark.sql.files.openCostInBytes": "1"}
#: The number of rows that a task sends at a time.
STEP = 100


class HeldWriter(StreamWriter):
    """A StreamWriter that sends in small steps and stops half-way while the file "hold" exists."""

    folder = ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        writer.GATHER_ROWS = STEP  # type: ignore[misc]
        staging.TOGETHER_BYTES = 0  # type: ignore[misc]
        return super().write(self._held(iterator))

    def _held(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        hold = Path(self.folder, "hold")
        for batch in batches:
            for at in range(0, batch.num_rows, STEP):
                if context.partitionId() and at > batch.num_rows // 2 and hold.exists():
                    Path(self.folder, "reached").touch()
                    while hold.exists():
                        time.sleep(0.05)
                yield batch.slice(at, STEP)


class HeldSource(DefaultSource):
    """The format ``orderedmq`` with a `HeldWriter`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> HeldWriter:
        options = dict(self.options)
        folder = options.pop("folder")
        writer = HeldWriter(options, schema, overwrite)
        writer.folder = folder
        return writer


def start(spark: SparkSession, form: str, home: str, **options: str) -> StreamingQuery:
    """Start the query that writes all rows of the folder ``home`` in one batch."""
    rows = spark.readStream.schema("sharding_key string, body string").json(f"{home}/rows")
    sink = rows.writeStream.format(form).options(**options).option("checkpointLocation", f"{home}/checkpoint")
    return sink.trigger(availableNow=True).start()


def main(cores: str, address: str, topic: str, folder: str) -> None:
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(f"local[{cores}]").appName("orderedmq-files")
    for name, value in {"spark.ui.enabled": "false", **SPLITS}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(HeldSource)
    start(spark, FORMAT, folder, namesrvAddr=address, topic=topic, folder=folder).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
