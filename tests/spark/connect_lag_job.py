"""A Spark Connect session whose client watches the lag of a query; run as a program of its own. Prints one JSON line."""

from __future__ import annotations

import json
import logging
import sys
import time

from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from ordered_source.observe import LagListener


class Kept(logging.Handler):
    """Keeps the lines, and what a scrape finds for the first queue when each is written."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self.registry = registry
        self.lines: list[str] = []
        self.lags: list[float | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.lags.append(lag(self.registry))


def lag(registry: CollectorRegistry) -> float | None:
    labels = {"query": "lagging", "topic": "in", "broker": "embedded", "queue": "0"}
    return registry.get_sample_value("orderedmq_queue_lag_messages", labels)


def main(path: str, checkpoint: str) -> None:
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    registry = CollectorRegistry()
    kept = Kept(registry)
    logger = logging.getLogger("orderedmq.lag")
    logger.setLevel(logging.INFO)
    logger.addHandler(kept)
    listener = LagListener(registry=registry)
    spark.streams.addListener(listener)
    stream = spark.readStream.format("orderedmq").option("path", path).option("topic", "in").option("consumerGroup", "g")
    writer = stream.option("maxOffsetsPerTrigger", 20).load().writeStream.format("noop").queryName("lagging")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    # Events come through a stream of their own, after the query's end too.
    deadline = time.monotonic() + 60
    while (len(kept.lines) < 3 or lag(registry) is not None) and time.monotonic() < deadline:
        time.sleep(0.05)
    after = {
        "lag": lag(registry),
        "rows": registry.get_sample_value("orderedmq_rows_processed_total", {"query": "lagging"}),
        "batches": registry.get_sample_value("orderedmq_batches_total", {"query": "lagging"}),
    }
    spark.streams.removeListener(listener)
    print(json.dumps({"kind": type(spark).__module__, "lines": kept.lines, "lags": kept.lags, "after": after}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
