"""The source in real Spark: the rows that are read, where reading begins, and how much a batch takes."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from orderedmq.model import MessageQueue
from tests.spark.conftest import Rig, copied, numbers
from tests.waits import until


def test_a_batch_read_gives_every_column_with_the_value_that_was_written(rig: Rig) -> None:
    rig.broker.admin.create_topic("in", 1)
    rows = pa.record_batch(
        {
            "body": pa.array([b"a", b"b"], pa.binary()),
            "tags": pa.array(["t", None]),
            "keys": pa.array([None, "k"]),
            "sharding_key": pa.array(["x", "y"]),
            "properties": pa.array([[("p", "1")], None], pa.map_(pa.string(), pa.string())),
        }
    )
    rig.broker.log.append({rig.broker.log.queues("in")[0]: rows})
    read = rig.batch(topic="in", includeProperties="true")
    plain = read.selectExpr("topic", "queue_id", "queue_offset", "cast(body as string) body", "tags", "keys", "sharding_key")
    expected = rig.spark.createDataFrame([("in", 0, 0, "a", "t", None, "x"), ("in", 0, 1, "b", None, "k", "y")], plain.schema)
    assert_df_equality(plain, expected)
    first = read.orderBy("queue_offset").first()
    assert first is not None
    assert first.properties == {"p": "1"}
    assert first.broker_name == "embedded"
    assert first.reconsume_times == 0
    assert len(first.message_id) == 32


def test_a_users_schema_chooses_columns_and_their_order(rig: Rig) -> None:
    rig.topic("in", 2, rows=10)
    read = rig.batch(schema="body binary, queue_offset long, queue_id int", topic="in")
    assert read.columns == ["body", "queue_offset", "queue_id"]
    assert isinstance(read.schema, StructType)
    assert read.count() == 10


def test_one_queue_is_one_partition_in_offset_order(rig: Rig) -> None:
    rig.topic("in", 3, rows=3000)
    parts = rig.batch(topic="in").rdd.glom().collect() if hasattr(rig.spark, "sparkContext") else []
    seen = [[(row.queue_id, row.queue_offset) for row in part] for part in parts if part]
    assert sorted(part[0][0] for part in seen) == [0, 1, 2]
    for part in seen:
        assert part == [(part[0][0], offset) for offset in range(1000)]


def test_a_batch_read_is_bounded_by_starting_and_ending_offsets(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    start = json.dumps({"in": {"embedded": {"0": 4, "1": -2}}})
    end = json.dumps({"in": {"embedded": {"0": 6, "1": -1}}})
    read = rig.batch(topic="in", startingOffsets=start, endingOffsets=end)
    assert sorted((row.queue_id, row.queue_offset) for row in read.collect()) == [(0, 4), (0, 5), *((1, n) for n in range(10))]


def test_a_batch_read_neither_locks_nor_moves_the_group(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    assert rig.batch(topic="in", consumerGroup="g").count() == 20
    assert rig.broker.admin.locks() == []
    assert rig.broker.admin.groups() == []


def test_an_empty_topic_reads_as_an_empty_frame(rig: Rig) -> None:
    rig.topic("in", 2)
    assert rig.batch(topic="in").count() == 0


def test_a_stream_copies_everything_once_and_moves_the_group_to_the_end(rig: Rig) -> None:
    rig.topic("in", 2, rows=1000)
    copied(rig)
    assert numbers(rig.bodies("out")) == list(range(1000))
    assert rig.offsets("g") == {0: 500, 1: 500}
    assert copied(rig) == []
    rig.fill("in", 10, first=1000)
    assert copied(rig) == [10]
    assert numbers(rig.bodies("out")) == list(range(1010))


def test_a_trigger_takes_at_most_max_offsets_from_all_queues_in_proportion(rig: Rig) -> None:
    rig.topic("in", 2, rows=100)
    sizes = copied(rig, maxOffsetsPerTrigger="30")
    assert sizes == [30, 30, 30, 10]
    assert numbers(rig.bodies("out")) == list(range(100))


def test_a_trigger_takes_at_most_max_bytes(rig: Rig) -> None:
    rig.broker.admin.create_topic("in", 2)
    for queue in rig.broker.log.queues("in"):
        rig.broker.log.append({queue: pa.record_batch({"body": pa.array([bytes(100)] * 50, pa.binary())})})
    sizes = copied(rig, maxBytesPerTrigger="1000")
    assert sum(sizes) == 100
    assert max(sizes) <= 10
    # Shares are rounded down, so each queue leaves at most one message of its share to the next trigger.
    assert min(sizes[:-2]) >= 8


def test_a_message_larger_than_max_bytes_goes_alone(rig: Rig) -> None:
    rig.broker.admin.create_topic("in", 1)
    bodies = [b"small", bytes(5000), b"small", b"small"]
    rig.broker.log.append({rig.broker.log.queues("in")[0]: pa.record_batch({"body": pa.array(bodies, pa.binary())})})
    assert copied(rig, maxBytesPerTrigger="1000") == [1, 1, 2]


def test_min_offsets_does_not_keep_available_now_from_ending(rig: Rig) -> None:
    rig.topic("in", 2, rows=10)
    assert copied(rig, minOffsetsPerTrigger="1000", maxTriggerDelay="10m") == [10]


def test_min_offsets_holds_a_trigger_back_until_enough_is_there(rig: Rig) -> None:
    rig.topic("in", 2, rows=4)
    df = rig.stream(topic="in", consumerGroup="g", minOffsetsPerTrigger="10", maxTriggerDelay="10m")
    query = rig.start(df, topic="out", topicQueueNums=2)
    until(lambda: query.lastProgress is not None)
    assert sum(map(len, rig.bodies("out").values())) == 0
    rig.fill("in", 6, first=4)
    until(lambda: numbers(rig.bodies("out")) == list(range(10)))
    query.stop()


@pytest.mark.parametrize(("start", "expected"), [("earliest", 20), ("latest", 0)])
def test_an_explicit_start_resets_a_group_for_a_fresh_checkpoint_only(rig: Rig, start: str, expected: int) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig, "first")
    assert copied(rig, "second", startingOffsets=start) == ([expected] if expected else [])
    assert copied(rig, "second", startingOffsets=start) == []
    assert rig.offsets("g") == {0: 10, 1: 10}


def test_a_group_that_never_committed_begins_where_consume_from_where_says(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    assert copied(rig, consumeFromWhere="last") == []
    assert rig.offsets("g") == {0: 10, 1: 10}
    rig.fill("in", 4, first=20)
    assert copied(rig, consumeFromWhere="last") == [4]


@pytest.mark.nightly
def test_a_deleted_checkpoint_goes_on_at_the_groups_offset(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    copied(rig, "first")
    rig.fill("in", 6, first=20)
    assert copied(rig, "second") == [6]


def test_broadcasting_reads_everything_without_group_or_lock(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    for name in ("one", "two"):
        df = rig.stream(topic="in", messageModel="broadcasting")
        rig.run(df, name, topic=name, topicQueueNums=2)
        assert numbers(rig.bodies(name)) == list(range(20))
    assert rig.broker.admin.locks() == []
    rig.fill("in", 6, first=20)
    rig.run(rig.stream(topic="in", messageModel="broadcasting"), "one", topic="one")
    assert numbers(rig.bodies("one")) == list(range(26))


def test_a_pattern_reads_topics_that_appear_while_the_query_runs(rig: Rig) -> None:
    rig.topic("in-a", 1, rows=5)
    query = rig.start(rig.stream(topicPattern="in-.*", consumerGroup="g"), topic="out", topicQueueNums=2)
    until(lambda: numbers(rig.bodies("out")) == list(range(5)) if "out" in names(rig) else False)
    rig.topic("in-b", 1)
    rig.fill("in-b", 5, first=5)
    until(lambda: numbers(rig.bodies("out")) == list(range(10)))
    query.stop()


def names(rig: Rig) -> list[str]:
    return [topic.name for topic in rig.broker.log.topics()]


@pytest.mark.nightly
def test_queues_that_are_added_are_read_from_their_beginning(rig: Rig) -> None:
    rig.topic("in", 2, rows=10)
    query = rig.start(rig.stream(topic="in", consumerGroup="g", startingOffsets="latest"), topic="out", topicQueueNums=2)
    until(lambda: query.lastProgress is not None and len(rig.broker.admin.locks()) == 2)
    rig.broker.admin.add_queues("in", 3)
    third = MessageQueue("in", "embedded", 2)
    rig.broker.log.append({third: pa.record_batch({"body": pa.array([b"2:100"], pa.binary())})})
    until(lambda: numbers(rig.bodies("out")) == [100])
    query.stop()


def test_lag_shows_in_the_progress(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    df = rig.stream(topic="in", consumerGroup="g", maxOffsetsPerTrigger="8")
    query = rig.run(df, topic="out", topicQueueNums=2)
    source = query.recentProgress[0].sources[0]
    assert json.loads(source.latestOffset)["next"] == {"in": {"embedded": {"0": 10, "1": 10}}}
    assert json.loads(source.endOffset)["next"] == {"in": {"embedded": {"0": 4, "1": 4}}}


def test_a_union_of_one_stream_with_itself_reads_each_queue_twice(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    df = rig.stream(topic="in", consumerGroup="g")
    rig.run(df.union(df), topic="out", topicQueueNums=2, onKeyConflict="ignore")
    assert numbers(rig.bodies("out")) == sorted([*range(20), *range(20)])
    assert rig.offsets("g") == {0: 10, 1: 10}


BAD = [
    (
        "an unknown option is named with its nearest",
        {"topic": "in", "consumerGroup": "g", "failOnDataLos": "x"},
        "failOnDataLoss",
    ),
    ("a missing topic says how to make it", {"topic": "nope", "consumerGroup": "g"}, "ORDEREDMQ_TOPIC.MISSING"),
    ("a missing store shows its path", {"path": "/nonexistent/omq", "topic": "in", "consumerGroup": "g"}, "/nonexistent/omq"),
    ("two brokers conflict", {"topic": "in", "consumerGroup": "g", "namesrvAddr": "x:1"}, "ORDEREDMQ_OPTION.CONFLICT"),
]


@pytest.mark.parametrize(("options", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_when_the_frame_is_built(rig: Rig, options: dict[str, str], words: str) -> None:
    rig.topic("in", 2)
    with pytest.raises(PySparkException, match="ORDEREDMQ_") as caught:
        rig.stream(**options)
    assert words in str(caught.value)
    assert rig.broker.admin.locks() == []


def test_a_stream_without_a_group_is_refused_with_what_to_do(rig: Rig) -> None:
    rig.topic("in", 2)
    query = rig.start(rig.stream(topic="in"), topic="out", topicQueueNums=2)
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_OPTION.MISSING.*consumerGroup.*broadcasting"):
        query.awaitTermination()


def test_tags_choose_messages_and_offsets_count_all(rig: Rig) -> None:
    rig.topic("in", 1)
    rows = [f"0:{number}".encode() for number in range(60)]
    tags = pa.array([("a", "b", None)[number % 3] for number in range(60)])
    rig.broker.log.append(
        {rig.broker.log.queues("in")[0]: pa.record_batch({"body": pa.array(rows, pa.binary()), "tags": tags})}
    )
    expected = [number for number in range(60) if number % 3 == 0]
    assert rig.batch(topic="in", tags=" a ").count() == 20
    assert sorted(copied(rig, tags="a || c", maxOffsetsPerTrigger="20")) == [6, 7, 7]
    assert numbers(rig.bodies("out")) == expected
    assert rig.offsets("g") == {0: 60}
    rig.fill("in", 5, first=60)
    assert copied(rig, tags="a || c") == []
    assert rig.offsets("g") == {0: 65}
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_OPTION.UNSUPPORTED.*filterSql.*DataFrame.filter"):
        rig.batch(topic="in", filterSql="a > 5")
