"""Starts the queries of these tests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ordered_source import OrderPerKey, OrderPerQueue, consume_orderly
from tests.live.faults.faulty import FORMAT
from tests.live.faults.key_listener import Recorder
from tests.live.faults.points import Points
from tests.live.faults.progress_listener import KINDS
from tests.quick_spark import jvm_options

#: A SQL expression for the queue and offset that a row came from, in the form that the checker reads.
ORIGIN = "concat(topic, '/', broker_name, '/', queue_id, ':', queue_offset)"


def session_config() -> dict[str, str]:
    """The Spark configuration of these tests."""
    return {
        "spark.driver.memory": "1g",
        "spark.executor.extraJavaOptions": jvm_options(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }


def start(
    spark: SparkSession,
    *,
    checkpoint: str,
    path: str = "",
    servers: str = "",
    group: str | None = "g",
    topic: str = "in",
    sink: str = "out",
    available_now: bool = False,
    trigger: str = "100 milliseconds",
    source: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    listener: Mapping[str, Any] | None = None,
    kind: str | None = None,
    shuffle: bool = False,
) -> StreamingQuery:
    """Start a query that reads ``topic`` and writes to ``sink``: a topic, ``noop``, ``parquet:<folder>``, or ``once:<folder>`` for the
    tables in it.

    The query uses the store at ``path``, or RocketMQ at ``servers`` (namesrvAddr) and passes no points in that case.

    - ``listener``: run the listener `Recorder` with these settings. The order is per key if the source has a parking lot, else per
      queue.
    - ``kind``: run the listener of this kind of `progress_listener`.
    - ``shuffle``: shuffle the rows before they are written.
    """
    format, place = ("orderedmq", ("namesrvAddr", servers)) if servers else (FORMAT, ("path", path))
    reader = spark.readStream.format(format).option(*place).option("topic", topic)
    for name, value in {**({"consumerGroup": group} if group else {}), **(source or {})}.items():
        reader = reader.option(name, str(value))
    rows = reader.load()
    if listener is not None:
        order = OrderPerKey if source is not None and "parkingLot" in source else OrderPerQueue
        rows = rows.transform(consume_orderly, Recorder, order(**listener))
    elif kind is not None:
        consume, function, settings, _ = KINDS[kind]
        rows = rows.transform(consume, function, settings)
    elif sink.startswith("once:"):
        # Other drivers do not need the libraries of tables.
        from tests.live.faults import once_tables

        rows = rows.select(*once_tables.COLUMNS)
    else:
        rows = rows.selectExpr("body", "sharding_key", f"{ORIGIN} AS keys")
    writer = (rows.repartition(1) if shuffle else rows).writeStream
    if sink.startswith("parquet:"):
        folder = sink.partition(":")[2]

        def append(batch: DataFrame, number: int) -> None:
            # The time distinguishes the repeat of a batch from its first delivery.
            at = time.monotonic_ns()
            batch.selectExpr("*", f"{number} AS batch", f"{at} AS at").write.mode("append").parquet(folder)
            Points(Path(path).parent / "points").reach("appended")

        writer = writer.foreachBatch(append)
    elif sink.startswith("once:"):
        writer = writer.foreachBatch(once_tables.append_to_all(sink.partition(":")[2], **(target or {})))
    elif sink == "noop":
        writer = writer.format("noop")
    else:
        writer = writer.format(format).option(*place).option("topic", sink)
    for name, value in (target or {}).items():
        writer = writer.option(name, str(value))
    writer = writer.option("checkpointLocation", checkpoint)
    return (writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime=trigger)).start()
