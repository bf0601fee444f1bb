"""Encodes, decodes and verifies chunks: messages of one queue as an Arrow IPC stream of one record batch. Pure.

Rules: the payload leaves out a column without values, and the index entry says which columns the payload has. So messages that have
only bodies take no more room than their bodies. The index entry has the timestamps that all messages of the chunk share. Timestamps
that differ, which only a merged chunk has, are columns. Columns that can be computed from a message's place (topic, offset, message
id) are made on reading, and only if they are requested. The index entry has the payload's xxh3 checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.schema import INLINE, Chunk
from orderedmq.errors import StoreError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.schema import MESSAGE_SCHEMA, concat_batches, select_schema

#: Columns that a payload can have. A column's index is its bit in ``Chunk.columns``, so the order is part of the format.
STORED: Final = ("body", "tags", "keys", "sharding_key", "properties", "born_timestamp", "store_timestamp", "reconsume_times")
CODECS: Final = ("none", "lz4")
#: Maximum rows of a chunk, and its approximate maximum bytes: large enough for speed, small enough for short write transactions.
CHUNK_ROWS: Final = 16384
CHUNK_BYTES: Final = 4 * 1024 * 1024

#: The bytes of a payload, as consecutive pieces.
Pieces = list[bytes | pa.Buffer]

#: Arrow's write options by codec number (index in CODECS). docs/performance.md has the cost of the default for the demo's bodies.
_WRITE_OPTIONS: Final = (
    pa.ipc.IpcWriteOptions(use_threads=False),
    pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False),
)
_SCHEMAS: dict[int, pa.Schema] = {}
_HEX: Final = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)
#: The three hex digits of each number below 4096.
_LAST_DIGITS: Final = _HEX[(np.arange(4096)[:, np.newaxis] >> np.array([8, 4, 0])) & 15]


def _schema(columns: int) -> pa.Schema:
    schema = _SCHEMAS.get(columns)
    if schema is None:
        schema = pa.schema([MESSAGE_SCHEMA.field(name) for bit, name in enumerate(STORED) if columns >> bit & 1])
        _SCHEMAS[columns] = schema
    return schema


def pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows into pieces of chunk size."""
    if rows.num_rows <= CHUNK_ROWS and rows.nbytes <= CHUNK_BYTES:
        if rows.num_rows:
            yield rows
        return
    step = max(1, min(CHUNK_ROWS, CHUNK_BYTES * rows.num_rows // rows.nbytes))
    for begin in range(0, rows.num_rows, step):
        yield rows.slice(begin, step)


def body_bytes(body: pa.Array) -> int:
    return int(pc.sum(pc.binary_length(body)).as_py() or 0)


def encode(rows: pa.RecordBatch, queue: MessageQueue, codec: int, born: int) -> tuple[Pieces, Chunk]:
    """Return the payload of ``rows`` (some of the STORED columns), and its chunk, still without offset, place and store times.

    The payload is in pieces, most of which share the memory of ``rows``. Joining them would copy each row once more.
    """
    columns, arrays = 0, []
    for bit, name in enumerate(STORED):
        index = rows.schema.get_field_index(name)
        if index >= 0:
            column = rows.column(index)
            if name == "body" or column.null_count < len(column):
                columns |= 1 << bit
                arrays.append(column)
    batch = pa.RecordBatch.from_arrays(arrays, schema=_schema(columns))
    stream = _Stream()
    with pa.ipc.new_stream(pa.PythonFile(stream, mode="w"), batch.schema, options=_WRITE_OPTIONS[codec]) as writer:
        writer.write_batch(batch)
    return stream.pieces, Chunk(
        topic=queue.topic,
        queue_id=queue.queue_id,
        first_offset=0,
        segment=INLINE,
        position=0,
        rows=rows.num_rows,
        columns=columns,
        codec=codec,
        checksum=stream.checksum.intdigest() & schema.HIGHEST,
        stored_bytes=stream.size,
        body_bytes=body_bytes(rows.column("body")),
        born=born,
        first_stored=0,
        last_stored=0,
    )


class _Stream:
    """A file to which Arrow writes a payload. It keeps the pieces as Arrow writes them."""

    closed = False

    def __init__(self) -> None:
        self.pieces: Pieces = []
        self.checksum = xxhash.xxh3_64()
        self.size = 0

    def write(self, piece: bytes | pa.Buffer) -> int:
        self.pieces.append(piece)
        self.checksum.update(piece)
        self.size += len(piece)
        return len(piece)

    def flush(self) -> None:
        """Do nothing, because ``write`` keeps every piece."""

    def close(self) -> None:
        self.closed = True


def verify(payload: bytes | pa.Buffer, chunk: Chunk) -> None:
    """Check a payload's size and checksum against its chunk. Raises StoreError CORRUPT."""
    if len(payload) != chunk.stored_bytes or schema.checksum(payload) != chunk.checksum:
        raise StoreError(
            StoreCondition.CORRUPT,
            f"messages {chunk.first_offset} to {chunk.end - 1} of queue {schema.queue_of(chunk)} fail their checksum: the disk or another "
            "program changed the store's file. Restore the store from a copy, or skip these messages with startingOffsets (--offset "
            f"{chunk.end})",
        )


def decode(payload: bytes | pa.Buffer, chunk: Chunk, names: tuple[str, ...]) -> dict[str, pa.Array]:
    """Return the columns of the payload that ``names`` lists. The other columns are not decompressed."""
    present = [name for bit, name in enumerate(STORED) if chunk.columns >> bit & 1]
    fields = [index for index, name in enumerate(present) if name in names]
    if not fields:
        return {}
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
    batch = pa.ipc.open_stream(pa.py_buffer(payload), options=options).read_next_batch()
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def rows_of(payload: bytes | pa.Buffer, chunk: Chunk, names: tuple[str, ...], incarnation: str) -> pa.RecordBatch:
    """Return all messages of a chunk with the columns ``names``. ``incarnation``: that of the chunk's topic."""
    stored = decode(payload, chunk, names)
    arrays = []
    for name in names:
        column = stored.get(name)
        arrays.append(column if column is not None else _derived_column(name, chunk, incarnation))
    if not names:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * chunk.rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=select_schema(names))


def _derived_column(name: str, chunk: Chunk, incarnation: str) -> pa.Array:
    first, count, kind = chunk.first_offset, chunk.rows, MESSAGE_SCHEMA.field(name).type
    constant: Any = None
    match name:
        case "topic":
            constant = chunk.topic
        case "broker_name":
            constant = EMBEDDED_BROKER
        case "queue_id":
            constant = chunk.queue_id
        case "queue_offset":
            return pa.array(np.arange(first, first + count, dtype=np.int64))
        case "message_id":
            return message_ids(incarnation, chunk.queue_id, first, count)
        case "born_timestamp":
            constant = chunk.born
        case "store_timestamp":
            constant = chunk.first_stored
        case "reconsume_times":
            constant = 0
    if constant is None:
        return pa.nulls(count, kind)
    return _repeated(constant, kind, count)


@lru_cache(maxsize=32)
def _repeated(constant: Any, kind: pa.DataType, count: int) -> pa.Array:
    """Return a column that repeats one value. It is cached, because most chunks of a queue have the same size and constants."""
    return pa.repeat(pa.scalar(constant, kind), count)


def message_ids(incarnation: str, queue_id: int, first: int, count: int) -> pa.Array:
    """Return unique ids of ``count`` messages: incarnation (16 hex digits), queue (4), offset (12)."""
    digits = np.empty((count, 32), dtype=np.uint8)
    done = 0
    while done < count:
        # The last three digits come from a table. The other digits are the same for 4096 messages.
        high, low = divmod(first + done, 4096)
        rows = digits[done : done + 4096 - low]
        rows[:, :29] = np.frombuffer(f"{incarnation}{queue_id:04X}{high:09X}".encode(), dtype=np.uint8)
        rows[:, 29:] = _LAST_DIGITS[low : low + len(rows)]
        done += len(rows)
    ends = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(digits)])


def merge(parts: list[tuple[bytes | pa.Buffer, Chunk]], codec: int) -> tuple[Pieces, Chunk]:
    """Merge consecutive chunks into one. Timestamps that differ become columns, so that none is lost."""
    kept: list[pa.RecordBatch] = []
    columns = 0
    for _, chunk in parts:
        columns |= chunk.columns
    names = [name for bit, name in enumerate(STORED) if columns >> bit & 1]
    for name, values in (
        ("born_timestamp", {chunk.born for _, chunk in parts}),
        ("store_timestamp", {stamp for _, chunk in parts for stamp in (chunk.first_stored, chunk.last_stored)}),
    ):
        if len(values) > 1 and name not in names:
            names.append(name)
    wanted = tuple(name for name in STORED if name in names)
    for payload, chunk in parts:
        # The incarnation is a dummy, because it matters only for a column that is never stored.
        kept.append(rows_of(payload, chunk, wanted, ""))
    first, last = parts[0][1], parts[-1][1]
    payload, chunk = encode(concat_batches(kept), schema.queue_of(first), codec, first.born)
    return payload, chunk._replace(
        first_offset=first.first_offset, first_stored=first.first_stored, last_stored=last.last_stored
    )
