"""Each message once in a table: the rule, and tables of the real libraries whose positions other writers change at any moment."""

from __future__ import annotations

import contextlib
import importlib.util
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table.metadata import TableMetadataV2

from ordered_sink import once
from ordered_sink.once.batch import Once
from ordered_sink.once.rule import Position, Positions, missing
from ordered_sink.once.targets import Append, Conflict, Part, Target, append
from orderedmq.errors import OptionError, OrderedMQError, SchemaError, SinkError
from orderedmq.model import MessageQueue
from tests.live.faults.once_tables import TableBatch

FIRST, SECOND = MessageQueue("in", "b", 0), MessageQueue("in", "b", 1)
BOTH = frozenset((FIRST, SECOND))
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("store_timestamp", pa.timestamp("us", "UTC")),
    ]
)


def rows(queue: MessageQueue, begin: int, end: int, stored: int = 1000) -> pa.RecordBatch:
    """Messages ``begin`` to ``end`` of a queue, one stored in each µs from ``stored`` + ``begin`` on."""
    return pa.RecordBatch.from_pylist(
        [{**queue._asdict(), "queue_offset": at, "store_timestamp": stored + at} for at in range(begin, end)], SCHEMA
    )


class Batch(TableBatch):
    """A micro-batch without Spark. ``meanwhile`` is called once, between the look at the table and the commit."""

    def __init__(self, *batches: pa.RecordBatch, meanwhile: Callable[[], None] | None = None) -> None:
        super().__init__(batches, batches[0].schema.names)
        self._meanwhile = meanwhile

    def missing(self, positions: Positions) -> Part:
        part = super().missing(positions)
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return part

    def part(self, rows: Iterable[pa.RecordBatch], moved: Positions) -> Part:
        return Part(pa.RecordBatchReader.from_batches(self.schema, rows), moved, BOTH)


# -- the rule ------------------------------------------------------------------------------------------------------------------


def offsets(batch: pa.RecordBatch, positions: Positions) -> list[int]:
    mask, _ = missing(batch, positions)
    return batch.filter(mask).column("queue_offset").to_pylist()


def test_a_table_without_a_position_lacks_every_row() -> None:
    mask, moved = missing(rows(FIRST, 5, 8), {})
    assert (mask.to_pylist(), moved) == ([True] * 3, {FIRST: Position(8, 1007)})


def test_the_message_at_the_position_is_the_first_that_the_table_lacks() -> None:
    assert offsets(rows(FIRST, 5, 12), {FIRST: Position(10, 1009)}) == [10, 11]
    assert missing(rows(FIRST, 5, 10), {FIRST: Position(10, 1009)})[1] == {}


def test_a_position_concerns_only_its_own_queue() -> None:
    both = pa.Table.from_batches([rows(FIRST, 0, 3), rows(SECOND, 0, 3)]).combine_chunks().to_batches()[0]
    mask, moved = missing(both, {FIRST: Position(2, 1001)})
    assert mask.to_pylist() == [False, False, True, True, True, True]
    assert moved == {FIRST: Position(3, 1002), SECOND: Position(3, 1002)}


def test_a_topic_that_was_created_again_begins_anew() -> None:
    before = {FIRST: Position(10, 1009)}
    later = rows(FIRST, 0, 4, stored=5000)
    mask, moved = missing(later, before)
    assert (mask.to_pylist(), moved) == ([True] * 4, {FIRST: Position(4, 5003)})
    # A repeat of these rows finds them in the table.
    assert offsets(later, moved) == []


def test_a_clock_that_went_back_loses_and_repeats_nothing() -> None:
    early = rows(FIRST, 10, 20, stored=0)
    mask, moved = missing(early, {FIRST: Position(10, 1009)})
    assert (mask.to_pylist(), moved) == ([True] * 10, {FIRST: Position(20, 1009)})
    assert offsets(early, moved) == []


def test_a_row_without_a_position_is_refused() -> None:
    with pytest.raises(SchemaError) as error:
        missing(pa.RecordBatch.from_pylist([{"topic": "in"}], SCHEMA), {})
    assert error.value.condition == "ORDEREDMQ_SCHEMA.MISSING_COLUMN"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=20))
