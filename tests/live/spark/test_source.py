"""The source in real Spark: the rows that it reads, where it begins, and how much a batch takes."""

from __future__ import annotations

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from tests.live.spark.conftest import Rig


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
    read = rig.batch(topic="in", includeProperties="true", consumerGroup="g")
    plain = read.selectExpr("topic", "queue_id", "queue_offset", "cast(body as string) body", "tags", "keys", "sharding_key")
    expected = rig.spark.createDataFrame([("in", 0, 0, "a", "t", None, "x"), ("in", 0, 1, "b", None, "k", "y")], plain.schema)
    assert_df_equality(plain, expected)
    first = read.orderBy("queue_offset").first()
    assert first is not None
    assert first.properties == {"p": "1"}
    assert first.broker_name == "embedded"
    assert first.reconsume_times == 0
    assert len(first.message_id) == 32
    assert (rig.broker.admin.locks(), rig.broker.admin.groups()) == ([], []), "a batch read has no lock and no offset"


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
