"""The layout of the store's keys and values in LMDB. Pure.

Databases (key → value; integers in keys are big-endian, so that keys sort in the order of the numbers):

    meta      name                       → format, store id, last transaction, next payload id, next epoch; the machine's clocks, as JSON
    topics    topic                      → TopicInfo as JSON
    queues    queue key                  → QueueState
    index     queue key, first offset    → Chunk: makes a payload visible at the offsets from the first one on
    payloads  payload id                 → a payload that is not in a segment: one Arrow IPC record batch (chunk_codec.py)
    segments  token                      → SegmentState as JSON: how many chunks are in the segment file, and bytes by topic
    space     incarnation of a topic     → bytes of the topic's messages, including deleted ones whose segment is still needed
    groups    group, queue key           → next offset to process
    locks     group, queue key           → QueueLock as JSON
    members   group, client id           → Member as JSON
    dead      group, queue key, offset   → offset of its dead letter
    parked    group, queue key, offset   → offset in the parking lot of the message that was parked from that offset
    batches   sink id, batch id          → replay record as JSON

Every value ends with a seal, except payloads and the store's format: a checksum of database, key and value. It covers the key, because a
changed bit in the key moves an entry to a key under which it was never written. The checksums of payloads are in the index.

A queue key is the topic, a NUL and the queue's number. The longest key has 127 + 1 + 127 + 1 + 4 + 8 bytes; LMDB allows 511.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import xxhash

from orderedmq.errors import no_such_queue
from orderedmq.model import DEAD_LETTER_PREFIX, EMBEDDED_BROKER, MAX_QUEUES, MessageQueue, check_topic
from orderedmq.ownership.lock import Instant, QueueLock
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.rows.retention import Clocks

#: The format of stores. No release has made a store of an earlier format.
FORMAT: Final = 6
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
    "segments",
    "space",
)

#: The database whose values have no seal.
UNSEALED: Final = "payloads"
#: The key in ``meta`` whose value has no seal, because earlier versions read it to see that a store is too new for them.
FORMAT_KEY: Final = b"format"
_SEAL_BYTES: Final = 8
#: Seeds of seals by database. The length of the key is added to a seed, so that a seal also covers where the key ends.
_SEEDS: Final = {name: number << 16 for number, name in enumerate(DATABASES)}

#: The key in ``meta`` for the machine's clocks as retention by age last read them.
CLOCKS: Final = b"clocks"
#: How many decoded keys and locks are cached. A process that watches a group reads the same ones again and again.
_KEPT: Final = 4096

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_CHUNK = struct.Struct("<16sQIHBQQQqqq")
_QUEUE = struct.Struct("<QQQq")


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    return value + xxhash.xxh3_64_digest(key + value, _SEEDS[database] | len(key))


def without_seal(database: str, key: bytes, value: bytes) -> bytes | None:
    """Return the value without its seal, or None if this value was not written under this key."""
    plain = value[:-_SEAL_BYTES]
    if xxhash.xxh3_64_digest(key + plain, _SEEDS[database] | len(key)) != value[-_SEAL_BYTES:]:
        return None
    return plain


#: The segment of a chunk whose payload is in LMDB.
INLINE: Final = bytes(16)


class Chunk(NamedTuple):
    """An index entry: the place of a payload, and properties that are needed without reading it. Times are in µs since the epoch."""

    #: The token of the segment file that has the payload, or INLINE.
    segment: bytes
    #: The position of the payload's first byte in the segment, or the payload's id in ``payloads`` if ``segment`` is INLINE.
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
    """The entry of a segment. ``chunks``: how many of its chunks are in the index. If there are none, the file may be deleted.

    ``topics``: the bytes of the messages that were published from this segment, by incarnation of their topic. They take disk space
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
    """A queue's first offset and its next offset, the bytes stored, and the last store timestamp, which never goes back."""

    min_offset: int
    max_offset: int
    stored_bytes: int
    last_stored: int

    def pack(self) -> bytes:
        return _QUEUE.pack(*self)

    @classmethod
    def unpack(cls, value: bytes) -> QueueState:
        return cls(*_QUEUE.unpack(value))


@functools.lru_cache(maxsize=_KEPT)
def topic_key(topic: str) -> bytes:
    """Return the key of a topic. Raises TopicError BAD_NAME if no topic can have that name."""
    # A group whose name is too long for a dead-letter topic has no dead letters. To ask for them is no error.
    check_topic(topic.removeprefix(DEAD_LETTER_PREFIX) or topic, writing=False)
    return topic.encode()


def queue_key(queue: MessageQueue) -> bytes:
    """Return a queue's key. Raises TopicError BAD_NAME or NO_SUCH_QUEUE if no queue can have that topic or number."""
    if not 0 <= queue.queue_id < MAX_QUEUES:
        raise no_such_queue(queue.topic, queue.queue_id)
    return topic_key(queue.topic) + b"\0" + _U32.pack(queue.queue_id)


def queue_of(key: bytes) -> MessageQueue:
    """Return the queue of a queue key, ignoring bytes after the key."""
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
    """Return the prefix of a sink's keys. A hash replaces a sink id that is too long for the header of a segment."""
    plain = sink_id.encode()
    if len(plain) > 160 or b"\0" in plain:
        plain = b"#" + hashlib.blake2b(plain, digest_size=32).hexdigest().encode()
    return plain + b"\0"


def lock_to_json(lock: QueueLock) -> bytes:
    return json.dumps(asdict(lock)).encode()


@functools.lru_cache(maxsize=_KEPT)
def lock_from_json(value: bytes) -> QueueLock:
    # The bytes are decoded here because json would first detect their encoding, which takes time.
    fields = json.loads(value.decode())
    fields["renewed"] = Instant(**fields["renewed"])
    return QueueLock(**fields)


def group_prefix(group: str) -> bytes:
    return group.encode() + b"\0"


def member_key(group: str, client_id: str) -> bytes:
    """Return the key of a member's record. A hash replaces the client id, which can be too long for a key."""
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


@functools.lru_cache(maxsize=1)
def clocks_from_json(value: bytes) -> Clocks:
    fields = json.loads(value.decode())
    return Clocks(Instant(**fields["at"]), fields["wall"], tuple((when, step) for when, step in fields["steps"]))


def message_key(group: str, queue: MessageQueue, offset: int) -> bytes:
    return index_key(group_key(group, queue), offset)


def described(database: str, key: bytes) -> str:
    """Return a description of an entry for an error message. The entry's key may be damaged."""
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
            return f"the record that group {first!r} parked message {int.from_bytes(key[-8:], 'big')} of queue {_queue_text(rest[:-8])}"
        case "segments":
            return f"the entry of segment {key.hex()}"
        case "space":
            return f"the size of the topic with incarnation {first!r}"
        case "batches":
            return f"batch {int.from_bytes(rest, 'big')} of sink {first!r}"
        case _:
            return f"{database} entry {first!r}"


def _queue_text(key: bytes) -> str:
    topic, _, number = key.partition(b"\0")
    return str(MessageQueue(topic.decode(errors="backslashreplace"), EMBEDDED_BROKER, int.from_bytes(number[:4], "big")))
