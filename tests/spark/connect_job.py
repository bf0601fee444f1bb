"""A Spark Connect session that copies a topic and reads it back; run as a program of its own. Prints one JSON line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import orderedmq


def relative(spark: SparkSession) -> list[Callable[[], Any]]:
    """What a relative path may be given to. (A stream with a schema of the user's own is made in the server's working directory.)"""
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


def main(path: str, checkpoint: str) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
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
    print(
        json.dumps(
            {
                "rows": len(bodies),
                "distinct": len(set(bodies)),
                "again": again,
                "refused": refused,
                "kind": type(spark).__module__,
            }
        )
    )
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
