"""Checks a whole store: its pages, the seal of every entry, the rules between its databases, and its segment files.

The check reads one snapshot without LMDB, because damaged pages can crash LMDB. A finding is a line of text. The check changes
nothing and continues after damage. It holds all entries in memory and reads payloads one by one.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.conditions import StoreCondition
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.garbage import LOOKED
from orderedmq.embedded.store import formats, layout, pages, verify
from orderedmq.embedded.store.environment import MAP_SIZE, Store
from orderedmq.embedded.store.layout import INLINE, Chunk, QueueState, SegmentState
from orderedmq.embedded.store.pages import Meta, Read, Snapshot, TreeEntry
from orderedmq.embedded.store.segments import FOLDER, Segments, parse_name
from orderedmq.embedded.store.transaction import WRITTEN
from orderedmq.errors import StoreError
from orderedmq.model import DEAD_LETTER_PREFIX, MessageQueue
from orderedmq.parking import leader_of, lot_name, origin


class Place(NamedTuple):
    """The place of a payload. ``str(place)`` is the payload's name in findings."""

    segment: bytes
    position: int | None = None

    def __str__(self) -> str:
        if self.segment == INLINE:
            return f"payload {self.position}"
        return f"{'' if self.position is None else f'payload {self.position} in '}segment {self.segment.hex()}"


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
    Store.require_there(path)
    out = Checked()
    lost: dict[str, bytes] = {}
    with Store(path, MAP_SIZE).errors_mapped("check"), contextlib.ExitStack() as stack:
        read = stack.enter_context(verify.reading(path))
        number = None
        try:
            verify.require_metas(path)
            number = stack.enter_context(Store.held(path))
        except StoreError as error:
            if error.sub != StoreCondition.CORRUPT:
                raise
            out.findings.append(error.message)
        metas = pages.metas(read)
        meta = _chosen(metas, number) if metas is not None else None
        if meta is not None:
            lost = _examine(path, read, meta, out)
            _check_older(read, metas, meta, out)
    out.findings += _needed(path, lost) if not out.findings else lost
    return out


def _needed(path: Path, lost: dict[str, bytes]) -> list[str]:
    """Return the findings about lost segments, except those about segments that were deleted during the check.

    Call this only if LMDB's pages are sound, because it opens the store.
    """
    if not lost:
        return []
    store = Store.open(path)
    try:
        with store.read() as txn:
            return [finding for finding, segment in lost.items() if txn.get("segments", segment) is not None]
    finally:
        store.close()


def _chosen(pair: tuple[Meta, Meta], number: int | None) -> Meta:
    return next((meta for meta in pair if meta.transaction == number), max(pair, key=lambda meta: meta.transaction))


def _check_older(read: Read, pair: tuple[Meta, Meta] | None, meta: Meta, out: Checked) -> None:
    """Check that the older snapshot was written by the transaction that its meta page names."""
    for other in pair or ():
        if other.transaction != meta.transaction and (wrong := verify.wrong_writer(read, other)) is not None:
            out.findings.append(wrong)


