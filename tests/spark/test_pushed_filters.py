"""Filters in Spark: queries return the right rows whether or not filters are pushed down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import StructType

from pyspark_orderedmq import DefaultSource
from tests.spark.conftest import Rig

ROWS, QUEUES = 60, 2


@pytest.fixture
def pushing(rig: Rig) -> Iterator[SparkSession]:
    """A separate session in which filters are pushed down, and a topic of 60 messages in two queues."""
    rig.topic("in", queues=QUEUES)
    for first in range(0, ROWS, 10):
        rig.fill("in", 10, first)
    session = rig.spark.newSession()
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield session
    for table in session.catalog.listTables():
        if table.isTemporary:
            session.catalog.dropTempView(table.name)


def offsets(rows: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.queue_id, row.queue_offset) for row in rows.select("queue_id", "queue_offset").collect())


ALL = [(queue, offset) for queue in range(QUEUES) for offset in range(ROWS // QUEUES)]
LAST = "queue_offset >= 28"
FIRST = "queue_id = 1 AND queue_offset < 3"


def queries(spark: SparkSession, view: str) -> list[list[tuple[int, int]]]:
    """Return the rows of three queries on a view, and of one that reads the view twice."""
    both = spark.sql(f"SELECT * FROM {view} WHERE {LAST} UNION ALL SELECT * FROM {view} WHERE {FIRST}")
    return [
        offsets(spark.sql(f"SELECT * FROM {view} WHERE {LAST}")),
        offsets(spark.table(view)),
        offsets(spark.sql(f"SELECT * FROM {view} WHERE {FIRST}")),
        offsets(both),
    ]


RIGHT = [
    [(0, 28), (0, 29), (1, 28), (1, 29)],
    ALL,
    [(1, 0), (1, 1), (1, 2)],
    [(0, 28), (0, 29), (1, 0), (1, 1), (1, 2), (1, 28), (1, 29)],
]


@pytest.mark.holds("pushed filters")
def test_queries_over_one_view_have_their_own_rows_with_pushing_on(rig: Rig, pushing: SparkSession) -> None:
    pushing.sql(f"CREATE TEMPORARY VIEW pushed USING orderedmq OPTIONS (path '{rig.path}', topic 'in')")
    assert queries(pushing, "pushed") == RIGHT


def taking_filters(notes: Path) -> type[DataSource]:
    """Return a source whose reader takes filters in any release of Spark, and notes the ranges that it plans."""

    class Taking(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "orderedmq_taking"

        def reader(self, schema: StructType) -> DataSourceReader:
            from ordered_source.partition_reader import QueuePartition
            from ordered_source.pushed_filters import FilteredReader

            class Noting(FilteredReader):
                def partitions(self) -> Any:
                    found = FilteredReader.partitions(self)
                    spans = [(one.queue.queue_id, one.begin, one.end) for one in found if isinstance(one, QueuePartition)]
                    with notes.open("a") as file:
                        file.write(f"{spans}\n")
                    return found

            return Noting(self.options, schema)

    return Taking


def test_filters_as_spark_pushes_them_narrow_what_is_read(rig: Rig, pushing: SparkSession) -> None:
    notes = rig.folder / "notes"
    pushing.dataSource.register(taking_filters(notes))

    def load() -> DataFrame:
        return pushing.read.format("orderedmq_taking").options(path=rig.path, topic="in").load()

    times = {(row.queue_id, row.queue_offset): row.store_timestamp for row in load().collect()}
    notes.unlink()
    since, until = times[0, 10], times[0, 15]
    later = [place for place in ALL if since <= times[place] < until]
    assert 0 < len(later) < len(ALL), "the appends must have different times"
    cases = {
        "queue_offset BETWEEN 7 AND 9 AND queue_id = 1": [(1, 7), (1, 8), (1, 9)],
        "queue_id IN (1, 5) AND queue_offset > 28L": [(1, 29)],
        "queue_id <> 1 AND queue_offset = 3": [(0, 3)],
        "topic = 'elsewhere'": [],
        "topic IN ('in', 'elsewhere') AND queue_offset < 1": [(0, 0), (1, 0)],
        f"store_timestamp >= TIMESTAMP '{since}+00:00' AND store_timestamp < TIMESTAMP '{until}+00:00'": later,
        # No row can be skipped by offset.
        "queue_offset % 10 = 3 OR queue_offset = 4": [place for place in ALL if place[1] % 10 == 3 or place[1] == 4],
    }
    for condition, wanted in cases.items():
        assert offsets(load().where(condition)) == wanted, condition
    planned = [
        [(queue, begin, end) for queue in range(QUEUES) for begin, end in [span(wanted, queue)] if begin < end]
        for wanted in list(cases.values())[:-1]
    ]
    assert [eval(line) for line in notes.read_text().splitlines()] == [*planned, [(0, 0, 30), (1, 0, 30)]]


def span(wanted: list[tuple[int, int]], queue: int) -> tuple[int, int]:
    """The range from the first to the last of these offsets in a queue."""
    found = [offset for of, offset in wanted if of == queue]
    return (found[0], found[-1] + 1) if found else (0, 0)


def test_a_reader_sees_in_which_of_sparks_workers_filters_are_pushed(rig: Rig, pushing: SparkSession) -> None:
    notes = rig.folder / "asked"

    class Asking(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "orderedmq_asking"

        def reader(self, schema: StructType) -> DataSourceReader:
            from ordered_source import pushed_filters

            with notes.open("a") as file:
                file.write(f"{pushed_filters._pushes()}\n")
            return DefaultSource.reader(self, schema)

    for session in (pushing, rig.spark.newSession()):
        session.dataSource.register(Asking)
        rows = session.read.format("orderedmq_asking").options(path=rig.path, topic="in").load()
        assert offsets(rows.where(LAST)) == RIGHT[0]
    assert notes.read_text().split() == ["True", "False"]


def test_spark_gives_a_query_what_another_one_pushed_down_unless_it_has_push_limit(rig: Rig, pushing: SparkSession) -> None:
    """In Spark releases without pushLimit, a query gets the filters of another query, so the source takes no filters there.

    If this test fails, Spark has changed, and the check in ordered_source/pushed_filters.py needs a revision.
    """
    pushing.dataSource.register(taking_filters(rig.folder / "notes"))
    pushing.sql(f"CREATE TEMPORARY VIEW leaking USING orderedmq_taking OPTIONS (path '{rig.path}', topic 'in')")
    first, everything, _, both = queries(pushing, "leaking")
    assert first == RIGHT[0]
    apart = hasattr(DataSourceReader, "pushLimit")
    assert (everything == RIGHT[1]) == apart
    assert (both == RIGHT[3]) == apart
