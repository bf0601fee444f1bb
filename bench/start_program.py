"""A typical program of a user: it starts a Spark session, runs a query from the source to the sink, and then another query.

    python -m bench.start_program FOLDER tuned|quick|plain BEGAN

FOLDER has the store with the topics "in" and "out". "quick" is "tuned" with Java's options for short programs. BEGAN is the value of the
monotonic clock when the program was started. The program prints one line of JSON: the seconds from BEGAN until the first query was done, and
the seconds that the second query spent outside its micro-batches.
"""

from __future__ import annotations

import json
import sys
import time

import orderedmq
from orderedmq.startup.archive import BRIEF


def main(folder: str, start: str, began: str) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "1g")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.warehouse.dir", f"{folder}/warehouse")
    if start == "quick":
        builder = builder.config("spark.driver.extraJavaOptions", BRIEF)
    if start == "plain":
        orderedmq.prepare_spark()
    else:
        builder = orderedmq.tuned(builder)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    unique = f"{start}-{began.replace('.', '-')}"

    def query(number: int) -> float:
        """Run a query, and return the seconds outside its micro-batches."""
        before = time.monotonic()
        store = f"{folder}/store"
        rows = spark.readStream.format("orderedmq").options(path=store, topic="in", consumerGroup=f"{unique}-{number}")
        writer = rows.load().writeStream.format("orderedmq").options(path=store, topic="out")
        checkpoint = f"{folder}/checkpoint-{unique}-{number}"
        running = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        running.awaitTermination()
        inside = sum(progress.durationMs["addBatch"] for progress in running.recentProgress if progress.numInputRows)
        return time.monotonic() - before - inside / 1000

    query(1)
    first = time.monotonic() - float(began)
    print(json.dumps({"first query": first, "outside, later query": query(2)}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
