"""Decodes pull responses into a RecordBatch of exactly the requested columns. Pure.

Decode the responses of many pulls in one call, because array operations have a fixed cost. It pays off from a few dozen messages on,
and is smallest per message with about 16k messages. Responses that are parts of one buffer are decoded without a copy. Uniform
responses (V1 records of one topic with the same kinds of hosts and regular properties, and perhaps compressed bodies) are decoded by
column. All others take the exact path, which defines the right result (row_decoder.py). Rows are in the order of the responses. A
pull may return fewer messages than requested, and has gaps where messages were filtered out. So continue at the response's
nextBeginOffset, not at the last row's offset + 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.model import MAX_OFFSET, MessageQueue
from orderedmq.rocketmq.codec.decode_properties import columns_of, find_entries, maps_of
from orderedmq.rocketmq.codec.gather import (
    Bytes,
    Int64s,
    contents,
    fixed_strings,
    gather,
    gather_alike,
    hex_digits,
    order_of,
    total_bytes,
)
from orderedmq.rocketmq.codec.record_scan import ScannedRecords, record_starts, scan_records
from orderedmq.rocketmq.codec.row_decoder import MAX_TIME, MIN_TIME, PIECE_BYTES, Selection, Unreadable, decode_exactly
from orderedmq.rocketmq.codec.stored_message import (
    COMPRESSED,
    CRC_BITS,
    KEYS,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    UNWRAP,
    VALUE_END,
    BodyError,
    decompress,
)
from orderedmq.schema import TIMESTAMP_TYPE, concat_batches, select_schema

MIN_OFFSET: Final = 0
#: With fewer messages than this, decoding them one at a time is faster.
FEWEST: Final = 48
#: The maximum bytes of responses that are decoded together. A larger response is decoded alone.
GROUP_BYTES: Final = 16 * 1024 * 1024

_PROPERTY_OF: Final = {
    "tags": TAGS,
    "keys": KEYS,
    "sharding_key": SHARDING_KEY,
    "message_id": UNIQ_KEY,
}


def decode(
    responses: Sequence[bytes | memoryview],
    columns: tuple[str, ...],
    queue: MessageQueue,
    *,
    begin: int = MIN_OFFSET,
    end: int = MAX_OFFSET,
    max_bytes: int = PIECE_BYTES,
    tags: frozenset[str] = frozenset(),
    verify_crc: bool = False,
    malformed: Callable[[Sequence[int]], None] | None = None,
) -> tuple[pa.RecordBatch, int]:
    """Return a RecordBatch of ``columns`` of MESSAGE_SCHEMA (at least one), and the offset below which it is complete.

    Its rows are the messages with offsets in [begin, end), in the order of the responses. If ``tags`` is not empty, messages with other
    tags are left out, because a broker compares only the hash codes of tags. The rows stop before ``end`` once their bodies have
    ``max_bytes`` (a few hundred bytes of zstd can expand to gigabytes), or once all columns together exceed both ``max_bytes`` and
    PIECE_BYTES. They also stop before a message that cannot be read. For either stop, ``columns`` must contain queue_offset. ``queue`` is
    the queue that was pulled, with the topic's name as the broker knows it. ``malformed`` gets the offsets of rows with text that is
    not UTF-8 (text.py). ``verify_crc`` verifies the checksum of each requested body.
    Raises Unreadable if the first requested message cannot be read, ProtocolError if bytes are not messages or a message belongs to
    another queue, and SchemaError UNKNOWN_COLUMN.
    """
    odd: set[int] = set()
    selection = Selection(queue, columns, begin, end, tags, verify_crc, max(1, min(max_bytes, PIECE_BYTES)), odd.update)
    pieces: list[pa.RecordBatch] = []
    bodies, size, stop = 0, 0, end
    try:
        for piece in decode_pieces(responses, selection):
            pieces.append(piece)
            size += piece.nbytes
            bodies += total_bytes(piece.column("body")) if "body" in columns else 0
            if bodies >= max_bytes or size > max(max_bytes, PIECE_BYTES):
                # A response is in order and complete, so later responses add no messages below its last offset.
                stop = max(pc.max(part.column("queue_offset")).as_py() for part in pieces) + 1
                break
    except Unreadable as error:
        if error.offset <= begin:
            raise
        stop = error.offset
    if odd and malformed is not None:
        malformed([offset for offset in sorted(odd) if offset < stop])
    if not pieces:
        return _empty(select_schema(columns)), stop
    return pieces[0] if len(pieces) == 1 else concat_batches(pieces), stop


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def decode_pieces(responses: Sequence[bytes | memoryview], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `decode` in non-empty pieces. Raises ProtocolError or Unreadable, perhaps after some pieces.

    A piece has at most the rows of one group of responses. Its compressed bodies expand to at most ``selection.piece_bytes`` plus one
    body.
    """
    schema = select_schema(selection.columns)
    for group in _groups(responses):
        batch = _decode_columns(group, selection, schema)
        if batch is None:
            yield from decode_exactly(map(bytes, group), selection)
        elif batch.num_rows:
            yield batch


