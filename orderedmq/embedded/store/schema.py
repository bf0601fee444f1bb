"""The tables of the store's index, and the seal of each row. Pure.

Each table is a named tuple: its fields are the columns, and the first ones are the key. Anybody can read the file with the sqlite3
shell. Times are in µs since 1970, except ``renewed``, which is in seconds of the monotonic clock of the boot ``boot_id``.

Every row ends with a seal, except that of a payload: a checksum of the table's name and of the whole row, key included, because a
changed bit in a key moves a row to a place where it was never written. The checksums of payloads are in ``chunks``.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, get_type_hints

import xxhash

from orderedmq.errors import no_such_queue
from orderedmq.model import DEAD_LETTER_PREFIX, EMBEDDED_BROKER, MAX_QUEUES, MessageQueue, check_topic
from orderedmq.ownership.lock import Instant, QueueLock
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.routing.generations import Resize
from orderedmq.rows.retention import Clocks

if TYPE_CHECKING:
    import pyarrow as pa

#: The format of stores, which the file has as SQLite's ``user_version``. No release has made a store of an earlier format.
FORMAT: Final = 10
#: SQLite's ``application_id`` of a store's file: "omq\0".
APPLICATION: Final = 0x6F6D7100
#: ``Chunk.segment`` of a chunk whose payload is in the table ``payloads``.
INLINE: Final = ""
#: The highest number that SQLite stores.
HIGHEST: Final = (1 << 63) - 1
#: How many decoded locks are cached. A process that watches a group reads the same ones again and again.
_KEPT: Final = 4096


class Setting(NamedTuple):
    """A number or a text of the store: its id and format, the last numbers of its sequences, the machine's clocks (`CLOCKS`)."""

    name: str
    number: int | None = None
    text: str | None = None


class TopicRow(NamedTuple):
    """A topic. ``incarnation`` distinguishes it from an earlier one of the same name.

    ``closed``: the number of further queues, which take no more messages since the topic shrank. They keep their offsets, because the topic
    may grow again. ``own_selector``: 1 if a selector of the user's own has chosen the queues of some rows.
    """

    name: str
    queues: int
    incarnation: str
    retention_seconds: float | None
    retention_bytes: int | None
    compression: str
    closed: int = 0
    own_selector: int = 0


class QueueRow(NamedTuple):
    """A queue: its first offset and its next offset, the bytes stored, and the last store timestamp, which never goes back."""

    topic: str
    queue_id: int
    min_offset: int = 0
    max_offset: int = 0
    stored_bytes: int = 0
    last_stored: int = 0


class ResizeRow(NamedTuple):
    """A resize of a topic (`routing.generations.Resize`): the numbers of queues before and after it.

    ``ends``: the next offset of each queue at that time, as a JSON array. Later queues did not exist.
    """

    topic: str
    number: int
    former: int
    queues: int
    ends: str


class Chunk(NamedTuple):
    """Makes a payload visible at the offsets from ``first_offset`` on, and has the properties that are needed without reading it."""

    topic: str
    queue_id: int
    first_offset: int
    #: The token of the segment file that has the payload, or INLINE.
    segment: str
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

    @property
    def end(self) -> int:
        return self.first_offset + self.rows


class Payload(NamedTuple):
    """A payload that is not in a segment: one Arrow IPC record batch (chunk_codec.py)."""

    id: int
    content: bytes


class Segment(NamedTuple):
    """A segment file that is needed. ``chunks``: how many of its chunks are in the index. If there are none, the file may be deleted."""

    token: str
    chunks: int = 0


class OffsetRow(NamedTuple):
    """The offset of a group in a queue: that of the next message to process."""

    consumer_group: str
    topic: str
    queue_id: int
    next_offset: int


class ProgressRow(NamedTuple):
    """The `Progress` of a group's listener in a queue."""

    consumer_group: str
    topic: str
    queue_id: int
    next_offset: int
    lot_offset: int
    listener: str


class LockRow(NamedTuple):
    """The `QueueLock` of a group on a queue."""

    consumer_group: str
    topic: str
    queue_id: int
    owner: str
    client_id: str
    epoch: int
    tenure: int
    held: int
    boot_id: str
    renewed: float
    life: float
    lingering: int
    orphaned: int


class MemberRow(NamedTuple):
    """A `Member` of a group. ``subscription`` is JSON."""

    consumer_group: str
    client_id: str
    owner: str
    name: str | None
    joined: int
    boot_id: str
    renewed: float
    life: float
    subscription: str


class DeadLetterRow(NamedTuple):
    """The offset of the dead letter of a message."""

    consumer_group: str
    topic: str
    queue_id: int
    message_offset: int
    letter_offset: int


class ParkedRow(NamedTuple):
    """The offset, in the parking lot, of the message that was parked from ``message_offset``."""

    consumer_group: str
    topic: str
    queue_id: int
    message_offset: int
    lot_offset: int


