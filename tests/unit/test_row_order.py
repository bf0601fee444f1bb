"""The memory that a task needs to sort its rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ordered_sink.row_order import sorted_rows
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
