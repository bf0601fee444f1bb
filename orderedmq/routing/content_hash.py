"""A 64-bit hash of a row's content, by which a selector chooses a queue. It depends only on the row. Pure.

Rules: except for chance collisions, two rows have the same hash exactly if their messages have the same `digests`
(rocketmq/sink/message_stamp.py): an empty text counts as no text, and properties have no order. The hashes are computed in C, for a
whole column at a time.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

Words: TypeAlias = npt.NDArray[np.uint64]

#: Weights by column, so that the same text counts differently in each column. They are odd so that no bit of a hash is lost.
_TEXTS: Final = {
    "tags": np.uint64(0x9E3779B97F4A7C15),
    "keys": np.uint64(0xBF58476D1CE4E5B9),
    "sharding_key": np.uint64(0x94D049BB133111EB),
}


def content_hash64(rows: pa.RecordBatch) -> Words:
    """Return the content hash of each row.

    ``rows`` have PRODUCER_COLUMNS as `message_rows.normalise` returns them. Other columns are ignored.
    """
    result = _hashes(rows.column("body"))
    for name, weight in _TEXTS.items():
        if name in rows.schema.names:
            result += _texts(rows.column(name)) * weight
    if "properties" in rows.schema.names:
        result += _properties(rows.column("properties"))
    return result


def _hashes(values: pa.Array) -> Words:
    """Return the xxh3 hash of each value in an array of bytes without nulls."""
    return np.fromiter(map(xxh3_64_intdigest, values.to_pylist()), np.uint64, len(values))


def _texts(values: pa.Array) -> Words:
    """Return the hash of each string, 0 for a null or an empty string. If the column has no other strings, nothing is hashed."""
    some = pc.fill_null(pc.greater(pc.binary_length(values), 0), False).to_numpy(zero_copy_only=False)
    result = np.zeros(len(values), np.uint64)
    if some.any():
        result[some] = _hashes(values.filter(pa.array(some)).view(pa.binary()))
    return result


def _properties(column: pa.Array) -> Words:
    """Return the hash of each map: the sum of its entries' hashes, so that their order does not matter.

    An entry whose value is null or empty is ignored.
    """
    bounds = column.offsets.to_numpy().astype(np.int64)
    begin, end = int(bounds[0]), int(bounds[-1])
    # In a sliced array, ``keys`` and ``items`` still belong to the whole array, and offsets count from its beginning.
    items = column.items.slice(begin, end - begin)
    entries = pc.binary_join_element_wise(column.keys.slice(begin, end - begin), items, "\x01")
    entries = pc.if_else(pc.equal(items, ""), pa.scalar(None, pa.string()), entries)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_texts(entries), dtype=np.uint64)))
    result: Words = sums[bounds[1:] - begin] - sums[bounds[:-1] - begin]
    if column.null_count:
        # A null row may still have entries in the buffers.
        result[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return result
