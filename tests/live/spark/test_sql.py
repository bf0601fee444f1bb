"""Tables and views in Spark SQL, as batches and streams: options reach source and sink, and a statement without them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tests.live.spark.conftest import Rig, numbers


@pytest.fixture
def table(rig: Rig) -> Iterator[str]:
    rig.topic("in", queues=2, rows=6)
    name = "orders_of_a_test"
    yield name
    rig.spark.sql(f"DROP TABLE IF EXISTS {name}")


def test_a_table_is_created_and_read_with_its_options_repeated_and_dropped_without_a_trace(rig: Rig, table: str) -> None:
    rig.spark.sql(
        f"CREATE TABLE {table} USING orderedmq OPTIONS (path '{rig.path}', topic 'in', includeProperties 'true') "
        "COMMENT 'orders' TBLPROPERTIES ('team' = 'sales')"
    )
    assert "properties" in rig.spark.table(table).columns
    with pytest.raises(PySparkException, match="ORDEREDMQ_OPTION.MISSING"):
        rig.spark.sql(f"SELECT * FROM {table}").collect()
    rows = rig.spark.sql(
        f"SELECT queue_id, count(*) n FROM {table} WITH (path = '{rig.path}', topic = 'in', includeProperties = 'true') GROUP BY 1"
    )
    assert {row.queue_id: row.n for row in rows.collect()} == {0: 3, 1: 3}
    rig.spark.sql(f"DROP TABLE {table}")
    assert Path(rig.path, "index.db").exists()
    assert sum(map(len, rig.bodies("in").values())) == 6


def test_a_temporary_view_keeps_its_options_to_read_and_to_write_and_its_end_until_it_is_replaced(rig: Rig) -> None:
    rig.topic("in", queues=1, rows=2)
    create = f"CREATE OR REPLACE TEMPORARY VIEW view_of_a_test USING orderedmq OPTIONS (path '{rig.path}', topic 'in')"
    rig.spark.sql(create)
    try:
        rig.spark.sql("INSERT INTO view_of_a_test SELECT * FROM view_of_a_test")
        assert rig.bodies("in") == {0: ["0:0", "0:1", "0:0", "0:1"]}
        assert rig.spark.sql("SELECT body FROM view_of_a_test").count() == 2
        rig.spark.sql(create)
        assert rig.spark.sql("SELECT body FROM view_of_a_test").count() == 4
    finally:
        rig.spark.catalog.dropTempView("view_of_a_test")


def test_a_table_is_written_with_its_options_repeated(rig: Rig, table: str) -> None:
    options = f"path = '{rig.path}', topic = 'in'"
    rig.spark.sql(f"CREATE TABLE {table} USING orderedmq OPTIONS (path '{rig.path}', topic 'in')")
    with pytest.raises(PySparkException, match="ORDEREDMQ_OPTION.MISSING"):
        rig.spark.sql(f"INSERT INTO {table} SELECT * FROM {table} WITH ({options})")
    rig.spark.sql(f"INSERT INTO {table} WITH ({options}) SELECT * FROM {table} WITH ({options})")
    columns = "body, sharding_key"
    rig.spark.sql(f"INSERT INTO {table} WITH ({options}) ({columns}) VALUES (CAST('values' AS BINARY), 'k0-0')")
    rig.spark.sql(
        f"INSERT INTO {table} WITH ({options}) BY NAME SELECT 'k0-0' AS sharding_key, CAST('by name' AS BINARY) AS body"
    )
    added = rig.spark.sql("SELECT CAST('by writeTo' AS BINARY) AS body, 'k0-0' AS sharding_key")
    added.writeTo(table).options(path=rig.path, topic="in").append()
    bodies_in_topic = [body for bodies in rig.bodies("in").values() for body in bodies]
    first = ["0:0", "0:2", "0:4", "1:1", "1:3", "1:5"]
    assert sorted(bodies_in_topic) == sorted([*first, *first, "values", "by name", "by writeTo"])
    assert rig.spark.read.options(path=rig.path, topic="in").table(table).count() == len(bodies_in_topic)
    with pytest.raises(PySparkException, match="ORDEREDMQ_SINK.MODE"):
        rig.spark.sql(f"INSERT OVERWRITE {table} WITH ({options}) SELECT * FROM {table} WITH ({options})")
    assert sum(map(len, rig.bodies("in").values())) == len(bodies_in_topic)


def test_a_table_is_a_stream_with_its_options_repeated(rig: Rig, table: str) -> None:
    given = {"path": rig.path, "topic": "in", "consumerGroup": "g"}
    rig.spark.sql(f"CREATE TABLE {table} USING orderedmq OPTIONS (path '{rig.path}', topic 'in')")
    rig.run(rig.spark.readStream.options(**given).table(table), "ck-table", topic="by-table", topicQueueNums=2)
    options = ", ".join(f"{name} = '{value}'" for name, value in {**given, "consumerGroup": "h"}.items())
    rig.run(rig.spark.sql(f"SELECT * FROM STREAM {table} WITH ({options})"), "ck-sql", topic="by-sql", topicQueueNums=2)
    wanted = numbers(rig.bodies("in"))
    assert numbers(rig.bodies("by-table")) == numbers(rig.bodies("by-sql")) == wanted == list(range(6))
    with pytest.raises(PySparkException, match="ORDEREDMQ_OPTION.MISSING"):
        rig.run(rig.spark.readStream.table(table), "ck-none", topic="by-table")


def test_a_view_is_a_stream_only_of_a_stream(rig: Rig) -> None:
    rig.topic("in", queues=2, rows=6)
    rig.spark.sql(f"CREATE TEMPORARY VIEW view_of_a_batch USING orderedmq OPTIONS (path '{rig.path}', topic 'in')")
    rig.stream(topic="in", consumerGroup="g").createOrReplaceTempView("view_of_a_stream")
    try:
        with pytest.raises(PySparkException):
            rig.spark.readStream.table("view_of_a_batch")
        rig.run(rig.spark.sql("SELECT * FROM view_of_a_stream WHERE queue_id = 1"), "ck-sql", topic="one", topicQueueNums=2)
        assert numbers(rig.bodies("one")) == [1, 3, 5]
        rig.fill("in", 2, first=6)
        rig.run(rig.spark.readStream.table("view_of_a_stream"), "ck-table", topic="all", topicQueueNums=2)
        assert numbers(rig.bodies("all")) == [6, 7], "the second query must not read what the group has processed"
    finally:
        rig.spark.catalog.dropTempView("view_of_a_batch")
        rig.spark.catalog.dropTempView("view_of_a_stream")
