"""64 bits of what a row says, to choose by: the same for a row whatever comes before it, in every process. Pure.

Rules: two rows have the same bits exactly when a broker's messages of them could not be told apart
(rocketmq/sink/message_stamp.py, `digests`; chance apart): an empty text counts as no text, and properties have no order. The hashing is
done by C code that is mapped over a column.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

Words: TypeAlias = npt.NDArray[np.uint64]

#: Odd numbers, so that the same text is another one in another column.
_TEXTS: Final = {
    "tags": np.uint64(0x9E3779B97F4A7C15),
    "keys": np.uint64(0xBF58476D1CE4E5B9),
    "sharding_key": np.uint64(0x94D049BB133111EB),
}


def content_hash64(rows: pa.RecordBatch) -> Words:
    """Of each row of PRODUCER_COLUMNS, as `rows.normalise` gives them; other columns are not looked at."""
    result = _hashes(rows.column("body"))
    for name, weight in _TEXTS.items():
        if name in rows.schema.names:
            result += _texts(rows.column(name)) * weight
    if "properties" in rows.schema.names:
        result += _properties(rows.column("properties"))
    return result


def _hashes(values: pa.Array) -> Words:
    """xxh3 of each value of an array of bytes without nulls."""
    return np.fromiter(map(xxh3_64_intdigest, values.to_pylist()), np.uint64, len(values))


def _texts(values: pa.Array) -> Words:
    """Of strings; 0 for null and empty ones, which cost nothing where all are."""
    some = pc.fill_null(pc.greater(pc.binary_length(values), 0), False).to_numpy(zero_copy_only=False)
    result = np.zeros(len(values), np.uint64)
    if some.any():
        result[some] = _hashes(values.filter(pa.array(some)).view(pa.binary()))
    return result


def _properties(column: pa.Array) -> Words:
    """Of maps: the sum over their entries, which has no order; an entry without a value is none."""
    bounds = column.offsets.to_numpy().astype(np.int64)
    begin, end = int(bounds[0]), int(bounds[-1])
    # Keys and items are those of the whole array, also of a slice, and offsets count from its beginning.
    items = column.items.slice(begin, end - begin)
    entries = pc.binary_join_element_wise(column.keys.slice(begin, end - begin), items, "\x01")
    entries = pc.if_else(pc.equal(items, ""), pa.scalar(None, pa.string()), entries)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_texts(entries), dtype=np.uint64)))
    result: Words = sums[bounds[1:] - begin] - sums[bounds[:-1] - begin]
    if column.null_count:
        # A null row may have entries that nobody sees.
        result[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return result
