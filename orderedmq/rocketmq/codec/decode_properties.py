"""Decodes the properties of many messages into columns, by a template, or in one vectorised scan for the separators. Pure.

Messages of one producer have the same property names in the same order. Some values are the same in all messages, and others have the
same length. A `Template` that is learned from some of the messages says so. The text between the values that differ is compared as a
whole, and the end of a value is searched only if its length also differs. This takes much less time than searching for all separators
(`find_entries`), where names are found by their length and bytes.

Functions return None if a message does not fit the template, or is irregular: an entry has no name or value, a value contains a separator,
or a name is not UTF-8. After the template the scan must read the messages, and after the scan the exact parser (`parse_properties`).
Otherwise the columns equal the exact parser's result. ``malformed`` gets the numbers of messages with a value that is not UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.rocketmq.codec.gather import (
    Bytes,
    Int64s,
    all_equal_to,
    at_every_byte,
    contents,
    equal_to,
    first_unequal,
    gather,
    gather_alike,
)
from orderedmq.rocketmq.codec.stored_message import NAME_END, VALUE_END
from orderedmq.schema import PROPERTIES_TYPE
from orderedmq.text import repaired

_NAME_END: Final = NAME_END[0]
_VALUE_END: Final = VALUE_END[0]
#: Duplicate names are looked for only if rows times names is at most this. The exact parser reads larger maps.
_MOST_CELLS: Final = 1 << 24
#: The separators of an entry, as one little-endian number.
_BOTH: Final = int.from_bytes(NAME_END + VALUE_END, "little")
_NONE: Final = np.zeros(0, dtype=np.int64)
#: The number of messages from which a template is first learned. At most as many messages that do not fit are added to them later.
_SAMPLES: Final = 6
_MORE: Final = 6
#: The template is given up if the end of a value is tried at more than this many places per message, on average.
_TRIES: Final = 3
#: Values of unusual lengths are searched one by one if at most one message in this many has such a value.
_ODD: Final = 8
_WORD: Final = 8


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


def strings(array: pa.Array) -> tuple[pa.Array, Int64s]:
    """Return the result of `text.repaired`. An array of strings is not checked, because it is known to be valid."""
    return (array, _NONE) if pa.types.is_string(array.type) else repaired(array.view(pa.string()))


def columns_of(entries: Entries, names: tuple[str, ...], malformed: set[int]) -> dict[str, pa.Array]:
    """Return the values of each name as strings. The value is null if a message has no such property."""
    layout = entries.layout([name.encode() for name in names])
    cut = partial(_search, entries, entries.rows()) if layout is None else partial(_cut, entries, layout)
    arrays = {}
    for name in names:
        arrays[name], rows = strings(cut(name.encode()))
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
    keys, bad = strings(gather(entries.text, entries.begins, entries.middles, entries.kind))
    if len(bad):
        return None
    items, bad = strings(gather(entries.text, entries.middles + 1, entries.ends, entries.kind))
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


class _Value(NamedTuple):
    """A property whose value differs between messages. ``lengths`` has the lengths of its values, the most frequent one first."""

    name: bytes
    lengths: tuple[int, ...]


class Template(NamedTuple):
    """Properties as literals[0] + value of values[0] + ... + literals[-1]. The literals include properties that never differ (``alike``)."""

    literals: tuple[bytes, ...]
    values: tuple[_Value, ...]
    alike: dict[bytes, bytes]

    @property
    def least(self) -> int:
        """The minimum size in bytes of properties that fit this template."""
        return sum(map(len, self.literals)) + len(self.values)


def learn(samples: Sequence[bytes]) -> Template | None:
    """Return the template that the properties of some messages fit; None if there is none, or if a message is irregular."""
    parsed = [_parse(sample) for sample in samples]
    first = parsed[0]
    if first is None:
        return None
    names = [name for name, _ in first]
    last = samples[0].endswith(VALUE_END)
    rows = []
    for sample, entries in zip(samples, parsed):
        if entries is None or [name for name, _ in entries] != names or sample.endswith(VALUE_END) != last:
            return None
        rows.append([value for _, value in entries])
    literals, values, alike = [b""], [], {}
    for name, positions in zip(names, zip(*rows)):
        literals[-1] += name + NAME_END
        if len(set(positions)) == 1:
            literals[-1] += positions[0]
            alike[name] = positions[0]
        else:
            alike.pop(name, None)
            values.append(_Value(name, tuple(length for length, _ in Counter(map(len, positions)).most_common())))
            literals.append(b"")
        literals[-1] += VALUE_END
    if not last:
        literals[-1] = literals[-1].removesuffix(VALUE_END)
    return Template(tuple(literals), tuple(values), alike)


def _parse(text: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return names and values; None if there are none, or if an entry is irregular."""
    entries = []
    for entry in text.removesuffix(VALUE_END).split(VALUE_END):
        name, _, value = entry.partition(NAME_END)
        if not name or not value or NAME_END in value:
            return None
        entries.append((name, value))
    return entries