def test_whatever_is_repeated_and_overlaps_each_message_is_in_the_table_once_and_in_order(
    ranges: list[tuple[int, int]],
) -> None:
    table: list[int] = []
    positions: Positions = {}
    end = 0
    for begin, count in ranges:
        # A writer has processed all messages below its batch.
        begin = min(begin, end)
        batch = rows(FIRST, begin, begin + count)
        table += offsets(batch, positions)
        positions = {**positions, **missing(batch, positions)[1]}
        end = max(end, begin + count)
    assert table == list(range(end))


# -- tables --------------------------------------------------------------------------------------------------------------------


class Table:
    """A table of one kind. ``write``: what a user gives to foreachBatch."""

    def __init__(self, write: Once, read: Callable[[], list[tuple[int, int]]]) -> None:
        self.write, self.read = write, read
        self.queues = BOTH

    @property
    def target(self) -> Target:
        return self.write.target

    def append(self, *batches: pa.RecordBatch, meanwhile: Callable[[], None] | None = None) -> None:
        append(self.target, Batch(*batches, meanwhile=meanwhile), self.queues)

    def positions(self) -> Mapping[MessageQueue, Position]:
        return self.target.read([FIRST, SECOND])[0]


def pairs(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True))


CREATE = (
    "CREATE TABLE payments (topic TEXT, broker_name TEXT, queue_id INTEGER, queue_offset BIGINT, store_timestamp TIMESTAMP)"
)


def database(connect: Callable[[], Any]) -> Table:
    with closing(connect()) as connection:
        connection.execute(CREATE)
        connection.commit()

    def read() -> list[tuple[int, int]]:
        with closing(connect()) as connection:
            return [tuple(row) for row in connection.execute("SELECT queue_id, queue_offset FROM payments").fetchall()]

    return Table(once.sql(connect, "payments"), read)


def iceberg_table(folder: Path) -> Table:
    def lake() -> SqlCatalog:
        return SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")

    lake().create_namespace("shop")
    lake().create_table("shop.payments", SCHEMA)
    return Table(once.iceberg(lake(), "shop.payments"), lambda: pairs(lake().load_table("shop.payments").scan().to_arrow()))


