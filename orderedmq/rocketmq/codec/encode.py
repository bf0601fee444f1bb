"""A producer's rows → the bodies of batch sends, by columns.

Rules: pure. One batch has messages of one queue, in the rows' order (``MessageBatch``, ``MessageDecoder.encodeMessages``); a broker
appends it whole or not at all and answers with the first offset, the others follow. It must be sent with ``m=true``: without it the
broker stores the whole batch as one body. UNIQ_KEY stands in each message: in the envelope it would make an inner batch of it.
Nothing that RocketMQ would silently change is sent: a separator in a value or an empty one is refused with its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.core.message_rows import reserved
from orderedmq.errors import MessageError
from orderedmq.model import MAX_BODY_BYTES, is_reserved
from orderedmq.rocketmq.codec import properties as names
from orderedmq.rocketmq.codec.gather import Int64s, contents

#: A request ends behind the message with which it would grow larger than this.
TARGET_BYTES: Final = 1024 * 1024
#: A broker refuses a batch whose body is larger (``maxMessageSize``); such a message is sent alone.
MAX_BATCH_BYTES: Final = MAX_BODY_BYTES
#: A broker writes a batch's records into a buffer of 4 MiB + 64 KiB (``MessageExtEncoder``); small messages grow most.
STORED_BYTES: Final = 3 * 1024 * 1024
#: Rows, and about as many bytes of them, that are encoded at once.
GROUP_ROWS: Final = 16384
GROUP_BYTES: Final = 32 * 1024 * 1024

#: totalSize, magic, bodyCRC, flag, bodyLength.
_HEAD_BYTES: Final = 20
_FRAME_BYTES: Final = _HEAD_BYTES + 2
#: Of a number that counts rows: more than a task ever has.
_MARK_DIGITS: Final = 12
#: What a stored record has more than a sent message: other fixed fields, the topic's name, the broker's own properties.
_STORED_EXTRA: Final = 91 - _FRAME_BYTES + 127 + names.BROKERS_SHARE
_COLUMNS: Final = {"tags": names.TAGS, "keys": names.KEYS, "sharding_key": names.SHARDING_KEY}
_SEPARATORS: Final = "[\x01\x02]"
_EMPTY: Final = pa.scalar("", pa.string())


class SendBody(NamedTuple):
    """The body of one send request: rows [first, first + rows) of those that were given.

    ``properties`` is None for a batch (``m=true``); otherwise the body is one message alone (``m=false``), too large for a batch, and
    these are its properties for the request's header (field ``i``).
    """

    first: int
    rows: int
    body: memoryview
    properties: str | None


def encode(
    rows: pa.RecordBatch,
    unique_keys: pa.Array,
    where: str,
    *,
    extra: Mapping[str, pa.Array | str] | None = None,
    first: int = 0,
    counted: tuple[str, int] | None = None,
) -> Iterator[SendBody]:
    """Rows of one queue as the bodies of send requests of about 1 MiB, in order.

    ``rows`` are as `rows.normalise` gives them. ``unique_keys`` has a UNIQ_KEY for each (message_id.UniqueKeys). ``extra`` are more
    properties by name: text for all rows, or an array of a string for each (null: none). An empty tag, key or sharding key is none,
    as in Java's ``Message``. ``counted`` is a property by which each message says with which row its request begins: its name, and the
    number of the first of ``rows``. Properties that only RocketMQ, a column or ``extra`` may set are left out. ``where`` names the target
    in errors, which count rows from ``first``. Raises MessageError BAD_PROPERTY or PROPERTIES_TOO_LARGE, before the first body
    of the 16k rows among which the row is.
    """
    if len(unique_keys) != rows.num_rows:
        raise ValueError(f"{len(unique_keys)} keys for {rows.num_rows} rows")
    given = extra or {}
    for begin, count in _groups(rows.column("body")):
        part = {
            name: value if isinstance(value, str) else value.slice(begin, count)
            for name, value in {**given, names.UNIQ_KEY: unique_keys}.items()
        }
        mark = _Mark(counted[0], counted[1] + begin) if counted is not None else None
        yield from _encode_group(rows.slice(begin, count), part, where, first, begin, mark)


def _groups(body: pa.Array) -> Iterator[tuple[int, int]]:
    """(begin, count) of rows that are encoded together."""
    _, bounds = contents(body)
    begin = 0
    while begin < len(body):
        limit = int(np.searchsorted(bounds, bounds[begin] + GROUP_BYTES, side="right")) - 1
        end = min(max(limit, begin + 1), begin + GROUP_ROWS, len(body))
        yield begin, end - begin
        begin = end


class _Mark(NamedTuple):
    """The property ``counted`` of rows that are encoded together; ``first`` is the number of the first of them."""

    name: str
    first: int

    @property
    def size(self) -> int:
        return len(self._text(0))

    def texts(self, cuts: list[tuple[int, int]]) -> pa.Array:
        """Of each row, by the request [start, stop) that it is in."""
        requests = np.repeat(np.arange(len(cuts)), [stop - start for start, stop in cuts])
        return pa.array([self._text(start) for start, _ in cuts], pa.binary()).take(pa.array(requests))

    def _text(self, row: int) -> bytes:
        # Always as wide, since which rows go together depends on how large they are.
        return f"{self.name}\x01{self.first + row:0{_MARK_DIGITS}}\x02".encode()


def _encode_group(
    rows: pa.RecordBatch, extra: Mapping[str, pa.Array | str], where: str, first: int, begin: int, mark: _Mark | None
) -> Iterator[SendBody]:
    body = rows.column("body")
    more = mark.size if mark is not None else 0
    properties = _Properties(rows, extra, where, first + begin).joined(names.MAX_SENT_BYTES - more).view(pa.binary())
    _, bounds = contents(properties)
    widths = np.diff(bounds) + more
    lengths = pc.binary_length(body).to_numpy().astype(np.int64)
    heads = np.zeros((len(body), _HEAD_BYTES // 4), dtype=">i4")
    heads[:, 0] = _FRAME_BYTES + lengths + widths
    heads[:, 4] = lengths
    ends = np.concatenate([[0], np.cumsum(heads[:, 0].astype(np.int64))])
    cuts = list(_cuts(ends))
    parts = [_fixed(heads), body, _fixed(widths.astype(">u2").reshape(-1, 1)), properties]
    if mark is not None:
        parts.append(mark.texts(cuts))
    joined = pc.binary_join_element_wise(*parts, b"")
    # The joined rows lie one behind the other: their buffer is the requests' bodies.
    data = memoryview(joined.buffers()[2]).cast("B") if len(joined) else memoryview(b"")
    for start, stop in cuts:
        size = int(ends[stop] - ends[start])
        if size <= MAX_BATCH_BYTES:
            yield SendBody(begin + start, stop - start, data[int(ends[start]) : int(ends[stop])], None)
        else:
            alone = int(ends[start]) + _HEAD_BYTES
            behind = alone + int(lengths[start]) + _FRAME_BYTES - _HEAD_BYTES
            text = str(data[behind : behind + int(widths[start])], "utf-8")
            yield SendBody(begin + start, 1, data[alone : alone + int(lengths[start])], text)


def _cuts(ends: Int64s) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of each request; row i of the batch is [ends[i], ends[i + 1])."""
    stored = ends + _STORED_EXTRA * np.arange(len(ends), dtype=np.int64)
    start, count = 0, len(ends) - 1
    while start < count:
        fits = min(
            int(np.searchsorted(ends, ends[start] + TARGET_BYTES, side="right")),
            int(np.searchsorted(stored, stored[start] + STORED_BYTES, side="right")),
        )
        stop = max(fits - 1, start + 1)
        yield start, stop
        start = stop


