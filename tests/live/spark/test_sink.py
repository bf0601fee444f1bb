"""The sink in real Spark: the queues and the order of rows. tests/loop/test_sink.py has refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.functions import expr

import orderedmq
from ordered_sink import route
from tests.live.spark.conftest import Rig


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
    for options, condition in (
        ({"sharding_key_type": "number"}, "OPTION.INVALID"),
        ({"message_queue_selector": "random"}, "OPTION.INVALID"),
        ({"sharding_key": "body", "message_queue_selector": "mod"}, "SCHEMA.WRONG_TYPE"),
        ({"queues": 65_537}, "OPTION.INVALID"),
        ({"order_by": ""}, "OPTION.INVALID"),
        ({"order_by": "tags"}, "SCHEMA.WRONG_TYPE"),
        ({"order_by": "time"}, "SCHEMA.MISSING_COLUMN"),
    ):
        with pytest.raises(orderedmq.OrderedMQError, match=condition):
            route(df.selectExpr("*", "array(id) AS tags"), **{"order_by": "id", "sharding_key": "key", **options})  # type: ignore[arg-type]
