"""Checks a whole store: SQLite's pages, the seal of every row, the rules between the tables, and the segment files.

A finding is a line of text. The check changes nothing and continues after damage. It holds the whole index in memory, except payloads, which
it reads one by one.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from orderedmq.conditions import StoreCondition
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.garbage import LOOKED
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import UNREADABLE, Store, page_findings
from orderedmq.embedded.store.schema import (
    BATCHES,
    CHUNKS,
    DEAD_LETTERS,
    INLINE,
    LOCKS,
    MEMBERS,
    OFFSETS,
    PARKED,
    PAYLOADS,
    PROGRESS,
    QUEUES,
    RESIZES,
    SEGMENTS,
    SETTINGS,
    TABLES,
    TOPICS,
    Chunk,
    OffsetRow,
    ProgressRow,
    QueueRow,
    Table,
    queue_of,
)
from orderedmq.embedded.store.segments import FOLDER, Segments, parse_name
from orderedmq.errors import StoreError
from orderedmq.model import DEAD_LETTER_PREFIX, EMBEDDED_BROKER, MessageQueue
from orderedmq.parking import leader_of, lot_name, origin

Row = TypeVar("Row", bound=tuple[Any, ...])


class Place(NamedTuple):
    """The place of a payload. ``str(place)`` is the payload's name in findings."""

    segment: str
    position: int | None = None

    def __str__(self) -> str:
        if self.segment == INLINE:
            return f"payload {self.position}"
        return f"{'' if self.position is None else f'payload {self.position} in '}segment {self.segment}"


@dataclass
class Checked:
    """The result of a check. ``findings`` is empty if the store is sound. The numbers say how much was read.

    ``unused``: names of segment files to which no entry points. They are not damage: running tasks write such files, and the files of
    killed tasks are deleted later. ``foreign``: names of files in the segments' folder that do not belong to this store. They are never
    deleted.
    """

    findings: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    entries: int = 0
    payloads: int = 0
    payload_bytes: int = 0


def check(store: Path | str | EmbeddedBroker) -> list[str]:
    """Return what is wrong with the store: an empty list if it is sound. Raises StoreError if there is no store."""
    return examine(store.path if isinstance(store, EmbeddedBroker) else Path(store)).findings


def examine(path: Path) -> Checked:
    """Check the whole store. Raises StoreError MISSING, NOT_A_STORE, OTHER_FORMAT, PERMISSION or IO."""
    out = Checked()
    try:
        store = Store.open(path, damaged_too=True)
    except StoreError as error:
        if error.sub != StoreCondition.CORRUPT:
            raise
        out.findings.append(error.message)
        return out
    try:
        with store.inspected() as connection:
            contents = Contents(path, connection, out)
            _examine(contents, out)
        if store.missing_transactions:
            out.findings.append(f"its last {store.missing_transactions} transactions are missing")
        if contents.lost and not out.findings:
            # Leave out segments that were deleted during the check.
            with store.read() as txn:
                contents.lost = {name: token for name, token in contents.lost.items() if txn.get(SEGMENTS, token) is not None}
        out.findings += contents.lost
    finally:
        store.close()
    return out


