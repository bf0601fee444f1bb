"""Spark queries over a real cluster, next to RocketMQ's Java client: the behaviour that users of `namesrvAddr` see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from tests.live.rocketmq.peers import Peers
from tests.waits import until

pytestmark = pytest.mark.spark


@dataclass
class Rig:
    spark: SparkSession
    broker: Broker
    address: str
    folder: Path
    name: str

    def topic(self, suffix: str, queues: int = 4) -> str:
        topic = f"{self.name}-{suffix}"
        self.broker.admin.create_topic(topic, queues)
        return topic

    @property
    def group(self) -> str:
        return f"{self.name}-g"

    def stream(self, topic: str, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("orderedmq").option("namesrvAddr", self.address).option("topic", topic)
        return reader.options(**{"consumerGroup": self.group, "consumeFromWhere": "first", **options}).load()

    def write(self, rows: DataFrame, topic: str, checkpoint: str = "ck", *, now: bool = True, **options: Any) -> Any:
        writer = rows.writeStream.format("orderedmq").option("namesrvAddr", self.address).option("topic", topic)
        writer = writer.options(checkpointLocation=str(self.folder / checkpoint), **options)
        query = (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="200 milliseconds")).start()
        if now:
            query.awaitTermination()
        return query

    def bodies(self, topic: str) -> dict[int, list[str]]:
        out: dict[int, list[str]] = {}
        for queue in self.broker.log.queues(topic):
            end = self.broker.log.bounds([queue])[queue].max_offset
            out[queue.queue_id] = []
            while (at := len(out[queue.queue_id])) < end:
                rows = self.broker.log.pull(queue, at, end - at, 1 << 24, ("body",))
                out[queue.queue_id] += [body.decode() for body in rows.column("body").to_pylist()]
        return out


def rigged(spark: SparkSession, cluster: Cluster, folder: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    name = f"s{abs(hash(request.node.name)) % 10**8}"
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield Rig(spark, broker, cluster.address, folder, name)
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def rig(spark: SparkSession, cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from rigged(spark, cluster, tmp_path, request)


@pytest.fixture
def everywhere(spark: SparkSession, every_version: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig for each release in turn."""
    yield from rigged(spark, every_version, tmp_path, request)


def sender(peers: Peers, address: str) -> Callable[[str, range], None]:
    producer = peers.producer(address)

    def send(topic: str, numbers: range) -> None:
        """Send the messages, and return when a reader can see them, which is a little after they are stored."""
        with orderedmq.connect(namesrv_addr=address) as broker:

            def there() -> int:
                return sum(at.max_offset for at in broker.log.bounds(broker.log.queues(topic)).values())

            before = there()
            for number in numbers:
                producer.send(topic, f"{number % 7}:{number}".encode(), f"key-{number % 7}")
            until(lambda: there() >= before + len(numbers), "the messages can be read")

    return send


def in_order(bodies: dict[int, list[str]], count: int) -> None:
    """Assert that each event occurs once, and that each key's events are in one queue and in order."""
    seen: dict[str, list[int]] = defaultdict(list)
    queues: dict[str, set[int]] = defaultdict(set)
    for queue, texts in bodies.items():
        for text in texts:
            key, _, number = text.partition(":")
            seen[key].append(int(number))
            queues[key].add(queue)
    assert sorted(number for numbers in seen.values() for number in numbers) == list(range(count))
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert all(len(found) == 1 for found in queues.values())


@pytest.mark.holds("queue order", "same key, same queue")
def test_events_of_a_java_producer_are_copied_once_with_their_queues_and_order(everywhere: Rig, peers: Peers) -> None:
    """The query is stopped while it waits for events, and started again on its checkpoint."""
    rig, send = everywhere, sender(peers, everywhere.address)
    source, target = rig.topic("in"), rig.topic("out")
    send(source, range(150))
    query = rig.write(rig.stream(source), target, now=False)
    sent = rig.bodies(source)
    until(lambda: rig.bodies(target) == sent, "the first events are copied")
    query.stop()
    send(source, range(150, 300))
    rig.write(rig.stream(source), target)
    assert rig.bodies(target) == rig.bodies(source)
    in_order(rig.bodies(target), 300)
    # A batch query reads the same events, and does not move the group.
    reader = rig.spark.read.format("orderedmq").option("namesrvAddr", rig.address).option("topic", source)
    rows = reader.schema("queue_id int, queue_offset long, body binary, sharding_key string").load().collect()
    read = {(row.queue_id, row.queue_offset): (bytes(row.body).decode(), row.sharding_key) for row in rows}
    assert read == {
        (queue, offset): (text, f"key-{text[0]}")
        for queue, texts in rig.bodies(source).items()
        for offset, text in enumerate(texts)
    }
    # The query's progress is stored as RocketMQ's own group offsets.
    admin = peers.admin(rig.address)
    assert admin.offsets(rig.group, source) == {queue: end for queue, (_, end) in admin.ends(source).items()}


@pytest.mark.holds("hand-over")
def test_a_java_consumer_and_a_shared_query_split_a_topic_and_hand_its_queues_over(rig: Rig, peers: Peers) -> None:
    send = sender(peers, rig.address)
    source, target = rig.topic("in", 4), rig.topic("out", 4)
    query = rig.write(rig.stream(source, assignment="shared"), target, now=False)
    send(source, range(40))
    until(lambda: sum(map(len, rig.bodies(target).values())) == 40, "the query has everything")
    assert len(peers.admin(rig.address).members(rig.group)) == 1
    consumer = peers.consumer(rig.address, rig.group, source)
    until(lambda: len(consumer.queues) == 2, "the consumer has its share", 90.0)
    send(source, range(40, 120))

    def all_there() -> bool:
        return (
            sum(map(len, rig.bodies(target).values())) + len({(message.queue, message.offset) for message in consumer.received})
            >= 120
        )

    until(all_there, "both have their share", 90.0)
    consumer.stop()
    send(source, range(120, 160))
    until(lambda: sum(map(len, rig.bodies(target).values())) + len(consumer.received) >= 160, "all messages are read", 120.0)
    query.stop()
    heard = [body for texts in rig.bodies(target).values() for body in texts] + [
        message.body.decode() for message in consumer.received
    ]
    assert sorted(int(body.partition(":")[2]) for body in heard) == list(range(160)), "a hand-over must repeat no message"
    assert len(consumer.received) > 0
