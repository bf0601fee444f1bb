"""Whether a store is consistent: every rule that its databases keep among themselves, looked at in one snapshot. For tests and repair.

A finding is a line of text. Nothing is changed, and what is damaged does not stop the walk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from orderedmq.broker import TopicInfo
from orderedmq.embedded import chunk as codec
from orderedmq.embedded import layout
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.layout import Chunk, QueueState
from orderedmq.embedded.store import Store, Transaction
from orderedmq.errors import StoreError
from orderedmq.model import DEAD_LETTER_PREFIX, MessageQueue


def check(store: Path | str | EmbeddedBroker) -> list[str]:
    """What is wrong with the store, nothing if it is sound. Raises StoreError when it cannot be opened."""
    opened = Store.open(store.path if isinstance(store, EmbeddedBroker) else Path(store))
    try:
        with opened.read() as txn:
            return list(_findings(txn))
    finally:
        opened.close()


def _findings(txn: Transaction) -> Iterator[str]:
    used: dict[int, str] = {}
    queues = {key: QueueState.unpack(value) for key, value in txn.scan("queues")}
    yield from _topics(txn, queues)
    yield from _index(txn, queues, used)
    yield from _staged(txn, used)
    yield from _payloads(txn, used)
    yield from _groups(txn, queues)
    yield from _members(txn)
    yield from _dead(txn, queues)
    yield from _batches(txn)


def _topics(txn: Transaction, queues: dict[bytes, QueueState]) -> Iterator[str]:
    expected: set[bytes] = set()
    for key, value in txn.scan("topics"):
        topic = TopicInfo(**json.loads(value))
        if topic.name.encode() != key:
            yield f"topic {key!r} calls itself {topic.name!r}"
        expected |= {layout.queue_key(MessageQueue(topic.name, "", number)) for number in range(topic.queues)}
    for key in sorted(expected ^ set(queues)):
        yield f"queue {layout.queue_of(key)} {'has no topic' if key in queues else 'has no state'}"


def _index(txn: Transaction, queues: dict[bytes, QueueState], used: dict[int, str]) -> Iterator[str]:
    """Chunks of a queue follow each other from its min to its max offset, and its state adds up."""
    ends = {key: at.min_offset for key, at in queues.items()}
    sizes = dict.fromkeys(queues, 0)
    stamps = dict.fromkeys(queues, 0)
    for key, value in txn.scan("index"):
        place, first, chunk = key[:-8], layout.index_offset(key), Chunk.unpack(value)
        queue = layout.queue_of(place)
        if place not in queues:
            yield f"queue {queue} is not there, but has a chunk at {first}"
            continue
        if first != ends[place]:
            yield f"queue {queue} has a chunk at {first} where one at {ends[place]} is expected"
        if chunk.rows <= 0:
            yield f"queue {queue} has an empty chunk at {first}"
        if not stamps[place] <= chunk.first_stored <= chunk.last_stored:
            yield f"queue {queue} goes back in time at {first}"
        ends[place] = first + chunk.rows
        sizes[place] += chunk.stored_bytes
        stamps[place] = chunk.last_stored
        yield from _payload(txn, f"chunk {first} of queue {queue}", queue, first, chunk, used)
    for place, at in queues.items():
        queue = layout.queue_of(place)
        if ends[place] != at.max_offset:
            yield f"queue {queue} ends at {at.max_offset}, its chunks end at {ends[place]}"
        if sizes[place] != at.stored_bytes:
            yield f"queue {queue} counts {at.stored_bytes} bytes, its chunks have {sizes[place]}"
        if stamps[place] > at.last_stored:
            yield f"queue {queue} was written last at {at.last_stored}, before its last chunk at {stamps[place]}"


def _payload(txn: Transaction, name: str, queue: MessageQueue, first: int, chunk: Chunk, used: dict[int, str]) -> Iterator[str]:
    """A payload belongs to one entry, is what was written, and has the rows that the entry says."""
    if chunk.payload in used:
        yield f"payload {chunk.payload} belongs to {name} and to {used[chunk.payload]}"
        return
    used[chunk.payload] = name
    value = txn.get("payloads", layout.number(chunk.payload))
    if value is None:
        yield f"payload {chunk.payload} of {name} is not there"
        return
    try:
        codec.verify(value, chunk, queue, first)
    except StoreError as error:
        yield error.message
        return
    try:
        stored = codec.decode(value, chunk, codec.STORED)
    except pa.ArrowException as error:
        yield f"payload {chunk.payload} of {name} has not the columns of its entry: {error}"
        return
    wrong = {column: len(values) for column, values in stored.items() if len(values) != chunk.rows}
    if wrong or sum(1 for bit in range(len(codec.STORED)) if chunk.columns >> bit & 1) != len(stored) or "body" not in stored:
        yield f"payload {chunk.payload} of {name} has columns {sorted(stored)}, of other length than {chunk.rows}: {wrong}"
    elif codec.body_bytes(stored["body"]) != chunk.body_bytes:
        yield f"payload {chunk.payload} of {name} has other body bytes than the {chunk.body_bytes} of its entry"


def _staged(txn: Transaction, used: dict[int, str]) -> Iterator[str]:
    """Every staged row has a token, and every token has rows, numbered from 0."""
    following = {key: 0 for key, _ in txn.scan("tokens")}
    for key, value in txn.scan("staged"):
        token, sequence = key[:-5], int.from_bytes(key[-4:], "big")
        queue, chunk = layout.from_staged(value)
        if token not in following:
            yield f"rows are staged under token {token!r}, which is not there"
        elif sequence != following[token]:
            yield f"token {token!r} has rows {sequence} where {following[token]} are expected"
        following[token] = sequence + 1
        yield from _payload(txn, f"staged rows {sequence} of token {token!r}", queue, sequence, chunk, used)
    for token, count in following.items():
        if not count:
            yield f"token {token!r} has no rows"


def _payloads(txn: Transaction, used: dict[int, str]) -> Iterator[str]:
    last = txn.get("meta", b"payload")
    greatest = layout.to_number(last) if last else 0
    for key, _ in txn.scan("payloads"):
        number = layout.to_number(key)
        if number not in used:
            yield f"payload {number} belongs to nothing"
        if number > greatest:
            yield f"payload {number} is beyond the last number given, {greatest}"


def _groups(txn: Transaction, queues: dict[bytes, QueueState]) -> Iterator[str]:
    for key, value in txn.scan("groups"):
        group, queue = layout.group_of(key)
        at, offset = queues.get(layout.queue_key(queue)), layout.to_number(value)
        if at is None:
            yield f"group {group!r} has an offset of queue {queue}, which is not there"
        elif offset > at.max_offset:
            yield f"group {group!r} is at {offset} of queue {queue}, which ends at {at.max_offset}"
    last = txn.get("meta", b"epoch")
    greatest, epochs = (layout.to_number(last) if last else 0), set[int]()
    for key, value in txn.scan("locks"):
        (group, queue), lock = layout.group_of(key), layout.lock_from_json(value)
        if not 0 < lock.tenure <= lock.epoch <= greatest or lock.epoch in epochs:
            yield f"the lock of queue {queue} in group {group!r} has epoch {lock.epoch} and tenure {lock.tenure}, given were {greatest}"
        epochs.add(lock.epoch)


def _members(txn: Transaction) -> Iterator[str]:
    """Every record is a member's, under its own key."""
    last = txn.get("meta", b"epoch")
    greatest = layout.to_number(last) if last else 0
    for key, value in txn.scan("members"):
        group = key.partition(b"\0")[0].decode()
        try:
            member = layout.member_from_json(value)
        except (ValueError, TypeError, KeyError) as error:
            yield f"group {group!r} has a member record that cannot be read: {error}"
            continue
        if key != layout.member_key(group, member.client_id):
            yield f"group {group!r} has member {member.client_id!r} under another's key"
        if not 0 < member.joined <= greatest:
            yield f"member {member.client_id!r} of group {group!r} joined at {member.joined}, given were {greatest}"


