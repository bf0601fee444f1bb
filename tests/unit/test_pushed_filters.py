"""Filters that Spark pushes down to a batch read of a real store: the rows that fit, and the chunks that are read for them.

The readers are called as Spark's workers call them. tests/spark/test_pushed_filters.py runs them in Spark.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds
from pyspark.sql.datasource import DataSourceReader, Filter

from ordered_source import pushed_filters
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import full_schema
from ordered_source.older_spark import batch_reader
from ordered_source.pushed_filters import FilteredReader, comparisons
from orderedmq import connections
from orderedmq.embedded import chunk_codec, index
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.errors import aged_out
from orderedmq.model import MessageQueue
from orderedmq.rows.pruning import Comparison
from tests.contract.support import FakeClock

CHUNKS, ROWS, QUEUES = 100, 10, 2
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def at(minutes: float) -> datetime:
    """The time of the chunk with this number. Chunks are stored one minute apart."""
    return BEGIN + timedelta(minutes=minutes)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Topics in and other with two queues each. Each queue has 100 chunks of 10 messages, stored one minute apart."""
    path = tmp_path_factory.mktemp("pruned") / "store"
    clock = FakeClock(micros=int(BEGIN.timestamp()) * 1_000_000)
    with pytest.MonkeyPatch.context() as patched, EmbeddedBroker(path, clock=clock) as broker:
        # Chunks are not merged, so each append stays a separate chunk.
        patched.setattr(index, "MERGE_BELOW", 1)
        for topic in ("in", "other"):
            broker.admin.create_topic(topic, QUEUES)
        for number in range(CHUNKS):
            for topic in ("in", "other"):
                for queue in broker.log.queues(topic):
                    bodies = [f"{number} {row}".encode() for row in range(ROWS)]
                    broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary())})})
            clock.pass_(60)
        assert broker.admin.describe_topic("in")[0].chunks == CHUNKS
    return str(path)


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[MessageQueue, int]]]:
    """The queue and first offset of each chunk that is read. They are recorded when the payload is verified, as every read does."""
    read: set[tuple[MessageQueue, int]] = set()
    verify = chunk_codec.verify

    def seen(payload: Any, chunk: Any, queue: MessageQueue, first: int) -> None:
        read.add((queue, first))
        verify(payload, chunk, queue, first)

    monkeypatch.setattr(chunk_codec, "verify", seen)
    # A connection caches the chunk that was read last, so start without connections.
    monkeypatch.setattr(connections, "_kept", {})
    yield read
    for _, broker in connections._kept.values():
        broker.close()


def rows(
    store: str, *filters: Filter, kind: Callable[..., BatchReader] = FilteredReader, **options: str
) -> list[dict[str, Any]]:
    """The rows of a reader after these filters are pushed to it. The reader is pickled in between, as in Spark."""
    reader = kind({"path": store, "topic": "in", **options}, full_schema(False))
    if filters:
        assert list(reader.pushFilters(list(filters))) == list(filters), "Spark must still compare each row"
    parts = reader.partitions()
    copy: BatchReader = pickle.loads(pickle.dumps(reader))
    return [row for part in parts for batch in copy.read(pickle.loads(pickle.dumps(part))) for row in batch.to_pylist()]


CASES: dict[str, tuple[list[Filter], Callable[[dict[str, Any]], bool], int]] = {
    "a range of offsets": (
        [ds.GreaterThanOrEqual(("queue_offset",), 500), ds.LessThan(("queue_offset",), 510)],
        lambda row: 500 <= row["queue_offset"] < 510,
        QUEUES,
    ),
    "an offset": ([ds.EqualTo(("queue_offset",), 517)], lambda row: row["queue_offset"] == 517, QUEUES),
    "some offsets": (
        [ds.In(("queue_offset",), (510, 515, 529))],
        lambda row: row["queue_offset"] in (510, 515, 529),
        2 * QUEUES,
    ),
    "a queue and an offset": (
        [ds.EqualTo(("queue_id",), 1), ds.LessThanOrEqual(("queue_offset",), 4)],
        lambda row: row["queue_id"] == 1 and row["queue_offset"] <= 4,
        1,
    ),
    "not a queue": (
        [ds.Not(ds.EqualTo(("queue_id",), 0)), ds.GreaterThan(("queue_offset",), 989)],
        lambda row: row["queue_id"] != 0 and row["queue_offset"] > 989,
        1,
    ),
    "a time": (
        [ds.GreaterThanOrEqual(("store_timestamp",), at(70)), ds.LessThan(("store_timestamp",), at(71))],
        lambda row: at(70) <= row["store_timestamp"] < at(71),
        QUEUES,
    ),
    "a moment": (
        [ds.EqualTo(("store_timestamp",), at(70).astimezone(timezone(timedelta(hours=5))))],
        lambda row: row["store_timestamp"] == at(70),
        QUEUES,
    ),
    "after a time": (
        [ds.GreaterThan(("store_timestamp",), at(97))],
        lambda row: row["store_timestamp"] > at(97),
        2 * QUEUES,
    ),
    "up to a time": (
        [ds.LessThanOrEqual(("store_timestamp",), at(1))],
        lambda row: row["store_timestamp"] <= at(1),
        2 * QUEUES,
    ),
    "another topic": ([ds.EqualTo(("topic",), "elsewhere")], lambda row: False, 0),
    "what cannot be": (
        [ds.GreaterThan(("queue_offset",), 600), ds.LessThan(("queue_offset",), 600)],
        lambda row: False,
        0,
    ),
    "a time that has not come": ([ds.GreaterThan(("store_timestamp",), at(10_000))], lambda row: False, 0),
}  # fmt: skip


