"""The check of a store: it finds nothing in a sound store, and finds each kind of damage."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orderedmq.broker import SinkBatch, TopicInfo
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check, examine
from orderedmq.embedded.index import put_queues
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import (
    CHUNKS,
    INLINE,
    LOCKS,
    MEMBERS,
    PAYLOADS,
    QUEUES,
    SEGMENTS,
    BatchRow,
    Chunk,
    DeadLetterRow,
    OffsetRow,
    ParkedRow,
    Payload,
    ProgressRow,
    Table,
    TopicRow,
)
from orderedmq.embedded.store.segment_file import HEADER_BYTES, Header
from orderedmq.embedded.store.segments import name_of
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MessageQueue
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket, parked_queue
from tests.contract.support import BIG, locked, queues_of, refused, rows

Q0, Q1 = (MessageQueue("orders", "embedded", number) for number in range(2))
P1 = parked_queue("h", Q1)
K0 = ("orders", 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A store with a lock, an offset, a member, two dead letters, a batch, and chunks: three in the first queue's segments, one inline."""
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.admin.create_topic("orders", 2, compression="none")
        for _ in range(3):
            broker.log.append({Q0: rows(range(BIG))})
        broker.log.append({Q1: rows("ab", tags=["x", None])})
        me = broker.groups.join("me")
        [token] = locked(broker, "g", me, [Q0])
        broker.groups.commit({token: 7})
        broker.groups.heartbeat("g", me, Subscription("shared", "orders", "averagely"))
        broker.groups.dead_letter(token, rows("ab"), [3, 5])
        staging = broker.outbox.open(SinkBatch("s", 0), 0)
        staging.add(Q0, rows("ab"))
        staging.add(Q1, rows("c"))
        broker.outbox.publish(SinkBatch("s", 0), [staging.receipt()])
        [other] = locked(broker, "h", me, [Q1])
        broker.groups.park(other, [Parking(Q1, 0, Ticket(0, 1, 1, 9)), Parking(Q1, 1, Ticket(1, 1, 1, 9))])
        broker.groups.park(other, [Parking(P1, 0, Ticket(0, 2, 2, 9))])
        yield broker


def test_a_sound_store_has_no_findings_also_after_deleting(broker: EmbeddedBroker):
    assert check(broker) == check(broker.path) == check(str(broker.path)) == []
    broker.admin.trim("orders", {Q0: BIG + 1000})
    assert check(broker) == []
    for topic in ("orders", "%DLQ%g"):
        broker.admin.delete_topic(topic)
        assert check(broker) == []


def test_files_that_no_entry_needs_are_no_damage_but_listed(broker: EmbeddedBroker):
    staging = broker.outbox.open(SinkBatch("s", 1), 0)
    staging.add(Q0, rows(range(BIG)))
    receipt = staging.receipt()
    segments = broker.path / "segments"
    (segments / "notes.txt").write_text("mine")
    (segments / f"{'0' * 32}.segment").write_bytes(b"not ours")
    found = examine(broker.path)
    assert (found.findings, found.unused) == ([], [f"{receipt.token}.segment"])
    assert found.foreign == [f"{'0' * 32}.segment", "notes.txt"]


def test_what_cannot_be_opened_is_not_checked(tmp_path: Path):
    with refused("STORE.MISSING"):
        check(tmp_path / "nothing")


def entry(txn: Transaction, first: int = BIG) -> Chunk:
    chunk = txn.get(CHUNKS, *K0, first)
    assert chunk is not None
    return chunk


def change(**fields: Any) -> Callable[[Transaction], None]:
    return lambda txn: txn.put(entry(txn)._replace(**fields))


def queue_state(**fields: Any) -> Callable[[Transaction], None]:
    def damage(txn: Transaction) -> None:
        queue = txn.get(QUEUES, *K0)
        assert queue is not None
        txn.put(queue._replace(**fields))

    return damage


def first_of(table: Table[Any], txn: Transaction) -> Any:
    return next(iter(list(txn.scan(table))))


