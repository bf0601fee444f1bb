"""Messages that are sent back to a group's retry topic: `consume_concurrently` next to RocketMQ's own MessageListenerConcurrently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from ordered_source import ConcurrentSettings, ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus, consume_concurrently
from orderedmq.conditions import DataLossCondition, LockCondition
from orderedmq.errors import DataLossError, LockError, TopicError
from orderedmq.model import DEAD_LETTER_PREFIX, RETRY_PREFIX, MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rows.dead_letters import REPLAYS, replays
from tests.rocketmq.peers import Peers
from tests.rocketmq.test_source import Rig, rig
from tests.waits import until

__all__ = ["rig"]

pytestmark = pytest.mark.spark
DONE, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER

#: The message's topic, body and reconsume_times, and the topic of the context's queue.
Heard = tuple[str, str, int, str]


class Query:
    """A query whose listener records its messages. ``accept`` decides, by a body and its number of retries, whether it is processed."""

    def __init__(self, spark: SparkSession, rig: Rig, accept: Callable[[str, int], bool], **settings: Any) -> None:
        self.heard_in, self.told_in = rig.folder / "heard", rig.folder / "told"
        heard, options = str(self.heard_in), settings.pop("options", {})

        def listener(messages: Sequence[Any], context: ConsumeConcurrentlyContext) -> ConsumeConcurrentlyStatus:
            (one,) = messages
            body = bytes(one.body).decode()
            with open(heard, "a") as file:
                file.write(f"{one.topic} {body} {one.reconsume_times} {context.message_queue.topic}\n")
            context.delay_level_when_next_consume = -1 if body == "dead" else 1
            return DONE if accept(body, one.reconsume_times) else LATER

        outcomes = consume_concurrently(
            stream(spark, rig, retryTopic="true", **options), listener, ConcurrentSettings(concurrency=4, **settings)
        )
        told = str(self.told_in)

        def tell(rows: Any, _: int) -> None:
            with open(told, "a") as file:
                for row in rows.collect():
                    file.write(f"{row.topic} {row.status} {row.attempts}\n")

        writer = outcomes.writeStream.option("checkpointLocation", str(rig.folder / "q")).foreachBatch(tell)
        self.query = writer.trigger(processingTime="200 milliseconds").start()

    def heard(self) -> list[Heard]:
        lines = self.heard_in.read_text().splitlines() if self.heard_in.exists() else []
        return [(topic, body, int(times), queue) for topic, body, times, queue in map(str.split, lines)]

    def told(self) -> list[str]:
        return self.told_in.read_text().splitlines() if self.told_in.exists() else []


def stream(spark: SparkSession, rig: Rig, **options: Any) -> DataFrame:
    return spark.readStream.format("orderedmq").options(**rig.options(**options)).load()


@pytest.mark.holds("concurrent listener")
def test_java_and_spark_share_the_retries_of_a_group(spark: SparkSession, rig: Rig, peers: Peers) -> None:
    """Java and Spark refuse each message at first. The owner of the retry topic's queue gets all retries, until the other takes it over."""
    rig.topic(4)
    until(lambda: len(rig.broker.log.queues(rig.source)) == 4, "the topic is known")
    retry = RETRY_PREFIX + rig.group
    in_java = peers.concurrent_consumer(rig.cluster.address, rig.group, rig.source, lambda batch: batch[0].reconsumed > 0)
    plain = stream(spark, rig, assignment="shared", lockTimeout="1s").writeStream.format("noop")
    refused = plain.option("checkpointLocation", str(rig.folder / "plain")).start()
    until(lambda: refused.exception() is not None, "a query that would not read the consumer's retries is refused", 60)
    assert "GROUP.DISAGREES" in str(refused.exception())
    assert "not retryTopic=true" in str(refused.exception())
    # The refused query was a member for a moment.
    until(lambda: (len(in_java.has(rig.source)), len(in_java.has(retry))) == (4, 1), "the consumer has all queues again", 60)
    query = Query(spark, rig, lambda body, times: times > 0, options={"assignment": "shared"})

    def of_java(retried: bool) -> set[str]:
        return {message.body.decode() for message in list(in_java.received) if (message.reconsumed > 0) is retried}

    def of_spark(retried: bool) -> set[str]:
        return {body for _, body, times, _ in query.heard() if (times > 0) is retried}

    def send(first: int, end: int) -> set[str]:
        for number in range(first, end):
            producer.send(rig.source, b"%d" % number, f"k{number}")
        return {f"{number}" for number in range(first, end)}

    producer = peers.producer(rig.cluster.address)
    until(lambda: query.query.exception() is not None or len(in_java.has(rig.source)) == 2, "both share the queues", 90)
    send(0, 16)
    # The query takes its queues of the retry topic together with those of the source.
    until(lambda: bool(of_java(False)) and bool(of_spark(False)), "both have read some messages", 90)
    sent = send(16, 60)
    until(lambda: sent <= of_java(True) | of_spark(True), "all refused messages have come back", 90)
    assert of_java(False) & sent
    assert of_spark(False) & sent
    # One of the two consumers received all retries, including retries of messages that the other consumer had refused.
    spark_has_it = sent <= of_spark(True)
    assert spark_has_it or sent <= of_java(True)
    if spark_has_it:
        assert all(topic == rig.source and queue == retry for topic, _, times, queue in query.heard() if times)
        query.query.stop()
    else:
        in_java.stop()
    more = send(60, 80)
    if spark_has_it:
        until(lambda: more <= of_java(True), "the Java consumer takes the retries over", 120)
        in_java.stop()
    else:
        until(lambda: more <= of_spark(True), "the query takes the retries over", 120)
        assert all(topic == rig.source and queue == retry for topic, _, times, queue in query.heard() if times)
        query.query.stop()
    producer.stop()


