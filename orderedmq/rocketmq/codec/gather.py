"""Gathers scattered strings of one buffer into an Arrow array by their bounds, at memory speed, and makes strings of hex digits.

Gathering bytes with numpy costs microseconds per row. Instead, make an Arrow array with a slot for each string and a slot for each gap
between two strings, which costs nothing. Then ``take`` copies every second slot at memory speed.
"""

from __future__ import annotations

import binascii
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def gather(
    data: pa.Buffer,
    begins: Int64s,
    ends: Int64s,
    kind: pa.DataType,
    rows: tuple[Int64s, int] | None = None,
    order: Int64s | None = None,
) -> pa.Array:
    """Return ``data[begins[i]:ends[i]]`` for each i, as an array of ``kind`` (binary, or string for bytes known to be UTF-8).

    The strings must not overlap, and ``data`` must have less than 2 GiB. If the strings are not in the order of the buffer, ``order``
    must sort them (`order_of`). ``rows``, if given, has the row of each string and the number of rows, and requires strings that are in
    order. Rows without a string are null. If a row has several strings, the last one counts.
    """
    count = len(begins)
    if not count:
        return pa.nulls(rows[1] if rows else 0, kind)
    if order is not None:
        begins, ends = begins[order], ends[order]
    bounds = np.empty(2 * count, dtype=np.int32)
    bounds[0::2] = begins
    bounds[1::2] = ends
    slots = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(bounds), data])
    if order is not None:
        slot_of = np.empty(count, dtype=np.int64)
        slot_of[order] = np.arange(0, 2 * count, 2)
        return slots.take(pa.array(slot_of))
    if rows is None:
        return slots.take(_every_second(count))
    slot_of = np.full(rows[1], -1, dtype=np.int64)
    slot_of[rows[0]] = np.arange(0, 2 * count, 2)
    return slots.take(pa.array(slot_of, mask=slot_of < 0))


def order_of(begins: Int64s) -> Int64s | None:
    """Return the indices that sort ``begins``; None if it is already sorted."""
    return None if (begins[1:] >= begins[:-1]).all() else np.argsort(begins, kind="stable")


def gather_alike(data: Bytes, begins: Int64s, length: int) -> pa.Array:
    """Return ``data[begins[i]:begins[i] + length]`` for each i as binary. ``length`` is above 0, and ``begins`` may be in any order."""
    values = at_every_byte(data, f"V{length}")[begins]
    return pa.Array.from_buffers(pa.binary(), len(begins), [None, _every(length, len(begins)), pa.py_buffer(values)])


@lru_cache(maxsize=16)
def _every(length: int, count: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, (count + 1) * length, length, dtype=np.int32))


@lru_cache(maxsize=4)
def _every_second(count: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * count, 2))


def total_bytes(array: pa.Array) -> int:
    """Return the total size of the values of a binary or string array without reading each value. Not for Arrow's large types."""
    if not len(array):
        return 0
    bounds = memoryview(array.buffers()[1]).cast("B").cast("i")
    size: int = bounds[array.offset + len(array)] - bounds[array.offset]
    return size


def contents(array: pa.Array) -> tuple[Bytes, Int64s]:
    """Return the bytes of a binary or string array, the start of each row, and the end of the last row. Not for Arrow's large types."""
    _, offsets, data = array.buffers()
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    bounds = np.frombuffer(offsets, dtype=np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    raw: Bytes = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, dtype=np.uint8)
    return raw, bounds


def at_every_byte(data: Bytes, kind: str | np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a view of ``data`` whose element i is the value of type ``kind`` at byte i."""
    kind = np.dtype(kind)
    return np.ndarray((max(len(data) - kind.itemsize + 1, 0),), dtype=kind, buffer=data.data, strides=(1,))


def equal_to(data: Bytes, begins: Int64s, text: bytes) -> npt.NDArray[np.bool_]:
    """Return for each of ``begins`` whether ``data`` has ``text`` there. ``text`` must not be empty, and ``data`` must be long enough."""
    # Compare numbers, because this is much faster than comparing bytes. The last number may overlap the previous one.
    width = next(size for size in (8, 4, 2, 1) if size <= len(text))
    numbers = at_every_byte(data, f"<u{width}")
    equal: npt.NDArray[np.bool_] = np.ones(len(begins), dtype=np.bool_)
    for place in (*range(0, len(text) - width, width), len(text) - width):
        equal &= numbers[begins + place] == int.from_bytes(text[place : place + width], "little")
    return equal


def all_equal_to(data: Bytes, begins: Int64s, text: bytes) -> bool:
    """Return whether ``data`` has ``text`` at all of ``begins``. See `equal_to`."""
    return at_every_byte(data, f"V{len(text)}")[begins].tobytes() == text * len(begins)


def hex_digits(data: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return rows of bytes as rows of upper-case hex digits, two for each byte."""
    digits = np.frombuffer(binascii.hexlify(data.tobytes()).upper(), dtype=np.uint8)
    return digits.reshape(len(data), 2 * data.shape[1])


def fixed_strings(characters: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> pa.Array:
    """Return rows of ASCII characters as an array of strings."""
    count, width = characters.shape
    ends = np.arange(0, width * (count + 1), width, dtype=np.int32)
    data = pa.py_buffer(np.ascontiguousarray(characters))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), data])
