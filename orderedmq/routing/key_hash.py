"""Hashes of sharding keys: Java's String.hashCode, and a 64-bit hash.

With Java's hash, this package sends a key to the same queue as Java producers do. Pure and vectorised, without Python loops over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from orderedmq.conditions import SchemaCondition
from orderedmq.errors import SchemaError
from orderedmq.text import text_of

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int64s: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
#: Row numbers, or a slice for all rows.
Rows: TypeAlias = npt.NDArray[np.intp] | slice
_ALL: Final = slice(None)
_LOW8: Final = np.uint64(0x00FF00FF00FF00FF)
_LOW16: Final = np.uint64(0x0000FFFF0000FFFF)
_HIGH_BITS: Final = np.uint64(0x8080808080808080)
#: Masks that keep the last 0 to 8 bytes of a little-endian word.
_KEEP: Final = np.array([0] + [(2**64 - 1) << (64 - 8 * n) & (2**64 - 1) for n in range(1, 9)], dtype=np.uint64)
#: Number of rows that are hashed together. Their arrays of 8 bytes per row fit the cache and stay below 128 KiB. For larger arrays, the
#: C library maps new pages for each array, which doubles the time.
_BLOCK: Final = 8192


class _Strings:
    """Strings as little-endian words of 8 bytes that are aligned at the strings' *ends*.

    ``words[k]`` is (rows, words): the rows that have more than 8k bytes, and their bytes 8k to 8k + 8, counted from the end. A word
    that extends beyond its string's start has zeros there. So a polynomial hash gives word k the same weight in every row, whatever
    the row's length, and no row needs a separate loop.
    """

    def __init__(self, data: Bytes, ends: Int64s, lengths: Int64s) -> None:
        """Row i is ``data[ends[i] - lengths[i] : ends[i]]``.

        If all lengths are equal, each row must begin where the previous row ended.
        """
        self.lengths = lengths
        self.ascii = not len(data) or int(data.max()) < 128
        self.words: list[tuple[Rows, Words]] = []
        longest, shortest = int(lengths.max()), int(lengths.min())
        rows: Rows = _ALL
        # The data is padded, because the first row may be shorter than a word.
        padded = np.concatenate((np.zeros(8, dtype=np.uint8), data))
        ending_at: Words = np.ndarray((len(data) + 1,), dtype="<u8", buffer=padded, strides=(1,))
        for done in range(0, longest, 8):
            if longest == shortest:
                at = int(ends[0]) - done
                word: Words = np.ndarray((len(ends),), dtype="<u8", buffer=padded, offset=at, strides=(longest,))
                self.words.append((_ALL, word & _KEEP[min(longest - done, 8)]))
                continue
            if done >= shortest:
                rows = np.flatnonzero(lengths > done) if isinstance(rows, slice) else rows[lengths[rows] > done]
            self.words.append((rows, ending_at[ends[rows] - done] & _KEEP[np.minimum(lengths[rows] - done, 8)]))

    def java_hash(self, unit: int) -> npt.NDArray[np.uint32]:
        """Return String.hashCode of each row: the sum of s[i] * 31^(n-1-i) over its units.

        ``unit``: the bytes of a unit, 1 for ASCII or 2 for UTF-16.
        """
        result = np.zeros(len(self.lengths), dtype=np.uint32)
        weight = 1
        for rows, words in self.words:
            result[rows] += _fold(words, unit) * np.uint32(weight)
            weight = weight * 31 ** (8 // unit) % 2**32
        return result

    def hash64(self) -> Words:
        """Return 64 well-mixed bits of each row. Keys of the same length up to 8 bytes never collide, and others only by chance."""
        result = _mix(self.lengths.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        for rows, words in self.words:
            result[rows] = _mix(result[rows] ^ words)
        return result

    def not_ascii(self) -> npt.NDArray[np.intp]:
        """Return the numbers of the rows that have a byte above 127."""
        found = np.zeros(len(self.lengths), dtype=np.bool_)
        for rows, words in () if self.ascii else self.words:
            found[rows] |= (words & _HIGH_BITS) != 0
        return np.flatnonzero(found)


def _fold(words: Words, unit: int) -> npt.NDArray[np.uint32]:
    """Return Java's hash of the 8 one-byte or 4 two-byte units in each word.

    It combines units in parallel lanes: first pairs, then pairs of pairs, then halves. No lane overflows into the next one before the
    last step: 255 * 32 < 2^16, 8160 * 962 < 2^32, 65535 * 32 < 2^32.
    """
    lanes = _LOW8 if unit == 1 else _LOW16
    high = words >> np.uint64(8 * unit)
    high &= lanes
    pairs = words & lanes
    pairs *= np.uint64(31)
    if unit == 1:
        pairs += high
        np.right_shift(pairs, np.uint64(16), out=high)
        high &= _LOW16
        pairs &= _LOW16
        pairs *= np.uint64(31**2)
    pairs += high
    np.right_shift(pairs, np.uint64(32), out=high)
    pairs *= np.uint64(31 ** (4 // unit))
    pairs += high
    return pairs.astype(np.uint32)


def _mix(x: Words) -> Words:
    """Apply MurmurHash3's 64-bit finaliser, in place: a bijection in which each input bit flips each output bit half of the time."""
    shift = np.uint64(33)
    x ^= x >> shift
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> shift
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> shift
    return x