def _groups(responses: Sequence[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    sizes = list(map(len, responses))
    if all(sizes) and 0 < sum(sizes) <= GROUP_BYTES:
        yield list(responses)
        return
    group: list[bytes | memoryview] = []
    size = 0
    for response in responses:
        if group and size + len(response) > GROUP_BYTES:
            yield group
            group, size = [], 0
        if len(response):
            group.append(response)
            size += len(response)
    if group:
        yield group


def _decode_columns(responses: list[bytes | memoryview], selection: Selection, schema: pa.Schema) -> pa.RecordBatch | None:
    """Return the requested rows; None if the exact path must decode them."""
    at = None
    for lay_out in (_in_place, _join):
        laid_out = lay_out(responses)
        if laid_out is not None and len(laid_out[0]) < 2**31:
            data, begins, ends = laid_out
            at = record_starts(data, begins, ends)
        if at is not None:
            break
    if at is None or len(at) < FEWEST:
        return None
    records = scan_records(data, at, selection.queue)
    if records is None or (records.heads["sys_flag"] & UNWRAP == UNWRAP).any():
        return None
    offsets = records.heads["queue_offset"].astype(np.int64)
    if offsets.min() < selection.begin or offsets.max() >= selection.end:
        records = records.take((offsets >= selection.begin) & (offsets < selection.end))
    if not len(records.heads):
        return _empty(schema)
    if selection.verify_crc and "body" in selection.columns and not _checksums_agree(data, records):
        return None
    builder = _Columns(data, records, selection)
    arrays = builder.build()
    if arrays is None:
        return None
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in selection.columns], schema=schema)
    odd = np.array(sorted(builder.malformed), dtype=np.int64)
    if selection.tags:
        matching = pc.is_in(arrays["tags"], value_set=pa.array(sorted(selection.tags)))
        batch = batch.filter(matching)
        odd = odd[matching.to_numpy(zero_copy_only=False)[odd]]
    if len(odd):
        selection.malformed(records.heads["queue_offset"][odd].tolist())
    return batch


def _in_place(responses: list[bytes | memoryview]) -> tuple[Bytes, Int64s, Int64s] | None:
    """Return the buffer that contains all responses, in any order, and where each begins and ends. None if they are in several buffers."""
    whole: Any = responses[0].obj if isinstance(responses[0], memoryview) else responses[0]
    buffers = []
    for response in responses:
        if (response.obj if isinstance(response, memoryview) else response) is not whole:
            return None
        buffers.append(pa.py_buffer(response).address)
    begins = np.array(buffers, dtype=np.int64)
    ends = begins + np.fromiter(map(len, responses), dtype=np.int64, count=len(responses))
    order = np.argsort(begins)
    if (begins[order[1:]] < ends[order[:-1]]).any():
        return None
    data = np.frombuffer(whole, dtype=np.uint8)
    first = pa.py_buffer(whole).address
    return data[: int(ends.max()) - first + 1], begins - first, ends - first


def _join(responses: list[bytes | memoryview]) -> tuple[Bytes, Int64s, Int64s] | None:
    """Return a copy of all responses in one buffer with an additional byte, and where each response begins and ends."""
    ends = np.cumsum(np.fromiter(map(len, responses), dtype=np.int64, count=len(responses)))
    # Arrow's allocator reuses memory. The C library returns large buffers to the system, and fresh pages cost more than the copy.
    buffer = pa.allocate_buffer(int(ends[-1]) + 1)
    view, at = memoryview(buffer).cast("B"), 0
    view[-1] = 0
    begins = []
    for response in responses:
        begins.append(at)
        view[at : at + len(response)] = response
        at += len(response)
    return np.frombuffer(buffer, dtype=np.uint8), np.array(begins, dtype=np.int64), ends


def _checksums_agree(data: Bytes, records: ScannedRecords) -> bool:
    view = memoryview(data.data)
    checksums = [zlib.crc32(view[begin:end]) for begin, end in zip(records.body_begins.tolist(), records.body_ends.tolist())]
    return bool((np.array(checksums) & CRC_BITS == records.heads["body_crc"]).all())


