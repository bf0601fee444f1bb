"""Spark queries over a real cluster, next to RocketMQ's Java client: the behaviour that users of `namesrvAddr` see."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession

import orderedmq
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerQueue, consume_orderly, dead_letter
from orderedmq.broker import Broker
from orderedmq.rocketmq.local.servers import Cluster
from tests.command import COMMAND
from tests.rocketmq.peers import Peers
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


@pytest.fixture(scope="module")
def send(peers: Peers, cluster: Cluster) -> Callable[[str, range], None]:
    """A function that sends events of seven keys with Java's own producer and selector."""
    return sender(peers, cluster.address)


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
def test_events_of_a_java_producer_come_out_once_in_the_same_queues_and_order(everywhere: Rig, peers: Peers) -> None:
    rig, send = everywhere, sender(peers, everywhere.address)
    source, target = rig.topic("in"), rig.topic("out")
    send(source, range(150))
    rig.write(rig.stream(source), target)
    send(source, range(150, 300))
    rig.write(rig.stream(source), target)
    assert rig.bodies(target) == rig.bodies(source)
    in_order(rig.bodies(target), 300)
    # The query's progress is stored as RocketMQ's own group offsets.
    admin = peers.admin(rig.address)
    assert admin.offsets(rig.group, source) == {queue: end for queue, (_, end) in admin.ends(source).items()}


def test_rocketmqs_own_tools_show_the_groups_progress(rig: Rig, send: Any, peers: Peers, cluster: Cluster) -> None:
    source, target = rig.topic("in", 2), rig.topic("out", 2)
    send(source, range(40))
    query = rig.write(rig.stream(source), target, now=False)
    admin = peers.admin(cluster.address)
    ends = {queue: end for queue, (_, end) in admin.ends(source).items()}
    until(lambda: admin.offsets(rig.group, source) == ends, "the group is at the end", 120.0)
    assert len(admin.members(rig.group)) == 1
    query.stop()


def test_a_query_stopped_and_restarted_goes_on_where_it_was(rig: Rig, send: Any) -> None:
    source, target = rig.topic("in"), rig.topic("out")

    def there() -> int:
        return sum(map(len, rig.bodies(target).values()))

    for begin in (0, 60, 120):
        send(source, range(begin, begin + 60))
        query = rig.write(rig.stream(source), target, now=False)
        until(lambda: there() >= begin + 60, "all messages are copied", 90.0)  # noqa: B023 (called before the next round)
        query.stop()
    in_order(rig.bodies(target), 180)


def test_a_batch_read_takes_what_is_there_and_moves_nothing(rig: Rig, send: Any) -> None:
    source = rig.topic("in")
    send(source, range(50))
    reader = rig.spark.read.format("orderedmq").option("namesrvAddr", rig.address).option("topic", source)
    rows = reader.schema("queue_id int, queue_offset long, body binary, sharding_key string").load().collect()
    assert sorted(int(bytes(row.body).decode().partition(":")[2]) for row in rows) == list(range(50))
    assert {row.sharding_key for row in rows} == {f"key-{n}" for n in range(7)}


@pytest.mark.holds("exclusive")
def test_a_second_exclusive_query_and_a_java_member_are_refused_by_name(
    rig: Rig, send: Any, peers: Peers, cluster: Cluster
) -> None:
    source, target = rig.topic("in"), rig.topic("out")
    send(source, range(10))
    consumer = peers.consumer(cluster.address, rig.group, source)
    consumer.wait(10, 120.0)
    with pytest.raises(Exception, match=r"ORDEREDMQ_(GROUP|LOCK)\.") as refused:
        rig.write(rig.stream(source, lockTimeout="2s"), target)
    assert consumer.id in str(refused.value)
    consumer.stop()


@pytest.mark.holds("hand-over")
def test_a_java_consumer_and_a_shared_query_split_a_topic_and_hand_its_queues_over(
    rig: Rig, send: Any, peers: Peers, cluster: Cluster
) -> None:
    source, target = rig.topic("in", 4), rig.topic("out", 4)
    query = rig.write(rig.stream(source, assignment="shared"), target, now=False)
    send(source, range(40))
    until(lambda: sum(map(len, rig.bodies(target).values())) == 40, "the query has everything", 90.0)
    consumer = peers.consumer(cluster.address, rig.group, source)
    until(lambda: len(consumer.queues) == 2, "the consumer has its share", 90.0)
    send(source, range(40, 120))

    def all_there() -> bool:
        return sum(map(len, rig.bodies(target).values())) + len({(one.queue, one.offset) for one in consumer.received}) >= 120

    until(all_there, "both have their share", 90.0)
    consumer.stop()
    send(source, range(120, 160))
    until(lambda: sum(map(len, rig.bodies(target).values())) + len(consumer.received) >= 160, "all messages are read", 120.0)
    query.stop()
    heard = [body for texts in rig.bodies(target).values() for body in texts] + [one.body.decode() for one in consumer.received]
    assert sorted(int(body.partition(":")[2]) for body in heard) == list(range(160)), "a hand-over must repeat no message"
    assert len(consumer.received) > 0