def cut_by_template(
    data: Bytes, begins: Int64s, ends: Int64s, names: Sequence[bytes], order: Int64s | None
) -> dict[bytes, pa.Array] | None:
    """Return for each name its value in each ``data[begins[i]:ends[i]]``; null if a message has no such property.

    Values are strings if all are ASCII, otherwise binary. If a message has a name twice, the last value counts. ``begins`` must not be
    empty, and ``order`` must sort it (`gather.order_of`).
    """
    rows = len(begins)
    chosen = sorted({row * (rows - 1) // (_SAMPLES - 1) for row in range(_SAMPLES)})
    samples = [data[begins[row] : ends[row]].tobytes() for row in chosen]
    for _ in range(1 + _MORE):
        template = learn(samples)
        if template is None or int((ends - begins).min()) < template.least:
            return None
        try:
            places = _locate(data, begins, ends, template)
        except _Unlike as unlike:
            if unlike.row is None:
                return None
            samples.append(data[begins[unlike.row] : ends[unlike.row]].tobytes())
            continue
        except IndexError:
            return None
        return _columns(data, rows, template, places, names, order)
    return None


class _Unlike(Exception):
    """A message does not fit the template. ``row`` is the message's number, if known."""

    def __init__(self, row: int | None = None) -> None:
        super().__init__(row)
        self.row = row


def _locate(data: Bytes, begins: Int64s, ends: Int64s, template: Template) -> list[tuple[Int64s, Int64s]]:
    """Return where each value begins and ends. Raises _Unlike or IndexError if a byte outside the values differs from the template."""
    literals, values = template.literals, template.values
    remaining = len(values)
    # Go from the end back to the last value whose length differs between messages.
    stops: list[tuple[Int64s, Int64s]] = []
    stop = _before(data, ends, literals[-1])
    while remaining and len(values[remaining - 1].lengths) == 1:
        remaining -= 1
        begin = stop - values[remaining].lengths[0]
        stops.append((begin, stop))
        stop = _before(data, begin, literals[remaining])
    at = begins
    if not remaining:
        if (stop != begins).any():
            raise _Unlike(int(np.argmax(stop != begins)))
        return stops[::-1]
    # Go from the beginning to that value.
    places = []
    at = _behind(data, begins, literals[0])
    for number in range(remaining - 1):
        end = _end_of(data, at, values[number].lengths, literals[number + 1])
        places.append((at, end))
        at = _behind(data, end, literals[number + 1])
    if (stop <= at).any():
        raise _Unlike(int(np.argmax(stop <= at)))
    return [*places, (at, stop), *stops[::-1]]


def _compare(data: Bytes, at: Int64s, literal: bytes) -> None:
    row = first_unequal(data, at, literal)
    if row is not None:
        raise _Unlike(row)


def _behind(data: Bytes, at: Int64s, literal: bytes) -> Int64s:
    _compare(data, at, literal)
    return at + len(literal)


def _before(data: Bytes, end: Int64s, literal: bytes) -> Int64s:
    if not literal:
        return end
    at = end - len(literal)
    _compare(data, at, literal)
    return at


def _end_of(data: Bytes, at: Int64s, lengths: Sequence[int], literal: bytes) -> Int64s:
    """Return where the values that begin at ``at`` end, which is where the first bytes of ``literal`` are. Raises _Unlike."""
    if len(lengths) == 1:
        return at + lengths[0]
    words = at_every_byte(data, "<u8")
    mask = np.uint64((1 << 8 * min(len(literal), _WORD)) - 1)
    word = np.uint64(int.from_bytes(literal[:_WORD], "little"))
    end = at + lengths[0]
    odd = np.flatnonzero((words[end] & mask) != word)
    tried = len(at)
    for length in lengths[1:]:
        if not len(odd):
            return end
        tried += len(odd)
        if tried > _TRIES * len(at):
            raise _Unlike
        ends = at[odd] + length
        is_end = (words[ends] & mask) == word
        end[odd[is_end]] = ends[is_end]
        odd = odd[~is_end]
    if len(odd) * _ODD > len(at):
        raise _Unlike
    longest = 2 * max(lengths) + len(literal) + _WORD
    for row in odd.tolist():
        begin = int(at[row])
        place = data[begin : begin + longest].tobytes().find(literal)
        if place < 1:
            raise _Unlike
        end[row] = begin + place
    return end


def _columns(
    data: Bytes,
    rows: int,
    template: Template,
    places: Sequence[tuple[Int64s, Int64s]],
    names: Sequence[bytes],
    order: Int64s | None,
) -> dict[bytes, pa.Array] | None:
    arrays: dict[bytes, pa.Array] = {}
    for value, (begins, ends) in zip(template.values, places):
        if len(value.lengths) == 1:
            array = gather_alike(data, begins, value.lengths[0])
        else:
            array = gather(pa.py_buffer(data), begins, ends, pa.binary(), order=order)
        text, bounds = contents(array)
        text = text[bounds[0] : bounds[-1]]
        # A value with a separator is really several properties, which the template does not have.
        if int(text.min()) <= VALUE_END[0] and ((text == NAME_END[0]) | (text == VALUE_END[0])).any():
            return None
        arrays[value.name] = array.view(pa.string()) if int(text.max()) < 128 else array
    for name, text_alike in template.alike.items():
        if name in names:
            kind = pa.string() if text_alike.isascii() else pa.binary()
            arrays[name] = pa.repeat(pa.scalar(text_alike, pa.binary()), rows).view(kind)
    return {name: arrays[name] if name in arrays else pa.nulls(rows, pa.string()) for name in names}
