"""Builds the bytes of a RocketMQ broker's pull response from its layout (MessageExtEncoder): fixed and random records."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

import pyarrow as pa
from hypothesis import strategies as st

from orderedmq.model import MessageQueue

V1, V2 = 0xDAA320A7, 0xDAA320AB
INNER = 0xC0
#: The default queue of a message.
QUEUE = MessageQueue("orders", "broker-a", 3)


@dataclass(frozen=True)
class Stored:
    """One stored record. Bits of ``sys_flag`` say how wide the host fields are and how the body is compressed."""

    offset: int = 0
    body: bytes = b"body"
    properties: bytes = b""
    topic: bytes = b"orders"
    queue_id: int = 3
    sys_flag: int = 0
    magic: int = V1
    physical: int = 128
    born: int = 1_700_000_000_123
    stored: int = 1_700_000_000_456
    reconsumed: int = 0
    crc: int | None = None
    #: The stored body, if it differs from `compress` of ``body``.
    packed: bytes | None = None

    def pack(self) -> bytes:
        hosts = [
            bytes(range(1, 17 if self.sys_flag & bit else 5)) + struct.pack(">i", port)
            for bit, port in ((0x10, 50000), (0x20, 10911))
        ]
        body = self.packed
        if body is None:
            body = compress(self.body, self.sys_flag >> 8 & 7) if self.sys_flag & 1 else self.body
        crc = zlib.crc32(body) & 0x7FFFFFFF if self.crc is None else self.crc
        head = struct.pack(">IiiiqqI", self.magic, crc, self.queue_id, 0, self.offset, self.physical, self.sys_flag)
        rest = b"".join(
            (
                head,
                struct.pack(">q", self.born),
                hosts[0],
                struct.pack(">q", self.stored),
                hosts[1],
                struct.pack(">iqi", self.reconsumed, 0, len(body)),
                body,
                struct.pack(">b" if self.magic == V1 else ">h", len(self.topic)),
                self.topic,
                struct.pack(">h", len(self.properties)),
                self.properties,
            )
        )
        return struct.pack(">i", 4 + len(rest)) + rest


def compress(body: bytes, method: int) -> bytes:
    if method in (0, 3):
        return zlib.compress(body)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {1: "lz4", 2: "zstd"}[method]) as stream:
        stream.write(body)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def inner(*messages: tuple[bytes, bytes]) -> bytes:
    """A batch of (body, properties) in the format that producers send and that an inner batch stores."""
    parts = []
    for body, properties in messages:
        parts.append(struct.pack(">iiiii", 22 + len(body) + len(properties), 0, 0, 0, len(body)) + body)
        parts.append(struct.pack(">h", len(properties)) + properties)
    return b"".join(parts)


def text(*pairs: tuple[str, str], last: bool = True) -> bytes:
    """Encoded properties. ``last``: with the last separator."""
    joined = "\x02".join(f"{name}\x01{value}" for name, value in pairs)
    return (joined + ("\x02" if last and pairs else "")).encode()


def queue_of(message: Stored) -> MessageQueue:
    return QUEUE._replace(topic=message.topic.decode(), queue_id=message.queue_id)


def moved(message: Stored, queue: MessageQueue) -> Stored:
    """A copy of the message that belongs to another queue."""
    topic = queue.topic.encode()
    return replace(message, topic=topic, queue_id=queue.queue_id, magic=V2 if len(topic) > 127 else message.magic)


def usual(number: int, topic: bytes = b"orders", queue_id: int = 3) -> Stored:
    """A message like a typical producer's: 320 bytes, with a body of 100 bytes and 6 properties."""
    properties = text(
        ("KEYS", f"order-{number:010d}"),
        ("UNIQ_KEY", f"0A010203F4D2ABCDEF010000{number & 0xFFFFFFFF:08X}"),
        ("CLUSTER", "DefaultCluster"),
        ("TAGS", "created"),
        ("__SHARDINGKEY", f"{number % 1000:06d}"),
        ("WAIT", "true"),
    )
    return Stored(
        offset=number, body=b"%0100d" % number, properties=properties, topic=topic, queue_id=queue_id, physical=number * 320
    )


NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "__SHARDINGKEY", "RETRY_TOPIC", "a", "KEYT", "TAG", "é", "CLUSTER"])
VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\x00\x01\x02"), min_size=1, max_size=8), st.just("t")
)
PLAIN_PROPERTIES = st.builds(
    lambda pairs, last: text(*pairs.items(), last=last), st.dictionaries(NAMES, VALUES, max_size=6), st.booleans()
)
#: Malformed properties: separators (bytes 1 and 2), names and invalid text in any order.
ODD_PROPERTIES = st.lists(
    st.sampled_from(
        [b"\x01", b"\x02", b"TAGS", b"TAGS\x01", b"a", b"UNIQ_KEY\x01u\x02", b"\x00", b"\xc3", b"\xff", "é".encode()]
    ),
    max_size=12,
).map(b"".join)
OFFSETS = st.integers(0, 60)
TOPICS = st.sampled_from(["orders", "orders", "orders", "", "o", "%RETRY%billing", "é", "g" * 127, "g" * 300])
QUEUES = st.builds(QUEUE._replace, topic=TOPICS, queue_id=st.integers(-1, 9))
TIMES = st.one_of(st.integers(0, 2**41), st.sampled_from([-1, -(2**63), 2**63 - 1, 253402300799999, 253402300800000]))

PLAIN = st.builds(
    Stored,
    offset=OFFSETS,
    body=st.binary(max_size=40),
    properties=PLAIN_PROPERTIES,
    physical=st.integers(0, 2**62),
    born=TIMES,
    reconsumed=st.integers(-1, 20),
)
INNER_BATCHES = st.builds(
    lambda messages, flag: Stored(offset=5, body=inner(*messages), sys_flag=INNER | flag),
    st.lists(st.tuples(st.binary(max_size=9), st.one_of(PLAIN_PROPERTIES, ODD_PROPERTIES)), max_size=4),
    st.sampled_from([0, 1, 0x101, 0x201, 0x30]),
)
ODD = st.one_of(
    st.builds(
        Stored,
        offset=OFFSETS,
        body=st.one_of(st.binary(max_size=40), st.just(bytes(5000))),
        properties=st.one_of(PLAIN_PROPERTIES, ODD_PROPERTIES),
        sys_flag=st.sampled_from([0, 0, 1, 0x101, 0x201, 0x301, 0x10, 0x20, 0x30, 0x31, 2, 0xC, 0x40, 0x80]),
        magic=st.sampled_from([V1, V1, V2]),
        physical=st.integers(-1, 2**62),
        born=TIMES,
        stored=TIMES,
    ),
    INNER_BATCHES,
)
#: A message of a queue other than QUEUE.
STRANGERS = st.builds(
    lambda message, place: replace(message, **place),
    ODD,
    st.sampled_from(
        [
            {"queue_id": 4},
            {"queue_id": -1},
            {"topic": b"order"},
            {"topic": b"ordert"},
            {"topic": b"orders2"},
            {"topic": b""},
            {"topic": b"\xff\xfe"},
            {"topic": b"g" * 300, "magic": V2},
        ]
    ),
)
