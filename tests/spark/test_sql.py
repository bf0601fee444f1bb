"""Tables and views in Spark SQL: the options that reach the source, and the errors of tables that lack one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tests.spark.conftest import Rig


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
    with pytest.raises(PySparkException, match="ORDEREDMQ_OPTION.MISSING.*WITH"):
        rig.spark.sql(f"SELECT * FROM {table}").collect()
    with pytest.raises(PySparkException, match="ORDEREDMQ_OPTION.MISSING.*WITH"):
        rig.spark.sql(f"INSERT INTO {table} SELECT * FROM {table} WITH (path = '{rig.path}', topic = 'in')")
    rows = rig.spark.sql(
        f"SELECT queue_id, count(*) n FROM {table} WITH (path = '{rig.path}', topic = 'in', includeProperties = 'true') GROUP BY 1"
    )
    assert {row.queue_id: row.n for row in rows.collect()} == {0: 3, 1: 3}
    rig.spark.sql(f"DROP TABLE {table}")
    assert Path(rig.path, "data.mdb").exists()
    assert sum(map(len, rig.bodies("in").values())) == 6


def test_a_tables_misspelt_option_is_refused_when_it_is_created(rig: Rig, table: str) -> None:
    with pytest.raises(PySparkException, match="'topics' is unknown.*did you mean topic"):
        rig.spark.sql(f"CREATE TABLE {table} USING orderedmq OPTIONS (path '{rig.path}', topics 'in')")


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