@pytest.mark.holds("quarantine", "concurrent listener")
def test_a_message_is_retried_and_becomes_a_dead_letter_after_its_retries(spark: SparkSession, rig: Rig) -> None:
    rig.topic()
    until(lambda: len(rig.broker.log.queues(rig.source)) == 1, "the topic is known")
    rig.fill(0, 3, **{REPLAYS: f"{rig.group}=2"})
    query = Query(spark, rig, lambda body, times: body != "1", max_reconsume_times=1)
    retry, letters = RETRY_PREFIX + rig.group, MessageQueue(DEAD_LETTER_PREFIX + rig.group, rig.cluster.broker.name, 0)
    until(lambda: len(query.told()) == 4, "every message has an outcome", 90)
    assert sorted(query.told()) == sorted(
        [f"{rig.source} SUCCESS 1"] * 2 + [f"{rig.source} SENT_BACK 1", f"{retry} DEAD_LETTER 2"]
    )
    assert sorted(query.heard()) == [
        (rig.source, "0", 0, rig.source),
        (rig.source, "1", 0, rig.source),
        (rig.source, "1", 1, retry),
        (rig.source, "2", 0, rig.source),
    ]
    rows = until(lambda: _rows(rig, letters, 1), "the dead letter is written")
    assert [bytes(row["body"]) for row in rows] == [b"1"]
    assert dict(rows[0]["properties"])["RETRY_TOPIC"] == rig.source
    assert replays(dict(rows[0]["properties"]), rig.group) == 2, "the letter must keep the number of replays"
    query.query.stop()


def test_a_query_that_begins_at_the_end_reads_earlier_messages_of_the_retry_topic(
    spark: SparkSession, rig: Rig, token: LockToken
) -> None:
    retry = make_retry_topic(rig)
    rig.broker.groups.send_back(token, [(1, 1)], 16)
    until(lambda: _rows(rig, retry, 1), "the message has come back", 30)
    rig.broker.groups.unlock([token])
    query = Query(spark, rig, lambda body, times: True, options={"consumeFromWhere": "last"})
    until(lambda: rig.broker.groups.offsets(rig.group, [retry]) == {retry: 1}, "the message is committed", 90)
    query.query.stop()
    assert query.heard() == [(rig.source, "1", 1, retry.topic)]
    assert query.told() == [f"{retry.topic} SUCCESS 2"]


# -- the broker's interface


@pytest.fixture
def token(rig: Rig) -> LockToken:
    """The lock of the first queue of the source, which has three messages."""
    rig.topic()
    (queue,) = until(lambda: rig.broker.log.queues(rig.source), "the topic is known")
    rig.fill(0, 3)
    granted = rig.broker.groups.lock(rig.group, rig.broker.groups.join("me"), [queue])[queue]
    assert isinstance(granted, LockToken)
    return granted


def make_retry_topic(rig: Rig) -> MessageQueue:
    """Create the retry topic, as the group's first heartbeat does."""
    topic = RETRY_PREFIX + rig.group
    ask(rig.cluster.broker.address, RequestCode.UPDATE_AND_CREATE_TOPIC, admin_requests.create_topic(topic, 1).ext)
    return until(lambda: _queues(rig, topic), "the retry topic is known")[0]


def test_messages_sent_back_before_an_error_are_counted(rig: Rig, token: LockToken) -> None:
    retry = make_retry_topic(rig)
    assert rig.broker.groups.send_back(token, [(0, 1), (2, 1), (9, 1)], 16) == 2
    with pytest.raises(DataLossError, match="message 9 was to be sent back") as caught:
        rig.broker.groups.send_back(token, [(9, 1)], 16)
    assert caught.value.sub == DataLossCondition.BEYOND_END
    rows = until(lambda: _rows(rig, retry, 2), "both have come back", 30)
    assert sorted(bytes(row["body"]) for row in rows) == [b"0", b"2"]


def test_nothing_is_sent_back_without_the_lock(rig: Rig, token: LockToken) -> None:
    make_retry_topic(rig)
    rig.broker.groups.unlock([token])
    with pytest.raises(LockError) as caught:
        rig.broker.groups.send_back(token, [(0, 1)], 16)
    assert caught.value.sub == LockCondition.LOST


def test_no_message_is_sent_back_to_a_broker_without_a_retry_queue(rig: Rig, token: LockToken) -> None:
    with pytest.raises(TopicError, match=RETRY_PREFIX + rig.group):
        rig.broker.groups.send_back(token, [(0, 1)], 16)
    make_retry_topic(rig)
    assert rig.broker.groups.send_back(token, [(0, 1)], 16) == 1


def _queues(rig: Rig, topic: str) -> list[MessageQueue]:
    try:
        return rig.broker.log.queues(topic)
    except TopicError:
        return []


def _rows(rig: Rig, queue: MessageQueue, count: int) -> list[dict[str, Any]]:
    """Return all rows of a queue if it has exactly ``count`` messages, otherwise []."""
    end = rig.broker.log.bounds([queue])[queue].max_offset if queue in _queues(rig, queue.topic) else 0
    return rig.broker.log.pull(queue, 0, count, 1 << 20, ("body", "properties")).to_pylist() if end == count else []
