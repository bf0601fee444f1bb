"""A 64-bit hash of a row's content. It depends only on the row. Pure.

A selector chooses a queue by it, and the embedded broker recognises a repeated batch by it.

Rules: except for chance collisions, two rows have the same hash exactly if their messages have the same `digests`
(rocketmq/sink/message_stamp.py): an empty text counts as no text, and properties have no order. The hashes are computed in C, for a
whole column at a time: hashing the values one by one would cost more than encoding and writing them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.schema import null_where

Words: TypeAlias = npt.NDArray[np.uint64]

#: Weights by column, so that the same text counts differently in each column. They are odd so that no bit of a hash is lost.
_TEXTS: Final = {
    "tags": np.uint64(0x9E3779B97F4A7C15),
    "keys": np.uint64(0xBF58476D1CE4E5B9),
    "sharding_key": np.uint64(0x94D049BB133111EB),
}
#: Approximate maximum bytes of a table of values. A larger one would not fit into a processor's cache.
_TABLE_BYTES: Final = 256 * 1024


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
    return _mixed(result)


def content_sum64(rows: pa.RecordBatch) -> int:
    """Return the sum of the rows' content hashes modulo 2^64. It identifies the rows whatever their order and their batches."""
    return int(content_hash64(rows).sum(dtype=np.uint64))


def _hashes(values: pa.Array) -> Words:
    """Return the hash of each value in an array of bytes without nulls: the weighted sum of its words of 8 bytes.

    Values of similar length are padded to one width, a power of two, so that they form a table of words.
    """
    sizes = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    result = sizes.astype(np.uint64)
    exponents = np.frexp(np.maximum(sizes - 1, 0) >> 3)[1]
    for exponent in np.flatnonzero(np.bincount(exponents)).tolist():
        width = 8 << exponent
        places = np.flatnonzero(exponents == exponent)
        alike = values if len(places) == len(values) else values.take(pa.array(places))
        step = max(1, _TABLE_BYTES // width)
        for begin in range(0, len(places), step):
            part = alike.slice(begin, step)
            padded = pc.ascii_rpad(part.view(pa.string()), width, padding="\0").buffers()[2]
            words = np.frombuffer(padded, "<u8", len(part) * width // 8).reshape(len(part), -1)
            # Without the shift, values that differ only in the last byte of words would often have the same sum.
            result[places[begin : begin + step]] += (words ^ words >> np.uint64(32)) @ _weights(width // 8)
    return _mixed(result)


@lru_cache(maxsize=32)
def _weights(count: int) -> Words:
    """Return odd numbers without a pattern, the same for each place whatever ``count`` is."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)


def _mixed(words: Words) -> Words:
    """Return numbers in which each bit depends on all bits of ``words`` (the finalizer of SplitMix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def _texts(values: pa.Array) -> Words:
    """Return the hash of each string, 0 for a null or an empty string. If the column has no other strings, nothing is hashed."""
    some = pc.fill_null(pc.greater(pc.binary_length(values), 0), False).to_numpy(zero_copy_only=False)
    if some.all():
        return _hashes(values.view(pa.binary()))
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
    entries = null_where(pc.equal(items, ""), entries)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_texts(entries), dtype=np.uint64)))
    result: Words = sums[bounds[1:] - begin] - sums[bounds[:-1] - begin]
    if column.null_count:
        # A null row may still have entries in the buffers.
        result[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return result