class Contents:
    """The undamaged rows of a snapshot by table, and the payloads that they point to."""

    def __init__(self, path: Path, connection: sqlite3.Connection, out: Checked) -> None:
        self._connection = connection
        self.segments = Segments(lambda: path, "")
        #: Finding about a payload whose segment file is missing → the segment.
        self.lost: dict[str, str] = {}
        self._rows: dict[str, list[Any]] = {table.name: [] for table in TABLES.values()}
        try:
            out.findings.extend(page_findings(connection, "integrity_check"))
        except UNREADABLE as error:
            out.findings.append(str(error))
        for table in TABLES.values():
            if table is not PAYLOADS:
                out.findings += self._read(table)
        out.entries = sum(map(len, self._rows.values()))
        self.segments.store_id = self.setting(schema.STORE_ID).text or ""
        if self.setting(schema.STORE_FORMAT).number != schema.FORMAT:
            out.findings.append("its format is missing")

    def _read(self, table: Table[Any]) -> Iterator[str]:
        rows = self._rows[table.name]
        try:
            for values in self._connection.execute(table.all):
                row = table.without_seal(values)
                if row is None:
                    yield f"{table.described(values)} fails its checksum"
                else:
                    rows.append(row)
        except UNREADABLE as error:
            yield f"table {table.name} cannot be read: {error}"

    def rows(self, table: Table[Row]) -> list[Row]:
        return self._rows[table.name]

    def setting(self, name: str) -> schema.Setting:
        return next((row for row in self.rows(SETTINGS) if row.name == name), schema.Setting(name))

    def payload(self, chunk: Chunk) -> bytes | pa.Buffer | None:
        """Return a chunk's payload, which may be truncated, or None if it is missing."""
        if chunk.segment == INLINE:
            row = self._connection.execute(PAYLOADS.get, (chunk.position,)).fetchone()
            return None if row is None else bytes(row[1])
        try:
            return self.segments.read(chunk.segment, chunk.position, chunk.stored_bytes)
        except FileNotFoundError:
            return None

    def payload_ids(self) -> list[int]:
        return [number for (number,) in self._connection.execute("SELECT id FROM payloads")]


def _examine(contents: Contents, out: Checked) -> None:
    used: dict[Place, str] = {}
    queues = {queue_of(row): row for row in contents.rows(QUEUES)}
    for findings in (
        _topics(contents, queues),
        _index(contents, queues, used, out),
        _payloads(contents, used),
        _files(contents, out),
        _groups(contents, queues),
        _members(contents),
        _dead(contents, queues),
        _parked(contents, queues),
        _batches(contents),
    ):
        try:
            out.findings.extend(findings)
        except UNREADABLE as error:
            out.findings.append(str(error))


def _topics(contents: Contents, queues: dict[MessageQueue, QueueRow]) -> Iterator[str]:
    expected = {
        MessageQueue(topic.name, EMBEDDED_BROKER, number)
        for topic in contents.rows(TOPICS)
        for number in range(topic.queues + topic.closed)
    }
    for queue in sorted(expected ^ set(queues)):
        yield f"queue {queue} {'has no topic' if queue in queues else 'has no state'}"
    last: dict[str, int] = {}
    for resize in contents.rows(RESIZES):
        name = f"resize {resize.number} of topic {resize.topic}"
        if last.setdefault(resize.topic, resize.former) != resize.former:
            yield f"{name} is from {resize.former} queues, but the one before it was to {last[resize.topic]}"
        last[resize.topic] = resize.queues
        for number, end in enumerate(json.loads(resize.ends)):
            queue = MessageQueue(resize.topic, EMBEDDED_BROKER, number)
            if queue not in queues or end > queues[queue].max_offset:
                yield f"{name} says that queue {queue} ended at {end}, which it has not reached"
    for topic in contents.rows(TOPICS):
        if last.pop(topic.name, topic.queues) != topic.queues:
            yield f"topic {topic.name} has {topic.queues} queues, but its last resize was to another number"
    for name in last:
        yield f"topic {name} was resized, but does not exist"


def _index(contents: Contents, queues: dict[MessageQueue, QueueRow], used: dict[Place, str], out: Checked) -> Iterator[str]:
    """Check that a queue's chunks follow each other from its min to its max offset, and that its state agrees with them."""
    ends = {queue: at.min_offset for queue, at in queues.items()}
    sizes = dict.fromkeys(queues, 0)
    stamps = dict.fromkeys(queues, 0)
    for chunk in contents.rows(CHUNKS):
        queue, first = queue_of(chunk), chunk.first_offset
        if queue not in queues:
            yield f"queue {queue} does not exist, but has a chunk at {first}"
            continue
        if first != ends[queue]:
            yield f"queue {queue} has a chunk at {first}, but its next chunk must begin at {ends[queue]}"
        if chunk.rows <= 0:
            yield f"queue {queue} has an empty chunk at {first}"
        if not stamps[queue] <= chunk.first_stored <= chunk.last_stored:
            yield f"queue {queue} has store times out of order at {first}"
        ends[queue] = chunk.end
        sizes[queue] += chunk.stored_bytes
        stamps[queue] = chunk.last_stored
        yield from _payload(contents, f"chunk {first} of queue {queue}", chunk, used, out)
    for queue, at in queues.items():
        if ends[queue] != at.max_offset:
            yield f"queue {queue} ends at {at.max_offset}, but its chunks end at {ends[queue]}"
        if sizes[queue] != at.stored_bytes:
            yield f"queue {queue} counts {at.stored_bytes} bytes, but its chunks have {sizes[queue]}"
        if stamps[queue] > at.last_stored:
            yield f"queue {queue} says that it was last written at {at.last_stored}, but its last chunk was written at {stamps[queue]}"