def _fixed(values: npt.NDArray[Any]) -> pa.Array:
    """Rows of a matrix as binary values of its row's width."""
    width = values.shape[1] * values.itemsize
    ends = np.arange(0, width * (len(values) + 1), width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(values))]
    )


class _Properties:
    """The properties texts of rows: the user's first, so that of two of one name ours counts."""

    def __init__(self, rows: pa.RecordBatch, extra: Mapping[str, pa.Array | str], where: str, first: int) -> None:
        self._rows = rows
        self._extra = extra
        self._where = where
        self._first = first
        #: Texts that stand one behind the other in each row; how many properties they have in all rows together.
        self._parts: list[pa.Array | str] = []
        self._entries = 0

    def joined(self, most: int) -> pa.Array:
        """One string a row. Raises MessageError BAD_PROPERTY, or PROPERTIES_TOO_LARGE for one of more than ``most`` bytes."""
        count = self._rows.num_rows
        texts = {name: self._rows.column(column) for column, name in _COLUMNS.items() if column in self._rows.schema.names}
        if "properties" in self._rows.schema.names:
            self._add_map(self._rows.column("properties"))
        for name, values in texts.items():
            self._add(name, values)
        for name, value in self._extra.items():
            if not isinstance(value, str):
                self._add(name, value)
            elif value:
                self._add_text(f"{name}\x01{value}\x02")
                self._entries += count
        # An array of empty texts makes the result an array, of one value for each row, whatever the parts are.
        text = pc.binary_join_element_wise(
            pa.repeat(_EMPTY, count), *self._parts, _EMPTY, null_handling="replace", null_replacement=""
        )
        data, bounds = contents(text)
        sizes = np.diff(bounds)
        if len(sizes) and int(sizes.max()) > most:
            row = int(np.argmax(sizes))
            raise MessageError(
                "PROPERTIES_TOO_LARGE",
                f"row {self._first + row} for {self._where} has properties of {sizes[row]} bytes, its tags and keys among them; at most "
                f"{most} can be sent",
            )
        # Each property brings one of each: any more of them are in a name or a value.
        if np.count_nonzero(data == 1) != self._entries or np.count_nonzero(data == 2) != self._entries:
            raise self._separator({**texts, **self._extra})
        return text

    def _add(self, name: str, values: pa.Array) -> None:
        """A property whose value each row has in a column; null and empty: none."""
        if values.null_count or (len(values) and pc.min(pc.binary_length(values)).as_py() == 0):
            values = pc.if_else(pc.equal(values, ""), pa.scalar(None, pa.string()), values)
            if values.null_count == len(values):
                return
            self._parts.append(pc.binary_join_element_wise(f"{name}\x01", values, "\x02", _EMPTY))
        else:
            self._add_text(f"{name}\x01")
            self._parts.append(values)
            self._add_text("\x02")
        self._entries += len(values) - values.null_count

    def _add_text(self, text: str) -> None:
        """The same text in each row. Every part costs a row some nanoseconds, so texts side by side become one."""
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        else:
            self._parts.append(text)

    def _add_map(self, column: pa.Array) -> None:
        """The user's properties, without the reserved ones."""
        if column.null_count and _hides(column):
            column = pa.array(column.to_pylist(), column.type)
        bounds = column.offsets.to_numpy().astype(np.int64)
        # Keys and items are those of the whole array, also of a slice, and offsets count from their beginning.
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
            raise self._bad(int(np.searchsorted(bounds, bad, side="right")) - 1, keys[bad].as_py(), items[bad].as_py() or "")
        if pc.any(ours).as_py():
            entries = pc.if_else(ours, _EMPTY, entries)
        self._entries += len(keys) - (pc.sum(ours).as_py() or 0)
        # The entries of a row lie one behind the other, so their buffer is the rows' texts.
        data, ends = contents(entries)
        offsets = ends[bounds].astype(np.int32)
        self._parts.append(pa.Array.from_buffers(pa.string(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(data)]))

    def _separator(self, columns: Mapping[str, pa.Array | str]) -> MessageError:
        """The first property with a separator in it."""
        for name, values in columns.items():
            if isinstance(values, str):
                values = pa.array([values])
            row = pc.index(pc.match_substring_regex(values, _SEPARATORS), True).as_py()
            if row >= 0:
                return self._bad(row, name, values[row].as_py())
        for row, pairs in enumerate(self._rows.column("properties").to_pylist()):
            for name, value in pairs or ():
                if not is_reserved(name) and name not in self._extra and names.bad_property(name, value):
                    return self._bad(row, name, value)
        raise AssertionError("no property has a separator")

    def _bad(self, row: int, name: str, value: str) -> MessageError:
        return MessageError(
            "BAD_PROPERTY", f"row {self._first + row} for {self._where}: property {name!r} {names.bad_property(name, value)}"
        )


def _hides(column: pa.Array) -> bool:
    """Whether a null row of a map array has entries that nobody sees."""
    return bool((np.diff(column.offsets.to_numpy())[column.is_null().to_numpy(zero_copy_only=False)] > 0).any())
