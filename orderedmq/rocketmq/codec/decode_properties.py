"""Decodes the properties of many messages into columns, in one vectorised scan for the separators. Pure.

Names are found by their length and bytes. Functions return None if a message is irregular: an entry has no name or value, a value contains
a separator, or a name is not UTF-8. Then the exact parser (`parse_properties`) must read the messages. Otherwise the columns equal its
result. ``malformed`` gets the numbers of messages with a value that is not UTF-8.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.rocketmq.codec.gather import Bytes, Int64s, all_equal_to, contents, equal_to, gather
from orderedmq.rocketmq.codec.stored_message import NAME_END, VALUE_END
from orderedmq.schema import PROPERTIES_TYPE
from orderedmq.text import repaired

_VALUE_END: Final = VALUE_END[0]
#: Duplicate names are looked for only if rows times names is at most this. The exact parser reads larger maps.
_MOST_CELLS: Final = 1 << 24
#: The separators of an entry, as one little-endian number.
_BOTH: Final = int.from_bytes(NAME_END + VALUE_END, "little")
_NONE: Final = np.zeros(0, dtype=np.int64)


class Entries(NamedTuple):
    """The properties of ``messages`` messages, concatenated in ``text``: name [begins, middles), value (middles, ends).

    ``kind`` is the Arrow type for parts of the text: string if all of the text is ASCII, otherwise binary. ``widths`` are the lengths
    of the names in bytes. ``each`` is the number of entries per message if the names have the same lengths in all messages, else None.
    """

    messages: int
    text: pa.Buffer
    data: Bytes
    row_ends: Int64s
    begins: Int64s
    middles: Int64s
    ends: Int64s
    kind: pa.DataType
    widths: npt.NDArray[np.int32]
    each: int | None

    def layout(self, names: Collection[bytes] | None = None) -> tuple[bytes, ...] | None:
        """Return the names of a message's entries if all messages have the same names in the same order (the usual case), else None.

        If ``names`` is given, only entries whose names are as long as one of ``names`` are compared. The other names in the result are
        empty.
        """
        if self.each is None:
            return None
        lengths = None if names is None else set(map(len, names))
        layouts, each = [], self.each
        for number, width in enumerate(self.widths[:each].tolist()):
            if lengths is not None and width not in lengths:
                layouts.append(b"")
                continue
            begins = self.begins[number::each]
            name = self.data[begins[0] : begins[0] + width].tobytes()
            if not all_equal_to(self.data, begins, name):
                return None
            layouts.append(name)
        return tuple(layouts)

    def rows(self) -> Int64s:
        """Return for each entry the number of its message."""
        if self.each is not None:
            return np.repeat(np.arange(self.messages, dtype=np.int64), self.each)
        return np.repeat(np.arange(self.messages, dtype=np.int64), np.diff(self.bounds()))

    def bounds(self) -> Int64s:
        """Return the index of each message's first entry, and the number of all entries."""
        bounds = np.zeros(self.messages + 1, dtype=np.int64)
        bounds[1:] = np.searchsorted(self.ends, self.row_ends)
        return bounds


def find_entries(texts: pa.Array) -> Entries | None:
    """Return the entries of an array of properties texts (binary, no nulls, less than 2 GiB in all). None if one is irregular."""
    data, bounds = contents(texts)
    lengths = np.diff(bounds)
    last = data[np.maximum(bounds[1:] - 1, 0)] if len(data) else np.zeros(len(texts), dtype=np.uint8)
    open_end = (lengths > 0) & (last != _VALUE_END)
    if open_end.any():
        # The last separator is optional. Add it if it is missing, so that all entries end in the same way.
        added = pc.if_else(pa.array(open_end), pa.scalar(VALUE_END), pa.scalar(b""))
        texts = pc.binary_join_element_wise(texts, added, b"")
        data, bounds = contents(texts)
    data = data[: bounds[-1]]
    places = np.flatnonzero(np.less_equal(data, _VALUE_END, out=_bools(len(data))))
    marks = data[places]
    if len(marks) and not marks.min():
        # Drop the zero bytes, which are not separators.
        places = places[marks > 0]
        marks = marks[marks > 0]
    # Each entry has two separators: one after its name and one after its value.
    if len(marks) % 2 or (marks.view("<u2") != _BOTH).any():
        return None
    middles, ends = places[0::2].copy(), places[1::2].copy()
    begins = np.empty_like(ends)
    if len(ends):
        begins[0] = 0
        np.add(ends[:-1], 1, out=begins[1:])
    widths = (middles - begins).astype(np.int32)
    if len(ends) and (widths.min() < 1 or int((ends - middles).min()) < 2):
        return None
    ascii_only = not len(data) or int(data.max()) < 128
    kind = pa.string() if ascii_only else pa.binary()
    each = _each(widths, ends, bounds[1:])
    return Entries(len(texts), texts.buffers()[2], data, bounds[1:], begins, middles, ends, kind, widths, each)


