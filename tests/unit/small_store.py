"""A small store with every kind of entry, and every read that a user can make of it. Damage must never change what these reads return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orderedmq.broker import Progress, Receipt, SinkBatch
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.ownership.lock import ClientIdentity, Instant, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Command, Parking, Ticket, lot_token
from orderedmq.schema import MESSAGE_SCHEMA
from tests.contract.support import locked, queues_of, rows

GROUPS = ("g", "h")
#: The time at which the store is read, in µs since the epoch.
NOW = 1_700_000_100_000_000


class FixedClock:
    """A fixed time, so that a store and everything read from it are the same in each run."""

    def __init__(self, micros: int = NOW) -> None:
        self.micros = micros

    def instant(self) -> Instant:
        return Instant("boot", self.micros / 1e6)

    def wall(self) -> int:
        return self.micros


def make(path: Path, *, small: bool = False) -> tuple[EmbeddedBroker, ClientIdentity, tuple[Receipt, ...]]:
    """Make the store. Return the broker, one of its members, and the receipts of rows that are staged as batch 1 of the sink
    "later".

    The broker stays open so that its member stays alive. One task's rows are in its receipt, the other task's rows are in a
    segment. A third segment has one message of each queue of "orders". ``small``: all messages are small.
    """
    large = 1 if small else 8000
    clock = FixedClock(1_700_000_000_000_000)
    broker = EmbeddedBroker(path, clock=clock)
    broker.admin.create_topic("gone", 2)
    broker.log.append({queues_of(broker, "gone")[0]: rows([b"gone" * 700] * 3)})
    broker.admin.create_topic("orders", 2, retention_bytes=1 << 30, compression="none")
    broker.admin.create_topic("plain", 1, compression="none")
    first, second = queues_of(broker)
    for number in range(4):
        clock.micros += 1_000_000
        keys = [f"key-{number}-{row}" for row in range(5)]
        broker.log.append(
            {first: rows([f"{number} {row}" for row in range(5)], sharding_key=keys, tags=["a", "b", None, "a", "b"])}
        )
    broker.log.append({second: rows(["x" * 2500], keys=["k"], properties=[[("colour", "red")]])})
    broker.log.append({queues_of(broker, "plain")[0]: rows(["p", "q" * 3000])})
    broker.admin.resize_topic("plain", 2)
    broker.admin.delete_topic("gone")
    me = broker.groups.join("me")
    tokens = locked(broker, "g", me, [first, second])
    broker.groups.commit({tokens[0]: 3, tokens[1]: 1})
    broker.groups.heartbeat("g", me, Subscription("shared", "orders", "averagely"))
    broker.groups.dead_letter(tokens[0], rows(["0 1", "0 3"]), [1, 3])
    broker.groups.park(tokens[0], [Parking(first, at, Ticket(at, 1, 1, 99, "why")) for at in (4, 9, 8)])
    broker.groups.park(tokens[0], [Parking(PARKED, 0, Ticket(4, 2, 2, 199, "again"))])
    broker.groups.commit({lot_token(tokens[0]): 1})
    broker.groups.park(tokens[0], [Parking(PARKED, 2, Ticket(8, 2, 2, 199, "again"))])
    broker.groups.record_progress(tokens[0], Progress(6, 1), "consume_orderly books.book")
    broker.log.append({first: rows([b"first" * large]), second: rows([b"other" * large])})
    broker.admin.seek("h", {first: 7, second: 0})
    for number in range(3):
        clock.micros += 1_000_000
        staging = broker.outbox.open(SinkBatch("s", number), 0)
        staging.add(first, rows([f"batch {number}"]))
        staging.add(second, rows([f"batch {number}", "two"]))
        broker.outbox.publish(SinkBatch("s", number), [staging.receipt()])
    return broker, me, tuple(staged(broker, number, size) for number, size in enumerate((2600, 9 * large)))


def staged(broker: EmbeddedBroker, partition: int, size: int) -> Receipt:
    staging = broker.outbox.open(SinkBatch("later", 1), partition)
    staging.add(queues_of(broker)[0], rows(["staged", "z" * size]))
    return staging.receipt()


QUEUES = tuple(MessageQueue(topic, EMBEDDED_BROKER, number) for topic, number in
               (("orders", 0), ("orders", 1), ("plain", 0), ("%DLQ%g", 0)))  # fmt: skip
PARKED = MessageQueue("%PARKED%g%orders", EMBEDDED_BROKER, 0)


#: The fields that are compared.
TOPIC = ("name", "queues", "incarnation", "retention_seconds", "retention_bytes", "compression")
LOCK = ("group", "queue", "owner", "client_id", "epoch", "tenure", "held", "alive", "age", "remaining")
MEMBER = ("owner", "client_id", "subscription", "joined", "renewed", "life")


def named(value: object, names: tuple[str, ...]) -> Any:
    return [plain(getattr(value, name)) for name in names]


def topics(broker: EmbeddedBroker) -> Any:
    """All topics, as the log and as the command list them."""
    described = [[plain(one) for one in broker.admin.describe_topic(topic.name)] for topic in broker.log.topics()]
    return [[named(topic, TOPIC) for topic in broker.log.topics()], described, broker.admin.groups()]


def group(broker: EmbeddedBroker, name: str) -> Any:
    """A group's offsets, locks and members."""
    offsets = broker.groups.offsets(name, QUEUES)
    return {
        "offsets": {str(queue): offset for queue, offset in offsets.items()},
        "described": {str(queue): offset for queue, offset in broker.admin.group_offsets(name).items()},
        "progress": {str(queue): offset for queue, offset in broker.admin.group_progress(name).items()},
        "locks": [named(lock, LOCK) for lock in broker.admin.locks(name)],
        "members": [named(member.member, MEMBER) for member in broker.admin.members(name)],
    }


