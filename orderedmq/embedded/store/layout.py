"""How the store's keys and values are laid out in LMDB. Pure.

Databases (key → value; integers in keys are big-endian, so that keys sort as numbers do):

    meta      name                       → format, store id, last transaction, next payload id, next epoch; reset numbers of groups;
                                          the machine's clocks, as JSON
    topics    topic                      → TopicInfo as JSON
    queues    queue key                  → QueueState
    index     queue key, first offset    → Chunk: makes a payload visible at these offsets
    payloads  payload id                 → a payload that is not in a segment: one Arrow IPC record batch (chunk_codec.py)
    segments  token                      → SegmentState as JSON: how many chunks are in the segment file, and whose bytes
    space     incarnation of a topic     → bytes that its messages take, also deleted ones whose segment is still needed
    groups    group, queue key           → next offset to process
    locks     group, queue key           → QueueLock as JSON
    members   group, client id           → Member as JSON
    dead      group, queue key, offset   → offset of its dead letter
    parked    group, queue key, offset   → offset in the parking lot of the message that was parked from there
    settled   group, queue key, block    → bits of the block's messages that were processed out of turn (settled.py)
    batches   sink id, batch id          → replay record as JSON

Every value ends with a seal (integrity/seal.py), except payloads and the store's format.

A queue key is the topic, a NUL and the queue's number. The longest key has 127 + 1 + 127 + 1 + 4 + 8 bytes; LMDB allows 511.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.ownership.lock import Instant, QueueLock
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.rows.retention import Clocks

#: No release made a store of a format below this one.
FORMAT: Final = 5
DATABASES: Final = (
    "meta",
    "topics",
    "queues",
    "index",
    "payloads",
    "groups",
    "locks",
    "members",
    "dead",
    "batches",
    "parked",
    "settled",
    "segments",
    "space",
)

#: The key in ``meta`` for the machine's clocks, as retention by age has last seen them.
CLOCKS: Final = b"clocks"
#: Keys and locks that are kept decoded: whoever watches a group reads the same ones again and again.
_KEPT: Final = 4096

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_CHUNK = struct.Struct("<16sQIHBQQQqqq")
_QUEUE = struct.Struct("<QQQq")


#: The segment of a chunk whose payload is in LMDB.
INLINE: Final = bytes(16)


class Chunk(NamedTuple):
    """An index entry: where a payload is, and its properties, known without reading it. Times are in µs since the epoch."""

    #: The token of the segment file that has the payload, or INLINE.
    segment: bytes
    #: The payload's first byte in the segment; its id in ``payloads`` if it is INLINE.
    position: int
    rows: int
    #: A bit for each stored column that the payload has (chunk_codec.STORED).
    columns: int
    #: 0 none, 1 lz4.
    codec: int
    checksum: int
    stored_bytes: int
    body_bytes: int
    born: int
    first_stored: int
    last_stored: int

    def pack(self) -> bytes:
        return _CHUNK.pack(*self)

    @classmethod
    def unpack(cls, value: bytes) -> Chunk:
        return cls(*_CHUNK.unpack(value))


@dataclass
class SegmentState:
    """What the index says about a segment: ``chunks`` are in it, at least one unless the file may be deleted.

    ``topics``: by incarnation of a topic, the bytes of its messages that were published from this segment. They are on the disk
    until the segment is deleted.
    """

    chunks: int
    topics: dict[str, int]

    def pack(self) -> bytes:
        return json.dumps([self.chunks, self.topics]).encode()

    @classmethod
    def unpack(cls, value: bytes) -> SegmentState:
        chunks, topics = json.loads(value)
        return cls(chunks, topics)


class QueueState(NamedTuple):
    """Offsets of the first message and of the next one, bytes stored, and the last store timestamp, which never goes back."""

    min_offset: int
    max_offset: int
    stored_bytes: int
    last_stored: int

    def pack(self) -> bytes:
        return _QUEUE.pack(*self)

    @classmethod
    def unpack(cls, value: bytes) -> QueueState:
        return cls(*_QUEUE.unpack(value))


def queue_key(queue: MessageQueue) -> bytes:
    return queue.topic.encode() + b"\0" + _U32.pack(queue.queue_id)


def queue_of(key: bytes) -> MessageQueue:
    """Return the queue of a queue key. Trailing bytes are ignored."""
    topic, _, rest = key.partition(b"\0")
    return MessageQueue(topic.decode(), EMBEDDED_BROKER, _U32.unpack(rest[:4])[0])


def index_key(queue: bytes, offset: int) -> bytes:
    return queue + _U64.pack(offset)


def index_offset(key: bytes) -> int:
    return int(_U64.unpack(key[-8:])[0])


def number(value: int) -> bytes:
    return _U64.pack(value)


def to_number(value: bytes) -> int:
    return int(_U64.unpack(value)[0])


def group_key(group: str, queue: MessageQueue) -> bytes:
    return group.encode() + b"\0" + queue_key(queue)


@functools.lru_cache(maxsize=_KEPT)
def group_of(key: bytes) -> tuple[str, MessageQueue]:
    group, _, rest = key.partition(b"\0")
    return group.decode(), queue_of(rest)


def sink_key(sink_id: str) -> bytes:
    """Return the prefix of a sink's keys. A sink id that is longer than a key may be is hashed."""
    plain = sink_id.encode()
    if len(plain) > 200 or b"\0" in plain:
        plain = b"#" + hashlib.blake2b(plain, digest_size=32).hexdigest().encode()
    return plain + b"\0"