class BatchRow(NamedTuple):
    """What a sink's batch had: its source ranges, rows and content, as JSON."""

    sink: str
    batch_id: int
    record: str


Row = TypeVar("Row", bound=tuple[Any, ...])


class Table(Generic[Row]):
    """A table's name, row type and SQL. ``keys``: how many of the row's first fields are its key."""

    def __init__(self, name: str, row: type[Row], keys: int, *, sealed: bool = True) -> None:
        self.name, self.row, self.keys, self.sealed = name, row, keys, sealed
        self._make: Callable[[tuple[Any, ...]], Row] = row._make  # type: ignore[attr-defined]
        #: A key that no row's key is before.
        self.least = tuple("" if kind is str else -(1 << 63) for kind in [*get_type_hints(row).values()][:keys])
        hints = get_type_hints(row)
        columns = [*hints, *["seal"] * sealed]
        key = columns[:keys]
        # A changed bit can turn a blob into a text, which might not be UTF-8. In a sealed row, the seal shows it.
        chosen = (
            "*"
            if sealed
            else ", ".join(f"CAST({column} AS BLOB)" if kind is bytes else column for column, kind in hints.items())
        )
        select = f"SELECT {chosen} FROM {name}"
        order, descending = ", ".join(key), ", ".join(f"{column} DESC" for column in key)
        marks = ", ".join("?" * keys)
        self.get = f"{select} WHERE {' AND '.join(f'{column} = ?' for column in key)}"
        self.put = f"INSERT OR REPLACE INTO {name} VALUES ({', '.join('?' * len(columns))})"
        self.delete = f"DELETE FROM {name} WHERE {' AND '.join(f'{column} = ?' for column in key)}"
        self.all = f"{select} ORDER BY {order}"
        #: The rows from a key on, the first of them, and the last row up to or before a key.
        self.following = f"{select} WHERE ({order}) >= ({marks}) ORDER BY {order}"
        self.from_key = f"{self.following} LIMIT 1"
        self.up_to = f"{select} WHERE ({order}) <= ({marks}) ORDER BY {descending} LIMIT 1"
        self.before = f"{select} WHERE ({order}) < ({marks}) ORDER BY {descending} LIMIT 1"

    def create(self) -> str:
        """Return the statement that creates the table."""
        hints = get_type_hints(self.row)
        columns = [f"{column} {_SQL_TYPES[kind]}" for column, kind in hints.items()]
        if self.sealed:
            columns.append("seal INTEGER NOT NULL")
        key = ", ".join(list(hints)[: self.keys])
        # A payload is large, and SQLite keeps large rows better in a table with rowids.
        return f"CREATE TABLE {self.name} ({', '.join(columns)}, PRIMARY KEY ({key})){' WITHOUT ROWID' * self.sealed}"

    def with_seal(self, row: Row) -> tuple[Any, ...]:
        return (*row, self._seal(tuple(row))) if self.sealed else row

    def without_seal(self, values: tuple[Any, ...]) -> Row | None:
        """Return the row of a table's values, or None if these values were not written as one row of this table."""
        if not self.sealed:
            return self.row(*values)
        row = values[:-1]
        return self._make(row) if self._seal(row) == values[-1] else None

    def described(self, values: tuple[Any, ...]) -> str:
        """Return a description of a row for an error message. The row may be damaged."""
        key = ", ".join(f"{column}={value!r}" for column, value in zip(get_type_hints(self.row), values[: self.keys]))
        return f"the row {key} of table {self.name}"

    def _seal(self, row: tuple[Any, ...]) -> int:
        return checksum(f"{self.name}{row!r}".encode())


_SQL_TYPES: Final[dict[Any, str]] = {
    int: "INTEGER NOT NULL",
    float: "REAL NOT NULL",
    str: "TEXT NOT NULL",
    bytes: "BLOB NOT NULL",
    int | None: "INTEGER",
    float | None: "REAL",
    str | None: "TEXT",
}

SETTINGS: Final = Table("settings", Setting, 1)
TOPICS: Final = Table("topics", TopicRow, 1)
QUEUES: Final = Table("queues", QueueRow, 2)
RESIZES: Final = Table("resizes", ResizeRow, 2)
CHUNKS: Final = Table("chunks", Chunk, 3)
PAYLOADS: Final = Table("payloads", Payload, 1, sealed=False)
SEGMENTS: Final = Table("segments", Segment, 1)
OFFSETS: Final = Table("group_offsets", OffsetRow, 3)
PROGRESS: Final = Table("progress", ProgressRow, 3)
LOCKS: Final = Table("locks", LockRow, 3)
MEMBERS: Final = Table("members", MemberRow, 2)
DEAD_LETTERS: Final = Table("dead_letters", DeadLetterRow, 4)
PARKED: Final = Table("parked", ParkedRow, 4)
BATCHES: Final = Table("batches", BatchRow, 2)
TABLES: Final[dict[type, Table[Any]]] = {
    table.row: table
    for table in (
        SETTINGS, TOPICS, QUEUES, RESIZES, CHUNKS, PAYLOADS, SEGMENTS, OFFSETS, PROGRESS, LOCKS, MEMBERS, DEAD_LETTERS,
        PARKED, BATCHES,
    )
}  # fmt: skip
#: The tables with rows of a group, by which `Admin.groups` finds it. The others keep rows only of groups that are in one of these.
OF_GROUPS: Final[tuple[Table[Any], ...]] = (OFFSETS, LOCKS, MEMBERS)

