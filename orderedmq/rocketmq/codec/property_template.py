"""Cuts the properties of many messages into columns by a template that is learned from some of the messages. Pure.

Messages of one producer have the same property names in the same order. Some values are the same in all messages, and others have the
same length. So the text between the values that differ is compared as a whole, and the end of a value is searched only if its length
also differs. This takes much less time than searching for all separators (`decode_properties`).

Functions return None if a message does not fit the template or is irregular. In that case `decode_properties` must read the messages.
Otherwise the values equal those of `decode_properties`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from orderedmq.rocketmq.codec.gather import Bytes, Int64s, at_every_byte, contents, first_unequal, gather, gather_alike
from orderedmq.rocketmq.codec.properties import NAME_END, VALUE_END

#: The number of messages from which a template is first learned. At most as many messages that do not fit are added to them later.
_SAMPLES: Final = 6
_MORE: Final = 6
#: The template is given up if the end of a value is tried at more than this many places per message, on average.
_TRIES: Final = 3
#: Values of unusual lengths are searched one by one if at most one message in this many has such a value.
_ODD: Final = 8
_WORD: Final = 8


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
    for name, found in zip(names, zip(*rows)):
        literals[-1] += name + NAME_END
        if len(set(found)) == 1:
            literals[-1] += found[0]
            alike[name] = found[0]
        else:
            alike.pop(name, None)
            values.append(_Value(name, tuple(length for length, _ in Counter(map(len, found)).most_common())))
            literals.append(b"")
        literals[-1] += VALUE_END
    if not last:
        literals[-1] = literals[-1].removesuffix(VALUE_END)
    return Template(tuple(literals), tuple(values), alike)


def _parse(text: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return names and values; None if there are none, or if an entry is irregular."""
    found = []
    for entry in text.removesuffix(VALUE_END).split(VALUE_END):
        name, _, value = entry.partition(NAME_END)
        if not name or not value or NAME_END in value:
            return None
        found.append((name, value))
    return found


def cut_by_template(
    data: Bytes, begins: Int64s, ends: Int64s, names: Sequence[bytes], order: Int64s | None = None
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
    left = len(values)
    # Go from the end back to the last value whose length differs between messages.
    stops: list[tuple[Int64s, Int64s]] = []
    stop = _before(data, ends, literals[-1])
    while left and len(values[left - 1].lengths) == 1:
        left -= 1
        begin = stop - values[left].lengths[0]
        stops.append((begin, stop))
        stop = _before(data, begin, literals[left])
    at = begins
    if not left:
        if (stop != begins).any():
            raise _Unlike(int(np.argmax(stop != begins)))
        return stops[::-1]
    # Go from the beginning to that value.
    places = []
    at = _behind(data, begins, literals[0])
    for number in range(left - 1):
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
        found = (words[ends] & mask) == word
        end[odd[found]] = ends[found]
        odd = odd[~found]
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
    found: dict[bytes, pa.Array] = {}
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
        found[value.name] = array.view(pa.string()) if int(text.max()) < 128 else array
    for name, text_alike in template.alike.items():
        if name in names:
            kind = pa.string() if text_alike.isascii() else pa.binary()
            found[name] = pa.repeat(pa.scalar(text_alike, pa.binary()), rows).view(kind)
    return {name: found[name] if name in found else pa.nulls(rows, pa.string()) for name in names}
