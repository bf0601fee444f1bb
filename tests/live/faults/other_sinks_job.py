"""Runs the recipes of docs/guides/other-sinks.md in a separate Spark, in the current folder, and stops them for a test.

    python -m tests.live.faults.other_sinks_job ADDRESS writing

ADDRESS is the address of PostgreSQL. The folder ``points`` has a point for each recipe, with its name. The second argument says
when a recipe reaches its point and stops forever:

    writing   a part of batch 0 is written to files or to the staging table, and nothing is committed
    written   the table has batch 1, but Spark's checkpoint does not
    -         nowhere: the page runs to its end
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.table import Transaction
from pyspark.sql import DataFrame

from tests import packages
from tests.live.faults.points import Points
from tests.snippets import ROOT, Snippet, execute, snippets

PAGE = ROOT / "docs" / "guides" / "other-sinks.md"
#: PostgreSQL's address in the recipes of the page. The job replaces it with the address of the tests' server.
ADDRESS = "127.0.0.1:5432"
#: The number of rows that a task passes on before it reaches the point.
PART = 20


def makes_topic(snippet: Snippet) -> bool:
    return "Producer(" in snippet.code


def runs(snippet: Snippet) -> bool:
    return "awaitTermination" in snippet.code


class Partly:
    """A DataFrame whose rows arrive in two parts. Between them, the point ``name`` is reached."""

    def __init__(self, df: DataFrame, name: str, points: Points) -> None:
        self._df, self._name, self._points = df, name, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._df, name)

    def toArrow(self) -> pa.RecordBatchReader:
        """Return the rows in two parts, for a library that writes while it reads."""
        rows = self._df.toArrow()

        def parts() -> Iterator[pa.RecordBatch]:
            yield from rows.slice(0, PART).to_batches()
            self._points.reach(self._name)
            yield from rows.slice(PART).to_batches()

        return pa.RecordBatchReader.from_batches(rows.schema, parts())

    def selectExpr(self, *columns: str) -> DataFrame:
        """Return the rows in two parts, for a recipe in which executors write."""
        name, points = self._name, self._points

        def parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield batch.slice(0, PART)
                points.reach(name)
                yield batch.slice(PART)

        return self._df.mapInArrow(parts, self._df.schema).selectExpr(*columns)


def hold_iceberg(points: Points) -> None:
    """Stop each commit to an Iceberg table after its files are written and before the catalog knows them."""
    commit = Transaction.commit_transaction

    def held(self: Transaction) -> Any:
        points.reach({"payments": "to-iceberg", "merged": "to-merged"}[self._table.name()[-1]])
        return commit(self)

    setattr(Transaction, "commit_transaction", held)  # noqa: B010


def held(write: Callable[[Any, int], None], name: str, where: str, points: Points) -> Callable[[DataFrame, int], None]:
    """Return the recipe ``write``, changed so that it stops at ``where``."""

    def writing(df: DataFrame, batch_id: int) -> None:
        write(df if name in ("to-iceberg", "to-merged") else Partly(df, name, points), batch_id)

    def written(df: DataFrame, batch_id: int) -> None:
        write(df, batch_id)
        if batch_id == 1:
            points.reach(name)

    return writing if where == "writing" else written


def main(address: str, where: str) -> None:
    packages.keep()
    points = Points(Path("points").absolute())
    first = not Path("data").exists()
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(PAGE):
        if (first or not makes_topic(snippet)) and (where == "-" or not runs(snippet)):
            execute(snippet._replace(code=snippet.code.replace(ADDRESS, address)), names)
    if where == "writing":
        hold_iceberg(points)
    if where != "-":
        queries = [names["start"](held(write, name, where, points), name) for name, write in names["RECIPES"].items()]
        for query in queries:
            query.awaitTermination()
    names["spark"].stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