class Contents:
    """The undamaged entries of a snapshot, by database and key, and the payloads that they point to."""

    def __init__(self, path: Path, snapshot: Snapshot, meta: Meta, out: Checked) -> None:
        self._snapshot = snapshot
        self.segments = Segments(lambda: path, "")
        #: Finding about a payload whose segment file is missing → the segment.
        self.lost: dict[str, bytes] = {}
        self._values: dict[str, dict[bytes, bytes]] = {name: {} for name in layout.DATABASES}
        self._payloads: dict[bytes, TreeEntry] = {}
        trees = snapshot.databases()
        self.is_store = "meta" in trees
        if not self.is_store:
            out.findings.append(f"it has databases {', '.join(sorted(trees)) or 'none'}, but not the database meta")
            return
        of_meta = list(snapshot.entries(trees["meta"], "meta"))
        entries = {entry.key: snapshot.value(entry) for entry in of_meta}
        format_value = entries.get(layout.FORMAT_KEY, b"")
        self.version = layout.to_number(format_value) if len(format_value) == 8 else 0
        wrong = verify.wrong_signature(self.version, layout.without_seal("meta", WRITTEN, entries.get(WRITTEN, b"")), meta)
        if wrong is not None:
            out.findings.append(wrong)
        elif self.version != layout.FORMAT:
            raise formats.other(path, self.version)
        for name in layout.DATABASES:
            if name not in trees:
                out.findings.append(f"its database {name} is missing")
            elif name == layout.UNSEALED:
                self._payloads = {entry.key: entry for entry in snapshot.entries(trees[name], name, exact=True)}
            else:
                for entry in of_meta if name == "meta" else snapshot.entries(trees[name], name):
                    out.entries += 1
                    self._keep(name, entry, out.findings)
        self.segments.store_id = (self.get("meta", b"store_id") or b"").decode()

    def _keep(self, name: str, entry: TreeEntry, findings: list[str]) -> None:
        key, value = entry.key, self._snapshot.value(entry)
        plain: bytes | None = value
        if not (name == "meta" and key == layout.FORMAT_KEY):
            plain = layout.without_seal(name, key, value)
        if plain is None:
            findings.append(f"{layout.described(name, key)} fails its checksum")
            return
        try:
            _decoded(name, key, plain)
        except (ValueError, TypeError, KeyError, struct.error) as error:
            findings.append(f"{layout.described(name, key)} cannot be read: {error}")
            return
        self._values[name][key] = plain

    def scan(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        yield from self._values[database].items()

    def get(self, database: str, key: bytes) -> bytes | None:
        return self._values[database].get(key)

    def payload(self, chunk: Chunk) -> bytes | pa.Buffer | None:
        """Return a chunk's payload, which may be truncated, or None if it is missing."""
        if chunk.segment == INLINE:
            entry = self._payloads.get(layout.number(chunk.position))
            return None if entry is None else self._snapshot.value(entry)
        try:
            return self.segments.read(chunk.segment, chunk.position, chunk.stored_bytes)
        except FileNotFoundError:
            return None

    def payload_keys(self) -> list[bytes]:
        return list(self._payloads)


def _examine(path: Path, read: Read, meta: Meta, out: Checked) -> dict[str, bytes]:
    """Check a snapshot. Return `Contents.lost`."""
    snapshot = Snapshot(read, meta, out.findings.append)
    contents = Contents(path, snapshot, meta, out)
    if not contents.is_store:
        return {}
    snapshot.require_free()
    used: dict[Place, str] = {}
    queues = {key: QueueState.unpack(value) for key, value in contents.scan("queues")}
    out.findings.extend(_topics(contents, queues))
    out.findings.extend(_index(contents, queues, used, out))
    out.findings.extend(_payloads(contents, used))
    out.findings.extend(_space(contents))
    out.findings.extend(_files(contents, out))
    out.findings.extend(_groups(contents, queues))
    out.findings.extend(_members(contents))
    out.findings.extend(_dead(contents, queues))
    out.findings.extend(_parked(contents, queues))
    out.findings.extend(_batches(contents))
    return contents.lost


def _decoded(database: str, key: bytes, value: bytes) -> object:
    """Return the decoded ``value``, which has no seal. Raises ValueError, TypeError, KeyError or struct.error."""
    match database:
        case "topics":
            return TopicInfo(**json.loads(value))
        case "queues":
            return layout.queue_of(key), layout.QueueState.unpack(value)
        case "index":
            return layout.queue_of(key), layout.Chunk.unpack(value)
        case "groups":
            return layout.group_of(key), layout.to_number(value)
        case "locks":
            return layout.group_of(key), layout.lock_from_json(value)
        case "members":
            return layout.member_from_json(value)
        case "dead" | "parked":
            return layout.group_of(key), layout.to_number(value)
        case "batches":
            return json.loads(value)
        case "segments":
            return SegmentState.unpack(value)
        case "meta" if key == b"store_id":
            return value.decode()
        case "meta" if key == WRITTEN:
            return layout.to_number(value[:8]), layout.to_number(value[8:])
        case "meta" if key == layout.CLOCKS:
            return layout.clocks_from_json(value)
        case _:
            return layout.to_number(value)


def _topics(contents: Contents, queues: dict[bytes, QueueState]) -> Iterator[str]:
    expected: set[bytes] = set()
    for key, value in contents.scan("topics"):
        topic = TopicInfo(**json.loads(value))
        if topic.name.encode() != key:
            yield f"topic {key!r} has the record of {topic.name!r}"
        expected |= {layout.queue_key(MessageQueue(topic.name, "", number)) for number in range(topic.queues)}
    for key in sorted(expected ^ set(queues)):
        yield f"queue {layout.queue_of(key)} {'has no topic' if key in queues else 'has no state'}"


def _index(contents: Contents, queues: dict[bytes, QueueState], used: dict[Place, str], out: Checked) -> Iterator[str]:
    """Check that a queue's chunks follow each other from its min to its max offset, and that its state agrees with them."""
    ends = {key: at.min_offset for key, at in queues.items()}
    sizes = dict.fromkeys(queues, 0)
    stamps = dict.fromkeys(queues, 0)
    for key, value in contents.scan("index"):
        queue_key, first, chunk = key[:-8], layout.index_offset(key), Chunk.unpack(value)
        queue = layout.queue_of(queue_key)
        if queue_key not in queues:
            yield f"queue {queue} does not exist, but has a chunk at {first}"
            continue
        if first != ends[queue_key]:
            yield f"queue {queue} has a chunk at {first}, but its next chunk must begin at {ends[queue_key]}"
        if chunk.rows <= 0:
            yield f"queue {queue} has an empty chunk at {first}"
        if not stamps[queue_key] <= chunk.first_stored <= chunk.last_stored:
            yield f"queue {queue} has store times out of order at {first}"
        ends[queue_key] = first + chunk.rows
        sizes[queue_key] += chunk.stored_bytes
        stamps[queue_key] = chunk.last_stored
        yield from _payload(contents, f"chunk {first} of queue {queue}", queue, first, chunk, used, out)
    for queue_key, at in queues.items():
        queue = layout.queue_of(queue_key)
        if ends[queue_key] != at.max_offset:
            yield f"queue {queue} ends at {at.max_offset}, but its chunks end at {ends[queue_key]}"
        if sizes[queue_key] != at.stored_bytes:
            yield f"queue {queue} counts {at.stored_bytes} bytes, but its chunks have {sizes[queue_key]}"
        if stamps[queue_key] > at.last_stored:
            yield f"queue {queue} says that it was last written at {at.last_stored}, but its last chunk was written at {stamps[queue_key]}"


def _payload(
    contents: Contents, name: str, queue: MessageQueue, first: int, chunk: Chunk, used: dict[Place, str], out: Checked
) -> Iterator[str]:
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
        codec.verify(value, chunk, queue, first)
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
    """Check that each payload in LMDB belongs to an entry, and that each segment's entry has the right number of chunks."""
    last = contents.get("meta", b"payload")
    greatest = layout.to_number(last) if last else 0
    for key in contents.payload_keys():
        number = layout.to_number(key)
        if Place(INLINE, number) not in used:
            yield f"payload {number} belongs to no entry"
        if number > greatest:
            yield f"payload {number} is beyond {greatest}, the last number that the store has given"
    chunks = Counter(place.segment for place in used if place.segment != INLINE)
    for segment, value in contents.scan("segments"):
        count = SegmentState.unpack(value).chunks
        if count != chunks[segment]:
            yield f"{Place(segment)} counts {count} chunks, but the index has {chunks[segment]}"
    for segment in chunks:
        if contents.get("segments", segment) is None:
            yield f"{Place(segment)} has chunks but no entry"


def _space(contents: Contents) -> Iterator[str]:
    """Check each topic's recorded size: the bytes of its payloads in LMDB plus its shares of segments.

    A topic's shares of segments must be large enough for its readable messages.
    """
    expected: Counter[str] = Counter()
    shares: Counter[str] = Counter()
    topics = {key.decode(): TopicInfo(**json.loads(value)).incarnation for key, value in contents.scan("topics")}
    for key, value in contents.scan("index"):
        chunk, incarnation = Chunk.unpack(value), topics.get(layout.queue_of(key[:-8]).topic)
        if incarnation is None:
            continue
        if chunk.segment == INLINE:
            expected[incarnation] += chunk.stored_bytes
        else:
            shares[incarnation] += chunk.stored_bytes
    for _, value in contents.scan("segments"):
        for incarnation, size in SegmentState.unpack(value).topics.items():
            expected[incarnation] += size
            shares[incarnation] -= size
    recorded = {key.decode(): layout.to_number(value) for key, value in contents.scan("space")}
    for incarnation in sorted(set(recorded) ^ set(topics.values())):
        yield f"incarnation {incarnation} of a topic {'has no topic' if incarnation in recorded else 'has no size'}"
    for topic, incarnation in topics.items():
        if incarnation in recorded and recorded[incarnation] != expected[incarnation]:
            yield f"topic {topic} counts {recorded[incarnation]} bytes, but its messages take {expected[incarnation]}"
        if shares[incarnation] > 0:
            yield f"topic {topic} has more bytes in segments than the segments count"


def _files(contents: Contents, out: Checked) -> Iterator[str]:
    """Check that every needed segment file belongs to this store, and list the files that are not needed."""
    try:
        names = contents.segments.names()
    except FileNotFoundError:
        yield f"folder {FOLDER} is missing"
        return
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
        if segment is not None and segment.complete and contents.get("segments", segment.segment) is not None:
            if header is None or not mine or bytes.fromhex(header.token) != segment.segment:
                yield f"{Place(segment.segment)} has a header that fails its checksum or belongs to another segment"
        elif segment is not None and (mine or not segment.complete):
            out.unused.append(name)
        else:
            out.foreign.append(name)


def _groups(contents: Contents, queues: dict[bytes, QueueState]) -> Iterator[str]:
    for key, value in contents.scan("groups"):
        group, queue = layout.group_of(key)
        at, offset = queues.get(layout.queue_key(queue)), layout.to_number(value)
        if at is None:
            yield f"group {group!r} has an offset of queue {queue}, which does not exist"
        elif offset > at.max_offset:
            yield f"group {group!r} is at {offset} of queue {queue}, which ends at {at.max_offset}"
    last = contents.get("meta", b"epoch")
    greatest, epochs = (layout.to_number(last) if last else 0), set[int]()
    for key, value in contents.scan("locks"):
        (group, queue), lock = layout.group_of(key), layout.lock_from_json(value)
        if not 0 < lock.tenure <= lock.epoch <= greatest or lock.epoch in epochs:
            yield (
                f"the lock of queue {queue} in group {group!r} has epoch {lock.epoch} and tenure {lock.tenure}, but the last number given "
                f"is {greatest}"
            )
        epochs.add(lock.epoch)


def _members(contents: Contents) -> Iterator[str]:
    """Check that each member's record is stored under the member's key, with a join number that the store has given."""
    last = contents.get("meta", b"epoch")
    greatest = layout.to_number(last) if last else 0
    for key, value in contents.scan("members"):
        group = key.partition(b"\0")[0].decode()
        member = layout.member_from_json(value)
        if key != layout.member_key(group, member.client_id):
            yield f"group {group!r} has member {member.client_id!r} under the key of another member"
        if not 0 < member.joined <= greatest:
            yield f"member {member.client_id!r} of group {group!r} has join number {member.joined}, but the last number given is {greatest}"


def _dead(contents: Contents, queues: dict[bytes, QueueState]) -> Iterator[str]:
    """Check that each dead-lettered message has its own letter in its group's dead-letter topic."""
    letters = dict[tuple[str, int], str]()
    for key, value in contents.scan("dead"):
        (group, queue), offset, letter = layout.group_of(key), layout.index_offset(key), layout.to_number(value)
        name = f"message {offset} of queue {queue} of group {group!r}"
        target = queues.get(layout.queue_key(MessageQueue(DEAD_LETTER_PREFIX + group, "", 0)))
        if layout.queue_key(queue) not in queues:
            yield f"{name} has a dead letter, but its queue does not exist"
        if target is None:
            yield f"{name} has a dead letter in a topic that does not exist"
        elif letter >= target.max_offset:
            yield f"{name} has a dead letter at {letter}, but the dead letters end at {target.max_offset}"
        if (group, letter) in letters:
            yield f"{name} has its dead letter at {letter}, and so has {letters[group, letter]}"
        letters[group, letter] = name


def _parked(contents: Contents, queues: dict[bytes, QueueState]) -> Iterator[str]:
    """Check that each parking lot's queue exists, and that each record of a parked message points to a message in the lot."""
    for key in queues:
        lot = layout.queue_of(key)
        parked_by = origin(lot.topic)
        if parked_by is not None and layout.queue_key(lot._replace(topic=parked_by[1])) not in queues:
            yield f"queue {lot} is the parking lot of a queue that does not exist"
    copies = dict[tuple[MessageQueue, int], str]()
    for key, value in contents.scan("parked"):
        (group, source), at, place = layout.group_of(key), layout.index_offset(key), layout.to_number(value)
        name = f"message {at} of queue {source} of group {group!r}"
        lot = source if leader_of(group, source) != source else source._replace(topic=lot_name(group, source.topic))
        lots, sources = queues.get(layout.queue_key(lot)), queues.get(layout.queue_key(source))
        if sources is None or at >= sources.max_offset:
            yield f"{name} was parked, but does not exist"
        if lots is None or place >= lots.max_offset:
            yield f"{name} was parked at {place} of queue {lot}, which has no such message"
        if (lot, place) in copies:
            yield f"{name} was parked at {place} of queue {lot}, and so was {copies[lot, place]}"
        copies[lot, place] = name


def _batches(contents: Contents) -> Iterator[str]:
    for key, value in contents.scan("batches"):
        record = json.loads(value)
        if set(record) != {"sources", "rows", "content", "spread"}:
            yield f"batch {layout.to_number(key[-8:])} of sink {key[:-9]!r} has a record of {sorted(record)}"
