"""The source over a real cluster, without Spark: filters, topics that were changed or recreated, deleted messages, Java members."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source import topic_watch
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import full_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker
from orderedmq.errors import DataLossError, GroupError, OptionError
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.topic_changes import delete_at_broker
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import group_requests, message_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from pyspark_orderedmq import DefaultSource
from tests.contract.support import bodies, locked, rows
from tests.live.rocketmq.peers import Peers
from tests.micro_batches import Checkpoint, MicroBatchLoop, batch_write
from tests.stopped_readers import stopped
from tests.stored_messages import inner
from tests.waits import soon, until

UPDATE_BROKER_CONFIG = 25
DELETE_EXPIRED_COMMITLOG = 329


@dataclass
class Rig:
    """A cluster with topics, a group and a query's checkpoint that belong to the test."""

    cluster: Cluster
    broker: Broker
    query: Callable[..., MicroBatchLoop]
    folder: Path
    source: str
    target: str
    group: str
    checkpoint: Checkpoint

    def topic(self, queues: int = 1) -> None:
        self.broker.admin.create_topic(self.source, queues)

    def fill(self, first: int, count: int, tags: Sequence[str | None] = (None,), **properties: str) -> None:
        """Append ``count`` messages to the first queue. Bodies are numbers from ``first`` on; the tags are used in turn."""
        numbers = range(first, first + count)
        columns: dict[str, Any] = {"tags": [tags[number % len(tags)] for number in numbers]}
        if properties:
            columns["properties"] = [[(name, text.format(number)) for name, text in properties.items()] for number in numbers]
        self.broker.log.append({self.broker.log.queues(self.source)[0]: rows(numbers, **columns)})

    def options(self, **more: Any) -> dict[str, Any]:
        """The options of a stream that reads the topic as the group."""
        at = {"namesrvAddr": self.cluster.address, "topic": self.source, "consumerGroup": self.group}
        return {**at, "consumeFromWhere": "first", **more}

    def start(self, sink: dict[str, Any] | None = None, *, now: bool = False, **options: Any) -> MicroBatchLoop:
        """Start a query on the checkpoint. ``now``: with availableNow."""
        return self.query(self.options(**options), sink, self.checkpoint, available_now=now)

    def run(self, **options: Any) -> MicroBatchLoop:
        """Copy the source's current messages to the target."""
        sink = {"namesrvAddr": self.cluster.address, "topic": self.target, "topicQueueNums": 1}
        return self.start(sink, now=True, **options).process_all_available()

    def batch(self, **options: Any) -> list[int]:
        """Read the topic as ``spark.read`` does."""
        reader = BatchReader({"namesrvAddr": self.cluster.address, "topic": self.source, **options}, full_schema())
        batches = [rows for part in reader.partitions() for rows in reader.read(part)]
        return sorted(int(body) for rows in batches for body in rows.column("body").to_pylist())

    def out(self) -> list[int]:
        return [int(body) for body in bodies(self.broker, self.broker.log.queues(self.target)[0])]

    def offset(self) -> int:
        queue = self.broker.log.queues(self.source)[0]
        return self.broker.groups.offsets(self.group, [queue])[queue]


@pytest.fixture
def rig(cluster: Cluster, query: Callable[..., MicroBatchLoop], tmp_path: Path) -> Iterator[Rig]:
    name = f"s-{uuid.uuid4().hex[:8]}"
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        yield Rig(cluster, broker, query, tmp_path, f"{name}-in", f"{name}-out", f"{name}-g", Checkpoint())


