"""The source in real Spark: the rows that it reads, where it begins, and how much a batch takes."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from tests.spark.conftest import Rig, copied, numbers


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


@pytest.mark.holds("queue order")
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


def test_a_batch_read_chooses_messages_by_their_tags(rig: Rig) -> None:
    rig.topic("in", 1)
    tags = pa.array([("a", "b", None)[number % 3] for number in range(60)])
    bodies = pa.array([b"x"] * 60, pa.binary())
    rig.broker.log.append({rig.broker.log.queues("in")[0]: pa.record_batch({"body": bodies, "tags": tags})})
    assert rig.batch(topic="in", tags=" a ").count() == 20
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_OPTION.UNSUPPORTED.*filterSql.*DataFrame.filter"):
        rig.batch(topic="in", filterSql="a > 5")


def test_real_time_and_continuous_mode_are_refused_before_anything_is_locked(rig: Rig) -> None:
    rig.topic("in", rows=2)
    writer = rig.stream(topic="in", consumerGroup="g").writeStream.format("console").outputMode("update")
    for trigger, reason in (
        ({"realTime": "5 seconds"}, "REAL_TIME_MODE.INPUT_STREAM"),
        ({"continuous": "1 second"}, "continuous"),
    ):
        started = writer.option("checkpointLocation", str(rig.folder / reason)).trigger(**trigger)
        with pytest.raises((PySparkException, Py4JJavaError), match=reason):
            started.start().awaitTermination()
    assert not rig.broker.admin.locks("g")
