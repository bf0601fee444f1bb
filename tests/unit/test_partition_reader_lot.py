"""A task's rows with a parking lot: first the parked messages as they were sent, with their tickets, then the messages of the queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from ordered_source import partition_reader
from ordered_source.columns import TICKET_TYPE, LotPlace, LotPlan, ReadContext
from ordered_source.partition_reader import QueuePartition
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.embedded.outbox import EmbeddedOutbox
from orderedmq.errors import LockError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.micro_batch import SourceRun
from orderedmq.parking import AT_ONCE, Command, Parking, Ticket, lot_token, parked_queue
from orderedmq.routing.generations import OFFSET_BITS, Generations
from orderedmq.schema import MESSAGE_SCHEMA
from tests.contract.support import locked, rows

QUEUE = MessageQueue("orders", "embedded", 0)
#: An ordinary queue that serves as the parking lot.
LOT = parked_queue("g", QUEUE)
#: The types of the columns that brokers do not have.
OWN = {"lock_token": pa.string(), "ticket": TICKET_TYPE, "key_sequence": pa.int64()}


class Rig:
    """Six messages in QUEUE with alternating keys a and b. The first two, followed by any ``commands``, are in LOT from offset 1 on."""

    def __init__(self, path: Path, *commands: Command) -> None:
        self.options = SourceOptions(
            path=str(path / "store"), consumer_group="g", pull_batch_size=4, parking_lot=True, parking_lot_max_messages=100
        )
        self.broker = EmbeddedBroker(path / "store")
        self.broker.admin.create_topic("orders", 1)
        keys = [*"ababab"]
        self.broker.log.append({QUEUE: rows(range(6), sharding_key=keys, properties=[[("shop", "berlin")]] * 6)})
        (self.token,) = locked(self.broker, "g", self.broker.groups.join("me"), [QUEUE])
        tickets = [Ticket(5, 1, 1, 9), Ticket(0, 3, 1, 5000, "no"), Ticket(1, 0, 0, AT_ONCE)]
        self.broker.groups.park(self.token, [Parking(QUEUE, ticket.offset, ticket) for ticket in tickets])
        if commands:
            self.broker.admin.command_parked("g", QUEUE, commands)

    def part(self, begin: int, end: int, lot: tuple[int, int]) -> QueuePartition:
        anchor = self.broker.log.topic("orders").incarnation
        return QueuePartition(
            self.broker.identity, QUEUE, begin, end, self.token, anchor, streaming=True, lot=OffsetRange(*lot)
        )

    def read(self, part: QueuePartition, *columns: str) -> list[dict[str, Any]]:
        schema = pa.schema([pa.field(name, OWN[name]) if name in OWN else MESSAGE_SCHEMA.field(name) for name in columns])
        batches = list(partition_reader.read(part, self.options, columns, schema))
        assert all(batch.schema == schema for batch in batches)
        return [row for batch in batches for row in batch.to_pylist()]

    def context(self, row: dict[str, Any]) -> ReadContext:
        return ReadContext.from_text(row["lock_token"])


def tickets(found: list[dict[str, Any]]) -> list[LotPlace | None]:
    return [None if row["ticket"] is None else LotPlace(**row["ticket"]) for row in found]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.broker.close()


def test_parked_messages_have_the_key_sequences_of_their_places_in_the_queue(rig: Rig) -> None:
    part = rig.part(4, 6, (1, 3))
    part.generations = Generations((0, 1, 5), (2, 3, 4))
    sequences = [row["key_sequence"] for row in rig.read(part, "key_sequence", "lock_token")]
    assert sequences == [2 << OFFSET_BITS | 0, 3 << OFFSET_BITS | 1, 3 << OFFSET_BITS | 4, 4 << OFFSET_BITS | 5]


def test_parked_messages_come_first_with_their_tickets(rig: Rig) -> None:
    found = rig.read(
        rig.part(4, 6, (1, 3)), "queue_offset", "lock_token", "ticket", "body", "topic", "reconsume_times", "properties"
    )
    assert [(row["queue_offset"], row["body"], row["topic"], row["reconsume_times"]) for row in found] == [
        (0, b"0", "orders", 3), (1, b"1", "orders", 0), (4, b"4", "orders", 0), (5, b"5", "orders", 0),
    ]  # fmt: skip
    assert [row["properties"] for row in found] == [[("shop", "berlin")]] * 4
    assert tickets(found) == [LotPlace(1, 3, 1, 5000, "no", 0), LotPlace(2, 0, 0, AT_ONCE, "", 1), None, None]
    (context,) = {rig.context(row) for row in found}
    assert context.lot == LotPlan(4, 1, 3, 100)
    lock = context.lock(QUEUE)
    assert (lock.token.epoch, lock.token.group, lock.token.queue, lock.lot) == (rig.token.epoch, "g", QUEUE, context.lot)


def test_each_message_of_a_lot_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, Command("retry", "b"))
    pull, offsets = EmbeddedLog.pull, list[int]()

    def counted(log: EmbeddedLog, queue: MessageQueue, *how: Any) -> pa.RecordBatch:
        pulled = pull(log, queue, *how)
        if queue == LOT:
            offsets.extend(pulled.column("queue_offset").to_pylist())
        return pulled

    monkeypatch.setattr(EmbeddedLog, "pull", counted)
    assert [row["queue_offset"] for row in rig.read(rig.part(4, 6, (1, 4)), "queue_offset")] == [0, 1, 4, 5]
    assert offsets == [1, 2, 3]
    rig.broker.close()


def test_both_ranges_are_registered_before_a_row_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(EmbeddedOutbox, "register", lambda self, *what: told.append(what))

    class Task:
        getLocalProperty = taskAttemptId = staticmethod(lambda: None)

    monkeypatch.setattr(TaskContext, "get", Task)
    monkeypatch.setattr(partition_reader, "run_of", lambda get: SourceRun("q", 7, "r"))
    lot = lot_token(rig.token)
    rig.read(rig.part(4, 6, (1, 3)), "body")
    assert told == [
        (SourceRun("q", 7, "r"), QUEUE, OffsetRange(4, 6), rig.token),
        (SourceRun("q", 7, "r"), LOT, OffsetRange(1, 3), lot),
    ]
    told.clear()
    rig.read(rig.part(4, 6, (1, 1)), "body")
    assert [queue for _, queue, _, _ in told] == [QUEUE]


def test_a_lock_that_is_lost_meanwhile_ends_the_reading_of_a_lot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_reader, "CHECK_INTERVAL", -1.0)
    batches = partition_reader.read(rig.part(4, 6, (1, 3)), rig.options, ("body",), pa.schema([MESSAGE_SCHEMA.field("body")]))
    next(batches)
    rig.broker.admin.release("g", [QUEUE], force=True)
    with pytest.raises(LockError, match="LOST"):
        next(batches)