@contextlib.contextmanager
def without_property_filter(cluster: Cluster) -> Iterator[None]:
    ask(cluster.broker.address, UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false\n")
    try:
        yield
    finally:
        ask(cluster.broker.address, UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=true\n")


# -- groups -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.holds("source to sink once")
@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
def test_a_query_that_changes_its_group_repeats_and_skips_nothing(
    assignment: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic()
    for run, group in enumerate((rig.group, f"{rig.group}-2", rig.group)):
        rig.fill(100 * run, 100)
        rig.run(consumerGroup=group, assignment=assignment)
        assert ("[ORDEREDMQ_GROUP.CHANGED]" in caplog.text) == (run > 0)
        caplog.clear()
    assert rig.out() == list(range(300))
    assert rig.offset() == 300


# -- filters ----------------------------------------------------------------------------------------------------------------------


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
    rig.start(filterSql="amount > 5").advance()

    def said() -> bool:
        code, found = ask(rig.cluster.broker.address, RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": rig.group})
        return code == 0 and b"amount > 5" in found and b"SQL92" in found

    until(said, "the broker knows the filter", 60.0)


def test_invalid_sql_is_refused_when_the_query_is_planned(rig: Rig) -> None:
    """A pull with such a filter would return every message."""
    rig.topic()
    rig.fill(0, 3)
    plans: list[Callable[[str], object]] = [
        lambda sql: DefaultSource(rig.options(filterSql=sql)).schema(),
        lambda sql: rig.batch(filterSql=sql),
    ]
    for plan in plans:
        with pytest.raises(OptionError, match="ORDEREDMQ_OPTION.INVALID.*filterSql"):
            plan("amount >")
        with without_property_filter(rig.cluster):
            with pytest.raises(OptionError, match="ORDEREDMQ_OPTION.UNSUPPORTED.*filterSql"):
                plan("amount > 5")
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
            with pytest.raises(GroupError, match=r"ORDEREDMQ_GROUP.DISAGREES.*10\.0\.0\.1@1#2") as caught:
                rig.run(tags=mine, assignment="shared", lockTimeout="1s")
            assert f"TAG {theirs!r}" in str(caught.value)
            subscriptions = java.call_address(rig.cluster.broker.address, group_requests.subscriptions(rig.group), soon())
            assert subscriptions[rig.source].expression == theirs, "the group's filter must not change"


# -- a group that others have moved -----------------------------------------------------------------------------------------------


# -- topics that are made again ----------------------------------------------------------------------------------------------------


def remake(rig: Rig, first: int, count: int) -> None:
    """Recreate the topic through another connection than the query's, as RocketMQ's own tools would."""
    with orderedmq.connect(namesrv_addr=rig.cluster.address) as other:
        other.admin.delete_topic(rig.source)
        other.admin.create_topic(rig.source, 1)
    rig.fill(first, count)


@pytest.mark.holds("named loss")
@pytest.mark.parametrize("count", [5, 100])
def test_a_recreated_topic_is_noticed_at_the_restart(rig: Rig, count: int) -> None:
    """The query notices even if the new topic already has more messages than the query had read of the former topic."""
    rig.topic()
    rig.fill(0, 20)
    rig.run()
    remake(rig, 1000, count)
    with pytest.raises(DataLossError, match="ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED"):
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
    [token] = locked(rig.broker, rig.group, me, [queue])
    rig.broker.groups.commit({token: 20})
    rig.broker.groups.leave(me)
    rig.run(failOnDataLoss="false")
    assert rig.out() == [*range(20), *range(1000, 1100)]


@pytest.mark.parametrize("accepted", [False, True])
def test_a_topic_that_is_deleted_before_its_offset_is_committed_is_a_loss_of_data(
    rig: Rig, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query has just listed its topics, so it does not notice the deletion. It must still commit the other topic's offset.

    The nameserver still knows the topic, as in the middle of a deletion, and the broker refuses the commit.
    """
    monkeypatch.setattr(topic_watch, "LISTING_INTERVAL", 600.0)
    rig.topic()
    rig.fill(0, 20)
    rig.broker.admin.create_topic(rig.target, 1)
    [kept] = until(lambda: rig.broker.log.queues(rig.target), "the other topic is known")
    row = rows(["x"])
    rig.broker.log.append({kept: row})
    pattern = f"{rig.source}|{rig.target}"
    options = {"namesrvAddr": rig.cluster.address, "topicPattern": pattern, "consumerGroup": rig.group}
    reader = StreamReader({**options, "failOnDataLoss": str(not accepted)}, full_schema())
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
        with Client(rig.cluster.address) as client:
            delete_at_broker(client, rig.cluster.broker.address, rig.source)
        with contextlib.nullcontext() if accepted else pytest.raises(DataLossError):
            until(
                lambda: reader.latestOffset(second, ReadAllAvailable())["next"].get(rig.target) == {"broker-a": {"0": 3}},
                "the query continues",
            )
        # The deletion was not noticed before the commit. The refused commit must not stop the commit for the other topic.
        assert rig.broker.groups.offsets(rig.group, [kept]) == {kept: 2}


# -- messages that are deleted ----------------------------------------------------------------------------------------------------


def test_an_error_names_a_message_that_cannot_be_decompressed_and_it_can_be_skipped(rig: Rig) -> None:
    """A broker stores any bytes as a compressed body, here some kB that expand to 32 MiB. Sinks may also meet such a message."""
    rig.topic()
    rig.fill(0, 3)
    [queue] = rig.broker.log.queues(rig.source)
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as bomb:
        bomb.write(bytes(2**25))
    now = time.time_ns() // 1_000_000
    request = message_requests.send(queue, packed.getvalue().to_pybytes(), "", group="p", born=now)
    # 0x201 in the field sysFlag: compressed with zstd.
    request = replace(request, ext={**request.ext, "f": str(0x201)})
    with Client(rig.cluster.address) as client:
        client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
    rig.fill(4, 3)
    # The driver reads the bodies of a batch's first messages if the batch has a limit in bytes.
    limits = {"maxOffsetsPerTrigger": "3", "maxBytesPerTrigger": "64m"}
    with pytest.raises(DataLossError, match="UNREADABLE.* message 3 "):
        rig.run(**limits)
    rig.run(**limits, failOnDataLoss="false")
    assert rig.out() == [0, 1, 2, 4, 5, 6]
    assert rig.offset() == 7
    # A sink that searches for rows of an earlier attempt must skip this message.
    sink = {"namesrvAddr": rig.cluster.address, "topic": rig.source, "txnAppId": rig.group, "txnVersion": "1"}
    batch_write(DefaultSource(sink), [rows(["7"], sharding_key=["k"])])
    assert rig.batch(startingOffsets=json.dumps({rig.source: {queue.broker_name: {"0": 4}}})) == [4, 5, 6, 7]


@pytest.mark.holds("other encodings")
def test_texts_that_are_not_utf_8_are_what_a_java_consumer_sees_and_go_where_its_producer_sends_them(
    rig: Rig, peers: Peers
) -> None:
    """A broker stores a batch's properties without checking them."""
    rig.topic()
    [queue] = rig.broker.log.queues(rig.source)
    stored = {
        b"0": b"__SHARDINGKEY\x01a\x02",
        b"1": b"__SHARDINGKEY\x01k\xff\xed\xa0\x80\x02TAGS\x01\xe4\x02KEYS\x01\xc3(\x02mine\x01\xf0\x9f\x02",
        b"2": b"\xff\x01x\x02__SHARDINGKEY\x01a\x02",
    }
    request = message_requests.send(queue, inner(*stored.items()), "", group="p", born=time.time_ns() // 1_000_000, batch=True)
    with Client(rig.cluster.address) as client:
        client.call(request, soon(), topic=queue.topic, broker_name=queue.broker_name)
    sink = {"namesrvAddr": rig.cluster.address, "topic": rig.target, "topicQueueNums": 5}
    rig.start(sink, now=True, includeProperties="true").process_all_available()
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
        seen = {message.body: message for message in consumer.wait(3)}
        assert (seen[b"1"].key, seen[b"1"].tags, seen[b"1"].keys) == out[b"1"][1:4]
        assert (seen[b"1"].properties["mine"], seen[b"2"].properties["\ufffd"]) == ("\ufffd", "x")
        assert producer.send_by(rig.target, key, "String").queue[1] == out[b"1"][0]
    finally:
        consumer.stop()
        producer.stop()


def fill_files(broker: Broker, topic: str, count: int) -> None:
    broker.log.append({broker.log.queues(topic)[0]: rows([b"%d" % number + bytes(50_000) for number in range(count)])})


def test_messages_that_were_deleted_by_age_under_a_query_are_a_named_error_or_counted(
    aging: Cluster, query: Callable[..., MicroBatchLoop]
) -> None:
    read: list[int] = []
    checkpoint = Checkpoint()

    def run(**options: str) -> None:
        source = {"namesrvAddr": aging.address, "topic": "aging", "consumerGroup": "g", "consumeFromWhere": "first", **options}

        def keep(found: pa.Table, _: int) -> None:
            read.extend(found.column("queue_offset").to_pylist())

        query(source, keep, checkpoint, available_now=True).process_all_available()

    with orderedmq.connect(namesrv_addr=aging.address) as broker:
        broker.admin.create_topic("aging", 1)
        [queue] = broker.log.queues("aging")
        fill_files(broker, "aging", 10)
        run()
        assert read == list(range(10))
        for _ in range(5):
            fill_files(broker, "aging", 40)
        # The broker deletes files the next 20 times that it looks, every half second.
        ask(aging.broker.address, DELETE_EXPIRED_COMMITLOG)
        deleted = "files with messages that were not read are deleted"
        until(lambda: broker.log.bounds([queue])[queue].min_offset > 20, deleted, 90.0)
        with pytest.raises(DataLossError, match=r"ORDEREDMQ_DATA_LOSS.AGED_OUT") as caught:
            run()
        run(failOnDataLoss="false")
        assert read[:10] == list(range(10))
        rest = read[10:]
        assert rest == list(range(rest[0], 210))
        assert rest[0] > 20
        # The broker may have deleted more files since the error was raised.
        said = re.search(r"messages 10 to (\d+) \((\d+)\) of queue aging/broker-a/0", str(caught.value))
        assert said is not None
        assert 20 <= int(said[1]) < rest[0]
        assert int(said[2]) == int(said[1]) - 9
