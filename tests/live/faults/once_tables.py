"""A table of each kind, for queries that append to all of them by `ordered_sink.once`, and the order in which rows were appended."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog

from ordered_sink import once
from ordered_sink.once.batch import Once
from ordered_sink.once.rule import POSITION_COLUMNS, Positions, merged, missing, queues_of
from ordered_sink.once.targets import Part

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The rows that the tables get.
COLUMNS = (*POSITION_COLUMNS, "sharding_key")
_ICEBERG = pa.schema(
    [
        ("topic", pa.string()),
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("store_timestamp", pa.timestamp("us", "UTC")),
        ("sharding_key", pa.string()),
    ]
)
_COLUMNS = "queue_id INTEGER, queue_offset BIGINT, sharding_key TEXT"


class TableBatch:
    """A micro-batch without Spark, by the same rule. ``columns``: those that the table gets."""

    def __init__(self, batches: Sequence[pa.RecordBatch], columns: Sequence[str]) -> None:
        self.batches = batches
        self._columns = list(columns)
        self.schema = batches[0].select(self._columns).schema

    def missing(self, positions: Positions) -> Part:
        parts = [(batch, *missing(batch, positions)) for batch in self.batches]
        lacking = [batch.filter(mask).select(self._columns) for batch, mask, _ in parts]
        queues = {queue for batch in self.batches for queue in queues_of(batch)}
        # One batch, as from a partition of Spark.
        rows = pa.Table.from_batches(lacking, self.schema).combine_chunks().to_reader()
        return Part(rows, merged(moved for *_, moved in parts), queues)


class Tables:
    """The tables in a folder. ``database``: the address of a PostgreSQL server for one more table."""

    def __init__(self, folder: Path, database: str | None = None) -> None:
        self._folder, self._database = folder.absolute(), database

    def create(self) -> None:
        self._folder.mkdir()
        with closing(self._catalog()) as catalog:
            catalog.create_namespace("shop")
            catalog.create_table("shop.payments", _ICEBERG)
        with closing(self._sqlite()) as connection:
            connection.execute(f"CREATE TABLE payments (number INTEGER PRIMARY KEY AUTOINCREMENT, {_COLUMNS})")
            connection.commit()
        if self._database is not None:
            with self._postgres() as connection:
                connection.execute("DROP TABLE IF EXISTS payments, orderedmq_positions")
                connection.execute(f"CREATE TABLE payments (number BIGSERIAL PRIMARY KEY, {_COLUMNS})")

    def writers(self) -> dict[str, Once]:
        places = ["queue_id", "queue_offset"]
        writers = {
            "delta": once.delta(self._folder / "delta"),
            "iceberg": once.iceberg(self._catalog(), "shop.payments"),
            "sqlite": once.sql(self._sqlite, "payments", columns=places),
        }
        if self._database is not None:
            writers["postgres"] = once.sql(self._postgres, "payments", columns=places)
        return writers

    @staticmethod
    def columns(name: str) -> Sequence[str]:
        """The columns of the table with this name."""
        return COLUMNS if name in ("delta", "iceberg") else ("queue_id", "queue_offset", "sharding_key")

    def appended(self) -> dict[str, dict[int, list[int]]]:
        """The offsets of each queue in each table, in the order in which they were appended."""
        tables = {"delta": self._delta_rows(), "iceberg": self._iceberg_rows(), "sqlite": self._sql_rows(self._sqlite)}
        if self._database is not None:
            tables["postgres"] = self._sql_rows(self._postgres)
        appended: dict[str, dict[int, list[int]]] = {}
        for name, rows in tables.items():
            queues: dict[int, list[int]] = appended.setdefault(name, {})
            for queue_id, offset in rows:
                queues.setdefault(queue_id, []).append(offset)
        return appended

    def _delta_rows(self) -> Iterator[tuple[int, int]]:
        folder = self._folder / "delta"
        for commit in sorted((folder / "_delta_log").glob("*.json")):
            actions = [json.loads(line) for line in commit.read_text().splitlines()]
            yield from _rows([str(folder / action["add"]["path"]) for action in actions if "add" in action])

    def _iceberg_rows(self) -> Iterator[tuple[int, int]]:
        with closing(self._catalog()) as catalog:
            table = catalog.load_table("shop.payments")
            entries = table.inspect.entries().to_pylist() if table.metadata.snapshots else []
        for entry in sorted(entries, key=lambda entry: entry["sequence_number"]):
            yield from _rows([entry["data_file"]["file_path"].removeprefix("file://")])

    def _sql_rows(self, connect: Callable[[], Any]) -> Iterator[tuple[int, int]]:
        with closing(connect()) as connection:
            yield from connection.execute("SELECT queue_id, queue_offset FROM payments ORDER BY number").fetchall()

    def _catalog(self) -> SqlCatalog:
        return SqlCatalog("lake", uri=f"sqlite:///{self._folder}/catalog.db", warehouse=f"file://{self._folder}/lake")

    def _sqlite(self) -> sqlite3.Connection:
        return sqlite3.connect(self._folder / "payments.db", timeout=30)

    def _postgres(self) -> Any:
        assert self._database is not None
        return psycopg.connect(self._database)


def _rows(files: list[str]) -> Iterator[tuple[int, int]]:
    for file in files:
        table = pq.read_table(file, columns=["queue_id", "queue_offset"])
        yield from zip(table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True)


def append_to_all(folder: str, database: str | None = None) -> Callable[[DataFrame, int], None]:
    """Return a function for foreachBatch that appends a micro-batch to each table."""
    writers = Tables(Path(folder), database).writers()

    def append(rows: DataFrame, batch_id: int) -> None:
        for write in writers.values():
            write(rows, batch_id)

    return append
