"""A stored message in a pull response: its layout, its properties and its body, and the exact parser, which reads one message at a time. Pure.

This parser decides what is well-formed, and faster parsers must agree with it. A malformed record raises ProtocolError. (RocketMQ's own
``MessageDecoder.decode`` silently drops it and all records that follow.) All numbers are big-endian and signed.

Layout (``MessageDecoder``, ``MessageVersion``, ``MessageSysFlag``), in which an IPv4 host has 8 bytes and an IPv6 host has 20::

    0 totalSize 4 | 4 magic 4 | 8 bodyCRC 4 | 12 queueId 4 | 16 flag 4 | 20 queueOffset 8 | 28 physicalOffset 8 | 36 sysFlag 4
    40 bornTimestamp 8 | 48 bornHost 8 or 20 | storeTimestamp 8 | storeHost 8 or 20 | reconsumeTimes 4
    preparedTransactionOffset 8 | bodyLength 4, body | topicLength 1 (V1) or 2 (V2), topic | propertiesLength 2, properties

Properties are text: ``name \\x01 value \\x02 name \\x01 value [\\x02]`` in UTF-8. Nothing is escaped, so a name or value with a separator
would change other properties and is refused. An entry without a name or a value is ignored. If two entries have the same name, the last
one counts. The last separator may be missing. The codec of a compressed body is in sysFlag.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.model import MAX_BODY_BYTES, MAX_PROPERTIES_BYTES, MessageQueue
from orderedmq.text import text_of

MAGIC_V1: Final = -626843481
#: V2 has two bytes for the topic's length, for topics of more than 127 characters (``%RETRY%`` and a long group).
MAGIC_V2: Final = -626843477

COMPRESSED: Final = 0x1
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
#: If a record has both of these flags, its body is a batch of messages (an inner batch).
NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80
UNWRAP: Final = NEED_UNWRAP | INNER_BATCH
COMPRESSION_MASK: Final = 0x700
COMPRESSION_SHIFT: Final = 8

# Positions of fields in a record with IPv4 hosts. An IPv6 host shifts the fields after it.
SYS_FLAG_AT: Final = 36
BORN_HOST_AT: Final = 48
BODY_AT: Final = 88
IPV4_HOST: Final = 8
IPV6_HOST: Final = 20
#: The size of the smallest record in bytes. It has no body, topic or properties.
MIN_SIZE: Final = BODY_AT + 1 + 2

_HEAD: Final = struct.Struct(">iiiiiqqiq")
_LENGTH: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_RECONSUME: Final = struct.Struct(">iqi")
_SHORT: Final = struct.Struct(">h")
_INNER: Final = struct.Struct(">iiiii")
#: The bits of a CRC-32 that are stored (``UtilAll.crc32``).
CRC_BITS: Final = 0x7FFFFFFF
#: The size of the smallest message of an inner batch in bytes.
INNER_MIN_SIZE: Final = _INNER.size + 2
#: The maximum size of a decompressed body in bytes: four times what a broker accepts by default. A larger body counts as a
#: decompression bomb, because a few hundred bytes of zstd can expand to gigabytes.
MAX_PLAIN_BYTES: Final = 4 * MAX_BODY_BYTES
#: Codecs by ``CompressionType``. Producers before 4.9.4 and 5.0 send 0. lz4 means its frame format (``LZ4FrameOutputStream``).
_CODECS: Final = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}
NAME_END: Final = b"\x01"
VALUE_END: Final = b"\x02"
TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
SHARDING_KEY: Final = "__SHARDINGKEY"
UNIQ_KEY: Final = "UNIQ_KEY"
#: Bytes reserved for the properties that a broker may add to a sent message: CLUSTER, MSG_REGION, TRACE_ON and WAIT.
BROKERS_SHARE: Final = 256
#: The maximum bytes of the properties of a sent message.
MAX_SENT_BYTES: Final = MAX_PROPERTIES_BYTES - BROKERS_SHARE


class StoredMessage(NamedTuple):
    """A record's fields as they are stored. The body may be compressed. Times are in milliseconds since 1970."""

    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: bytes
    properties: bytes


class InnerMessage(NamedTuple):
    """One message of a batch, in the form in which a producer sends it and an inner batch stores it."""

    flag: int
    body: bytes
    properties: bytes