def flip(txn: Transaction) -> None:
    """Flip a bit in the first inline payload."""
    payload = first_of(PAYLOADS, txn)
    value = bytearray(payload.content)
    value[len(value) // 2] ^= 4
    txn.put(payload._replace(content=bytes(value)))


def segment_file(txn: Transaction) -> Path:
    return txn.segments.folder / name_of(entry(txn).segment)


def flip_in_segment(txn: Transaction) -> None:
    path, chunk = segment_file(txn), entry(txn)
    content = bytearray(path.read_bytes())
    content[chunk.position + chunk.stored_bytes // 2] ^= 4
    path.write_bytes(content)


def cut_segment(txn: Transaction) -> None:
    os.truncate(segment_file(txn), entry(txn).position + 100)


def other_header(txn: Transaction) -> None:
    """Give the file the header of another store."""
    path = segment_file(txn)
    content = path.read_bytes()
    header = Header.unpack(content)
    assert header is not None
    path.write_bytes(replace(header, store_id="0" * 32).pack() + content[HEADER_BYTES:])


def segment_entry(**fields: Any) -> Callable[[Transaction], None]:
    def damage(txn: Transaction) -> None:
        segment = txn.get(SEGMENTS, entry(txn).segment)
        assert segment is not None
        txn.put(segment._replace(**fields))

    return damage


def member(**fields: Any) -> Callable[[Transaction], None]:
    return lambda txn: txn.put(first_of(MEMBERS, txn)._replace(**fields))


def letter(offset: int, at: int, group: str = "g", queue: MessageQueue = Q0) -> Callable[[Transaction], None]:
    return lambda txn: txn.put(DeadLetterRow(group, queue.topic, queue.queue_id, offset, at))


def copied(source: MessageQueue, offset: int, at: int) -> Callable[[Transaction], None]:
    return lambda txn: txn.put(ParkedRow("h", source.topic, source.queue_id, offset, at))


def lots_of_nothing(txn: Transaction) -> None:
    put_queues(txn, TopicInfo("%PARKED%h%other", 1, "1" * 16))


DAMAGE: list[tuple[Callable[[Transaction], object], str]] = [
    (copied(Q1, 0, 3), f"message 0 of queue {Q1} of group 'h' was parked at 3 of queue {P1}, which has no such message"),
    (copied(P1, 0, 9), f"message 0 of queue {P1} of group 'h' was parked at 9 of queue {P1}, which has no such message"),
    (copied(Q1, 99, 0), f"message 99 of queue {Q1} of group 'h' was parked, but does not exist"),
    (copied(Q1, 0, 1), f"was parked at 1 of queue {P1}, and so was message 0 of queue {Q1}"),
    (copied(Q0._replace(topic="x"), 0, 0), "of queue x/embedded/0 of group 'h' was parked, but does not exist"),
    (lots_of_nothing, "queue %PARKED%h%other/embedded/0 is the parking lot of a queue that does not exist"),
    (
        lambda txn: txn.delete(CHUNKS, *K0, BIG),
        f"has a chunk at {2 * BIG}, but its next chunk must begin at {BIG}",
    ),
    (change(rows=BIG - 1), f"with another length than {BIG - 1}"),
    (change(rows=0), "empty chunk"),
    (change(checksum=1), f"{BIG} to {2 * BIG - 1} of queue orders/embedded/0 fail their checksum"),
    (change(segment=INLINE, position=999), f"payload 999 of chunk {BIG} of queue orders/embedded/0 is missing"),
    (change(segment="01" * 16), f"in segment {'01' * 16} of chunk {BIG} of queue orders/embedded/0 is missing"),
    (change(segment="01" * 16), f"segment {'01' * 16} has chunks but no entry"),
    (lambda txn: segment_file(txn).unlink(), f"of chunk {BIG} of queue orders/embedded/0 is missing"),
    (flip_in_segment, f"{BIG} to {2 * BIG - 1} of queue orders/embedded/0 fail their checksum"),
    (cut_segment, f"{BIG} to {2 * BIG - 1} of queue orders/embedded/0 fail their checksum"),
    (other_header, "has a header that fails its checksum or belongs to another segment"),
    (segment_entry(chunks=2), "counts 2 chunks, but the index has 1"),
    (lambda txn: txn.delete(SEGMENTS, entry(txn).segment), "has chunks but no entry"),
    (change(body_bytes=1), "does not have the 1 body bytes of its entry"),
    (change(columns=3), "does not have the columns of its entry"),
    (change(first_stored=1), f"store times out of order at {BIG}"),
    (change(last_stored=1 << 60), f"store times out of order at {2 * BIG}"),
    (queue_state(last_stored=1), "was last written at 1, but"),
    (change(stored_bytes=1), "fail their checksum"),
    (flip, "fail their checksum"),
    (change(first_offset=2 * BIG), f"belongs to chunk {2 * BIG} of queue orders/embedded/0 and to chunk {BIG}"),
    (queue_state(max_offset=3 * BIG), f"its chunks end at {3 * BIG + 2}"),
    (queue_state(min_offset=BIG), f"has a chunk at 0, but its next chunk must begin at {BIG}"),
    (queue_state(stored_bytes=1), "counts 1 bytes"),
    (lambda txn: txn.put(Payload(888, b"x")), "payload 888 belongs to no entry"),
    (lambda txn: txn.put(Payload(888, b"x")), "the last number that the store has given"),
    (
        lambda txn: txn.put(TopicRow("orders", 3, "A", None, None, "none")),
        "orders/embedded/2 has no state",
    ),
    (lambda txn: txn.put(OffsetRow("g", "orders", 1, 99)), "is at 99 of queue orders/embedded/1, which ends at 3"),
    (lambda txn: txn.put(OffsetRow("g", "nothing", 1, 0)), "which does not exist"),
    (lambda txn: txn.put(ProgressRow("g", "orders", 1, 99, 0, "book")), "is at 99 of queue orders/embedded/1, which ends at 3"),
    (lambda txn: txn.put(first_of(LOCKS, txn)._replace(epoch=999)), "has epoch 999"),
    (member(joined=99), "has join number 99"),
    (member(joined=0), "has join number 0"),
    (letter(4, 2), "message 4 of queue orders/embedded/0 of group 'g' has a dead letter at 2, but the dead letters end at 2"),
    (letter(4, 1), "has its dead letter at 1, and so has message "),
    (letter(4, 0, "h"), "message 4 of queue orders/embedded/0 of group 'h' has a dead letter in a topic that does not exist"),
    (letter(4, 1, queue=Q1._replace(topic="nothing")), "has a dead letter, but its queue does not exist"),
    (lambda txn: txn.put(BatchRow("s", 5, "{}")), "batch 5 of sink 's'"),
]


@pytest.mark.parametrize(("damage", "finding"), DAMAGE, ids=[finding for _, finding in DAMAGE])
def test_damage_is_found(broker: EmbeddedBroker, damage, finding: str):
    assert check(broker) == []
    opened = Store.open(broker.path)
    try:
        with opened.write() as txn:
            damage(txn)
    finally:
        opened.close()
    assert any(finding in one for one in check(broker)), check(broker)


def test_the_places_used_here_are_the_brokers(broker: EmbeddedBroker):
    assert queues_of(broker) == [Q0, Q1]


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "troubleshooting.md"


@pytest.mark.parametrize("used", [True, False], ids=["in use", "closed"])
def test_the_guides_queries_read_the_index_and_change_nothing(broker: EmbeddedBroker, used: bool):
    """The guide gives them to SQLite's own shell, which opens the file as the program here does."""
    path = broker.path
    if not used:
        broker.close()
    lag, size, locks = re.findall(r'-readonly -box data/omq/index\.db "\n(.*?)"\n', GUIDE.read_text(), re.DOTALL)
    with contextlib.closing(sqlite3.connect(f"{(path / 'index.db').as_uri()}?mode=ro", uri=True)) as connection:
        assert ("g", "orders", 0, 7, 3 * BIG + 2 - 7) in connection.execute(lag).fetchall()
        assert ("orders", 2, 3 * BIG + 2 + 3) in [row[:3] for row in connection.execute(size)]
        assert {row[:3] for row in connection.execute(locks)} == {("g", "orders", 0), ("h", "orders", 1)}
    assert check(path) == []
