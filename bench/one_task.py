"""A task of the source without Spark: it reads a whole queue and keeps no rows, for measurements of memory."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from ordered_source.columns import full_schema
from ordered_source.partition_reader import QueuePartition, read
from orderedmq.broker import Broker
from orderedmq.options.source import SourceOptions
from orderedmq.schema import DEFAULT_COLUMNS

CHUNK = 16_384  # the default of pullBatchSize


def whole_queue(broker: Broker, topic: str, rows: int) -> QueuePartition:
    """Return the partition of a topic's only queue, which has ``rows`` messages."""
    (queue,) = broker.log.queues(topic)
    incarnation = broker.log.topic(topic).incarnation
    return QueuePartition(broker.identity, queue, 0, rows, None, incarnation, streaming=False)


def read_away(partition: QueuePartition, options: SourceOptions) -> None:
    """Read a partition and write its rows to /dev/null, as Spark's worker writes them to its socket."""
    with pa.OSFile("/dev/null", "wb") as sink:
        writer = None
        for batch in read(partition, options, DEFAULT_COLUMNS, to_arrow_schema(full_schema(False), timezone="UTC")):
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