@pytest.mark.holds("orderly listener")
def test_the_orderly_listener_puts_a_poison_message_where_rocketmqs_tools_look(rig: Rig, send: Any) -> None:
    source = rig.topic("in", 1)
    send(source, range(5))

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        if messages[0].queue_offset == 2:
            raise ValueError("no such customer")
        return ConsumeOrderlyStatus.SUCCESS

    rows = rig.stream(source, includeLockToken="true")
    outcomes = rows.transform(
        consume_orderly, listener, OrderPerQueue(max_reconsume_times=1, suspend_current_queue_time_millis=10)
    )
    table = str(rig.folder / "outcomes")
    writer = outcomes.writeStream.format("parquet").option("path", table)
    writer.option("checkpointLocation", str(rig.folder / "ck")).trigger(availableNow=True).start().awaitTermination()
    found = rig.spark.read.schema(outcomes.schema).parquet(table).orderBy("begin_offset").collect()
    assert [(row.begin_offset, row.status, row.attempts) for row in found] == [
        (0, "SUCCESS", 1), (1, "SUCCESS", 1), (2, "DEAD_LETTER", 2), (3, "SUCCESS", 1), (4, "SUCCESS", 1),
    ]  # fmt: skip
    until(lambda: rig.bodies(f"%DLQ%{rig.group}") == {0: ["2:2"]}, "the dead letter is written", 30.0)


def test_a_row_that_meets_the_condition_is_one_dead_letter_though_its_batch_is_repeated(rig: Rig, send: Any) -> None:
    source = rig.topic("in", 1)
    send(source, range(5))
    rows = rig.stream(source, includeLockToken="true").transform(dead_letter, "queue_offset = 2", "not an order")
    passed: list[list[int]] = []

    def write(df: DataFrame, batch: int) -> None:
        passed.append([row.queue_offset for row in df.collect()])
        if len(passed) == 1:
            raise RuntimeError("after the letter, before Spark's commit")

    def run() -> None:
        writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(rig.folder / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="after the letter"):
        run()
    run()
    assert passed == [[0, 1, 3, 4]] * 2
    until(lambda: rig.bodies(f"%DLQ%{rig.group}") == {0: ["2:2"]}, "the dead letter is written", 30.0)


@pytest.mark.holds("source to sink once")
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_demo_runs_on_a_cluster_and_its_audit_finds_nothing(quick_locks: Cluster, tmp_path: Path) -> None:
    """Uses the cluster where a killed attempt's locks end after 3 s, because otherwise the resumed job waits for up to 60 s."""
    # The path contains a space, as temporary folders of some systems do.
    folder, temporary = tmp_path / "a demo", tmp_path / "tmp"
    temporary.mkdir()
    command = [*COMMAND, "--json", "--namesrv", quick_locks.address, "--path", str(folder)]
    done = subprocess.run(
        [*command, "demo", "--events", "8000", "--queues", "4", "--batches", "4"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stderr == ""
    produced, killed, resumed, audited = map(json.loads, done.stdout.splitlines())
    assert (produced["step"], produced["events"], produced["queues"]) == ("produced", 8000, 4)
    # Some batches were committed, one was in flight, and the second run wrote the rest.
    assert killed["step"] == "killed"
    assert killed["killed_in"] == killed["committed"] in (2, 3)
    assert (resumed["killed_in"], resumed["committed"], resumed["events"]) == (None, 4, 8000)
    assert (audited["lost"], audited["duplicated"], audited["out_of_order"], audited["ok"]) == (0, 0, 0, True)
    # No process is left, and no files except those that the demo names.
    assert [
        process for process in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(process.info["cmdline"] or [])
    ] == []
    assert sorted(entry.name for entry in folder.iterdir()) == ["checkpoint", "spark.log"]
    assert list(temporary.iterdir()) == []
