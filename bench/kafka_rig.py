"""The Kafka server and the embedded store that Kafka's cases share, and the rows in both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark.sql import DataFrame

import orderedmq
from bench import data
from bench.kafka_server import KafkaServer, fetch_connector
from bench.latency import ROWS
from bench.measure import Bench, Skipped
from bench.process_cpu import ProcessCpu
from orderedmq.errors import JavaError, ServersError

QUEUES: Final = 4
#: Columns of the rows in both sides. Each row names its queue or partition.
_PLACED: Final = "queue_id int, sharding_key string, body binary"
#: Topics with the same rows on both sides: one is written with default settings, one with tuned settings.
PLAIN: Final = "plain"
TUNED: Final = "tuned"

#: Options of Spark's connector that make large micro-batches faster.
TUNED_READ: Final = {
    "kafka.max.poll.records": "20000",
    "kafka.max.partition.fetch.bytes": str(16 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
}
TUNED_WRITE: Final = {
    "kafka.linger.ms": "20",
    "kafka.batch.size": str(512 << 10),
    "kafka.buffer.memory": str(128 << 20),
}
#: Options that make small micro-batches faster.
TUNED_SMALL: Final = {"kafka.fetch.max.wait.ms": "10"}


@dataclass(eq=False)
class Rig:
    """A Kafka and an embedded store, each with the topics ``plain`` and ``tuned`` of ``rows`` rows in 4 queues or partitions."""

    bench: Bench
    server: KafkaServer
    admin: Any
    cpu: ProcessCpu
    store: Path
    rows: int
    _made: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    # --- Kafka

    def create(self, partitions: int = QUEUES, *, flush: bool = False, name: str | None = None) -> str:
        """Create a Kafka topic and return its name. With ``flush``, each append is written to the disk before it is acknowledged."""
        name = name or self.bench.fresh("topic").name
        java = self._jvm.java.util
        settings = java.HashMap()
        if flush:
            settings.put("flush.messages", "1")
        topic = self._jvm.org.apache.kafka.clients.admin.NewTopic(name, java.Optional.of(partitions), java.Optional.empty())
        self.admin.createTopics(java.Collections.singletonList(topic.configs(settings))).all().get()
        return name

    def delete(self, topic: str) -> None:
        self.admin.deleteTopics(self._jvm.java.util.Collections.singletonList(topic)).all().get()

    def from_kafka(self, topic: str, options: Mapping[str, str]) -> DataFrame:
        """Stream a Kafka topic from its beginning, with all seven columns."""
        reader = self.bench.spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.server.address)
        return reader.options(subscribe=topic, startingOffsets="earliest", **options).load()

    def to_kafka(self, topic: str, options: Mapping[str, str]) -> dict[str, str]:
        """Return options of Spark's Kafka sink. The sink waits for acknowledgements by all replicas in sync; there is one replica."""
        return {"kafka.bootstrap.servers": self.server.address, "kafka.acks": "all", "topic": topic, **options}

    def send(self, topic: str, partition: int) -> None:
        """Send ten messages to a partition of a Kafka topic, and wait until they are acknowledged."""
        for record in self._records(topic, partition):
            self._sender.send(record)
        self._sender.flush()

    @cached_property
    def _sender(self) -> Any:
        settings = self._properties()
        for kind in ("key", "value"):
            settings.put(f"{kind}.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer")
        sender = self._jvm.org.apache.kafka.clients.producer.KafkaProducer(settings)
        self.bench.closing.callback(sender.close)
        return sender

    def _records(self, topic: str, partition: int) -> list[Any]:
        """Return ten records, made once for each partition, because making them costs more than sending them."""
        if (topic, partition) not in self._made:
            record = self._jvm.org.apache.kafka.clients.producer.ProducerRecord
            self._made[topic, partition] = [
                record(topic, partition, row["sharding_key"].encode(), row["body"]) for row in data.messages(ROWS).to_pylist()
            ]
        return self._made[topic, partition]

    @property
    def _jvm(self) -> Any:
        return self.bench.spark._jvm

    def _properties(self) -> Any:
        settings = self._jvm.java.util.Properties()
        settings.put("bootstrap.servers", self.server.address)
        return settings

    # --- both

    def fill(self) -> None:
        """Write the same rows to the topics of both sides, through both sinks."""
        for name, options, compression in ((PLAIN, {}, "lz4"), (TUNED, TUNED_WRITE, "none")):
            self.create(name=name)
            with orderedmq.connect(self.store) as broker:
                broker.admin.create_topic(name, QUEUES, compression=compression)
            rows = self.bench.null_source(_PLACED, self.rows, QUEUES)
            given = rows.selectExpr("queue_id AS partition", "sharding_key AS key", "body AS value")
            self.bench.drain(given, "kafka", self.rows, **self.to_kafka(name, options))
            target = {"path": str(self.store), "topic": name, "messageQueueSelector": "queueId"}
            self.bench.drain(rows, "orderedmq", self.rows, **target)
        # Write the system's cache to the disk now, so that the system does not do so during a measurement.
        os.sync()

    def measured(self, rows: int, call: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Return the result of ``call``, with its CPU time in µs a row, by process and together."""
        before = self.cpu.now()
        found = dict(call())
        return {**found, **{name: seconds / rows * 1e6 for name, seconds in self.cpu.since(before).items()}}


def rig(bench: Bench) -> Rig:
    """Return the rig, which the first case creates and the bench ends. Raises Skipped if the jars cannot be fetched."""
    if "kafka" not in bench.shared:
        try:
            release, jars = fetch_connector()
            home = bench.fresh("kafka")
            home.mkdir()
            server = bench.closing.enter_context(KafkaServer(home))
        except (ServersError, JavaError) as error:
            if error.sub not in ("NO_JARS", "MISSING", "TOO_OLD"):
                raise
            bench.shared["kafka"] = Skipped(str(error))
            raise bench.shared["kafka"] from None
        bench.add_jars(jars)
        bench.software = f"Kafka {server.version}, Spark's connector {release} on Spark {pyspark.__version__}"
        cpu = bench.closing.enter_context(ProcessCpu({server.pid: "Kafka"}))
        made = Rig(bench, server, None, cpu, bench.fresh("embedded"), 100_000 if bench.quick else 3_000_000)
        made.admin = made._jvm.org.apache.kafka.clients.admin.AdminClient.create(made._properties())
        bench.closing.callback(made.admin.close)
        made.fill()
        bench.shared["kafka"] = made
    found: Rig | Skipped = bench.shared["kafka"]
    if isinstance(found, Skipped):
        # Fail immediately, because it takes long to try again to fetch missing jars.
        raise found
    return found