def _dead(txn: Transaction, queues: dict[bytes, QueueState]) -> Iterator[str]:
    """What was put aside lies in its group's dead-letter topic, a letter for each message."""
    letters = dict[tuple[str, int], str]()
    for key, value in txn.scan("dead"):
        (group, queue), offset, letter = layout.group_of(key), layout.index_offset(key), layout.to_number(value)
        name = f"message {offset} of queue {queue} of group {group!r}"
        target = queues.get(layout.queue_key(MessageQueue(DEAD_LETTER_PREFIX + group, "", 0)))
        if layout.queue_key(queue) not in queues:
            yield f"{name} was put aside, and its queue is not there"
        if target is None:
            yield f"{name} was put aside in a topic that is not there"
        elif letter >= target.max_offset:
            yield f"{name} was put aside at {letter}, the dead letters end at {target.max_offset}"
        if (group, letter) in letters:
            yield f"{name} was put aside at {letter}, as was {letters[group, letter]}"
        letters[group, letter] = name


def _batches(txn: Transaction) -> Iterator[str]:
    for key, value in txn.scan("batches"):
        record = json.loads(value)
        if set(record) != {"sources", "rows"}:
            yield f"batch {layout.to_number(key[-8:])} of sink {key[:-9]!r} has a record of {sorted(record)}"