def _payload(contents: Contents, name: str, chunk: Chunk, used: dict[Place, str], out: Checked) -> Iterator[str]:
    """Check that a payload belongs to only one entry, passes its checksum, and has the columns, rows and bytes that its entry names."""
    place = Place(chunk.segment, chunk.position)
    if place in used:
        yield f"{place} belongs to {name} and to {used[place]}"
        return
    used[place] = name
    out.payloads += 1
    try:
        value = contents.payload(chunk)
    except OSError as error:
        yield f"{place} of {name} cannot be read: {error}"
        return
    if value is None:
        finding = f"{place} of {name} is missing"
        if chunk.segment == INLINE:
            yield finding
        else:
            contents.lost[finding] = chunk.segment
        return
    out.payload_bytes += len(value)
    try:
        codec.verify(value, chunk)
    except StoreError as error:
        yield error.message
        return
    try:
        stored = codec.decode(value, chunk, codec.STORED)
    except pa.ArrowException as error:
        yield f"{place} of {name} does not have the columns of its entry: {error}"
        return
    wrong = {column: len(values) for column, values in stored.items() if len(values) != chunk.rows}
    if wrong or sum(1 for bit in range(len(codec.STORED)) if chunk.columns >> bit & 1) != len(stored) or "body" not in stored:
        yield f"{place} of {name} has columns {sorted(stored)}, or columns with another length than {chunk.rows}: {wrong}"
    elif codec.body_bytes(stored["body"]) != chunk.body_bytes:
        yield f"{place} of {name} does not have the {chunk.body_bytes} body bytes of its entry"


def _payloads(contents: Contents, used: dict[Place, str]) -> Iterator[str]:
    """Check that each payload in the index belongs to a chunk, and that each segment's row has the right number of chunks."""
    greatest = contents.setting(schema.LAST_PAYLOAD).number or 0
    for number in contents.payload_ids():
        if Place(INLINE, number) not in used:
            yield f"payload {number} belongs to no entry"
        if number > greatest:
            yield f"payload {number} is beyond {greatest}, the last number that the store has given"
    chunks = Counter(place.segment for place in used if place.segment != INLINE)
    counts = {segment.token: segment.chunks for segment in contents.rows(SEGMENTS)}
    for token, count in counts.items():
        if count != chunks[token]:
            yield f"{Place(token)} counts {count} chunks, but the index has {chunks[token]}"
    for token in chunks:
        if token not in counts:
            yield f"{Place(token)} has chunks but no entry"


def _files(contents: Contents, out: Checked) -> Iterator[str]:
    """Check that every needed segment file belongs to this store, and list the files that are not needed."""
    try:
        names = contents.segments.names()
    except FileNotFoundError:
        yield f"folder {FOLDER} is missing"
        return
    needed = {segment.token for segment in contents.rows(SEGMENTS)}
    for name in names:
        segment = parse_name(name)
        if name == LOOKED:
            continue
        try:
            header = contents.segments.header(name)
        except FileNotFoundError:
            # The file was deleted after the folder was listed.
            continue
        except OSError as error:
            yield f"file {name} cannot be read: {error}"
            continue
        mine = header is not None and header.store_id == contents.segments.store_id
        if segment is not None and segment.complete and segment.segment in needed:
            if header is None or not mine or header.token != segment.segment:
                yield f"{Place(segment.segment)} has a header that fails its checksum or belongs to another segment"
        elif segment is not None and (mine or not segment.complete):
            out.unused.append(name)
        else:
            out.foreign.append(name)


