"""The source in real Spark over a real cluster: filters, topics that were changed or recreated, and deleted messages."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source import topic_watch
from ordered_source.columns import full_schema
from ordered_source.stop_request import StopRequest
from ordered_source.stream_reader import POLL_INTERVAL, StreamReader
from orderedmq.broker import Broker
from orderedmq.errors import DataLossError
from orderedmq.ownership.lock import LockToken
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.topic_changes import delete_at_broker
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import group_requests, message_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from tests.contract.support import commit_beyond_end
from tests.micro_batches import MicroBatchLoop
from tests.rocketmq.peers import Peers
from tests.stopped_readers import stopped
from tests.stored_messages import inner
from tests.waits import soon, until

pytestmark = pytest.mark.spark

READ = "queue_offset long, body binary, tags string"
UPDATE_BROKER_CONFIG = 25
DELETE_EXPIRED_COMMITLOG = 329


@dataclass
class Rig:
    """A cluster with topics and a group that belong to the test."""

    spark: SparkSession
    cluster: Cluster
    broker: Broker
    folder: Path
    source: str
    target: str
    group: str

    def topic(self, queues: int = 1) -> None:
        self.broker.admin.create_topic(self.source, queues)

    def fill(self, first: int, count: int, tags: Sequence[str | None] = (None,), **properties: str) -> None:
        """Append ``count`` messages to the first queue. Bodies are numbers from ``first`` on; the tags are used in turn."""
        numbers = range(first, first + count)
        rows: dict[str, Any] = {
            "body": pa.array([b"%d" % number for number in numbers], pa.binary()),
            "tags": pa.array([tags[number % len(tags)] for number in numbers], pa.string()),
        }
        if properties:
            pairs = [[(name, text.format(number)) for name, text in properties.items()] for number in numbers]
            rows["properties"] = pa.array(pairs, pa.map_(pa.string(), pa.string()))
        self.broker.log.append({self.broker.log.queues(self.source)[0]: pa.record_batch(rows)})

    def stream(self, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("orderedmq").options(namesrvAddr=self.cluster.address)
        return reader.options(
            **{"topic": self.source, "consumerGroup": self.group, "consumeFromWhere": "first", **options}
        ).load()

    def batch(self, **options: Any) -> list[int]:
        reader = self.spark.read.format("orderedmq").options(namesrvAddr=self.cluster.address)
        # With a user's schema, Spark does not ask the data source for one, so the reader makes the checks.
        rows = reader.options(**{"topic": self.source, **options}).schema(READ).load().collect()
        return sorted(int(row.body) for row in rows)

    def run(self, checkpoint: str = "ck", **options: Any) -> Any:
        """Copy the source's current messages to the target."""
        writer = self.stream(**options).writeStream.format("orderedmq").options(namesrvAddr=self.cluster.address)
        writer = writer.options(topic=self.target, topicQueueNums="1", checkpointLocation=str(self.folder / checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    def out(self) -> list[int]:
        queue = self.broker.log.queues(self.target)[0]
        end = self.broker.log.bounds([queue])[queue].max_offset
        found: list[int] = []
        while len(found) < end:
            rows = self.broker.log.pull(queue, len(found), end - len(found), 1 << 24, ("body",))
            found += [int(body) for body in rows.column("body").to_pylist()]
        return found

    def offset(self) -> int:
        queue = self.broker.log.queues(self.source)[0]
        return self.broker.groups.offsets(self.group, [queue])[queue]


@pytest.fixture
def rig(spark: SparkSession, cluster: Cluster, tmp_path: Path) -> Iterator[Rig]:
    name = f"s-{uuid.uuid4().hex[:8]}"
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield Rig(spark, cluster, broker, tmp_path, f"{name}-in", f"{name}-out", f"{name}-g")
    for query in spark.streams.active:
        query.stop()


@contextlib.contextmanager
def without_property_filter(cluster: Cluster) -> Iterator[None]:
    ask(cluster.broker.address, UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false\n")
    try:
        yield
    finally:
        ask(cluster.broker.address, UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=true\n")


# -- filters ----------------------------------------------------------------------------------------------------------------------


def test_a_stream_by_tags_reads_them_exactly_and_its_offsets_count_everything(rig: Rig) -> None:
    """Brokers compare hashes of tags, and "Aa" and "BB" have the same hash."""
    rig.topic()
    rig.fill(0, 5000, tags=("Aa", "BB", None, "c d"))
    rig.run(tags=" Aa ||c d")
    expected = [number for number in range(5000) if number % 4 in (0, 3)]
    assert rig.out() == expected
    until(lambda: rig.offset() == 5000, "all messages are processed", 60.0)
    rig.fill(5000, 300, tags=("BB",))
    rig.fill(5300, 1, tags=("Aa",))
    query = rig.run(tags="c d || Aa", maxOffsetsPerTrigger="100")
    assert rig.out() == [*expected, 5300]
    assert [progress.numInputRows for progress in query.recentProgress][:4] == [0, 0, 0, 1]


def test_a_batch_by_tags_and_by_sql(rig: Rig) -> None:
    rig.topic(2)
    rig.fill(0, 1000, tags=("a", "b", None), amount="{}", color="red")
    assert rig.batch(tags="a || b") == [number for number in range(1000) if number % 3 < 2]
    assert rig.batch(tags="*", pullThresholdForQueue="70", pullThresholdSizeForQueue="3k") == list(range(1000))
    assert rig.batch(filterSql="TAGS = 'a' AND amount > 500") == [n for n in range(1000) if n % 3 == 0 and n > 500]
    assert rig.batch(filterSql="color = 'blue' or TAGS is null") == [n for n in range(1000) if n % 3 == 2]
    ends = json.dumps({rig.source: {rig.broker.log.queues(rig.source)[0].broker_name: {"0": 7, "1": 0}}})
    assert rig.batch(filterSql="color = 'red'", endingOffsets=ends) == list(range(7))


def test_a_stream_by_sql_tells_its_filter_to_rocketmqs_own_tools(rig: Rig) -> None:
    rig.topic()
    rig.fill(0, 3000, amount="{}")
    rig.run(filterSql="amount between 2990 and 2995")
    assert rig.out() == list(range(2990, 2996))
    stream = rig.stream(filterSql="amount > 5").writeStream.format("noop")
    query = stream.option("checkpointLocation", str(rig.folder / "other")).start()

    def said() -> bool:
        code, found = ask(rig.cluster.broker.address, RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": rig.group})
        return code == 0 and b"amount > 5" in found and b"SQL92" in found

    until(said, "the broker knows the filter", 60.0)
    query.stop()


def test_a_hundred_thousand_messages_that_do_not_match_stall_nothing(rig: Rig) -> None:
    rig.topic()
    rig.fill(0, 100_000, tags=("b",))
    rig.fill(100_000, 3, tags=("a",))
    begin = time.monotonic()
    assert rig.batch(tags="a") == [100_000, 100_001, 100_002]
    # A broker looks at 16,000 messages per pull. If it held one of these pulls back, that pull would take 15 s.
    assert time.monotonic() - begin < 90


@pytest.mark.parametrize("kind", ["stream", "batch"])
def test_sql_that_is_none_is_refused_when_the_query_is_planned(rig: Rig, kind: str) -> None:
    """A pull with such a filter would return every message."""
    rig.topic()
    rig.fill(0, 3)
    load = rig.stream if kind == "stream" else rig.batch
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_OPTION.INVALID\] option filterSql 'amount >' is not valid SQL"):
        load(filterSql="amount >")
    with without_property_filter(rig.cluster):
        with pytest.raises(PySparkException, match=r"ORDEREDMQ_OPTION.UNSUPPORTED\] option filterSql.*enablePropertyFilter"):
            load(filterSql="amount > 5")
        assert rig.batch(tags="*") == [0, 1, 2]
    assert rig.group not in rig.broker.admin.groups(), "the query must be refused before it creates the group"


@pytest.mark.holds("agreement")
def test_a_query_that_filters_otherwise_than_a_java_member_of_its_group_is_refused(rig: Rig) -> None:
    """A heartbeat replaces the whole group's filter, so the Java member would receive messages by the query's filter."""
    rig.topic()
    rig.fill(0, 3)
    with Client(rig.cluster.address) as java:
        for version, (theirs, mine) in enumerate((("a || b", "a"), ("*", "b || a"), ("a", "*"))):
            read = [TopicSubscription(rig.source, theirs)]
            beat = group_requests.heartbeat("10.0.0.1@1#2", rig.group, read, version=version)
            java.call_address(rig.cluster.broker.address, beat, soon())
            with pytest.raises(PySparkException, match=r"ORDEREDMQ_GROUP.DISAGREES.*10\.0\.0\.1@1#2") as caught:
                rig.run(tags=mine, assignment="shared", lockTimeout="1s")
            assert f"TAG {theirs!r}" in str(caught.value)
            found = java.call_address(rig.cluster.broker.address, group_requests.consumer_connections(rig.group), soon())
            assert found.subscriptions[rig.source].expression == theirs, "the group's filter must not change"


# -- a group that others have moved -----------------------------------------------------------------------------------------------


def test_an_exclusive_query_goes_on_where_another_member_has_stopped(rig: Rig) -> None:
    rig.topic()
    rig.fill(0, 20)
    rig.run()
    rig.fill(20, 20)
    queue = rig.broker.log.queues(rig.source)[0]
    other = rig.broker.groups.join("another")

    def granted() -> LockToken | None:
        [found] = rig.broker.groups.lock(rig.group, other, [queue]).values()
        return found if isinstance(found, LockToken) else None

    # Spark reports the end of a query before its source has released the queues.
    token = until(granted, "the query's source has released the queue", 60.0)
    rig.broker.groups.commit({token: 40})
    rig.broker.groups.unlock([token])
    rig.broker.groups.leave(other)
    rig.fill(40, 3)
    rig.run()
    assert rig.out() == [*range(20), 40, 41, 42]
    assert rig.offset() == 43


def test_a_reset_by_rocketmqs_own_tools_is_followed_after_one_restart(rig: Rig, peers: Peers) -> None:
    rig.topic()
    rig.fill(0, 20)
    writer = rig.stream().writeStream.format("noop").option("checkpointLocation", str(rig.folder / "ck"))
    query = writer.trigger(processingTime="200 milliseconds").start()
    queues = rig.broker.log.queues(rig.source)
    until(lambda: rig.broker.groups.offsets(rig.group, queues) == {queues[0]: 20}, "the group is at the end", 60.0)
    peers.admin(rig.cluster.address).client.resetOffsetByTimestamp(rig.source, rig.group, 0, True)
    rig.fill(20, 5)
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_LOCK.LOST\].*were reset by RocketMQ's own tools"):
        query.awaitTermination(180)
    done = rig.stream().writeStream.format("noop").option("checkpointLocation", str(rig.folder / "ck"))
    again = done.trigger(availableNow=True).start()
    assert again.awaitTermination(180)
    assert sum(progress.numInputRows for progress in again.recentProgress) >= 25
    assert rig.offset() == 25


# -- topics that are made again ----------------------------------------------------------------------------------------------------


def remake(rig: Rig, first: int, count: int) -> None:
    """Recreate the topic through another connection than the query's, as RocketMQ's own tools would."""
    with orderedmq.connect(namesrv_addr=rig.cluster.address) as other:
        other.admin.delete_topic(rig.source)
        other.admin.create_topic(rig.source, 1)
    rig.fill(first, count)


@pytest.mark.holds("named loss")
@pytest.mark.parametrize("count", [5, 100])
def test_a_topic_that_was_made_anew_is_noticed_at_the_restart(rig: Rig, count: int) -> None:
    """The query notices even if the new topic already has more messages than the query had read of the former topic."""
    rig.topic()
    rig.fill(0, 20)
    rig.run()
    remake(rig, 1000, count)
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED\] topic"):
        rig.run()
    assert rig.out() == list(range(20))
    rig.run(failOnDataLoss="false")
    assert rig.out() == [*range(20), *range(1000, 1000 + count)]
    rig.fill(2000, 3)
    rig.run()
    assert rig.out() == [*range(20), *range(1000, 1000 + count), 2000, 2001, 2002]


def test_a_groups_offset_of_the_former_topic_is_not_followed(rig: Rig) -> None:
    """RocketMQ 4 keeps a group's offsets when a topic is deleted, so they must be ignored."""
    rig.topic()
    rig.fill(0, 20)
    rig.run()
    remake(rig, 1000, 100)
    queue = rig.broker.log.queues(rig.source)[0]
    me = rig.broker.groups.join("somebody")
    [token] = rig.broker.groups.lock(rig.group, me, [queue]).values()
    assert isinstance(token, LockToken)
    rig.broker.groups.commit({token: 20})
    rig.broker.groups.leave(me)
    rig.run(failOnDataLoss="false")
    assert rig.out() == [*range(20), *range(1000, 1100)]


def test_a_topic_that_is_made_anew_while_it_is_read_is_noticed(rig: Rig) -> None:
    """The error depends on what the query sees first: no topic, a topic without the messages that it read, or other messages."""
    rig.topic()
    rig.fill(0, 20)
    writer = rig.stream().writeStream.format("noop").option("checkpointLocation", str(rig.folder / "ck"))
    query = writer.trigger(processingTime="200 milliseconds").start()
    until(lambda: sum(progress.numInputRows for progress in query.recentProgress) == 20, "the messages are processed", 60.0)
    remake(rig, 1000, 100)
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_DATA_LOSS.(TOPIC_RECREATED|TOPIC_DELETED|QUEUE_DELETED|BEYOND_END)"):
        query.awaitTermination(180)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
def test_a_topic_that_is_deleted_before_its_offset_is_committed_is_a_loss_of_data(
    rig: Rig, accepted: bool, routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query has just listed its topics, so it does not notice the deletion. It must still commit the other topic's offset.

    ``routed``: the nameserver still knows the topic, as in the middle of a deletion, and the broker refuses the commit.
    """
    monkeypatch.setattr(topic_watch, "LISTING_INTERVAL", 600.0)
    rig.topic()
    rig.fill(0, 20)
    rig.broker.admin.create_topic(rig.target, 1)
    [kept] = until(lambda: rig.broker.log.queues(rig.target), "the other topic is known")
    row = pa.record_batch({"body": pa.array([b"x"])})
    rig.broker.log.append({kept: row})
    pattern = f"{rig.source}|{rig.target}"
    options = {"namesrvAddr": rig.cluster.address, "topicPattern": pattern, "consumerGroup": rig.group}
    reader = StreamReader({**options, "failOnDataLoss": str(not accepted)}, full_schema(False))
    with stopped(reader):
        first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert sorted(first["next"]) == [rig.source, rig.target]
        rig.fill(20, 1)
        rig.broker.log.append({kept: row})
        ends = {rig.source: {"broker-a": {"0": 21}}, rig.target: {"broker-a": {"0": 2}}}
        second = until(
            lambda: (found := reader.latestOffset(first, ReadAllAvailable()))["next"] == ends and found,
            "the new messages are seen",
        )
        rig.broker.log.append({kept: row})
        if routed:
            with Client(rig.cluster.address) as client:
                delete_at_broker(client, rig.cluster.broker.address, rig.source)
        else:
            rig.broker.admin.delete_topic(rig.source)
        with contextlib.nullcontext() if accepted else pytest.raises(DataLossError):
            until(
                lambda: reader.latestOffset(second, ReadAllAvailable())["next"].get(rig.target) == {"broker-a": {"0": 3}},
                "the query continues",
            )
        if routed:
            # The deletion was not noticed before the commit. The refused commit must not stop the commit for the other topic.
            assert rig.broker.groups.offsets(rig.group, [kept]) == {kept: 2}


def test_offsets_do_not_change_while_nothing_is_to_be_read_and_an_anchor_is_kept(rig: Rig) -> None:
    rig.topic()
    rig.fill(0, 20)
    reader = StreamReader(
        {
            "namesrvAddr": rig.cluster.address,
            "topic": rig.source,
            "messageModel": "broadcasting",
            "startingOffsets": "earliest",
        },
        full_schema(False),
    )
    with stopped(reader):
        first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert first["topics"][rig.source].startswith("broker-a/0/19@")
        for _ in range(5):
            time.sleep(1.2 * POLL_INTERVAL)
            assert json.dumps(reader.latestOffset(first, ReadAllAvailable())) == json.dumps(first)
        rig.fill(20, 5)

        def more() -> Any:
            found = reader.latestOffset(first, ReadAllAvailable())
            return found if found["next"] != first["next"] else None

        second = until(more, "the new messages are seen")
        assert second["topics"] == first["topics"]


# -- messages that are deleted ----------------------------------------------------------------------------------------------------


def test_a_message_that_cannot_be_decompressed_is_named_and_can_be_passed(rig: Rig) -> None:
    """A broker stores any bytes as a compressed body, here some kB that expand to 32 MiB. Sinks may also meet such a message."""
    rig.topic()
    rig.fill(0, 3)
    [queue] = rig.broker.log.queues(rig.source)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as bomb:
        bomb.write(bytes(2**25))
    now = time.time_ns() // 1_000_000
    request = message_requests.send(queue, sink.getvalue().to_pybytes(), "", group="p", born=now)
    # 0x201 in the field sysFlag: compressed with zstd.
    request = replace(request, ext={**request.ext, "f": str(0x201)})
    with Client(rig.cluster.address) as client:
        client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
    rig.fill(4, 3)
    # The driver reads the bodies of a batch's first messages if the batch has a limit in bytes.
    limits = {"maxOffsetsPerTrigger": "3", "maxBytesPerTrigger": "64m"}
    with pytest.raises(
        PySparkException, match=r"ORDEREDMQ_DATA_LOSS.UNREADABLE\] message 3 of queue .*Set failOnDataLoss=false to skip it"
    ):
        rig.run(**limits)
    rig.run(**limits, failOnDataLoss="false")
    assert rig.out() == [0, 1, 2, 4, 5, 6]
    assert rig.offset() == 7
    # A sink that searches for rows of an earlier attempt must skip this message.
    rows = rig.spark.createDataFrame([(b"7", "k")], "body binary, sharding_key string")
    writer = rows.write.format("orderedmq").mode("append").options(namesrvAddr=rig.cluster.address, topic=rig.source)
    writer.options(txnAppId=rig.group, txnVersion="1").save()
    assert rig.batch(startingOffsets=json.dumps({rig.source: {queue.broker_name: {"0": 4}}})) == [4, 5, 6, 7]


@pytest.mark.holds("other encodings")
def test_texts_that_are_not_utf_8_are_what_a_java_consumer_sees_and_go_where_its_producer_sends_them(
    rig: Rig, peers: Peers
) -> None:
    """A broker stores a batch's properties without checking them."""
    rig.topic()
    [queue] = rig.broker.log.queues(rig.source)
    rows = {
        b"0": b"__SHARDINGKEY\x01a\x02",
        b"1": b"__SHARDINGKEY\x01k\xff\xed\xa0\x80\x02TAGS\x01\xe4\x02KEYS\x01\xc3(\x02mine\x01\xf0\x9f\x02",
        b"2": b"\xff\x01x\x02__SHARDINGKEY\x01a\x02",
    }
    request = message_requests.send(queue, inner(*rows.items()), "", group="p", born=time.time_ns() // 1_000_000, batch=True)
    with Client(rig.cluster.address) as client:
        client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
    found = (
        rig.stream(includeProperties="true")
        .writeStream.format("orderedmq")
        .options(
            namesrvAddr=rig.cluster.address, topic=rig.target, topicQueueNums="5", checkpointLocation=str(rig.folder / "ck")
        )
    )
    found.trigger(availableNow=True).start().awaitTermination()
    out = {
        bytes(row.pop("body")): (
            at.queue_id,
            row.pop("sharding_key"),
            row.pop("tags"),
            row.pop("keys"),
            dict(row["properties"]),
        )
        for at in rig.broker.log.queues(rig.target)
        for row in rig.broker.log.pull(at, 0, 10, 1 << 20, ("body", "sharding_key", "tags", "keys", "properties")).to_pylist()
    }
    key = "k\ufffd\ufffd"
    assert out[b"1"][1:4] == (key, "\ufffd", "\ufffd(")
    assert out[b"1"][4]["mine"] == "\ufffd"
    assert out[b"2"][4]["\ufffd"] == "x"
    consumer = peers.consumer(rig.cluster.address, f"{rig.group}-java", rig.source)
    producer = peers.producer(rig.cluster.address)
    try:
        seen = {one.body: one for one in consumer.wait(3)}
        assert (seen[b"1"].key, seen[b"1"].tags, seen[b"1"].keys) == out[b"1"][1:4]
        assert (seen[b"1"].properties["mine"], seen[b"2"].properties["\ufffd"]) == ("\ufffd", "x")
        assert producer.send_by(rig.target, key, "String").queue[1] == out[b"1"][0]
    finally:
        consumer.stop()
        producer.stop()


def test_an_accepted_lost_end_moves_the_group_back(rig: Rig) -> None:
    rig.topic()
    rig.fill(0, 10)
    commit_beyond_end(rig.broker, rig.broker.log.queues(rig.source)[0], rig.group)
    source = {"namesrvAddr": rig.cluster.address, "topic": rig.source, "consumerGroup": rig.group, "failOnDataLoss": False}
    query = MicroBatchLoop(source, available_now=True).process_all_available()
    assert rig.offset() == 10
    for count in (5, 2):
        rig.fill(0, count)
        query = MicroBatchLoop(source, None, query.checkpoint, available_now=True).process_all_available()
        assert query.rows == [count]


def fill_files(broker: Broker, topic: str, count: int) -> None:
    bodies = [b"%d" % number for number in range(count)]
    broker.log.append(
        {broker.log.queues(topic)[0]: pa.record_batch({"body": pa.array([b.ljust(50_000) for b in bodies], pa.binary())})}
    )


def test_messages_that_were_deleted_by_age_under_a_query_are_a_named_error_or_counted(
    aging: Cluster, spark: SparkSession, tmp_path: Path
) -> None:
    def run(**options: str) -> list[int]:
        reader = spark.readStream.format("orderedmq").options(
            namesrvAddr=aging.address, topic="aging", consumerGroup="g", **options
        )
        rows = reader.option("consumeFromWhere", "first").schema("queue_offset long").load()
        table = str(tmp_path / "table")
        writer = rows.writeStream.format("parquet").option("path", table).option("checkpointLocation", str(tmp_path / "ck"))
        writer.trigger(availableNow=True).start().awaitTermination()
        return sorted(row.queue_offset for row in spark.read.schema("queue_offset long").parquet(table).collect())

    with orderedmq.connect(namesrv_addr=aging.address) as broker:
        broker.admin.create_topic("aging", 1)
        [queue] = broker.log.queues("aging")
        fill_files(broker, "aging", 10)
        assert run() == list(range(10))
        for _ in range(5):
            fill_files(broker, "aging", 40)

        def deleted() -> bool:
            ask(aging.broker.address, DELETE_EXPIRED_COMMITLOG)
            return broker.log.bounds([queue])[queue].min_offset > 20

        until(deleted, "files with messages that were not read are deleted", 90.0)
        with pytest.raises(PySparkException, match=r"ORDEREDMQ_DATA_LOSS.AGED_OUT") as caught:
            run()
        read = run(failOnDataLoss="false")
        assert read[:10] == list(range(10))
        rest = read[10:]
        assert rest == list(range(rest[0], 210))
        assert rest[0] > 20
        # The broker may have deleted more files since the error was raised.
        said = re.search(r"messages 10 to (\d+) \((\d+)\) of queue aging/broker-a/0", str(caught.value))
        assert said is not None
        assert 20 <= int(said[1]) < rest[0]
        assert int(said[2]) == int(said[1]) - 9


@pytest.mark.holds("stop at a boundary")
def test_a_query_that_was_asked_to_stop_commits_and_gives_its_queues_back_at_once(rig: Rig) -> None:
    rig.topic(2)
    rig.fill(0, 10)
    source = {"namesrvAddr": rig.cluster.address, "topic": rig.source, "consumerGroup": rig.group, "consumeFromWhere": "first"}
    query = MicroBatchLoop({**source, "maxOffsetsPerTrigger": 4})
    query.advance("written")
    request = StopRequest(query.checkpoint.end(-1)["owner"])
    request.write()
    try:
        query.advance("committed")
        assert query.advance() == "idle"
        assert request.answered
        assert rig.offset() == 4
        other = MicroBatchLoop({**source, "lockTimeout": "0"}, available_now=True).process_all_available()
        assert sum(other.rows) == 6
    finally:
        request.withdraw()
        query.stop()
