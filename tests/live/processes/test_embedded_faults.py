"""The store under faults: killed processes, many concurrent processes, no room, flipped bits. Each test ends by checking the store."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from orderedmq import Producer
from orderedmq.broker import Broker, SinkBatch
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import transaction, wal
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import CHUNKS, PAYLOADS, TABLES, queue_of
from orderedmq.embedded.store.segments import name_of
from orderedmq.embedded.store.store_file import FILE
from orderedmq.errors import DataLossError, StoreFullError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Parking, Ticket, parked_queue
from tests import evidence
from tests.children import PROCESSES, Child, preload
from tests.contract.support import BIG, bodies, locked, queues_of, refused, rows, state

# Preload pandas because pyarrow imports it when it creates its first array.
preload("tests.live.processes.test_embedded_faults")


@pytest.fixture
def broker(path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(path) as broker:
        broker.admin.create_topic("orders", 2)
        yield broker


# -- killed processes -------------------------------------------------------------------------------------------------------------


def append_for_ever(broker: Broker, pipe: Connection) -> None:
    [queue, _] = queues_of(broker)
    at = broker.log.bounds([queue])[queue].max_offset
    while True:
        done = broker.log.append({queue: rows(range(at, at + 3))})[queue]
        pipe.send(done)
        at = done.end


@pytest.mark.fault("killed process", "embedded")
@pytest.mark.holds("kill -9")
def test_a_killed_producer_loses_no_acknowledged_message(path: Path, broker: EmbeddedBroker):
    """After each of 20 kills, all acknowledged appends are in the store, and at most one more append."""
    random, queue = Random(1), queues_of(broker)[0]
    for _ in range(20):
        before = broker.log.bounds([queue])[queue].max_offset
        child = Child(path, append_for_ever)
        heard = list(child.messages(random.randint(1, 15)))
        heard += child.kill()
        end = broker.log.bounds([queue])[queue].max_offset
        assert [done.begin for done in heard] == list(range(before, before + 3 * len(heard), 3))
        assert end - heard[-1].end in (0, 3)
        assert check(path) == []
    stored = bodies(broker, queue)
    evidence.note_lists({queue: [str(number) for number in range(end)]}, {queue: stored}, runs=20)
    assert stored == [str(number) for number in range(end)]


# -- many concurrent processes ----------------------------------------------------------------------------------------------------


def write_some(broker: Broker, pipe: Connection, name: int, turns: int) -> None:
    random = Random(name)
    kept, aged = queues_of(broker), queues_of(broker, "aged")
    sent = 0
    for turn in range(turns):
        queue = kept[name % 2]
        values = [f"{name}.{sent + n}" for n in range(random.randint(1, 40))]
        sent += len(values)
        if turn % 3:
            broker.log.append({queue: rows(values)})
        else:
            batch = SinkBatch(f"sink {name}", turn)
            staging = broker.outbox.open(batch, 0)
            staging.add(queue, rows(values))
            broker.outbox.publish(batch, [staging.receipt()])
        broker.log.append({random.choice(aged): rows([os.urandom(40) for _ in range(300)])})
    pipe.send(sent)


def read_all(broker: Broker, pipe: Connection, expected_end: Connection) -> None:
    """Read both topics until the writers have ended and no rows are left. Each pull begins where the last one ended."""
    queues = [*queues_of(broker), *queues_of(broker, "aged")]
    at = dict.fromkeys(queues, 0)
    seen: dict[str, int] = {}
    aged_out, done = 0, False
    while True:
        done = done or expected_end.poll(0)
        moved = False
        for queue in queues:
            try:
                batch = broker.log.pull(queue, at[queue], 500, 1 << 20, ("queue_offset", "body"))
            except DataLossError as error:
                if error.sub != "AGED_OUT" or queue.topic != "aged":
                    raise
                at[queue] = broker.log.bounds([queue])[queue].min_offset
                aged_out += 1
                continue
            assert batch.column(0).to_pylist() == list(range(at[queue], at[queue] + batch.num_rows))
            if queue.topic == "orders":
                for body in batch.column(1).to_pylist():
                    writer, number = body.decode().split(".")
                    assert int(number) == seen.get(writer, 0), "the rows of a writer must be in its order"
                    seen[writer] = int(number) + 1
            at[queue] += batch.num_rows
            moved = moved or batch.num_rows > 0
        if done and not moved:
            pipe.send((seen, aged_out))
            return


def trim_until_told(broker: Broker, pipe: Connection, stop: Connection) -> None:
    trimmed = 0
    while not stop.poll(0.01):
        trimmed += sum(broker.admin.trim("aged").values())
    pipe.send(trimmed)


def test_many_writers_readers_and_retention_share_a_store(path: Path, broker: EmbeddedBroker):
    broker.admin.create_topic("aged", 2, retention_bytes=500_000)
    writers = [Child(path, write_some, name, 20) for name in range(8)]
    ends = [PROCESSES.Pipe() for _ in range(5)]
    readers = [Child(path, read_all, theirs) for _, theirs in ends[:4]]
    trimmer = Child(path, trim_until_told, ends[4][1])
    sent = {str(name): writer.end()[0] for name, writer in enumerate(writers)}
    for ours, _ in ends:
        ours.send("done")
    for reader in readers:
        [(seen, _)] = reader.end()
        assert seen == sent
    assert len(trimmer.end()) == 1
    assert sum(broker.log.bounds([queue])[queue].min_offset for queue in queues_of(broker, "aged")) > 0, (
        "retention must have deleted messages"
    )
    assert check(path) == []
    assert sum(len(bodies(broker, queue)) for queue in queues_of(broker)) == sum(sent.values())


# -- no room ----------------------------------------------------------------------------------------------------------------------


class Writes:
    """Every kind of write. Each call writes different data, so that it needs more room."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.broker = broker
        self.number = 0
        self.queue = queues_of(broker)[0]
        self.client = broker.groups.join("me")
        self.token: LockToken | None = None
        broker.log.append({self.queue: rows(["first"])})
        self.lot = parked_queue("parking", self.queue)
        [self.parking] = locked(broker, "parking", self.client, [self.queue])
        broker.groups.park(self.parking, [Parking(self.queue, 0, Ticket(0, 1, 1, 9))])

    def append(self) -> None:
        self.broker.log.append({self.queue: rows([os.urandom(1000).hex()])})

    def send(self) -> None:
        """Send to two queues, with a second row that is much larger than the first. Both rows or none must be stored."""
        Producer(self.broker.log, "orders").send(pa.record_batch({"body": [b"small", os.urandom(20_000)]}))

    def publish(self) -> None:
        self.number += 1
        self.broker.outbox.publish(SinkBatch("x" * 150 + str(self.number), 0), [])

    def lock(self) -> None:
        self.number += 1
        self.broker.groups.lock(f"{'g' * 100}{self.number}", self.client, queues_of(self.broker))

    def commit(self) -> None:
        """Alternate between a lock and a commit under it, so that each call is one write."""
        if self.token is None:
            self.number += 1
            [self.token] = locked(self.broker, f"{'c' * 100}{self.number}", self.client, [self.queue])
        else:
            self.broker.groups.commit({self.token: 1})
            self.token = None

    def create_topic(self) -> None:
        self.number += 1
        self.broker.admin.create_topic(f"{'t' * 100}{self.number}", 8)

    def seek(self) -> None:
        self.number += 1
        self.broker.admin.seek(f"{'s' * 100}{self.number}", {self.queue: 1})

    def park(self) -> None:
        """Park the message again at the end of the lot, so that the lot grows."""
        last = self.broker.log.bounds([self.lot])[self.lot].max_offset - 1
        self.broker.groups.park(self.parking, [Parking(self.lot, last, Ticket(0, 1, 1, 9, os.urandom(500).hex()))])


