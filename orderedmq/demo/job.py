"""The demo's streaming query: reads flights and writes turnarounds. It is a separate process, so that it can be killed.

    python -m orderedmq.demo.job STORE CHECKPOINT QUEUES EVENTS_PER_BATCH START

STORE is the absolute directory of an embedded broker, or the nameservers of a cluster, whose account is in the command's environment
variables. START is "tuned", or for comparison "plain", which means without ``orderedmq.tuned`` and with both compilers of Java.

The last event of each aircraft must survive a restart, so Spark keeps it. The job groups rows by queue and not by aircraft, because a
queue keeps the order and has all events of its aircraft. So a batch takes a few calls on columns instead of thousands of calls on rows,
which is four times as fast, and one task writes the rows of a queue, in order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json

from orderedmq.demo import IN, OUT
from orderedmq.java import prepare_spark
from orderedmq.options.endpoint import from_environment
from orderedmq.spark_support import has_work_left
from orderedmq.startup.tuning import tuned

#: The folder for Spark's own files. It is in the working directory, because a killed Spark does not remove its files.
SCRATCH: Final = "spark"


#: The fields of an event that are read.
EVENT: Final = pa.schema(
    [("type", pa.string()), ("tailnum", pa.string()), ("actual", pa.timestamp("s", tz="UTC")), ("delay", pa.int64())]
)


def queue_by_queue(_key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    """Process the events of one queue in a batch. ``state``: the last events that `follow` returned for the previous batch."""
    import pandas as pd

    # A shuffle does not keep the order. Sorting by offset restores it.
    events = pd.concat(list(frames)).sort_values("queue_offset")
    last, messages = follow(state.get[0] if state.exists else b"", events["body"].tolist())
    state.update((last,))
    yield messages


def follow(last: bytes, bodies: Sequence[bytes]) -> tuple[bytes, Any]:
    """Process events in the order in which they happened. Return the last event of each aircraft, and one message for each event.

    ``last``: the last event of each aircraft before, one in a line. ``bodies``: at least one event, each a JSON object in a line. A message
    has the fields of its event. For a departure, it also has the minutes since the aircraft's landing (turnaround), which include the
    flight back that is not in the data, and the minutes of its delay that the aircraft brought along from that landing (carried).
    """
    import pandas as pd

    before = last.splitlines()
    lines = [*before, *bodies]
    text = b"\n".join(lines)
    events = pyarrow.json.read_json(
        pa.BufferReader(text),
        # One block, so that rows stay in order.
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=EVENT, unexpected_field_behavior="ignore"),
    ).to_pandas()
    previous = events.groupby("tailnum")[["type", "actual", "delay"]].shift()
    landed = (events["type"] == "departure") & (previous["type"] == "arrival")
    turnaround = (events["actual"] - previous["actual"]).dt.total_seconds() // 60
    carried = np.minimum(events["delay"], previous["delay"]).clip(lower=0)
    texts = [column.where(landed).astype("Int64").astype(str).replace("<NA>", "null") for column in (turnaround, carried)]
    results = [
        (b'{"turnaround":%b,"carried":%b,%b' % (minutes.encode(), delay.encode(), line[1:]), tail)
        for minutes, delay, line, tail in zip(*texts, lines, events["tailnum"], strict=True)
    ]
    last_events = events.drop_duplicates("tailnum", keep="last").index
    messages = pd.DataFrame(results[len(before) :], columns=["body", "sharding_key"])
    return b"\n".join(lines[index] for index in last_events), messages


def main(store: str, checkpoint: str, queues: str, events_per_batch: str, start: str) -> None:
    # Set these before the JVM starts, because it passes its environment to the Python workers.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.state import GroupStateTimeout

    scratch = os.path.abspath(SCRATCH)
    # The garbage collector that starts fastest, because the job runs for about a minute on two cores.
    java_options = f'-XX:+UseSerialGC "-Djava.io.tmpdir={scratch}"'
    if start == "tuned":
        # The job is too short to benefit from the optimising compiler.
        java_options += " -XX:TieredStopAtLevel=1"
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("orderedmq-demo")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", java_options)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", scratch)
        .config("spark.sql.warehouse.dir", scratch)
    )
    if start == "tuned":
        builder = tuned(builder)
    else:
        prepare_spark()
    spark = builder.getOrCreate()
    java: Any = spark._jvm
    # The parent process needs this id to kill the whole job.
    print(json.dumps({"jvm": java.java.lang.ProcessHandle.current().pid()}), flush=True)  # noqa: T201
    broker = {"path": store} if os.path.isabs(store) else from_environment() | {"namesrvAddr": store}
    flights = (
        spark.readStream.format("orderedmq")
        .options(**broker)
        .schema("queue_id int, queue_offset long, body binary")
        .option("topic", IN)
        .option("consumerGroup", OUT)
        .option("maxOffsetsPerTrigger", events_per_batch)
        .load()
    )
    turnarounds = flights.groupBy("queue_id").applyInPandasWithState(
        queue_by_queue, "body binary, sharding_key string", "last binary", "append", GroupStateTimeout.NoTimeout
    )
    writer = (
        turnarounds.writeStream.format("orderedmq")
        .options(**broker)
        .option("topic", OUT)
        .option("topicQueueNums", queues)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
    )
    query = writer.start()
    query.awaitTermination()
    while has_work_left(query.lastProgress):
        query = writer.start()
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