@pytest.fixture(params=["delta", "iceberg", "sqlite", "duckdb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    if request.param == "delta":
        path = str(tmp_path / "payments")
        yield Table(once.delta(path), lambda: pairs(DeltaTable(path).to_pyarrow_table()))
    elif request.param == "iceberg":
        yield iceberg_table(tmp_path)
    elif request.param == "sqlite":
        yield database(lambda: sqlite3.connect(tmp_path / "payments.db"))
    else:
        kept = duckdb.connect(tmp_path / "payments.duckdb")
        yield database(kept.cursor)
        kept.close()


def whole(end: int, queue: MessageQueue = FIRST) -> list[tuple[int, int]]:
    return [(queue.queue_id, at) for at in range(end)]


def test_a_repeat_adds_only_what_the_table_lacks(table: Table) -> None:
    table.append(rows(FIRST, 0, 5), rows(SECOND, 0, 2))
    table.append(rows(FIRST, 0, 5), rows(SECOND, 0, 2))
    table.append(rows(FIRST, 3, 8))
    assert sorted(table.read()) == [*whole(8), *whole(2, SECOND)]
    assert table.positions() == {FIRST: Position(8, 1007), SECOND: Position(2, 1001)}


def test_the_rows_of_a_queue_are_appended_in_order(table: Table) -> None:
    table.append(*(rows(FIRST, begin, begin + 10) for begin in range(0, 120, 10)))
    assert table.read() == whole(120)


def test_a_writer_that_was_overtaken_looks_again(table: Table) -> None:
    table.append(rows(FIRST, 0, 2))
    table.append(rows(FIRST, 2, 6), meanwhile=lambda: table.append(rows(FIRST, 2, 4)))
    assert sorted(table.read()) == whole(6)
    # Now the other writer has taken all of it, and this one has nothing to add.
    table.append(rows(FIRST, 6, 8), meanwhile=lambda: table.append(rows(FIRST, 6, 9)))
    assert sorted(table.read()) == whole(9)
    assert table.positions() == {FIRST: Position(9, 1008)}


def test_a_new_writer_finds_the_positions_of_queues_that_it_did_not_know(table: Table) -> None:
    table.append(rows(FIRST, 0, 4), rows(SECOND, 0, 4))
    table.queues = frozenset()
    table.append(rows(FIRST, 2, 6), rows(SECOND, 1, 5))
    assert sorted(table.read()) == [*whole(6), *whole(5, SECOND)]


def test_two_writers_of_the_first_batch_add_it_once(table: Table) -> None:
    table.append(rows(FIRST, 0, 4), meanwhile=lambda: table.append(rows(FIRST, 0, 4)))
    assert sorted(table.read()) == whole(4)


def test_writers_of_different_queues_both_succeed(table: Table) -> None:
    table.append(rows(FIRST, 0, 4), meanwhile=lambda: table.append(rows(SECOND, 0, 3)))
    assert sorted(table.read()) == [*whole(4), *whole(3, SECOND)]


def test_a_batch_without_rows_for_the_table_moves_its_position(table: Table) -> None:
    class Dropped(Batch):
        def missing(self, positions: Positions) -> Part:
            return self.part([], super().missing(positions).moved)

    append(table.target, Dropped(rows(FIRST, 0, 4)))
    assert (table.read(), table.positions()) == ([], {FIRST: Position(4, 1003)})
    # Another writer whose batch has no rows either does not set the position back.

    def meanwhile() -> None:
        append(table.target, Dropped(rows(FIRST, 4, 9)))

    append(table.target, Dropped(rows(FIRST, 4, 6), meanwhile=meanwhile), BOTH)
    assert table.positions() == {FIRST: Position(9, 1008)}


class Failed(Exception):
    pass


def test_an_append_that_fails_moves_no_position(table: Table) -> None:
    class Failing(Batch):
        def missing(self, positions: Positions) -> Part:
            def parts() -> Iterator[pa.RecordBatch]:
                yield self.batches[0]
                raise Failed

            return self.part(parts(), super().missing(positions).moved)

    with pytest.raises(Exception):  # noqa: B017  each library wraps it
        append(table.target, Failing(rows(FIRST, 0, 4), rows(FIRST, 4, 8)))
    assert table.positions() == {}
    table.append(rows(FIRST, 0, 8))
    assert sorted(table.read()) == whole(8)


def test_a_column_that_the_table_lacks_is_refused_before_any_row(table: Table) -> None:
    table.append(rows(FIRST, 0, 2))
    with pytest.raises(SchemaError) as error:
        table.append(rows(FIRST, 2, 4).append_column("city", pa.array(["x", "y"])))
    assert error.value.condition == "ORDEREDMQ_SCHEMA.UNKNOWN_COLUMN"
    assert sorted(table.read()) == whole(2)


def test_a_table_that_is_always_busy_is_a_named_error(tmp_path: Path) -> None:
    class Busy:
        name = "table payments"

        def prepare(self, schema: pa.Schema) -> None: ...

        def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
            def refuse(rows: pa.RecordBatchReader, moved: Positions) -> None:
                raise Conflict from sqlite3.OperationalError("database is locked")

            return {}, refuse

    with pytest.raises(SinkError) as error:
        append(Busy(), Batch(rows(FIRST, 0, 2)))
    assert error.value.condition == "ORDEREDMQ_SINK.TARGET_BUSY"


# -- planted bugs --------------------------------------------------------------------------------------------------------------


class Planted:
    """A target with a bug in the way in which it appends. ``dies``: the process dies at the worst moment of its first append."""

    def __init__(self, target: Target, bug: str) -> None:
        self._target, self._bug, self._dies = target, bug, True
        self.name = target.name
        self.prepare = target.prepare

    def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
        positions = self._target.read(queues)[0]

        def commit(rows: pa.Table, moved: Positions) -> None:
            self._target.read(queues)[1](rows.to_reader(), moved)

        def planted(rows: pa.RecordBatchReader, moved: Positions) -> None:
            added = rows.read_all()
            if self._bug == "positions in a second transaction":
                commit(added, {})
                self._die()
                commit(added.slice(0, 0), moved)
            elif self._bug == "a position moved although the append failed":
                commit(added.slice(0, 0), moved)
                self._die()
                commit(added, {})
            else:
                commit(added, moved)

        return positions, planted

    def _die(self) -> None:
        if self._dies:
            self._dies = False
            raise Failed


@pytest.mark.parametrize(
    "bug",
    ["positions in a second transaction", "a position moved although the append failed", "no look again after a conflict"],
)
def test_planted_bugs_lose_or_repeat_messages(bug: str, tmp_path: Path) -> None:
    table = database(lambda: sqlite3.connect(tmp_path / "payments.db"))
    planted = Planted(table.target, bug)

    def meanwhile() -> None:
        if bug.startswith("no look"):
            table.append(rows(FIRST, 0, 2))

    for _ in range(2):
        with contextlib.suppress(Failed):
            append(planted, Batch(rows(FIRST, 0, 4), meanwhile=meanwhile), BOTH)
    assert sorted(table.read()) != whole(4)


def test_a_planted_comparison_loses_the_message_at_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pc, "greater_equal", pc.greater)
    assert offsets(rows(FIRST, 10, 12), {FIRST: Position(10, 5000)}) != [10, 11]


def test_a_planted_retry_of_pyiceberg_repeats_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = TableMetadataV2.model_copy
    kept = lambda metadata, **how: metadata if "properties" in how.get("update", {}) else copy(metadata, **how)  # noqa: E731
    monkeypatch.setattr(TableMetadataV2, "model_copy", kept)
    table = iceberg_table(tmp_path)
    table.append(rows(FIRST, 0, 4), meanwhile=lambda: table.append(rows(FIRST, 0, 4)))
    assert sorted(table.read()) != whole(4)


# -- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "condition"),
    [
        (once.delta, "ORDEREDMQ_OPTION.UNSUPPORTED"),
        (lambda folder: once.parquet, "ORDEREDMQ_OPTION.UNSUPPORTED"),
        (lambda folder: once.kafka, "ORDEREDMQ_OPTION.UNSUPPORTED"),
        (lambda folder: once.delta(folder / "new", columns=["amount"]), "ORDEREDMQ_OPTION.INVALID"),
        (
            lambda folder: once.sql(lambda: sqlite3.connect(folder / "db"), "absent").target.prepare(SCHEMA),
            "ORDEREDMQ_OPTION.INVALID",
        ),
        (
            lambda folder: once.sql(lambda: sqlite3.connect(folder / "db", isolation_level=None), "t").target.prepare(SCHEMA),
            "ORDEREDMQ_OPTION.INVALID",
        ),
    ],
)
def test_what_cannot_record_positions_is_refused(call: Callable[[Path], Any], condition: str, tmp_path: Path) -> None:
    (tmp_path / "part-0.parquet").touch()
    with pytest.raises(OptionError) as error:
        call(tmp_path)
    assert error.value.condition == condition