KINDS = ["append", "send", "publish", "lock", "commit", "create_topic", "seek", "park"]


def fill(broker: EmbeddedBroker, write: Callable[[], object]) -> None:
    """Write until there is no room, and assert that the refused writes changed nothing."""
    while not refuses(write):
        pass
    # A smaller write may still find room, so write again until one is refused. Read the whole store before each write.
    before = everything(broker)
    while not refuses(write):
        before = everything(broker)
    assert everything(broker) == before


def refuses(write: Callable[[], object]) -> bool:
    try:
        write()
    except StoreFullError as error:
        return error.condition == "ORDEREDMQ_STORE.FULL" and error.retriable and "nothing was changed" in error.message
    return False


def everything(broker: EmbeddedBroker) -> dict[str, Any]:
    """Return every row of the store, with the sizes of payloads. A refused write must not change them."""
    opened = Store.open(broker.path)
    try:
        with opened.read() as txn:
            return {
                table.name: [(row.id, len(row.content)) for row in txn.scan(PAYLOADS)]
                if table is PAYLOADS
                else list(txn.scan(table))
                for table in TABLES.values()
            }
    finally:
        opened.close()


def fill_the_disk(broker: EmbeddedBroker, pipe: Connection, kind: str) -> None:
    setattr(transaction, "INLINE_BYTES", 1 << 30)  # noqa: B010
    writes = Writes(broker)
    write = getattr(writes, kind)
    write()
    limit = max(wal.size(broker.path), os.stat(broker.path / FILE).st_size) + 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    fill(broker, lambda: broker.log.append({writes.queue: rows([os.urandom(10_000).hex()])}))
    fill(broker, write)
    pipe.send(check(broker.path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    write()
    broker.log.append({writes.queue: rows(["after"])})
    pipe.send(bodies(broker, writes.queue)[-1])
    pipe.send(check(broker.path))


@pytest.mark.fault("full disk", "embedded")
@pytest.mark.holds("kill -9", "all queues or none")
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_a_named_error_that_changes_nothing_until_there_is_room(path: Path, broker: EmbeddedBroker, kind: str):
    """A full disk is simulated by limiting the size of files that the process may write."""
    assert Child(path, fill_the_disk, kind).end() == [[], "after", []]
    evidence.note()


# -- damage -----------------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A payload: its queue, first offset and number of messages; its file, its start in the file, and its length."""

    queue: MessageQueue
    first: int
    messages: int
    file: Path
    begin: int
    length: int


def payload_places(broker: EmbeddedBroker) -> list[Place]:
    """Return each payload. All must be in segments."""
    opened = Store.open(broker.path)
    with opened.read() as txn:
        chunks = list(txn.scan(CHUNKS))
        folder = txn.segments.folder
    opened.close()
    return [
        Place(
            queue_of(chunk), chunk.first_offset, chunk.rows, folder / name_of(chunk.segment), chunk.position, chunk.stored_bytes
        )
        for chunk in chunks
    ]


def flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << bit]))