def lock_to_json(lock: QueueLock) -> bytes:
    return json.dumps(asdict(lock)).encode()


@functools.lru_cache(maxsize=_KEPT)
def lock_from_json(value: bytes) -> QueueLock:
    # Decoded here: json would first detect the encoding of the bytes.
    fields = json.loads(value.decode())
    fields["renewed"] = Instant(**fields["renewed"])
    return QueueLock(**fields)


def group_prefix(group: str) -> bytes:
    return group.encode() + b"\0"


def member_key(group: str, client_id: str) -> bytes:
    """Return the key of a member's record. It has a hash of the client id, which can be longer than a key may be."""
    return group_prefix(group) + hashlib.blake2b(client_id.encode(), digest_size=16).digest()


def member_to_json(member: Member) -> bytes:
    return json.dumps(asdict(member)).encode()


def member_from_json(value: bytes) -> Member:
    fields = json.loads(value.decode())
    fields["renewed"] = Instant(**fields["renewed"])
    fields["subscription"] = Subscription(**fields["subscription"])
    return Member(**fields)


def clocks_to_json(clocks: Clocks) -> bytes:
    return json.dumps(asdict(clocks)).encode()


def clocks_from_json(value: bytes) -> Clocks:
    fields = json.loads(value.decode())
    return Clocks(Instant(**fields["at"]), fields["wall"], tuple((when, step) for when, step in fields["steps"]))


def message_key(group: str, queue: MessageQueue, offset: int) -> bytes:
    return index_key(group_key(group, queue), offset)


def described(database: str, key: bytes) -> str:
    """Return a description of an entry for an error. The entry's key may be damaged."""
    name, _, rest = key.partition(b"\0")
    first = name.decode(errors="backslashreplace")
    match database:
        case "topics":
            return f"topic {first!r}"
        case "queues":
            return f"the state of queue {_queue_text(key)}"
        case "index":
            return f"the index entry of queue {_queue_text(key[:-8])} at offset {int.from_bytes(key[-8:], 'big')}"
        case "groups":
            return f"the offset of group {first!r} in queue {_queue_text(rest)}"
        case "locks":
            return f"the lock of group {first!r} on queue {_queue_text(rest)}"
        case "members":
            return f"a member of group {first!r}"
        case "dead":
            return f"the dead-letter record of group {first!r} for offset {int.from_bytes(key[-8:], 'big')} of queue {_queue_text(rest[:-8])}"
        case "parked":
            return f"the record that group {first!r} parked offset {int.from_bytes(key[-8:], 'big')} of queue {_queue_text(rest[:-8])}"
        case "settled":
            return f"what group {first!r} settled in block {int.from_bytes(key[-8:], 'big')} of queue {_queue_text(rest[:-8])}"
        case "segments":
            return f"the entry of segment {key.hex()}"
        case "space":
            return f"the size of the topic with incarnation {first!r}"
        case "batches":
            return f"batch {int.from_bytes(rest, 'big')} of sink {first!r}"
        case "meta" if rest:
            return f"the reset number of group {rest.decode(errors='backslashreplace')!r}"
        case _:
            return f"{database} entry {first!r}"


def _queue_text(key: bytes) -> str:
    topic, _, number = key.partition(b"\0")
    return str(MessageQueue(topic.decode(errors="backslashreplace"), EMBEDDED_BROKER, int.from_bytes(number[:4], "big")))
