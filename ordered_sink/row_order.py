"""Sorts all rows of one task in memory, up to a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import SinkCondition
from orderedmq.errors import SinkError
from orderedmq.options.sink import SortColumn


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
        whole = held[0] if len(held) == 1 else pa.concat_batches(held)
        # Release each copy before the next one is made, because the caller also copies the result.
        held.clear()
        keys = [(column.name, "descending" if column.descending else "ascending") for column in columns]
        ordered = whole.take(pc.sort_indices(whole, sort_keys=keys))
        del batch, whole
        yield ordered