def _bools(count: int) -> npt.NDArray[np.bool_]:
    """Return a writable array in memory of Arrow's allocator, because fresh pages for a large array cost more than filling it."""
    return np.frombuffer(pa.allocate_buffer(count), dtype=np.bool_) if count else np.zeros(0, dtype=np.bool_)


def _each(widths: npt.NDArray[np.int32], ends: Int64s, row_ends: Int64s) -> int | None:
    """Return the number of entries per message if all messages have equally many, with names of the same lengths; otherwise None."""
    rows = len(row_ends)
    each = len(ends) // rows if rows else 0
    if not each or each * rows != len(ends) or (ends[each - 1 :: each] != row_ends - 1).any():
        return None
    return each if (widths.reshape(-1, each) == widths[:each]).all() else None


def _strings(array: pa.Array) -> tuple[pa.Array, Int64s]:
    """Return the result of `text.repaired`. An array of strings is not checked, because it is known to be valid."""
    return (array, _NONE) if pa.types.is_string(array.type) else repaired(array.view(pa.string()))


def columns_of(entries: Entries, names: tuple[str, ...], malformed: set[int]) -> dict[str, pa.Array]:
    """Return the values of each name as strings. The value is null if a message has no such property."""
    layout = entries.layout([name.encode() for name in names])
    cut = partial(_search, entries, entries.rows()) if layout is None else partial(_cut, entries, layout)
    arrays = {}
    for name in names:
        arrays[name], rows = _strings(cut(name.encode()))
        malformed.update(rows.tolist())
    return arrays


def _cut(entries: Entries, layout: tuple[bytes, ...], name: bytes) -> pa.Array:
    """Return the values of a name that is at the same index in every message. If a name occurs twice, the last value counts."""
    if name not in layout:
        return pa.nulls(entries.messages, entries.kind)
    each = len(layout)
    at = each - 1 - layout[::-1].index(name)
    return gather(entries.text, entries.middles[at::each] + 1, entries.ends[at::each], entries.kind)


def _search(entries: Entries, rows: Int64s, name: bytes) -> pa.Array:
    """Return the values of a name that may be at any index. ``rows`` has the index of each entry's message."""
    at = np.flatnonzero(entries.widths == len(name))
    at = at[equal_to(entries.data, entries.begins[at], name)]
    return gather(entries.text, entries.middles[at] + 1, entries.ends[at], entries.kind, (rows[at], entries.messages))


def maps_of(entries: Entries, malformed: set[int]) -> pa.Array | None:
    """Return all properties of each message in their order. None if a message has a name twice, or a name that is not UTF-8."""
    keys, bad = _strings(gather(entries.text, entries.begins, entries.middles, entries.kind))
    if len(bad):
        return None
    items, bad = _strings(gather(entries.text, entries.middles + 1, entries.ends, entries.kind))
    if len(bad):
        malformed.update(entries.rows()[bad].tolist())
    layout = entries.layout()
    if layout is not None:
        if len(set(layout)) < len(layout):
            return None
    elif len(keys):
        codes = keys.dictionary_encode()
        different = len(codes.dictionary)
        if different * entries.messages > _MOST_CELLS:
            return None
        cells = entries.rows() * different + codes.indices.to_numpy()
        if np.bincount(cells, minlength=1).max() > 1:
            return None
    return pa.MapArray.from_arrays(pa.array(entries.bounds().astype(np.int32)), keys, items).cast(PROPERTIES_TYPE)
