"""Decodes pull responses one message at a time: the reference for every column, and the exact path for irregular responses.

This decoder reads everything that RocketMQ may store: V2 records, IPv6 hosts, compressed bodies, inner batches, irregular properties.
It checks the structure of every record, and that the record belongs to the requested queue. It verifies and decompresses a body only
if bodies are requested and the message has a requested offset and tag. It verifies and decompresses an inner batch if some of its
offsets may be requested. Rows are yielded in pieces, so that memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orderedmq.model import LAST_MS, MessageQueue
from orderedmq.rocketmq.codec.stored_message import (
    COMPRESSED,
    KEYS,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    UNWRAP,
    BodyError,
    StoredMessage,
    crc32,
    decompress,
    foreign,
    offset_message_id,
    parse_all,
    parse_batch,
    parse_properties,
)
from orderedmq.schema import select_schema
from orderedmq.text import TEXTS, is_text, text_of

#: A piece is yielded when its rows have this number of bytes.
PIECE_BYTES: Final = 64 * 1024 * 1024
#: Approximate bytes of a row without its body. These bytes count because an inner batch may have hundreds of thousands of empty messages.
ROW_BYTES: Final = 256
# The range of a timestamp column, in ms since 1970: years 1 to 9999. A message's born time comes from a client's clock and may be any
# number.
MIN_TIME: Final = -62135596800000
MAX_TIME: Final = LAST_MS


class Unreadable(Exception):
    """The message at ``offset`` cannot be read because of its content. The text says why."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(why)
        self.offset = offset


def _ignore(offsets: Iterable[int]) -> None:
    """Ignore messages whose text is not UTF-8."""


class Selection(NamedTuple):
    """A reader's request: columns of MESSAGE_SCHEMA, offsets [begin, end), tags (empty: all messages), whether to verify checksums.

    ``queue`` is the queue that was pulled, with the topic's name as the broker knows it, because messages are stored under that name.
    Rows are yielded in pieces of about ``piece_bytes``. ``malformed`` gets the offsets of messages whose requested text is not UTF-8,
    and may get an offset twice.
    """

    queue: MessageQueue
    columns: tuple[str, ...]
    begin: int
    end: int
    tags: frozenset[str]
    verify_crc: bool
    piece_bytes: int = PIECE_BYTES
    malformed: Callable[[Iterable[int]], None] = _ignore

    @property
    def texts(self) -> bool:
        """Whether any requested column contains text from a message."""
        return any(name in self.columns for name in (*TEXTS, "message_id"))

    def takes(self, offset: int) -> bool:
        return self.begin <= offset < self.end


def decode_exactly(responses: Iterable[bytes], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Yield the requested rows of pull responses in non-empty pieces. Raises ProtocolError, or Unreadable after earlier rows."""
    schema = select_schema(selection.columns)
    place = selection.queue.queue_id, selection.queue.topic.encode()
    rows: list[tuple[Any, ...]] = []
    size = 0
    stop: Unreadable | None = None
    try:
        for stored in chain.from_iterable(map(parse_all, responses)):
            if (stored.queue_id, stored.topic) != place:
                raise foreign(stored, selection.queue)
            for message, offset in _unwrap(stored, selection):
                properties = parse_properties(message.properties)
                # Compare the tags again, as PullAPIWrapper.processPullResult does, because the broker compares only their hash codes.
                if selection.tags and properties.get(TAGS) not in selection.tags:
                    continue
                # An inner batch was verified and decompressed as a whole.
                if "body" in selection.columns and message.sys_flag & UNWRAP != UNWRAP:
                    message = _plain(message, offset, selection)
                if selection.texts and not is_text(message.properties):
                    selection.malformed((offset,))
                rows.append(_row(message, offset, properties, selection))
                size += ROW_BYTES + len(message.body)
                if size >= selection.piece_bytes:
                    yield _batch(rows, schema)
                    rows, size = [], 0
    except Unreadable as error:
        stop = error
    if rows:
        yield _batch(rows, schema)
    if stop is not None:
        raise stop


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(zip(*rows), schema)], schema=schema
    )


def _plain(message: StoredMessage, offset: int, selection: Selection) -> StoredMessage:
    """Return the message with its body decompressed. Verify the checksum if that is requested. Raises Unreadable."""
    if selection.verify_crc and crc32(message.body) != message.body_crc:
        # The producer is not the cause, because the broker computed the checksum from the body that it had received.
        raise Unreadable(
            offset,
            f"its body of {len(message.body)} bytes does not have the checksum that was stored with it. The broker's commit log is "
            "damaged, or the answer was damaged on its way",
        )
    if not message.sys_flag & COMPRESSED:
        return message
    try:
        return message._replace(body=decompress(message.body, message.sys_flag), sys_flag=message.sys_flag & ~COMPRESSED)
    except BodyError as error:
        raise Unreadable(offset, f"{error}. Its producer sent it like this, or the broker's commit log is damaged") from error


def _unwrap(stored: StoredMessage, selection: Selection) -> Iterator[tuple[StoredMessage, int]]:
    """Yield the requested messages of a record, which may be an inner batch, with offsets (``MessageDecoder.decodeMessage``)."""
    inner = stored.sys_flag & UNWRAP == UNWRAP
    # The record of an inner batch has the offset of its first message. The number of its messages is not known yet.
    if not (stored.queue_offset < selection.end if inner else selection.takes(stored.queue_offset)):
        return
    if not inner:
        yield stored, stored.queue_offset
        return
    stored = _plain(stored, max(stored.queue_offset, selection.begin), selection)
    for offset, message in enumerate(parse_batch(stored.body), stored.queue_offset):
        if offset >= selection.end:
            return
        if offset >= selection.begin:
            single = stored._replace(flag=message.flag, body=message.body, properties=message.properties, reconsume_times=0)
            yield single, offset


def _row(message: StoredMessage, offset: int, properties: dict[str, str], selection: Selection) -> tuple[Any, ...]:
    row = []
    for name in selection.columns:
        value: Any
        match name:
            case "topic":
                value = text_of(message.topic)
            case "broker_name":
                value = selection.queue.broker_name
            case "queue_id":
                value = message.queue_id
            case "queue_offset":
                value = offset
            case "body":
                value = message.body
            case "tags":
                value = properties.get(TAGS)
            case "keys":
                value = properties.get(KEYS)
            case "sharding_key":
                value = properties.get(SHARDING_KEY)
            case "message_id":
                # As in MessageClientExt.getMsgId. A message of an inner batch without a UNIQ_KEY has the record's id; in Java, it has none.
                value = properties.get(UNIQ_KEY) or offset_message_id(message.store_host, message.physical_offset)
            case "born_timestamp":
                value = _microseconds(message.born_timestamp)
            case "store_timestamp":
                value = _microseconds(message.store_timestamp)
            case "reconsume_times":
                value = message.reconsume_times
            case "properties":
                value = list(properties.items())
            case _:
                raise AssertionError(name)
        row.append(value)
    return tuple(row)


def _microseconds(ms: int) -> int:
    return min(max(ms, MIN_TIME), MAX_TIME) * 1000
