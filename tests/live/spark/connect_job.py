"""A program for a Spark Connect session, so that all tests share one server. It copies a topic, tries calls that are refused, and
runs a listener with order per key.

It prints one JSON line: python connect_job.py STORE FOLDER_OF_CHECKPOINTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from ordered_source import ConsumeOrderlyStatus, OrderPerKey, consume_orderly
from orderedmq.parking import Command
from orderedmq.tools.parked import LotReader


def copied(spark: SparkSession, path: str, checkpoint: str) -> dict[str, Any]:
    """Copy a topic in a stream, read the copy before and after `orderedmq.register`, and collect the refusals."""
    stream = spark.readStream.format("orderedmq").option("path", path).option("topic", "in").option("consumerGroup", "g").load()
    query = (
        stream.writeStream.format("orderedmq")
        .option("path", path)
        .option("topic", "out")
        .option("topicQueueNums", 2)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    bodies = [row.body for row in spark.read.format("orderedmq").option("path", path).option("topic", "out").load().collect()]
    refused = [reason(work) for work in relative(spark)]
    orderedmq.register(spark)
    again = spark.read.format("orderedmq").option("path", path).option("topic", "out").load().count()
    return {"rows": len(bodies), "distinct": len(set(bodies)), "again": again, "refused": refused}


def relative(spark: SparkSession) -> list[Callable[[], Any]]:
    """Return calls with a relative path. (A stream with a user's schema would be opened in the server's directory.)"""
    given = {"path": "data/omq", "topic": "in", "consumerGroup": "g"}
    rows = spark.createDataFrame([("x",)], "body string").write.format("orderedmq").mode("append")
    return [
        lambda: spark.read.format("orderedmq").options(**given).load().collect(),
        lambda: spark.read.format("orderedmq").option("topic", "in").schema("body binary").load().collect(),
        lambda: spark.readStream.format("orderedmq").options(**given).load().isStreaming,
        lambda: rows.options(path="data/omq", topic="in").save(),
    ]


def reason(work: Callable[[], Any]) -> str:
    try:
        return f"not refused: {work()}"
    except PySparkException as error:
        return next((line for line in str(error).splitlines() if "ORDEREDMQ_" in line), str(error))


def by_key(spark: SparkSession, path: str, folder: str) -> dict[str, Any]:
    """Run a listener with order per key until a poisoned key is parked. Then heal the key, and run until it has come back.

    Return the calls of each run, and the number of parked messages after it.
    """
    heard, healed = f"{folder}/heard", Path(folder, "healed")

    def listener(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus | None:
        with open(heard, "a") as file:
            file.write("".join(f"{message.sharding_key} {message.queue_offset}\n" for message in messages))
        return None if messages[0].sharding_key == "poisoned" and not healed.exists() else ConsumeOrderlyStatus.SUCCESS

    said: dict[str, Any] = {}
    stream = spark.readStream.format("orderedmq").options(path=path, topic="keyed", consumerGroup="k", parkingLot="true").load()
    outcomes = consume_orderly(stream, listener, OrderPerKey(concurrency=2, in_batch_attempts=1))
    with orderedmq.connect(path) as broker:
        [queue] = broker.log.queues("keyed")
        for run in ("poisoned", "healed"):
            finish(outcomes, f"{folder}/by key")
            said[run] = Path(heard).read_text().splitlines()
            Path(heard).unlink()
            parked = LotReader(broker).look("k")
            said[f"parked of {run}"] = parked[queue].messages if parked else 0
            healed.touch()
            broker.admin.command_parked("k", queue, [Command("retry", "poisoned")])
    return said


def finish(outcomes: DataFrame, checkpoint: str) -> None:
    """Process all current messages."""
    writer = outcomes.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


def main(path: str, checkpoints: str) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    said: dict[str, Any] = {"kind": type(spark).__module__}
    said["copied"] = copied(spark, path, f"{checkpoints}/copied")
    said["by key"] = by_key(spark, path, checkpoints)
    print(json.dumps(said))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