class _Columns:
    """Builds the columns of records that have the same layout."""

    def __init__(self, data: Bytes, records: ScannedRecords, selection: Selection) -> None:
        self._data = data
        self._buffer = pa.py_buffer(data)
        self._records = records
        self._heads = records.heads
        self._rows = len(records.heads)
        self._order = order_of(records.body_begins)
        self._selection = selection
        #: Numbers of rows with text that is not UTF-8.
        self.malformed: set[int] = set()

    def build(self) -> dict[str, pa.Array] | None:
        """Return the requested columns, and also ``tags`` if messages are selected by tag. None if the exact path must decode them."""
        selection = self._selection
        columns = dict.fromkeys((*selection.columns, "tags") if selection.tags else selection.columns)
        properties = self._properties(columns)
        if properties is None:
            return None
        arrays: dict[str, pa.Array] = {}
        for name in columns:
            column = properties[name] if name in properties else self._column(name, selection.piece_bytes)
            if column is None:
                return None
            arrays[name] = column
        return arrays

    def _properties(self, columns: dict[str, Any]) -> dict[str, pa.Array] | None:
        """Return the columns that come from properties. None if the exact path must decode them."""
        texts = tuple(name for name in columns if name in _PROPERTY_OF)
        if not texts and "properties" not in columns:
            return {}
        names = tuple(_PROPERTY_OF[name] for name in texts)
        entries = find_entries(self._texts())
        if entries is None:
            return None
        values = columns_of(entries, names, self.malformed)
        arrays: dict[str, pa.Array] = {name: values[_PROPERTY_OF[name]] for name in texts}
        if "message_id" in arrays:
            arrays["message_id"] = self._message_id(arrays["message_id"])
        if "properties" in columns:
            maps = maps_of(entries, self.malformed)
            if maps is None:
                return None
            arrays["properties"] = maps
        return arrays

    def _texts(self) -> pa.Array:
        """Return the properties of each message. If all lack the last separator, add it here, because doing so later costs a copy."""
        begins, ends = self._records.properties_begins, self._records.properties_ends
        open_ends = (self._data[ends - 1] != VALUE_END[0]).all() and (ends > begins).all() and int(ends.max()) < len(self._data)
        if open_ends:
            texts = gather(self._buffer, begins, ends + 1, pa.binary(), order=self._order)
            data, bounds = contents(texts)
            if data.flags.writeable:
                # Overwrite the byte after each text. Nothing else uses the array, because it was just made.
                data[bounds[1:] - 1] = VALUE_END[0]
                return texts
        return gather(self._buffer, begins, ends, pa.binary(), order=self._order)

    def _column(self, name: str, most_bytes: int) -> pa.Array | None:
        match name:
            case "topic":
                return pa.repeat(pa.scalar(self._selection.queue.topic, pa.string()), self._rows)
            case "broker_name":
                return pa.repeat(pa.scalar(self._selection.queue.broker_name, pa.string()), self._rows)
            case "body":
                return self._body(most_bytes)
            case "queue_id" | "reconsume_times":
                return pa.array(self._heads[name].astype(np.int32))
            case "queue_offset":
                return pa.array(self._heads[name].astype(np.int64))
            case "born_timestamp" | "store_timestamp":
                times = self._heads[name].astype(np.int64)
                if times.min() < MIN_TIME or times.max() > MAX_TIME:
                    times = np.clip(times, MIN_TIME, MAX_TIME)
                return pa.array(times * 1000).view(TIMESTAMP_TYPE)
            case _:
                raise AssertionError(name)

    def _message_id(self, unique_keys: pa.Array) -> pa.Array:
        """Return each message's id from the producer, or from the broker if the producer set none."""
        if not unique_keys.null_count:
            return unique_keys
        width = self._heads["store_host"].dtype.itemsize
        id_bytes = np.empty((self._rows, width + 8), dtype=np.uint8)
        id_bytes[:, :width] = np.frombuffer(self._heads["store_host"].tobytes(), dtype=np.uint8).reshape(-1, width)
        id_bytes[:, width:] = np.frombuffer(self._heads["physical_offset"].tobytes(), dtype=np.uint8).reshape(-1, 8)
        return pc.coalesce(unique_keys, fixed_strings(hex_digits(id_bytes)))

    def _body(self, most_bytes: int) -> pa.Array | None:
        """Return the decompressed bodies. None if one cannot be decompressed, or if they expand to more than ``most_bytes`` in all."""
        begins, ends = self._records.body_begins, self._records.body_ends
        length = int(ends[0] - begins[0])
        if length and (ends - begins == length).all():
            bodies = gather_alike(self._data, begins, length)
        else:
            bodies = gather(self._buffer, begins, ends, pa.binary(), order=self._order)
        packed = self._heads["sys_flag"] & COMPRESSED != 0
        if not packed.any():
            return bodies
        plain: list[bytes] = []
        size = 0
        mask: npt.NDArray[np.bool_] = packed
        for row in np.flatnonzero(mask).tolist():
            try:
                plain.append(decompress(bodies[row].as_py(), int(self._heads["sys_flag"][row])))
            except BodyError:
                return None
            size += len(plain[-1])
            if size > most_bytes:
                return None
        return pc.replace_with_mask(bodies, pa.array(mask), pa.array(plain, pa.binary()))
