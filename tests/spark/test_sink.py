"""The sink in real Spark: the queues and the order of rows. tests/loop/test_sink.py has refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

import orderedmq
from ordered_sink import route
from ordered_sink.commit import BatchWriter
from tests.sink_tasks import written
from tests.spark.conftest import Rig


def save(rig: Rig, df: DataFrame, **options: Any) -> None:
    writer = df.write.format("orderedmq").mode("append").option("path", rig.path)
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def events(rig: Rig, count: int = 100, keys: int = 7) -> DataFrame:
    return rig.spark.range(count).selectExpr(f"concat('k', id % {keys}) sharding_key", "cast(id as string) body", "id")


def java_hash(text: str) -> int:
    value = 0
    for unit in text:
        value = (31 * value + ord(unit)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@pytest.mark.holds("same key, same queue")
def test_a_key_goes_to_the_queue_that_javas_selector_chooses(rig: Rig) -> None:
    rig.topic("out", 4)
    save(rig, events(rig).drop("id").coalesce(1), topic="out")
    for number, bodies in rig.bodies("out").items():
        for body in bodies:
            hashed = java_hash(f"k{int(body) % 7}")
            assert abs(int(abs(hashed) % 4) * (1 if hashed >= 0 else -1)) == number
        assert bodies == sorted(bodies, key=int)


@pytest.mark.holds("same key, same queue")
def test_a_key_that_is_a_number_goes_where_a_java_producer_of_that_type_sends_it(rig: Rig) -> None:
    # The hash of -1 is 0 as a Long, -1 as an Integer, and 1444 as a String.
    for name, kind, given, queues in (
        ("long", "bigint", "auto", {"-1": 0, "17": 1, "4294967298": 3}),
        ("int", "smallint", "auto", {"-1": 1, "17": 1, "32767": 3}),
        ("text", "bigint", "text", {"-1": 0, "17": 2}),
        ("parsed", "string", "int", {"-1": 1, "17": 1}),
        ("binary", "binary", "long", {"-1": 0, "17": 1, "4294967298": 3}),
    ):
        rig.topic(name, 4)
        values = ", ".join(f"('{key}')" for key in queues)
        df = rig.spark.sql(f"select cast(k as {kind}) id, k body from values {values} as t(k)").coalesce(1)
        save(rig, df, topic=name, shardingKey="id", shardingKeyType=given)
        assert {body: number for number, bodies in rig.bodies(name).items() for body in bodies} == queues, name
        assert sorted(row.sharding_key for row in rig.batch(topic=name).collect()) == sorted(queues)


def test_rows_of_the_source_can_be_written_as_they_are(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    rig.topic("out", 2)
    save(rig, rig.batch(topic="in", includeProperties="true"), topic="out")
    assert sum(map(len, rig.bodies("out").values())) == 20


def test_null_keys_and_tags_that_are_lists_are_warned_of_once_a_batch_with_their_count(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.topic("out", 4)
    df = rig.spark.range(100).selectExpr(
        "if(id % 10 = 0, null, concat('k', id)) key",
        "cast(id as string) body",
        "case when id % 4 = 0 then 'A,B' when id % 4 = 1 then 'A || B' when id % 4 = 2 then 'A|B' end tags",
    )

    def warned(df: DataFrame, **options: str) -> list[str]:
        caplog.clear()
        writer = BatchWriter({"path": rig.path, "topic": "out", "shardingKey": "key", **options}, df.schema, False)
        with caplog.at_level(logging.WARNING, "orderedmq"):
            writer.commit(list(written(df.repartition(2), writer)))
        return [record.getMessage() for record in caplog.records]

    null_keys, several_tags = warned(df)
    assert null_keys.startswith(
        "[ORDEREDMQ_MESSAGE.NULL_KEY] 10 of 100 rows have no key (column 'key' is null): they go to the queues in turn"
    )
    assert null_keys.endswith("Filter them out, or write them separately with shardingKey=none")
    assert several_tags.startswith("[ORDEREDMQ_MESSAGE.SEVERAL_TAGS] 50 of 100 rows have a comma or || in column 'tags'")
    assert sum(map(len, rig.bodies("out").values())) == 100
    # There is no warning if the selector ignores the key, or if every row has a key and at most one tag.
    assert warned(df.drop("tags"), messageQueueSelector="random", onKeyConflict="ignore") == []
    assert warned(df.where("key is not null and id % 4 > 1"), messageQueueSelector="hash") == []


def test_a_key_in_two_tasks_is_refused_and_nothing_is_visible(rig: Rig) -> None:
    rig.topic("out", 2)
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_SINK.KEY_CONFLICT.*7 sharding keys.*No row of the batch"):
        save(rig, events(rig).drop("id").repartition(2), topic="out")
    assert sum(map(len, rig.bodies("out").values())) == 0
    numbers = rig.spark.range(100).selectExpr("id % 7 as sharding_key", "'x' body")
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_SINK.KEY_CONFLICT.*7 sharding keys"):
        save(rig, numbers.repartition(2), topic="out")
    save(rig, events(rig).drop("id").repartition(2), topic="out", onKeyConflict="ignore")
    assert sum(map(len, rig.bodies("out").values())) == 100


def test_route_brings_each_queue_into_one_task_in_order(rig: Rig) -> None:
    rig.topic("out", 4)
    routed = route(events(rig, 1000).repartition(3), "id", queues=4)
    save(rig, routed, topic="out", orderBy="id")
    for bodies in rig.bodies("out").values():
        assert bodies == sorted(bodies, key=int)
    assert sum(map(len, rig.bodies("out").values())) == 1000


def test_route_sorts_nulls_and_nan_as_spark_does(rig: Rig) -> None:
    values = "if(id % 3 = 0, null, element_at(array(double('NaN'), -0.5D, double('-Infinity')), int(id % 4 % 3) + 1))"
    df = rig.spark.range(24).selectExpr(
        "'key' sharding_key", "id", f"{values} value", f"struct({values} value, id % 2 part) pair"
    )
    for order in (["value asc", "pair desc", "id"], ["value desc", "pair asc", "id"]):
        by = [expr(column.split()[0]).desc() if column.endswith(" desc") else expr(column.split()[0]) for column in order]
        assert route(df, order, queues=1).select("id").collect() == df.orderBy(*by).select("id").collect()


def test_route_moves_keys_that_are_numbers_by_their_own_hash(rig: Rig) -> None:
    rig.topic("out", 4)
    df = rig.spark.range(200).selectExpr("id % 50 - 10 AS key", "cast(id as string) body", "id").repartition(3)
    # Each of two tasks writes two queues. With another rule than the sink's, some key would be in two tasks.
    save(rig, route(df, "id", sharding_key="key", queues=4), topic="out", shardingKey="key", orderBy="id")
    assert sorted(int(body) for bodies in rig.bodies("out").values() for body in bodies) == list(range(200))
    for number, bodies in rig.bodies("out").items():
        keys = [int(body) % 50 - 10 for body in bodies]
        assert {(key if key >= 0 else -key - 1) % 4 for key in keys} == {number}
        assert bodies == sorted(bodies, key=int)
    for options, says in (
        ({"sharding_key_type": "number"}, "sharding_key_type='number'"),
        ({"message_queue_selector": "random"}, "message_queue_selector='random'"),
        ({"sharding_key": "body", "message_queue_selector": "mod"}, "needs keys that are whole numbers"),
        ({"queues": 65_537}, "queues=65537 is not a number of queues. Give 1 to 65536"),
        ({"buffer_size": "3g"}, "option buffer_size: '3g' is too large"),
        ({"order_by": "tags"}, "order_by names column 'tags', but values of type array<bigint> cannot be sorted"),
        ({"order_by": "time"}, "order_by names column 'time', but the rows have only key, body, id, tags"),
    ):
        with pytest.raises(orderedmq.OrderedMQError, match=says):
            route(df.selectExpr("*", "array(id) AS tags"), **{"order_by": "id", "sharding_key": "key", **options})  # type: ignore[arg-type]


def test_route_works_in_a_stream(rig: Rig) -> None:
    rig.topic("in", 4, rows=200)
    df = rig.stream(topic="in", consumerGroup="g").selectExpr(
        "concat('x', queue_offset % 3) sharding_key", "body", "queue_offset"
    )
    rig.run(route(df, ["queue_offset"], queues=2), topic="out", topicQueueNums=2, orderBy="queue_offset")
    assert sum(map(len, rig.bodies("out").values())) == 200


def test_route_without_an_order_is_refused(rig: Rig) -> None:
    with pytest.raises(orderedmq.OrderedMQError, match="order_by"):
        route(events(rig), "")


def test_two_outputs_of_one_stream_by_foreach_batch(rig: Rig) -> None:
    rig.topic("in", 2, rows=60)
    rig.topic("one", 2)
    rig.topic("two", 2)
    path = rig.path

    def both(df: DataFrame, batch: int) -> None:
        df.persist()
        for topic in ("one", "two"):
            writer = df.write.format("orderedmq").mode("append").option("path", path).option("topic", topic)
            writer.option("txnAppId", f"copy-{topic}").option("txnVersion", batch).save()
        df.unpersist()

    df = rig.stream(topic="in", consumerGroup="g", maxOffsetsPerTrigger="20")
    query = (
        df.writeStream.foreachBatch(both)
        .option("checkpointLocation", str(rig.folder / "ck"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    for topic in ("one", "two"):
        assert sorted(int(body.partition(":")[2]) for found in rig.bodies(topic).values() for body in found) == list(range(60))
    assert rig.offsets("g") == {0: 30, 1: 30}