def malformed(what: str) -> ProtocolError:
    """Return the ProtocolError for bytes that are not messages. ``what`` is a sentence without a full stop."""
    return ProtocolError(
        ProtocolCondition.PROTOCOL,
        f"a broker's answer cannot be read: {what}. The connection or the broker's commit log is damaged, or the server is not a "
        "RocketMQ broker. Try again, and look at the broker's log if it fails again",
    )


def foreign(message: StoredMessage, queue: MessageQueue) -> ProtocolError:
    """Return the ProtocolError for a message of another queue in the answer to a pull of ``queue``."""
    return ProtocolError(
        ProtocolCondition.PROTOCOL,
        f"a broker answered a pull of queue {queue} with a message of queue {message.queue_id} of topic {text_of(message.topic)!r}, at "
        f"queue offset {message.queue_offset}: the broker's consume queue or commit log is damaged, or something between this client "
        "and the broker mixes up answers. No row was delivered. Try again, and look at the broker's log if it fails again",
    )


def _beyond(what: str, at: int) -> ProtocolError:
    return malformed(f"the record at byte {at} has a {what} that does not fit its size")


def parse_stored(data: bytes, at: int) -> tuple[StoredMessage, int]:
    """Return the record that begins at byte ``at``, and where the next record begins. Raises ProtocolError."""
    remaining = len(data) - at
    if remaining < MIN_SIZE:
        raise malformed(f"{remaining} bytes at byte {at} are too few for a record")
    size, magic, crc, queue_id, flag, queue_offset, physical, sys_flag, born = _HEAD.unpack_from(data, at)
    if not MIN_SIZE <= size <= remaining:
        raise malformed(f"the record at byte {at} announces {size} bytes, but {remaining} are left")
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise malformed(f"the record at byte {at} has the magic number {magic & 0xFFFFFFFF:#010x}")
    end = at + size
    position = at + BORN_HOST_AT
    born_width = IPV6_HOST if sys_flag & BORN_HOST_V6 else IPV4_HOST
    store_width = IPV6_HOST if sys_flag & STORE_HOST_V6 else IPV4_HOST
    if size < MIN_SIZE + born_width + store_width - 2 * IPV4_HOST:
        raise _beyond("host", at)
    born_host = data[position : position + born_width]
    position += born_width
    (stored,) = _LONG.unpack_from(data, position)
    position += 8
    store_host = data[position : position + store_width]
    position += store_width
    reconsumed, prepared, length = _RECONSUME.unpack_from(data, position)
    position += _RECONSUME.size
    # The body must be followed at least by the lengths of topic and properties.
    topic_width = 1 if magic == MAGIC_V1 else 2
    if not 0 <= length <= end - position - topic_width - 2:
        raise _beyond(f"body of {length} bytes", at)
    body = data[position : position + length]
    position += length
    length = int.from_bytes(data[position : position + topic_width], "big", signed=True)
    position += topic_width
    if not 0 <= length <= end - position - 2:
        raise _beyond(f"topic of {length} bytes", at)
    topic = data[position : position + length]
    position += length
    (length,) = _SHORT.unpack_from(data, position)
    position += 2
    if length != end - position:
        raise _beyond(f"properties length of {length}", at)
    message = StoredMessage(
        body_crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical,
        sys_flag=sys_flag,
        born_timestamp=born,
        born_host=born_host,
        store_timestamp=stored,
        store_host=store_host,
        reconsume_times=reconsumed,
        prepared_transaction_offset=prepared,
        body=body,
        topic=topic,
        properties=data[position:end],
    )
    return message, end


def parse_all(data: bytes) -> Iterator[StoredMessage]:
    """Yield the records of a pull response's body. Raises ProtocolError."""
    at = 0
    while at < len(data):
        message, at = parse_stored(data, at)
        yield message


def record_offsets(data: bytes) -> list[tuple[int, int]] | None:
    """Return the first byte and the queue offset of each record of a pull response's body; None if a record's size is wrong."""
    starts = []
    at = 0
    while at < len(data):
        if len(data) - at < MIN_SIZE:
            return None
        size, _, _, _, _, queue_offset, *_ = _HEAD.unpack_from(data, at)
        if not MIN_SIZE <= size <= len(data) - at:
            return None
        starts.append((at, queue_offset))
        at += size
    return starts