SOURCE = [("topic", "string"), ("broker_name", "string"), ("queue_id", "int"), ("queue_offset", "bigint")]
STORED = ("store_timestamp", "timestamp")


@pytest.mark.parametrize(
    ("types", "condition"),
    [
        (SOURCE, "ORDEREDMQ_SCHEMA.MISSING_COLUMN"),
        ([*SOURCE, ("store_timestamp", "date")], "ORDEREDMQ_SCHEMA.WRONG_TYPE"),
        ([*SOURCE, STORED, ("ticket", "struct<place:bigint>")], "ORDEREDMQ_OPTION.UNSUPPORTED"),
    ],
)
def test_rows_without_their_position_are_refused_before_they_are_read(
    types: list[tuple[str, str]], condition: str, tmp_path: Path
) -> None:
    rows: Any = SimpleNamespace(dtypes=types)
    with pytest.raises(OrderedMQError) as error:
        once.delta(tmp_path / "payments")(rows, 0)
    assert error.value.condition == condition
    assert not (tmp_path / "payments").exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"orderedmq\[delta\]"):
        once.delta("data/payments")


def test_positions_name_every_queue_as_starting_offsets(table: Table) -> None:
    table.append(rows(FIRST, 0, 5))
    assert once.positions(table.write, [FIRST, SECOND]) == {"in": {"b": {"0": 5, "1": -2}}}


def test_streams_of_one_table_have_their_own_positions(tmp_path: Path) -> None:
    for stream in ("paris", "tokyo"):
        append(once.delta(tmp_path / "payments", stream=stream).target, Batch(rows(FIRST, 0, 3)))
    assert DeltaTable(tmp_path / "payments").count() == 6
