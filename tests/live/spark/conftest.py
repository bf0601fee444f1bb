"""Each test gets a store, whose topics are filled directly through the broker, and queries on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from orderedmq.broker import Broker
from tests.contract.support import bodies
from tests.waits import until


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.spark)


@dataclass
class StoreRig:
    """A store, with the actions and checks of a test."""

    broker: Broker
    path: str
    folder: Path

    def topic(self, name: str, queues: int = 2, rows: int = 0) -> None:
        self.broker.admin.create_topic(name, queues)
        if rows:
            self.fill(name, rows)

    def fill(self, name: str, rows: int, first: int = 0) -> None:
        """Append ``rows`` messages round-robin to the queues. Their bodies are ``<queue>:<number>``, numbered from ``first``."""
        queues = self.broker.log.queues(name)
        for queue in queues:
            numbers = range(first + queue.queue_id, first + rows, len(queues))
            bodies = [f"{queue.queue_id}:{number}".encode() for number in numbers]
            keys = [f"k{queue.queue_id}-{number % 5}" for number in numbers]
            if bodies:
                self.broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary()), "sharding_key": keys})})

    def bodies(self, topic: str) -> dict[int, list[str]]:
        """The bodies in each queue of a topic, in order."""
        return {queue.queue_id: bodies(self.broker, queue) for queue in self.broker.log.queues(topic)}

    def released(self, group: str = "g") -> None:
        """Wait until the group's queues are unlocked, because Spark reports a query's end before its source has stopped."""
        until(
            lambda: not any(lock.held and lock.remaining > 0 for lock in self.broker.admin.locks(group)),
            f"the queues of group {group} are unlocked",
        )

    def offsets(self, group: str) -> dict[int, int]:
        return {queue.queue_id: offset for queue, offset in self.broker.admin.group_offsets(group).items()}


@dataclass
class Rig(StoreRig):
    """A store, and Spark queries on it."""

    spark: SparkSession

    def stream(self, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("orderedmq").option("path", self.path)
        for name, value in options.items():
            reader = reader.option(name, value)
        return (reader.schema(schema) if schema else reader).load()

    def batch(self, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.read.format("orderedmq").option("path", self.path)
        for name, value in options.items():
            reader = reader.option(name, value)
        return (reader.schema(schema) if schema else reader).load()

    def run(self, df: DataFrame, checkpoint: str = "ck", **options: Any) -> Any:
        """Process all current messages with availableNow, wait for the end, and return the finished query."""
        query = self.start(df, checkpoint, available_now=True, **options)
        query.awaitTermination()
        return query

    def start(self, df: DataFrame, checkpoint: str = "ck", *, available_now: bool = False, **options: Any) -> Any:
        writer = df.writeStream.format("orderedmq").option("path", self.path)
        writer = writer.option("checkpointLocation", str(self.folder / checkpoint))
        for name, value in options.items():
            writer = writer.option(name, value)
        return (
            writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="100 milliseconds")
        ).start()


def numbers(bodies: dict[int, list[str]]) -> list[int]:
    """The numbers in the bodies that `Rig.fill` wrote, sorted."""
    return sorted(int(body.partition(":")[2]) for texts in bodies.values() for body in texts)


@pytest.fixture
def rig(spark: SparkSession, tmp_path: Path) -> Iterator[Rig]:
    path = str(tmp_path / "store")
    with orderedmq.connect(path) as broker:
        yield Rig(broker, path, tmp_path, spark)
    for query in spark.streams.active:
        query.stop()