def parse_batch(data: bytes) -> Iterator[InnerMessage]:
    """Yield the messages of a producer's batch, or of the body of an inner batch. Raises ProtocolError.

    Layout: totalSize 4 | magic 4 | bodyCRC 4 | flag 4 | bodyLength 4, body | propertiesLength 2, properties. Magic and CRC are 0
    and ignored, as in ``MessageDecoder.decodeMessage``.
    """
    at = 0
    while at < len(data):
        remaining = len(data) - at
        if remaining < INNER_MIN_SIZE:
            raise malformed(f"{remaining} bytes at byte {at} of a batch are too few for a message")
        size, _, _, flag, length = _INNER.unpack_from(data, at)
        if not INNER_MIN_SIZE <= size <= remaining:
            raise malformed(f"the message at byte {at} of a batch announces {size} bytes, but {remaining} are left")
        end, position = at + size, at + _INNER.size
        if not 0 <= length <= end - position - 2:
            raise malformed(f"the message at byte {at} of a batch has a body of {length} bytes, which does not fit its size")
        body = data[position : position + length]
        position += length
        (length,) = _SHORT.unpack_from(data, position)
        position += 2
        if length != end - position:
            raise malformed(f"the message at byte {at} of a batch has properties of {length} bytes, which do not fit its size")
        yield InnerMessage(flag, body, data[position:end])
        at = end


def crc32(body: bytes) -> int:
    """Return the 31-bit checksum of a body in its stored, perhaps compressed form (``UtilAll.crc32``); 0 for an empty body."""
    return zlib.crc32(body) & CRC_BITS


class BodyError(Exception):
    """A body cannot be decompressed. The text says why."""


def decompress(body: bytes, sys_flag: int) -> bytes:
    """Return the decompressed body of a message with the flag COMPRESSED; an empty body stays empty. Raises BodyError."""
    if not body:
        return body
    number = (sys_flag & COMPRESSION_MASK) >> COMPRESSION_SHIFT
    codec = _CODECS.get(number)
    if codec is None:
        raise BodyError(f"its body is compressed with the unknown method {number}")
    try:
        plain = _inflate(body) if codec == "zlib" else _stream(body, codec)
    except (zlib.error, OSError, pa.ArrowException) as error:
        raise BodyError(f"its body of {len(body)} bytes is not {codec} ({error})".replace("\n", " ")) from error
    if len(plain) > MAX_PLAIN_BYTES:
        raise BodyError(f"its body of {len(body)} bytes of {codec} expands to more than the limit of {MAX_PLAIN_BYTES} bytes")
    return plain


def _inflate(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    plain = stream.decompress(body, MAX_PLAIN_BYTES + 1)
    if not stream.eof and len(plain) <= MAX_PLAIN_BYTES:
        raise zlib.error("it is cut off")
    return plain


def _stream(body: bytes, codec: str) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        plain: bytes = stream.read(MAX_PLAIN_BYTES + 1)
    return plain


def parse_properties(data: bytes) -> dict[str, str]:
    """Return names and values in order (``MessageDecoder.string2messageProperties``). Malformed text is read as in Java (text.py)."""
    properties: dict[str, str] = {}
    for entry in data.split(VALUE_END):
        name, _, value = entry.partition(NAME_END)
        if name and value:
            properties[text_of(name)] = text_of(value)
    return properties


def bad_property(name: str, value: str | None) -> str | None:
    """Return what is wrong with a property, and what to do; None if RocketMQ can carry it."""
    if not name:
        return "has an empty name"
    if not value:
        return "has no value. Leave it out"
    if any(separator in text for separator in "\x01\x02" for text in (name, value)):
        return "has the character \\x01 or \\x02, which separates properties in RocketMQ. Remove it"
    return None


def offset_message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the broker's id of a message (``MessageDecoder.createMessageId``): 32 digits, or 56 if the host has an IPv6 address.

    ``store_host`` is the field of the record: 4 or 16 bytes of address and 4 bytes of port.
    """
    return (store_host + _LONG.pack(physical_offset)).hex().upper()