#: The names of settings: the store's id, its format, the number of its last transaction, the machine's clocks as retention by age last
#: read them, and the last payload id and epoch that were given.
STORE_ID: Final = "store_id"
STORE_FORMAT: Final = "format"
TRANSACTION: Final = "transaction"
CLOCKS: Final = "clocks"
LAST_PAYLOAD: Final = "payload"
LAST_EPOCH: Final = "epoch"


def checksum(content: bytes | pa.Buffer) -> int:
    """Return the xxh3 of bytes without its highest bit, because SQLite's integers have a sign."""
    return xxhash.xxh3_64_intdigest(content) & HIGHEST


@functools.lru_cache(maxsize=_KEPT)
def topic_name(topic: str) -> str:
    """Return the name of a topic. Raises TopicError BAD_NAME if no topic can have that name."""
    # A group whose name is too long for a dead-letter topic has no dead letters. To ask for them is no error.
    check_topic(topic.removeprefix(DEAD_LETTER_PREFIX) or topic, writing=False)
    return topic


def key_of(queue: MessageQueue) -> tuple[str, int]:
    """Return a queue's key. Raises TopicError BAD_NAME or NO_SUCH_QUEUE if no queue can have that topic or number."""
    if not 0 <= queue.queue_id < MAX_QUEUES:
        raise no_such_queue(queue.topic, queue.queue_id)
    return topic_name(queue.topic), queue.queue_id


def queue_of(row: QueueRow | Chunk | OffsetRow | ProgressRow | LockRow | DeadLetterRow | ParkedRow) -> MessageQueue:
    return MessageQueue(row.topic, EMBEDDED_BROKER, row.queue_id)


@functools.lru_cache(maxsize=_KEPT)
def resize_of(row: ResizeRow, by_key: bool) -> Resize:
    every = [MessageQueue(row.topic, EMBEDDED_BROKER, number) for number in range(max(row.former, row.queues))]
    return Resize(
        tuple(every[: row.former]),
        tuple(every[: row.queues]),
        dict(zip(every, json.loads(row.ends), strict=False)),
        by_key,
        row.number,
    )


def sink_key(sink_id: str) -> str:
    """Return the key of a sink. A hash replaces a sink id that is too long for the header of a segment."""
    if len(json.dumps(sink_id)) <= 200 and sink_id.isprintable():
        return sink_id
    return f"#{hashlib.blake2b(sink_id.encode(errors='surrogatepass'), digest_size=32).hexdigest()}"


def lock_row(group: str, queue: MessageQueue, lock: QueueLock) -> LockRow:
    return LockRow(
        group,
        *key_of(queue),
        lock.owner,
        lock.client_id,
        lock.epoch,
        lock.tenure,
        int(lock.held),
        lock.renewed.boot_id,
        float(lock.renewed.seconds),
        float(lock.life),
        int(lock.lingering),
        int(lock.orphaned),
    )


@functools.lru_cache(maxsize=_KEPT)
def lock_of(row: LockRow) -> QueueLock:
    return QueueLock(
        row.owner,
        row.client_id,
        row.epoch,
        row.tenure,
        bool(row.held),
        Instant(row.boot_id, row.renewed),
        row.life,
        bool(row.lingering),
        bool(row.orphaned),
    )


def member_row(group: str, member: Member) -> MemberRow:
    return MemberRow(
        group,
        member.client_id,
        member.owner,
        member.name,
        member.joined,
        member.renewed.boot_id,
        float(member.renewed.seconds),
        float(member.life),
        json.dumps(asdict(member.subscription)),
    )


def member_of(row: MemberRow) -> Member:
    return Member(
        row.owner,
        row.client_id,
        Subscription(**json.loads(row.subscription)),
        row.joined,
        Instant(row.boot_id, row.renewed),
        row.life,
        row.name,
    )


def clocks_to_text(clocks: Clocks) -> str:
    return json.dumps(asdict(clocks))


@functools.lru_cache(maxsize=1)
def clocks_of(text: str) -> Clocks:
    fields = json.loads(text)
    return Clocks(Instant(**fields["at"]), fields["wall"], tuple((when, step) for when, step in fields["steps"]))
