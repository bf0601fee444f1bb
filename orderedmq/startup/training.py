"""A driver that runs small queries once, so that Java loads the classes for the archive. ``archive`` starts it.

    python -m orderedmq.startup.training FOLDER

FOLDER is an empty directory for a store, checkpoints and Spark's own files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupStateTimeout

from orderedmq import connect

_ROWS: Final = 10


def counted(_key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    """Yield the rows that a group has in a batch, and count them in the group's state."""
    before = state.get[0] if state.exists else 0
    for frame in frames:
        before += len(frame)
        yield frame[["body", "sharding_key"]]
    state.update((before,))


def main(folder: str) -> None:
    store = f"{folder}/store"
    with connect(store) as broker:
        for topic in ("in", "out"):
            broker.admin.create_topic(topic, 2)
        for queue in broker.log.queues("in"):
            keys = [f"key of queue {queue.queue_id}"] * _ROWS
            broker.log.append({queue: pa.record_batch({"body": [b"body"] * _ROWS, "sharding_key": keys})})
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("orderedmq-training")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", folder)
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        .getOrCreate()
    )
    spark.range(_ROWS).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    rows = spark.range(_ROWS).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS body", "CAST(id AS STRING) AS sharding_key")
    rows.write.format("orderedmq").mode("append").options(path=store, topic="other", topicQueueNums="2").save()

    def stream(group: str) -> Any:
        reader = spark.readStream.format("orderedmq").options(path=store, topic="in", consumerGroup=group)
        return reader.option("consumeFromWhere", "first").load()

    def run(frame: Any, form: str, name: str, **options: str) -> None:
        writer = frame.writeStream.format(form).options(checkpointLocation=f"{folder}/checkpoint-{name}", **options)
        writer.trigger(availableNow=True).start().awaitTermination()

    run(stream("sink"), "orderedmq", "sink", path=store, topic="out")
    run(stream("files"), "parquet", "files", path=f"{folder}/files")
    stateful = (
        stream("state")
        .groupBy("queue_id")
        .applyInPandasWithState(
            counted, "body binary, sharding_key string", "count long", "append", GroupStateTimeout.NoTimeout
        )
    )
    run(stateful, "orderedmq", "state", path=store, topic="out")
    spark.read.parquet(f"{folder}/files").orderBy("queue_offset").collect()
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    # Java exits when its standard input is closed, and then writes the archive.
    process.stdin.close()
    process.wait(300)


if __name__ == "__main__":
    main(sys.argv[1])