def test_messages_are_appended_behind_a_damaged_chunk(path: Path, broker: EmbeddedBroker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows([os.urandom(1000) for _ in range(100)])})
    [place] = payload_places(broker)
    flip(place.file, place.begin + place.length // 2, 3)
    broker.log.append({queue: rows(["y" * 100] * 100)})
    with refused("STORE.CORRUPT", f"{place.first} to {place.first + place.messages - 1}"):
        bodies(broker, queue)
    assert bodies(broker, queue, 100) == ["y" * 100] * 100
    assert len(check(path)) == 1


def test_damaged_staged_rows_are_not_merged_into_a_queue(broker: EmbeddedBroker):
    queue = queues_of(broker)[0]
    broker.log.append({queue: rows([b"x" * 100] * 1000)})
    staging = broker.outbox.open(SinkBatch("s", 0), 0)
    staging.add(queue, rows([os.urandom(100) for _ in range(1000)]))
    receipt = staging.receipt()
    [staged] = receipt.staged.chunks
    flip(broker.path / "segments" / name_of(staged.chunk.segment), staged.chunk.position + 5000, 0)
    before = state(broker, ["orders"])
    with refused("STORE.CORRUPT", queue):
        broker.outbox.publish(SinkBatch("s", 0), [receipt])
    assert state(broker, ["orders"]) == before


def test_a_damaged_store_can_still_be_trimmed_and_its_topics_deleted(path: Path, broker: EmbeddedBroker):
    queue = queues_of(broker)[0]
    for _ in range(2):
        broker.log.append({queue: rows([os.urandom(20) for _ in range(BIG)])})
    for place in payload_places(broker):
        flip(place.file, place.begin + place.length // 2, 1)
    assert broker.admin.trim("orders", {queue: BIG}) == {queue: BIG}
    broker.admin.delete_topic("orders")
    assert check(path) == []