class HashedKeys:
    """The hashes of an array of sharding keys. Each kind of hash is computed at its first use.

    ``keys`` is an array of strings (string, large_string, string_view, or a dictionary of these; sliced or not), or of nulls.
    Keys are not dictionary-encoded, because finding the distinct keys costs more than hashing them all, except for long keys (UUIDs).
    Raises SchemaError WRONG_TYPE for another type, or TypeError for a chunked array.
    """

    def __init__(self, keys: pa.Array) -> None:
        if not isinstance(keys, pa.Array):
            raise TypeError(f"sharding keys must be one array, not {type(keys).__name__}")
        self.keys = keys
        kind = keys.type.value_type if pa.types.is_dictionary(keys.type) else keys.type
        if not any(
            test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        ):
            raise SchemaError(
                SchemaCondition.WRONG_TYPE, f"a sharding key is a string, not {keys.type}. Cast the column to string"
            )
        #: The keys in a memory layout with offsets.
        self._plain = keys if pa.types.is_string(keys.type) else keys.cast(pa.large_string())

    @cached_property
    def valid(self) -> npt.NDArray[np.bool_] | None:
        """A mask of the rows that have a key, None if all have one."""
        mask: npt.NDArray[np.bool_] | None = None
        if self._plain.null_count:
            mask = self._plain.is_valid().to_numpy(zero_copy_only=False)
        return mask

    @cached_property
    def java(self) -> npt.NDArray[np.int32]:
        """Java's String.hashCode of each key, over its UTF-16 units, and 0 for a null."""
        result = np.zeros(len(self._plain), dtype=np.uint32)
        for rows, strings in self._blocks():
            result[rows] = strings.java_hash(1)
            other = strings.not_ascii() + rows.start
            if len(other):
                result[other] = _utf16(self._plain.take(pa.array(other))).java_hash(2)
        return result.view(np.int32)

    @cached_property
    def hash64(self) -> Words:
        """A 64-bit hash of each key's UTF-8 bytes, the same in every process and on every machine. It is 0 for a null."""
        result = np.zeros(len(self._plain), dtype=np.uint64)
        for rows, strings in self._blocks():
            result[rows] = strings.hash64()
        if self.valid is not None:
            result[~self.valid] = 0
        return result

    def filter(self, mask: pa.Array) -> HashedKeys:
        """Return the keys where ``mask`` is true."""
        return HashedKeys(self.keys.filter(mask))

    def _blocks(self) -> Iterator[tuple[slice, _Strings]]:
        """Yield the keys in blocks. A null has no bytes. The caller must not keep a block, so that the next one can reuse its memory."""
        data, offsets = _buffers(self._plain)
        for first in range(0, len(self._plain), _BLOCK):
            bounds = offsets[first : first + _BLOCK + 1].astype(np.int64)
            lengths = np.diff(bounds)
            rows = slice(first, first + len(lengths))
            if self.valid is not None:
                lengths *= self.valid[rows]
            yield rows, _Strings(data[bounds[0] : bounds[-1]], bounds[1:] - bounds[0], lengths)


def _buffers(keys: pa.Array) -> tuple[Bytes, npt.NDArray[Any]]:
    """Return the bytes of a (large_)string array, sliced or not, and the offsets of its rows in them (rows + 1, int32 or int64)."""
    if not len(keys):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, data = keys.buffers()
    width = np.int64 if pa.types.is_large_string(keys.type) else np.int32
    raw = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(0, dtype=np.uint8)
    return raw, np.frombuffer(offsets, dtype=width)[keys.offset : keys.offset + len(keys) + 1]


def _utf16(keys: pa.Array) -> _Strings:
    """Return strings without nulls in UTF-16, little-endian. Bytes that are not UTF-8 become U+FFFD, as in Java."""
    data, offsets = _buffers(keys)
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    leads = (data & 0xC0) != 0x80
    try:
        # Decode all rows in one call, unless a row begins with a continuation byte, which would join the previous row's character.
        if not leads[offsets[:-1][np.diff(offsets) > 0]].all():
            raise UnicodeDecodeError("utf-8", b"", 0, 0, "a row begins within a character")
        units = data.tobytes().decode().encode("utf-16-le")
    except UnicodeDecodeError:
        rows = [text_of(value.as_buffer().to_pybytes()).encode("utf-16-le") for value in keys]
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        units = b"".join(rows)
    else:
        # A character has one UTF-16 unit, or two if it has four bytes in UTF-8.
        count = np.zeros(len(data) + 1, dtype=np.int64)
        np.cumsum(leads.view(np.uint8) + (data >= 0xF0), dtype=np.int64, out=count[1:])
        ends = 2 * count[offsets[1:]]
    return _Strings(np.frombuffer(units, dtype=np.uint8), ends, np.diff(ends, prepend=0))


def java_string_hash(keys: pa.Array) -> npt.NDArray[np.int32]:
    """Return Java's String.hashCode of each key, 0 for a null. See `HashedKeys` for types and errors."""
    return HashedKeys(keys).java


def key_hash64(keys: pa.Array) -> Words:
    """Return 64 well-mixed bits of each key, 0 for a null, so that two tasks can recognise the same key. See `HashedKeys`."""
    return HashedKeys(keys).hash64
