"""The order in which a task sorts its rows, and the memory that it needs for that."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from ordered_sink.columns import sorted_rows
from orderedmq.options.sink import SortColumn

ROWS = 20_000


def batches() -> Iterator[pa.RecordBatch]:
    for begin in range(0, 8 * ROWS, ROWS):
        yield pa.record_batch({"number": pa.array(range(begin, begin + ROWS))})


def test_sorted_rows_are_held_once_when_they_are_handed_over() -> None:
    before = pa.total_allocated_bytes()
    rows = sorted_rows(batches(), [SortColumn("number", True)], 1 << 30, "")
    whole = next(rows)
    assert whole.column("number")[0].as_py() == 8 * ROWS - 1
    assert pa.total_allocated_bytes() - before < 1.5 * whole.nbytes


NAN = float("nan")
STRUCT = pa.struct({"a": pa.float64(), "b": pa.int64()})


@pytest.mark.parametrize(
    ("kind", "ascending"),
    [
        (pa.float64(), [None, float("-inf"), -1.5, 0.0, 2.0, float("inf"), NAN]),
        (pa.string(), [None, "", "A", "B", "a", "é", "\U0001f600"]),
        (pa.bool_(), [None, False, True]),
        (pa.binary(), [None, b"", b"\x7f", b"\x80"]),
        (
            STRUCT,
            [None, {"a": None, "b": None}, {"a": None, "b": 1}, {"a": 1.0, "b": None}, {"a": 1.0, "b": 0}, {"a": NAN, "b": 0}],
        ),
        (pa.null(), [None]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_rows_are_in_sparks_order(kind: pa.DataType, ascending: list[object]) -> None:
    """Spark's order: null is less than any value, NaN greater, and a descending order is the reverse of that."""
    values = pa.array(ascending, kind)
    shuffled = pa.record_batch({"value": values.take(pa.array([*range(1, len(values), 2), *range(0, len(values), 2)]))})
    for descending, expected in ((False, values), (True, values[::-1])):
        [rows] = sorted_rows(iter([shuffled]), [SortColumn("value", descending)], 1 << 20, "")
        assert [str(value) for value in rows.column("value")] == [str(value) for value in expected]
