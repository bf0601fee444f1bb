"""Filters that Spark pushes down to a batch read: queues and ranges without a row that fits are not read.

Rules: Spark compares each row itself as well, so filters that say nothing of queues or ranges are ignored. Spark without
``DataSourceReader.pushLimit`` (up to 4.3) keeps what a query pushed down in the DataFrame or view, where the next query finds it, or the other
side of a self-join: its PythonScanBuilder stores the planned read in the PythonDataSourceV2 that all scans share. So no filters are
taken there. Where pushing is off (spark.sql.python.filterPushdown.enabled), Spark refuses a reader with `pushFilters`. A reader cannot
ask for the setting, but filters are pushed by a worker with a main module of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader, Filter

from ordered_source.batch_reader import BatchReader
from orderedmq.concise import concise_calls
from orderedmq.rows.pruning import Column, Comparison, Operator, Pruning, Value

#: The module that runs in the process in which Spark pushes filters down.
WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OPERATORS: Final[Mapping[type[Filter], Operator]] = {
    datasource.EqualTo: "=",
    datasource.EqualNullSafe: "=",
    datasource.In: "=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
}
_COLUMNS: Final[Mapping[str, Column]] = {
    "topic": "topic",
    "queue_id": "queue_id",
    "queue_offset": "queue_offset",
    "store_timestamp": "store_timestamp",
}


def reader_class() -> type[BatchReader]:
    """Return the class of a batch's reader: one that takes filters where Spark pushes them down."""
    return FilteredReader if _keeps_scans_apart() and _pushes() else BatchReader


def _keeps_scans_apart() -> bool:
    """Whether this release of Spark keeps what is pushed down to a scan with that scan."""
    return hasattr(DataSourceReader, "pushLimit")


def _pushes() -> bool:
    """Whether this process is Spark's worker that pushes filters down."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return WORKER in sys.modules or (main is not None and main.name == WORKER)


@concise_calls
class FilteredReader(BatchReader):
    """A batch reader that leaves out what Spark's filters rule out."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Note the filters, and return them all: Spark has to compare rows as well. The same filters give the same ranges."""
        self.pruning = Pruning(tuple(comparisons(filters)))
        return filters


def comparisons(filters: Sequence[Filter]) -> Iterator[Comparison]:
    """Yield those of the filters that compare a column of `rows.pruning` with values."""
    for one in filters:
        negated = isinstance(one, datasource.Not)
        inner: Any = one.child if isinstance(one, datasource.Not) else one
        operator = _OPERATORS.get(type(inner))
        if operator is None or len(inner.attribute) != 1 or (negated and operator != "="):
            continue
        column = _COLUMNS.get(inner.attribute[0])
        if column is None:
            continue
        given = inner.value if isinstance(inner, datasource.In) else (inner.value,)
        values = [_value(column, value) for value in given]
        known = tuple(value for value in values if value is not None)
        if len(known) == len(values):
            yield Comparison(column, "!=" if negated else operator, known)


def _value(column: Column, value: Any) -> Value | None:
    """Return a value as `rows.pruning` has it; None if it is of another type than the column."""
    if column == "store_timestamp":
        known = isinstance(value, datetime) and value.tzinfo is not None
        return (value - _EPOCH) // timedelta(microseconds=1) if known else None
    kind = str if column == "topic" else int
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