def messages(broker: EmbeddedBroker, queue: MessageQueue) -> list[Any]:
    """All columns of a queue's messages, pulled in small portions, and the results of searches by time and size."""
    found = broker.log.bounds([queue])
    if not found:
        return []
    begin, end = found[queue].min_offset, found[queue].max_offset
    out: list[Any] = [[begin, end]]
    at = begin
    while at < end:
        batch = broker.log.pull(queue, at, 7, 1 << 20, tuple(MESSAGE_SCHEMA.names))
        assert batch.num_rows, f"{queue} has no message at offset {at}"
        out += [plain(list(row.values())) for row in batch.to_pylist()]
        at += batch.num_rows
    stamps = [1_700_000_000_000_000 + 1_500_000 * step for step in range(1, 5)]
    out.append([broker.log.offset_at(queue, stamp) for stamp in stamps])
    out.append([broker.log.advance(queue, begin, end, size) for size in (10, 1000)])
    return out


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value if isinstance(value, str | int | float | None) else str(value)


#: Everything that a user can read. Each read is separate and returns values of JSON.
READS: dict[str, Callable[[EmbeddedBroker], Any]] = {
    # The part of the store's identity that does not depend on the place of its file.
    "identity": lambda broker: broker.identity.partition("-")[0],
    "topics": topics,
    **{f"messages of {queue}": partial(messages, queue=queue) for queue in (*QUEUES, PARKED)},
    **{f"group {name}": partial(group, name=name) for name in GROUPS},
}


def read_all(broker: EmbeddedBroker) -> dict[str, Any]:
    return {name: read(broker) for name, read in READS.items()}


def park_more(broker: EmbeddedBroker, queue: MessageQueue) -> None:
    """Park messages that are already parked, settled, or new; then move the lot's offset. Stores of earlier versions have no lot."""
    if not broker.log.bounds([PARKED]):
        return
    [lock] = [lock for lock in broker.admin.locks("g") if lock.queue == queue]
    token = LockToken("g", queue, lock.owner, lock.client_id, lock.epoch, lock.tenure)
    places = [(queue, 9), (PARKED, 0), (PARKED, 2), (queue, 10), (queue, 1), (PARKED, 3)]
    answers = broker.groups.park(token, [Parking(source, at, Ticket(9, 1, 1, 99)) for source, at in places])
    assert answers == [True, False, True, True, False, True]
    broker.groups.commit({token: 4, lot_token(token): 2})
    broker.admin.command_parked("g", queue, [Command("hold", "key-0-4")])


def write_all(broker: EmbeddedBroker, receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Publish the staged rows, repeat a published batch, move an offset and delete a topic; then read everything."""
    first = queues_of(broker)[0]
    known = broker.outbox.publish(SinkBatch("s", 2), [], skip_differing_replay=True).replayed
    broker.outbox.publish(SinkBatch("later", 1), receipts)
    broker.log.append({first: rows(["after"])})
    offsets = broker.groups.offsets("h", [first])
    broker.admin.seek("h", {first: offsets[first] + 1})
    broker.admin.trim("orders", {first: 9})
    broker.admin.delete_topic("plain")
    park_more(broker, first)
    return {"known": known, **read_all(broker)}
