"""Parking lots in the embedded broker: which entries it deletes, and that a killed process leaves either all of a change or nothing."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.embedded import payloads
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import PARKED, Chunk, QueueRow, TopicRow
from orderedmq.embedded.store.store_file import FILE
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Parking, Ticket, lot_token, parked_queue
from tests.contract.support import BIG, bodies, locked, refused, rows

PROCESSES = mp.get_context("forkserver")
PROCESSES.set_forkserver_preload(["pandas", "orderedmq.embedded.broker", "tests.unit.test_embedded_parking"])

QUEUE = MessageQueue("orders", "embedded", 0)
LOT = parked_queue("g", QUEUE)


@pytest.fixture
def broker(path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(path) as broker:
        broker.admin.create_topic("orders", 2)
        yield broker
    assert check(path) == []


@pytest.fixture
def token(broker: EmbeddedBroker) -> LockToken:
    return locked(broker, "g", broker.groups.join("me"), [QUEUE])[0]


def parkings(source: MessageQueue, offsets: range) -> list[Parking]:
    return [Parking(source, offset, Ticket(offset, 1, 1, 9)) for offset in offsets]


def remembered(broker: EmbeddedBroker) -> list[tuple[str, int, int]]:
    """(topic, offset in the queue, offset in the lot) of each message that is recorded as parked."""
    opened = Store.open(broker.path)
    try:
        with opened.read() as txn:
            return [(row.topic, row.message_offset, row.lot_offset) for row in txn.scan(PARKED)]
    finally:
        opened.close()


# -- deletion -----------------------------------------------------------------------------------------------------------------


def test_deletes_messages_of_a_lot_up_to_the_previous_offset_of_the_group(broker: EmbeddedBroker, token: LockToken):
    broker.log.append({QUEUE: rows(range(3 * BIG))})
    for part in range(3):
        broker.groups.park(token, parkings(QUEUE, range(part * BIG, part * BIG + BIG)))
    begins = []
    for offset in (BIG, 2 * BIG, 3 * BIG, 3 * BIG):
        broker.groups.commit({lot_token(token): offset})
        begins.append(broker.log.bounds([LOT])[LOT].min_offset)
    assert begins == [0, BIG, 2 * BIG, 2 * BIG]


def test_deletes_no_parked_message_above_the_offset_of_the_group(broker: EmbeddedBroker, token: LockToken):
    broker.log.append({QUEUE: rows(range(2 * BIG))})
    for part in range(2):
        broker.groups.park(token, parkings(QUEUE, range(part * BIG, part * BIG + BIG)))
    for offset in (BIG - 1, BIG, BIG + 1):
        broker.groups.commit({lot_token(token): offset})
    assert broker.log.bounds([LOT])[LOT].min_offset == BIG
    broker.groups.commit({lot_token(token): 2 * BIG})
    assert len(bodies(broker, LOT, BIG)) == BIG


def test_forgets_a_parked_place_when_the_offset_passes_it(broker: EmbeddedBroker, token: LockToken):
    broker.log.append({QUEUE: rows(range(10))})
    broker.groups.park(token, parkings(QUEUE, range(2, 6)))
    broker.groups.park(token, parkings(LOT, range(1, 3)))
    assert remembered(broker) == [
        *[(LOT.topic, 1, 4), (LOT.topic, 2, 5)],
        *[("orders", 2, 0), ("orders", 3, 1), ("orders", 4, 2), ("orders", 5, 3)],
    ]
    broker.groups.commit({token: 4})
    assert remembered(broker) == [(LOT.topic, 1, 4), (LOT.topic, 2, 5), ("orders", 4, 2), ("orders", 5, 3)]
    broker.groups.commit({token: 8, lot_token(token): 2})
    assert remembered(broker) == [(LOT.topic, 2, 5)]
    broker.groups.commit({lot_token(token): 6})
    assert remembered(broker) == []


def test_a_lot_that_does_not_exist_gets_no_offset(broker: EmbeddedBroker, token: LockToken):
    """A lot that is made later begins at 0. An offset of a former lot would wrongly settle messages parked in the new one."""
    broker.log.append({QUEUE: rows(range(10))})
    broker.groups.commit({token: 1, lot_token(token): 5})
    assert broker.groups.offsets("g", [QUEUE, LOT]) == {QUEUE: 1}
    assert broker.groups.park(token, parkings(QUEUE, range(1, 3))) == [True, True]
    assert broker.groups.park(token, parkings(LOT, range(1))) == [True]


def test_each_chunk_is_read_once(broker: EmbeddedBroker, token: LockToken, monkeypatch: pytest.MonkeyPatch):
    broker.log.append({QUEUE: rows(range(BIG))})
    broker.log.append({QUEUE: rows(range(BIG))})
    read: list[int] = []
    load = payloads.load

    def counted(txn: Transaction, chunk: Chunk) -> bytes | pa.Buffer:
        read.append(chunk.first_offset)
        return load(txn, chunk)

    monkeypatch.setattr(payloads, "load", counted)
    scattered = [BIG + 5, 1, BIG - 1, 7, BIG + 1]
    broker.groups.park(token, [Parking(QUEUE, at, Ticket(at, 1, 1, 9)) for at in scattered])
    assert read == [0, BIG]
    assert bodies(broker, LOT) == ["5", "1", str(BIG - 1), "7", "1"]


# -- killed processes


def park_and_die(path: Path, token: LockToken, table: type) -> None:
    """Park messages in a process that is killed at its first write to the table of these rows."""
    put = Transaction.put

    def die(self: Transaction, row: tuple[Any, ...]) -> None:
        put(self, row)
        if isinstance(row, table):
            os.kill(os.getpid(), signal.SIGKILL)

    Transaction.put = die  # type: ignore[method-assign]
    with EmbeddedBroker(path) as broker:
        broker.groups.park(token, parkings(QUEUE, range(5)))


@pytest.mark.parametrize("table", [TopicRow, QueueRow, schema.Payload, Chunk, schema.ParkedRow])
def test_a_process_that_is_killed_in_the_middle_has_parked_nothing(
    path: Path, broker: EmbeddedBroker, token: LockToken, table: type
):
    broker.log.append({QUEUE: rows(range(10))})
    child = PROCESSES.Process(target=park_and_die, args=(path, token, table), daemon=True)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [topic.name for topic in broker.log.topics()] == ["orders"]
    assert remembered(broker) == []
    assert check(path) == []
    assert broker.groups.park(token, parkings(QUEUE, range(5))) == [True] * 5
    assert bodies(broker, LOT) == list("01234")


def test_a_store_that_lacks_the_table_is_damaged(path: Path):
    with EmbeddedBroker(path) as broker:
        broker.admin.create_topic("orders", 1)
    with contextlib.closing(sqlite3.connect(path / FILE)) as connection:
        connection.execute("DROP TABLE parked")
    with EmbeddedBroker(path) as broker, refused("STORE.CORRUPT", "parked"):
        broker.admin.seek("g", {QUEUE: 0})
    assert any("table parked cannot be read" in finding for finding in check(path))
