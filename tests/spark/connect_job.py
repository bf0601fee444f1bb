"""A Spark Connect session that copies a topic and reads it back; run as a program of its own. Prints one JSON line."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession

import orderedmq


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
    orderedmq.register(spark)
    again = spark.read.format("orderedmq").option("path", path).option("topic", "out").load().count()
    print(json.dumps({"rows": len(bodies), "distinct": len(set(bodies)), "again": again, "kind": type(spark).__module__}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
