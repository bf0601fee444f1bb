"""Sorts all rows of one task in memory, up to a limit, as Spark does: null is less than any value, and NaN greater."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import SinkCondition
from orderedmq.errors import SinkError
from orderedmq.options.sink import SortColumn
from orderedmq.schema import concat_batches


def sorted_rows(
    batches: Iterator[pa.RecordBatch], columns: Sequence[SortColumn], limit: int, full: str
) -> Iterator[pa.RecordBatch]:
    """Yield all rows as one batch, sorted by ``columns``; yield nothing if there are no rows.

    Raises SinkError ORDER_BUFFER_FULL with the message ``full`` if the rows take more than ``limit`` bytes.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        size += batch.nbytes
        if size > limit:
            raise SinkError(SinkCondition.ORDER_BUFFER_FULL, full)
    if held:
        whole = held[0] if len(held) == 1 else concat_batches(held)
        # Release each copy before the next one is made, because the caller also copies the result.
        held.clear()
        ordered = whole.take(_sorted(whole, columns))
        del batch, whole
        yield ordered


def _sorted(rows: pa.RecordBatch, columns: Sequence[SortColumn]) -> pa.Array:
    """Return the indices of the rows in their order."""
    keys = [
        (key, "descending" if column.descending else "ascending")
        for column in columns
        for key in _comparable(rows.column(rows.schema.get_field_index(column.name)))
    ]
    together = pa.RecordBatch.from_arrays([key for key, _ in keys], names=[str(number) for number in range(len(keys))])
    return pc.sort_indices(together, sort_keys=[(str(number), order) for number, (_, order) in enumerate(keys)])


def _comparable(column: pa.Array) -> Iterator[pa.Array]:
    """Yield arrays that have together the order of the column.

    Arrow puts nulls and NaNs last, in ascending and in descending order.
    """
    if pa.types.is_null(column.type) or column.null_count:
        yield column.is_valid()
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            yield from _comparable(field)
        return
    if pa.types.is_floating(column.type):
        yield pc.is_nan(column)
    if not pa.types.is_null(column.type):
        yield column
