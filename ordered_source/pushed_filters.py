"""Filters that Spark pushes down to a batch read. Queues and ranges that cannot contain a matching row are not read.

Rules: Spark also applies the filters to each row itself, so filters that do not restrict queues or ranges are ignored.

In Spark without ``DataSourceReader.pushLimit`` (up to 4.3), PythonScanBuilder stores the planned read in the PythonDataSourceV2 that all
scans of a DataFrame or view share. The filters of one query would then also apply to the next query, or to the other side of a self-join.
So filters are not used in these releases.

If filter pushdown is off (spark.sql.python.filterPushdown.enabled), Spark refuses a reader that has `pushFilters`. A reader cannot read
this setting, but Spark pushes filters down in a separate worker process, which `_pushes` recognises by its main module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import datasource
from pyspark.sql.datasource import Filter

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
    """Return the class of the batch reader, which accepts filters only in the process in which Spark pushes them down."""
    return FilteredReader if _pushes() else BatchReader


def _pushes() -> bool:
    """Whether this process is Spark's worker that pushes filters down."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return WORKER in sys.modules or (main is not None and main.name == WORKER)


@concise_calls
class FilteredReader(BatchReader):
    """A batch reader that does not read queues and ranges that Spark's filters exclude."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Store the filters, and return all of them, because Spark also has to apply them to each row.

        The same filters always give the same ranges.
        """
        self.pruning = Pruning(tuple(comparisons(filters)))
        return filters


def comparisons(filters: Sequence[Filter]) -> Iterator[Comparison]:
    """Yield the comparisons for the filters that compare a column of `rows.pruning` with values."""
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
    """Return a value in the form that `rows.pruning` uses, or None if its type is not that of the column."""
    if column == "store_timestamp":
        known = isinstance(value, datetime) and value.tzinfo is not None
        return (value - _EPOCH) // timedelta(microseconds=1) if known else None
    kind = str if column == "topic" else int
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