@pytest.mark.holds("pushed filters")
@pytest.mark.parametrize("case", CASES)
def test_the_rows_that_fit_are_read_and_the_chunks_of_others_are_not(
    case: str, store: str, chunks_read: set[tuple[MessageQueue, int]]
) -> None:
    filters, fits, chunks = CASES[case]
    found = rows(store, *filters)
    assert len(chunks_read) == chunks, f"read {len(chunks_read)} of {CHUNKS * QUEUES} chunks"
    wanted = [row for row in rows(store, kind=BatchReader) if fits(row)]
    assert [row for row in found if fits(row)] == wanted
    assert bool(wanted) == bool(chunks)


def test_a_topic_of_several_is_left_out(store: str, chunks_read: set[tuple[MessageQueue, int]]) -> None:
    found = rows(store, ds.In(("topic",), ("other", "third")), ds.LessThan(("queue_offset",), 10), topic="in,other")
    assert {queue.topic for queue, _ in chunks_read} == {row["topic"] for row in found} == {"other"}
    assert len(chunks_read) == QUEUES


def test_filters_narrow_what_the_options_say(store: str) -> None:
    since = ds.GreaterThanOrEqual(("queue_offset",), 300)
    found = rows(store, since, startingTimestamp=at(20).isoformat(), endingTimestamp=at(40).isoformat())
    assert {row["queue_offset"] for row in found} == set(range(300, 400))


#: Filters that say nothing about a queue or a range, have another type than their column, or name no column.
IGNORED: list[Filter] = [
    ds.IsNotNull(("queue_id",)),
    ds.EqualTo(("queue_id",), None),
    ds.EqualTo(("queue_id",), True),
    ds.EqualTo(("queue_id",), "1"),
    ds.In(("queue_id",), (1, None)),
    ds.LessThan(("queue_offset",), 1.5),
    ds.Not(ds.LessThan(("queue_offset",), 4)),
    ds.Not(ds.IsNull(("queue_offset",))),
    ds.StringStartsWith(("topic",), "i"),
    ds.EqualTo(("body",), b"x"),
    ds.EqualTo(("properties", "queue_id"), 1),
    ds.EqualTo(("store_timestamp",), datetime(2026, 3, 1)),
]


@pytest.mark.parametrize("given", IGNORED, ids=str)
def test_other_filters_are_left_to_spark(given: Filter) -> None:
    assert list(comparisons([given])) == []


def test_filters_are_understood_one_by_one() -> None:
    given = [*IGNORED, ds.EqualNullSafe(("queue_id",), 3), ds.Not(ds.In(("topic",), ("a", "b")))]
    assert list(comparisons(given)) == [Comparison("queue_id", "=", (3,)), Comparison("topic", "!=", ("a", "b"))]


def test_a_loss_on_the_way_of_a_search_leaves_the_range_as_it_is(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: EmbeddedLog, queue: MessageQueue, timestamp: int) -> int:
        raise aged_out(queue, 0, 1)

    monkeypatch.setattr(EmbeddedLog, "offset_at", lost)
    found = rows(store, ds.GreaterThan(("store_timestamp",), at(98.5)), ds.EqualTo(("queue_id",), 0))
    assert len(found) == CHUNKS * ROWS


@pytest.mark.parametrize("runs_as", ["module", "main"])
def test_a_reader_takes_filters_in_sparks_worker_that_pushes_and_where_spark_keeps_scans_apart(
    runs_as: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ModuleType("pyspark.sql.worker.data_source_pushdown_filters")
    worker.__spec__ = importlib.machinery.ModuleSpec(worker.__name__, None)
    monkeypatch.delitem(sys.modules, worker.__name__, raising=False)
    monkeypatch.delattr(DataSourceReader, "pushLimit", raising=False)
    assert batch_reader() is BatchReader
    monkeypatch.setitem(sys.modules, worker.__name__ if runs_as == "module" else "__main__", worker)
    assert batch_reader() is BatchReader, "this release of Spark would give the rows of one query to the next"
    monkeypatch.setattr(DataSourceReader, "pushLimit", lambda self, limit: False, raising=False)
    assert batch_reader() is FilteredReader
    monkeypatch.delitem(sys.modules, worker.__name__, raising=False)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert batch_reader() is BatchReader, "where Spark does not push filters, a reader that accepts them is an error"
    assert BatchReader.pushFilters is DataSourceReader.pushFilters


def test_the_worker_that_pushes_filters_is_where_this_spark_has_it() -> None:
    assert importlib.util.find_spec(pushed_filters.WORKER) is not None