def _groups(contents: Contents, queues: dict[MessageQueue, QueueRow]) -> Iterator[str]:
    rows: list[OffsetRow | ProgressRow] = [*contents.rows(OFFSETS), *contents.rows(PROGRESS)]
    for row in rows:
        group, queue = row.consumer_group, queue_of(row)
        at = queues.get(queue)
        if at is None:
            yield f"group {group!r} has an offset of queue {queue}, which does not exist"
        elif row.next_offset > at.max_offset:
            yield f"group {group!r} is at {row.next_offset} of queue {queue}, which ends at {at.max_offset}"
    greatest, epochs = contents.setting(schema.LAST_EPOCH).number or 0, set[int]()
    for lock in contents.rows(LOCKS):
        if not 0 < lock.tenure <= lock.epoch <= greatest or lock.epoch in epochs:
            yield (
                f"the lock of queue {queue_of(lock)} in group {lock.consumer_group!r} has epoch {lock.epoch} and tenure {lock.tenure}, but "
                f"the last number given is {greatest}"
            )
        epochs.add(lock.epoch)


def _members(contents: Contents) -> Iterator[str]:
    """Check that each member has a join number that the store has given."""
    greatest = contents.setting(schema.LAST_EPOCH).number or 0
    for member in contents.rows(MEMBERS):
        if not 0 < member.joined <= greatest:
            yield (
                f"member {member.client_id!r} of group {member.consumer_group!r} has join number {member.joined}, but the last number given "
                f"is {greatest}"
            )


def _dead(contents: Contents, queues: dict[MessageQueue, QueueRow]) -> Iterator[str]:
    """Check that each dead-lettered message has its own letter in its group's dead-letter topic."""
    letters = dict[tuple[str, int], str]()
    for row in contents.rows(DEAD_LETTERS):
        group, queue, letter = row.consumer_group, queue_of(row), row.letter_offset
        name = f"message {row.message_offset} of queue {queue} of group {group!r}"
        target = queues.get(MessageQueue(DEAD_LETTER_PREFIX + group, EMBEDDED_BROKER, 0))
        if queue not in queues:
            yield f"{name} has a dead letter, but its queue does not exist"
        if target is None:
            yield f"{name} has a dead letter in a topic that does not exist"
        elif letter >= target.max_offset:
            yield f"{name} has a dead letter at {letter}, but the dead letters end at {target.max_offset}"
        if (group, letter) in letters:
            yield f"{name} has its dead letter at {letter}, and so has {letters[group, letter]}"
        letters[group, letter] = name


def _parked(contents: Contents, queues: dict[MessageQueue, QueueRow]) -> Iterator[str]:
    """Check that each parking lot's queue exists, and that each record of a parked message points to a message in the lot."""
    for lot in queues:
        parked_by = origin(lot.topic)
        if parked_by is not None and lot._replace(topic=parked_by[1]) not in queues:
            yield f"queue {lot} is the parking lot of a queue that does not exist"
    copies = dict[tuple[MessageQueue, int], str]()
    for row in contents.rows(PARKED):
        group, source = row.consumer_group, queue_of(row)
        name = f"message {row.message_offset} of queue {source} of group {group!r}"
        lot = source if leader_of(group, source) != source else source._replace(topic=lot_name(group, source.topic))
        if source not in queues or row.message_offset >= queues[source].max_offset:
            yield f"{name} was parked, but does not exist"
        if lot not in queues or row.lot_offset >= queues[lot].max_offset:
            yield f"{name} was parked at {row.lot_offset} of queue {lot}, which has no such message"
        if (lot, row.lot_offset) in copies:
            yield f"{name} was parked at {row.lot_offset} of queue {lot}, and so was {copies[lot, row.lot_offset]}"
        copies[lot, row.lot_offset] = name


def _batches(contents: Contents) -> Iterator[str]:
    for batch in contents.rows(BATCHES):
        record = json.loads(batch.record)
        if set(record) != {"sources", "rows", "content", "spread"}:
            yield f"batch {batch.batch_id} of sink {batch.sink!r} has a record of {sorted(record)}"
