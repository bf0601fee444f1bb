"""Sharding keys by type (text, or whole numbers that Java hashes as an Integer or a Long), and their hashes. Pure and vectorised.

A message stores its key as text, whatever the key's type was. The type decides the hash, and thus the queue: Java's producer may
send the String "17" and the Long 17 to different queues. With Java's hash, this package sends a key to the same queue as Java producers
do. There are no Python loops over rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.text import Int64s, narrow, repaired, text_of

#: The type that Java's producer hashes: a String, an Integer (or Short or Byte), or a Long.
KeyType: TypeAlias = Literal["text", "int", "long"]
#: ``auto``: the type of the column decides.
GivenKeyType: TypeAlias = Literal["auto", "text", "int", "long"]
KEY_TYPES: Final[tuple[GivenKeyType, ...]] = ("auto", "text", "int", "long")

_BITS: Final = {"int": 32, "long": 64}
#: Arrow's types of texts, and of binary values, which are keys if they are UTF-8. Spark's setting useLargeVarTypes chooses the large ones.
_TEXT_LIKE: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_null,
)
_NUMBER: Final = "-?[0-9]+"
#: Maximum characters of a bad key that an error shows.
_SHOWN: Final = 40

Bytes: TypeAlias = npt.NDArray[np.uint8]
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
        mask = np.zeros(len(self.lengths), dtype=np.bool_)
        for rows, words in () if self.ascii else self.words:
            mask[rows] |= (words & _HIGH_BITS) != 0
        return np.flatnonzero(mask)


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


class HashedNumbers(HashedKeys):
    """The hashes of whole numbers, which are stored as text. ``hash64`` is the hash of the text."""

    def __init__(self, texts: pa.Array, numbers: npt.NDArray[np.int64], kind: Literal["int", "long"]) -> None:
        """``numbers`` are the values of ``texts``, 0 for a null. If ``kind`` is ``int``, they must fit 32 bits."""
        super().__init__(texts)
        self.numbers = numbers
        self._kind: Final = kind

    @cached_property
    def java(self) -> npt.NDArray[np.int32]:
        """Java's Integer.hashCode or Long.hashCode of each key, 0 for a null."""
        if self._kind == "int":
            return self.numbers.astype(np.int32)
        words = self.numbers.view(np.uint64)
        return (words ^ words >> np.uint64(32)).astype(np.uint32).view(np.int32)

    def filter(self, mask: pa.Array) -> HashedNumbers:
        return HashedNumbers(self.keys.filter(mask), self.numbers[mask.to_numpy(zero_copy_only=False)], self._kind)


def key_type(column: pa.DataType, given: GivenKeyType = "auto") -> KeyType:
    """Return the type by which the keys of an Arrow column are hashed. Raises SchemaError WRONG_TYPE if the column cannot have keys."""
    whole = pa.types.is_integer(column)
    if not whole and not _is_text(column):
        raise SchemaError(
            SchemaCondition.WRONG_TYPE, f"a sharding key is a string or a whole number, not {column}. Cast the column"
        )
    if given != "auto":
        return given
    if not whole:
        return "text"
    # A column type whose values all fit a Java Integer is hashed as an Integer.
    return "int" if column.bit_width + pa.types.is_unsigned_integer(column) <= 32 else "long"


def _is_text(column: pa.DataType) -> bool:
    kind = column.value_type if pa.types.is_dictionary(column) else column
    return any(test(kind) for test in _TEXT_LIKE)


def hashed_keys(column: pa.Array, given: GivenKeyType, where: str, first: int = 0) -> HashedKeys:
    """Return the keys of a column with their hashes. A string that is not UTF-8 is decoded as Java does (text.py).

    In errors, ``where`` names the rows, and ``first`` is the number of the first row. Raises SchemaError WRONG_TYPE, or MessageError
    BAD_KEY for a key that is not a whole number or is too large for the type, TOO_LARGE for keys of more than 2 GiB.
    """
    kind = key_type(column.type, given)
    column = narrow(column, f"the column of sharding keys of {where}")
    try:
        texts = repaired(column)[0].cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"the sharding keys of {where} are binary, and not all are UTF-8. Write the keys as text, for example hex(key)",
        ) from error
    if kind == "text":
        return HashedKeys(texts)
    numbers = _numbers(column if pa.types.is_integer(column.type) else texts, kind)
    if isinstance(numbers, int):
        raise _bad(f"row {first + numbers} of {where}", texts[numbers].as_py(), kind)
    return HashedNumbers(texts, numbers, kind)


def check_lines(keys: pa.Array, kind: KeyType, lines: Sequence[int]) -> None:
    """Check the keys (strings) of input lines. Raises MessageError BAD_KEY, which names the line, for a key that ``kind`` cannot hold."""
    if kind == "text":
        return
    numbers = _numbers(keys, kind)
    if isinstance(numbers, int):
        raise _bad(f"line {lines[numbers]} of the input", keys[numbers].as_py(), kind)


def _bad(where: str, key: str, kind: Literal["int", "long"]) -> MessageError:
    shown = repr(key) if len(key) <= _SHOWN else f"{key[:_SHOWN]!r}…"
    java = "Integer" if kind == "int" else "Long"
    return MessageError(
        MessageCondition.BAD_KEY,
        f"{where} has the sharding key {shown}, but Java's {java} holds only whole numbers of {_BITS[kind]} bits. "
        "Correct the key, or hash keys as text with shardingKeyType=text (--sharding-key-type text)",
    )


def _numbers(column: pa.Array, kind: Literal["int", "long"]) -> npt.NDArray[np.int64] | int:
    """Return the values of whole numbers or of their texts, 0 for a null. If ``kind`` cannot hold a value, return its row number instead."""
    if not pa.types.is_integer(column.type):
        bad = pc.fill_null(pc.invert(pc.match_substring_regex(column, f"^{_NUMBER}$")), False)
        if pc.any(bad).as_py():
            return int(pc.index(bad, True).as_py())
    try:
        wide = pc.fill_null(column.cast(pa.int64()), 0)
    except pa.ArrowInvalid:
        least, most = -(2**63), 2**63 - 1
        return next(row for row, key in enumerate(column.to_pylist()) if key is not None and not least <= int(key) <= most)
    numbers: npt.NDArray[np.int64] = wide.to_numpy(zero_copy_only=False)
    if kind == "int":
        large = np.flatnonzero(numbers.astype(np.int32) != numbers)
        if len(large):
            return int(large[0])
    return numbers


def is_number(key: str) -> bool:
    """Whether a key's text is a whole number of any size."""
    return re.fullmatch(_NUMBER, key) is not None
