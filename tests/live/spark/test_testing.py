"""`orderedmq.testing` in real Spark: queries that run to their end, continue, fail once, or are killed in a chosen micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from orderedmq.testing import QueryTestError, TemporaryStore
from orderedmq.testing.kill import After

EVENTS = [(f"order-{n % 5}", f"event {n}") for n in range(100)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemporaryStore]:
    with TemporaryStore(tmp_path / "pipeline") as store:
        yield store


def orders(spark: SparkSession, broker: dict[str, str], **options: str) -> DataFrame:
    return spark.readStream.format("orderedmq").options(**broker, topic="orders", consumerGroup="g", **options).load()


def copied(spark: SparkSession, broker: dict[str, str]) -> Any:
    return orders(spark, broker).writeStream.format("orderedmq").options(**broker, topic="copies", topicQueueNums="4")


def appended(spark: SparkSession, broker: dict[str, str], folder: str, write: Any = None) -> Any:
    """A query whose sink does not recognise repeated batches."""

    def append(batch: DataFrame, number: int) -> None:
        batch.selectExpr("*", f"{number} AS batch").write.mode("append").parquet(folder)

    return orders(spark, broker, maxOffsetsPerTrigger="40").writeStream.foreachBatch(write or append)


def broken(spark: SparkSession, broker: dict[str, str]) -> Any:
    return orders(spark, broker).selectExpr("raise_error('a broken row') AS body").writeStream.format("noop")


def counts(spark: SparkSession, folder: Path) -> dict[int, int]:
    """The number of rows of each batch in a table."""
    return {row["batch"]: row["count"] for row in spark.read.parquet(str(folder)).groupBy("batch").count().collect()}


def test_a_query_that_takes_too_long_is_stopped(store: TemporaryStore, spark: SparkSession) -> None:
    store.produce("orders", *EVENTS[:1])
    with pytest.raises(QueryTestError, match=r"TIMED_OUT\] the query appended .* after 1 s"):
        store.run_to_end(partial(appended, folder="", write=lambda batch, number: time.sleep(3)), spark, timeout=1)


def test_a_query_continues_where_its_last_run_ended(store: TemporaryStore, spark: SparkSession) -> None:
    store.produce("orders", *EVENTS[:60])
    store.run_to_end(copied, spark)
    store.assert_same("orders", "copies")
    store.produce("orders", *EVENTS[60:])
    # A writer that is passed with the name of its function's checkpoint continues the same query.
    again = store.run_to_end(copied(spark, store.options), checkpoint="copied")
    assert [progress.numInputRows for progress in again.recentProgress if progress.numInputRows] == [40]
    store.assert_same(EVENTS, "copies")


@pytest.mark.timeout(400)
def test_a_query_is_killed_when_the_batch_that_is_asked_for_is_written(
    store: TemporaryStore, spark: SparkSession, tmp_path: Path
) -> None:
    store.produce("orders", *EVENTS)
    table = tmp_path / "table"
    store.kill_in_batch(partial(appended, folder=str(table)), spark, 1)
    # This sink does not recognise a repeat, so only the batch that was repeated is in the table twice.
    assert counts(spark, table) == {0: 40, 1: 80, 2: 20}


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("after", ["planned", "task"])
def test_a_query_is_killed_earlier_in_a_batch(store: TemporaryStore, spark: SparkSession, tmp_path: Path, after: After) -> None:
    store.produce("orders", *EVENTS)
    table = tmp_path / "table"
    store.kill_in_batch(partial(appended, folder=str(table)), spark, 1, after=after)
    rows_by_batch = counts(spark, table)
    assert (rows_by_batch[0], rows_by_batch[2]) == (40, 20)
    # The table has no file, some files or all files of the killed append.
    assert 40 <= rows_by_batch[1] <= 80


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_query_that_ends_or_fails_before_its_batch_says_so(store: TemporaryStore, spark: SparkSession) -> None:
    store.produce("orders", *EVENTS)
    with pytest.raises(QueryTestError, match=r"NOT_KILLED\] the query copied ended before micro-batch 1, so it was not killed"):
        store.kill_in_batch(copied, spark, 1)
    # Both queries have the same group, which is now at the end of the topic.
    store.produce("orders", *EVENTS)
    with pytest.raises(
        QueryTestError, match=r"FAILED\] the query broken failed before it could be killed in micro-batch 1: .* a broken row"
    ):
        store.kill_in_batch(broken, spark, 1)
    assert "a broken row" in (store.folder / "killed.log").read_text()
