"""Encodes a producer's rows into the bodies of batch sends, by column. Pure.

A batch has messages of one queue, in the order of the rows (``MessageBatch``, ``MessageDecoder.encodeMessages``). A broker appends the
whole batch or nothing, and answers with the offset of the first message. The others follow without a gap. Send a batch with ``m=true``,
because otherwise the broker stores it as one body. Each message has its own UNIQ_KEY, because a UNIQ_KEY in the envelope would turn the
batch into an inner batch. Properties that RocketMQ would silently change (with separators, or empty) are refused. The error names the row.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition
from orderedmq.errors import MessageError
from orderedmq.model import MAX_BODY_BYTES, is_reserved
from orderedmq.rocketmq.codec.gather import Int64s, contents
from orderedmq.rocketmq.codec.stored_message import (
    BROKERS_SHARE,
    KEYS,
    MAX_SENT_BYTES,
    NAME_END,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    VALUE_END,
    bad_property,
)
from orderedmq.rows.message_rows import reserved
from orderedmq.schema import PROPERTIES_TYPE, null_where

#: A request ends before a message that would make it larger than this number of bytes.
TARGET_BYTES: Final = 1024 * 1024
#: A broker refuses a batch with a larger body (``maxMessageSize``), so a message that is too large for a batch is sent alone.
MAX_BATCH_BYTES: Final = MAX_BODY_BYTES
#: The maximum bytes of a batch when it is stored. A broker writes its records into a buffer of 4 MiB + 64 KiB (``MessageExtEncoder``).
#: Small messages grow most when they are stored.
STORED_BYTES: Final = 3 * 1024 * 1024
#: The maximum number of rows that are encoded together, and the approximate maximum bytes of their bodies.
GROUP_ROWS: Final = 16384
GROUP_BYTES: Final = 32 * 1024 * 1024

#: With fewer rows than this, encoding them one at a time is faster: a few rows take 450 µs by column, and 7 µs each one at a time.
FEWEST: Final = 32

#: totalSize, magic, bodyCRC, flag, bodyLength.
_HEAD_BYTES: Final = 20
_FRAME_BYTES: Final = _HEAD_BYTES + 2
_HEAD: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">H")
#: The maximum number of messages in a request, so that four digits are enough for a message's place in the request.
MOST_ROWS: Final = 10_000
#: The numbers below 10,000 as four ASCII digits each.
_DIGITS: Final = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype=np.uint32)
#: The bytes by which a stored record is larger than the sent message: more fixed fields, the topic's name, the broker's properties.
_STORED_EXTRA: Final = 91 - _FRAME_BYTES + 127 + BROKERS_SHARE
_COLUMNS: Final = {"tags": TAGS, "keys": KEYS, "sharding_key": SHARDING_KEY}
_NAME_END: Final = NAME_END[0]
_VALUE_END: Final = VALUE_END[0]
_SEPARATORS: Final = "[\x01\x02]"
_EMPTY: Final = pa.scalar("", pa.string())


class Stamp(NamedTuple):
    """A property of each message: ``text``, the message's number (12 digits), and the message's place in its request (4 digits).

    ``first`` is the number of the first message. A task never has 10^12 rows.
    """

    name: str
    text: str
    first: int

    @property
    def size(self) -> int:
        """The size of the property in bytes."""
        return len(self._prefix) + 17

    @property
    def _prefix(self) -> bytes:
        return f"{self.name}\x01{self.text}".encode()

    def text_of(self, number: int, place: int) -> bytes:
        """Return the property of message ``number``, counted from the first. ``place``: its place in its request."""
        return self._prefix + b"%012d%04d\x02" % (self.first + number, place)

    def texts(self, begin: int, cuts: Sequence[tuple[int, int]]) -> pa.Array:
        """Return the property of each message.

        ``begin``: the number of messages sent before. ``cuts``: the rows [start, stop) of each request.
        """
        count = cuts[-1][1] if cuts else 0
        numbers = np.arange(self.first + begin, self.first + begin + count)
        starts = np.repeat([start for start, _ in cuts], [stop - start for start, stop in cuts])
        quads = np.empty((count, 4), dtype=np.uint32)
        quads[:, 0] = _DIGITS[numbers // 10**8]
        quads[:, 1] = _DIGITS[numbers // 10**4 % 10**4]
        quads[:, 2] = _DIGITS[numbers % 10**4]
        quads[:, 3] = _DIGITS[np.arange(count) - starts]
        prefix = np.frombuffer(self._prefix, dtype=np.uint8)
        # The width is fixed, because the sizes of rows decide which rows go into a request.
        out = np.empty((count, self.size), dtype=np.uint8)
        out[:, : len(prefix)] = prefix
        out[:, len(prefix) : -1] = quads.view(np.uint8)
        out[:, -1] = VALUE_END[0]
        return _fixed(out)


class Packing(Enum):
    """How rows are divided into requests."""

    #: Rows share a batch. Its envelope has no properties.
    BATCH = "batch"
    #: Rows share a batch. Its envelope has the sharding key of the first row. See `append.broker_port`.
    FIFO_BATCH = "FIFO batch"
    #: Each row has its own request.
    ALONE = "alone"


class SendBody(NamedTuple):
    """The body of one send request, with the rows [first, first + rows).

    ``properties`` is None for a batch (``m=true``). Otherwise the body is that of one message that is too large for a batch or must be
    sent alone (``m=false``), and ``properties`` are those of the message, for field ``i`` of the request's header. A batch has
    ``envelope`` in that field.
    """

    first: int
    rows: int
    body: memoryview
    properties: str | None
    envelope: str = ""


def encode(
    rows: pa.RecordBatch,
    unique_keys: pa.Array,
    where: str,
    *,
    extra: Mapping[str, pa.Array | str] | None = None,
    first: int = 0,
    stamp: Stamp | None = None,
    packing: Packing = Packing.BATCH,
) -> Iterator[SendBody]:
    """Yield rows of one queue as the bodies of send requests of about 1 MiB, in order.

    ``rows`` come from `message_rows.normalise`. ``unique_keys`` has a UNIQ_KEY for each row (sender.UniqueKeys). ``extra``
    has further properties by name: a text for all rows, or an array with a string for each row (null means no property). An empty tag,
    key or sharding key is left out, as in Java's ``Message``. ``stamp`` is a property with a reserved name that numbers the messages.
    User properties that only RocketMQ, a column or ``extra`` may set are left out. ``packing`` FIFO_BATCH requires a sharding key in each
    row. ``where`` names the target in errors, which count rows from ``first``.

    Raises MessageError BAD_PROPERTY or PROPERTIES_TOO_LARGE before it yields any of the up to 16k rows that are encoded together with
    the bad row.
    """
    if len(unique_keys) != rows.num_rows:
        raise ValueError(f"there are {len(unique_keys)} keys for {rows.num_rows} rows")
    properties = extra or {}
    for begin, count in _groups(rows.column("body")):
        part = {
            name: value if isinstance(value, str) else value.slice(begin, count)
            for name, value in {**properties, UNIQ_KEY: unique_keys}.items()
        }
        yield from _encode_group(rows.slice(begin, count), part, where, first, begin, stamp, packing)


def property_columns(rows: pa.RecordBatch, names: Iterable[str]) -> dict[str, pa.Array]:
    """Return the properties ``names`` of rows as columns for the argument ``extra`` of `encode`.

    `encode` removes properties with reserved names from rows, so the caller passes those that are to stay separately.
    """
    of_rows: list[dict[str, str]] = [{} for _ in range(rows.num_rows)]
    index = rows.schema.get_field_index("properties")
    if index >= 0:
        of_rows = [dict(pairs or ()) for pairs in rows.column(index).cast(PROPERTIES_TYPE).to_pylist()]
    return {name: pa.array([properties.get(name) for properties in of_rows], pa.string()) for name in names}


def _groups(body: pa.Array) -> Iterator[tuple[int, int]]:
    """Yield (begin, count) of each group of rows that are encoded together."""
    _, bounds = contents(body)
    begin = 0
    while begin < len(body):
        limit = int(np.searchsorted(bounds, bounds[begin] + GROUP_BYTES, side="right")) - 1
        end = min(max(limit, begin + 1), begin + GROUP_ROWS, len(body))
        yield begin, end - begin
        begin = end


def _encode_group(
    rows: pa.RecordBatch,
    extra: Mapping[str, pa.Array | str],
    where: str,
    first: int,
    begin: int,
    stamp: Stamp | None,
    packing: Packing,
) -> Iterator[SendBody]:
    is_small = len(rows) < min(FEWEST, MOST_ROWS) and packing is Packing.BATCH
    if is_small and (few := _encode_few(rows, extra, begin, stamp)) is not None:
        yield SendBody(begin, len(rows), few, None)
        return
    body = rows.column("body")
    more = stamp.size if stamp is not None else 0
    properties = _Properties(rows, extra, where, first + begin)
    texts = properties.parts()
    widths = properties.sizes(MAX_SENT_BYTES - more) + more
    lengths = pc.binary_length(body).to_numpy().astype(np.int64)
    heads = np.zeros((len(body), _HEAD_BYTES // 4), dtype=">i4")
    heads[:, 0] = _FRAME_BYTES + lengths + widths
    heads[:, 4] = lengths
    ends = np.concatenate([[0], np.cumsum(heads[:, 0].astype(np.int64))])
    alone = packing is Packing.ALONE
    cuts = [(row, row + 1) for row in range(len(body))] if alone else list(_cuts(ends))
    parts = [_fixed(heads), body, _fixed(widths.astype(">u2").reshape(-1, 1)), *texts]
    if stamp is not None:
        parts.append(stamp.texts(begin, cuts))
    joined = pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")
    # The joined rows are stored one after another, so the requests' bodies are slices of their buffer.
    data = memoryview(joined.buffers()[2]).cast("B") if len(joined) else memoryview(b"")
    for start, stop in cuts:
        size = int(ends[stop] - ends[start])
        if size <= MAX_BATCH_BYTES and not alone:
            envelope = ""
            if packing is Packing.FIFO_BATCH:
                envelope = f"{SHARDING_KEY}\x01{rows.column('sharding_key')[start].as_py()}\x02"
            yield SendBody(begin + start, stop - start, data[int(ends[start]) : int(ends[stop])], None, envelope)
        else:
            at = int(ends[start]) + _HEAD_BYTES
            behind = at + int(lengths[start]) + _FRAME_BYTES - _HEAD_BYTES
            text = str(data[behind : behind + int(widths[start])], "utf-8")
            yield SendBody(begin + start, 1, data[at : at + int(lengths[start])], text)


def _encode_few(
    rows: pa.RecordBatch, extra: Mapping[str, pa.Array | str], begin: int, stamp: Stamp | None
) -> memoryview | None:
    """Return the body of one request with all rows, built row by row; None if the rows need more than that or one may be bad."""
    if "properties" in rows.schema.names and rows.column("properties").null_count < len(rows):
        return None
    columns = {name: rows.column(column) for column, name in _COLUMNS.items() if column in rows.schema.names}
    values = {
        name: [value] * len(rows) if isinstance(value, str) else value.to_pylist()
        for name, value in {**columns, **extra}.items()
    }
    messages: list[bytes] = []
    size = 0
    for row, body in enumerate(rows.column("body").to_pylist()):
        pairs = [(name, texts[row]) for name, texts in values.items() if texts[row]]
        text = "".join(f"{name}\x01{value}\x02" for name, value in pairs)
        properties = text.encode()
        if len(properties) > MAX_SENT_BYTES - (stamp.size if stamp is not None else 0):
            return None
        if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs):
            return None
        if stamp is not None:
            properties += stamp.text_of(begin + row, row)
        length = _FRAME_BYTES + len(body) + len(properties)
        messages += (_HEAD.pack(length, 0, 0, 0, len(body)), body, _SHORT.pack(len(properties)), properties)
        size += length
    return memoryview(b"".join(messages)) if size <= TARGET_BYTES else None


def _cuts(ends: Int64s) -> Iterator[tuple[int, int]]:
    """Yield the rows [start, stop) of each request. Row i has the bytes [ends[i], ends[i + 1])."""
    stored = ends + _STORED_EXTRA * np.arange(len(ends), dtype=np.int64)
    start, count = 0, len(ends) - 1
    while start < count:
        fits = min(
            int(np.searchsorted(ends, ends[start] + TARGET_BYTES, side="right")),
            int(np.searchsorted(stored, stored[start] + STORED_BYTES, side="right")),
        )
        stop = min(max(fits - 1, start + 1), start + MOST_ROWS)
        yield start, stop
        start = stop


def _fixed(values: npt.NDArray[Any]) -> pa.Array:
    """Return the rows of a matrix as binary values."""
    width = values.shape[1] * values.itemsize
    ends = np.arange(0, width * (len(values) + 1), width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(values))]
    )


class _Properties:
    """Builds the properties texts of rows. User properties come first, because the last property of a name counts."""

    def __init__(self, rows: pa.RecordBatch, extra: Mapping[str, pa.Array | str], where: str, first: int) -> None:
        self._rows = rows
        self._extra = extra
        self._where = where
        self._first = first
        #: The texts to join in each row. Null means no text.
        self._parts: list[pa.Array | str] = []
        self._sound = True

    def parts(self) -> list[pa.Array | bytes]:
        """Return binary texts whose concatenation is a row's properties. Raises MessageError BAD_PROPERTY."""
        texts = {name: self._rows.column(column) for column, name in _COLUMNS.items() if column in self._rows.schema.names}
        if "properties" in self._rows.schema.names:
            self._add_map(self._rows.column("properties"))
        for name, values in {**texts, **self._extra}.items():
            if not isinstance(values, str):
                self._add(name, values)
            elif values:
                self._add_text(f"{name}\x01{values}\x02")
                self._sound = self._sound and not re.search(_SEPARATORS, name + values)
        if not self._sound:
            raise self._separator_error({**texts, **self._extra})
        return [part.encode() if isinstance(part, str) else part.view(pa.binary()) for part in self._parts]

    def sizes(self, most: int) -> Int64s:
        """Return the size of each row's properties in bytes. Raises MessageError PROPERTIES_TOO_LARGE above ``most`` bytes."""
        sizes = np.zeros(self._rows.num_rows, dtype=np.int64)
        for part in self._parts:
            if isinstance(part, str):
                sizes += len(part.encode())
            else:
                # Arrays with nulls are the results of a join, in which a null has no bytes.
                sizes += np.diff(contents(part)[1])
        if len(sizes) and int(sizes.max()) > most:
            row = int(np.argmax(sizes))
            raise MessageError(
                MessageCondition.PROPERTIES_TOO_LARGE,
                f"row {self._first + row} for {self._where} has properties of {sizes[row]} bytes, including its tags and keys, but at most "
                f"{most} can be sent",
            )
        return sizes

    def _add(self, name: str, values: pa.Array) -> None:
        """Add a property with a value per row. A row whose value is null or empty gets no property."""
        if values.null_count or (len(values) and pc.min(pc.binary_length(values)).as_py() == 0):
            values = null_where(pc.equal(values, ""), values)
            if values.null_count == len(values):
                return
            self._parts.append(pc.binary_join_element_wise(f"{name}\x01", values, "\x02", _EMPTY))
        else:
            self._add_text(f"{name}\x01")
            self._parts.append(values)
            self._add_text("\x02")
        data, bounds = contents(values)
        # Check the minimum first, because it takes one pass without a copy, and text seldom has control characters.
        if len(data := data[bounds[0] : bounds[-1]]) and data.min() <= _VALUE_END:
            self._sound = self._sound and not np.isin(data, (_NAME_END, _VALUE_END)).any()

    def _add_text(self, text: str) -> None:
        """Add the same text to each row. Adjacent texts are merged, because every part costs some nanoseconds per row."""
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        else:
            self._parts.append(text)

    def _add_map(self, column: pa.Array) -> None:
        """Add the user's properties, except those with reserved names and those in ``extra``."""
        if column.null_count and _has_hidden_entries(column):
            column = pa.array(column.to_pylist(), column.type)
        bounds = column.offsets.to_numpy().astype(np.int64)
        # A slice still has the keys and items of the whole array, and its offsets count from the beginning of these.
        keys = column.keys.slice(bounds[0], bounds[-1] - bounds[0])
        items = column.items.slice(bounds[0], bounds[-1] - bounds[0])
        bounds = bounds - bounds[0]
        if not len(keys):
            return
        ours = pc.or_(reserved(keys), pc.is_in(keys, value_set=pa.array(sorted(self._extra), pa.string())))
        entries = pc.binary_join_element_wise(keys, "\x01", items, "\x02", _EMPTY, null_handling="replace", null_replacement="")
        empty = pc.or_(pc.equal(pc.fill_null(items, ""), ""), pc.equal(keys, ""))
        bad = pc.index(pc.and_not(empty, ours), True).as_py()
        if bad >= 0:
            raise self._bad_property_error(
                int(np.searchsorted(bounds, bad, side="right")) - 1, keys[bad].as_py(), items[bad].as_py() or ""
            )
        if pc.any(ours).as_py():
            entries = pc.if_else(ours, _EMPTY, entries)
        # Entries are stored one after another in the order of the rows, so their buffer is also the buffer of the rows' texts.
        data, ends = contents(entries)
        # Each entry contributes one separator of each kind. Any further separator is in a name or a value.
        count = len(keys) - (pc.sum(ours).as_py() or 0)
        self._sound = np.count_nonzero(data == _NAME_END) == np.count_nonzero(data == _VALUE_END) == count
        offsets = ends[bounds].astype(np.int32)
        self._parts.append(pa.Array.from_buffers(pa.string(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(data)]))

    def _separator_error(self, columns: Mapping[str, pa.Array | str]) -> MessageError:
        """Return the error for the first property whose name or value contains a separator."""
        for name, values in columns.items():
            if isinstance(values, str):
                values = pa.array([values])
            row = pc.index(pc.match_substring_regex(values, _SEPARATORS), True).as_py()
            if row >= 0:
                return self._bad_property_error(row, name, values[row].as_py())
        for row, pairs in enumerate(self._rows.column("properties").to_pylist()):
            for name, value in pairs or ():
                if not is_reserved(name) and name not in self._extra and bad_property(name, value):
                    return self._bad_property_error(row, name, value)
        raise AssertionError("no property has a separator")

    def _bad_property_error(self, row: int, name: str, value: str) -> MessageError:
        return MessageError(
            MessageCondition.BAD_PROPERTY,
            f"row {self._first + row} for {self._where}: property {name!r} {bad_property(name, value)}",
        )


def _has_hidden_entries(column: pa.Array) -> bool:
    """Return whether a null row of a map array has entries, which Arrow hides."""
    return bool((np.diff(column.offsets.to_numpy())[column.is_null().to_numpy(zero_copy_only=False)] > 0).any())
