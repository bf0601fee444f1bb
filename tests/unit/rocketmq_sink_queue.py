"""An in-memory queue for the attempts of a sink's task: it stores messages, forgets old ones, and fails sends on request."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.errors import RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import Packing, SendBody
from orderedmq.rocketmq.codec.stored_message import parse_properties
from orderedmq.rocketmq.sink import commit_history, commit_report
from orderedmq.rocketmq.sink.commit_history import Committed
from orderedmq.rocketmq.sink.commit_report import Token, Verdict, judge, parse_token
from orderedmq.rocketmq.sink.message_stamp import COLUMNS, Writer, read_stamp
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, Start, settle
from orderedmq.schema import MESSAGE_SCHEMA, PRODUCER_SCHEMA

QUEUE = MessageQueue("t", "broker-a", 0)
SINK = "sink"


def rows_of(names: list[str]) -> pa.RecordBatch:
    """Rows with these names, each with the first letter of its name as its key."""
    columns: dict[str, Any] = {
        "body": [name.encode() for name in names],
        "sharding_key": [name[0] for name in names],
        "properties": [[("name", name)] for name in names],
    }
    return pa.record_batch({name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in columns.items()})


@dataclass
class Stored:
    body: bytes
    properties: dict[str, str]


def split(data: bytes) -> list[Stored]:
    """The messages that a broker stores for a batch."""
    out, at = [], 0
    while at < len(data):
        size, _, _, _, length = struct.unpack_from(">iiiii", data, at)
        (width,) = struct.unpack_from(">h", data, at + 20 + length)
        text = data[at + 22 + length : at + 22 + length + width]
        out.append(Stored(data[at + 20 : at + 20 + length], parse_properties(text)))
        at += size
    return out


def pulled(messages: Sequence[Stored], begin: int, end: int, columns: Sequence[str]) -> pa.RecordBatch:
    """The rows of stored messages. A broker has added a property to each message."""
    offsets = range(begin, min(end, len(messages)))
    chosen = messages[begin:end]
    values: dict[str, list[Any]] = {
        "queue_offset": list(offsets),
        "body": [message.body for message in chosen],
        "message_id": [message.properties.get("UNIQ_KEY") for message in chosen],
        "tags": [message.properties.get("TAGS") for message in chosen],
        "keys": [message.properties.get("KEYS") for message in chosen],
        "sharding_key": [message.properties.get("__SHARDINGKEY") for message in chosen],
        "properties": [list({**message.properties, "CLUSTER": "c"}.items()) for message in chosen],
        "born_timestamp": [0] * len(chosen),
        "store_timestamp": [0] * len(chosen),
    }
    return pa.record_batch({name: pa.array(values[name], MESSAGE_SCHEMA.field(name).type) for name in columns})


@dataclass
class Queue:
    """A queue with the owner of its lock, the sink's bookmark in it, and the sink's newest committed batch."""

    messages: list[Stored] = field(default_factory=list)
    owner: object = None
    bookmark: int | None = None
    first_visit: bool = True
    committed: int = -1
    #: The stored value of each slot of the history of committed batches.
    history: dict[int, int] = field(default_factory=dict)

    def read(self, begin: int, end: int, step: int = 3) -> Iterator[pa.RecordBatch]:
        for at in range(begin, end, step):
            yield pulled(self.messages, at, min(at + step, end), COLUMNS)

    def named(self, batch: int, partition: int | None = None) -> list[str]:
        """The names of the stored rows of a batch: of one partition, or of all."""
        return [
            message.properties["name"]
            for message in self.messages
            if (stamp := read_stamp(message.properties, SINK)) is not None
            and stamp.batch == batch
            and partition in (None, stamp.partition)
        ]


class Crash(Exception):
    """The simulated process has died."""


class FakePort:
    """A port whose sends end as ``fate`` says: ok, busy, lost or stored (no answer in either case), crash, crash after, stolen, others."""

    def __init__(self, world: Queue, fate: Callable[[], str], rival: Callable[[], None] = lambda: None) -> None:
        self.queue = QUEUE
        self._world = world
        self._fate = fate
        self._rival = rival
        self._lost = True
        self.limit = 10**9
        self.refusal = RocketMQError(RocketMQCondition.MESSAGE_ILLEGAL, "too large")

    def acquire(self) -> None:
        # The former owner is dead or waiting.
        self._world.owner, self._lost = self, False

    def keep(self) -> bool:
        return not self._lost and self._world.owner is self

    def require(self) -> None:
        """Nothing to check: only this sink uses its lock."""

    def start(self) -> Start:
        if self._world.first_visit:
            self._world.bookmark, self._world.first_visit = len(self._world.messages), False
        return Start(len(self._world.messages), self._world.bookmark, self._world.committed)

    def least(self) -> int:
        return 0

    def end(self) -> int:
        return len(self._world.messages)

    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        return self._world.read(begin, end)

    def packing(self, rows: pa.RecordBatch, where: str, first: int) -> Packing:
        return Packing.BATCH

    def send(self, body: SendBody) -> Callable[[], int]:
        return partial(self._send, body)

    def _send(self, body: SendBody) -> int:
        assert self.keep(), "sent without owning the lock"
        if body.rows > self.limit:
            raise self.refusal
        fate = self._fate()
        if fate == "busy":
            raise RocketMQUnavailableError(UnavailableCondition.BUSY, "busy")
        if fate == "lost":
            raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "lost")
        if fate == "crash":
            raise Crash
        if fate == "others":
            self._world.messages.append(Stored(b"x", {"KEYS": "x"}))
        offset = len(self._world.messages)
        self._world.messages += split(bytes(body.body))
        if fate == "stored":
            raise RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, "lost")
        if fate == "crash after":
            raise Crash
        if fate == "stolen":
            self._rival()
        return offset

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        if error.outcome_unknown:
            self._lost = True

    def release(self) -> None:
        if self._world.owner is self:
            self._world.owner = None


def attempt(port: FakePort, writer: Writer, names: list[str], draw: random.Random) -> Receipt:
    """Run one attempt of a task, which adds its rows in portions."""
    work = QueueWriter(port, writer, writer.partition)
    at = 0
    while at < len(names):
        size = draw.randint(1, len(names))
        work.write(rows_of(names[at : at + size]), at)
        at += size
    port.release()
    reports = (work.report(),) if names else ()
    return Receipt(
        Token(writer.sink, writer.batch, writer.partition, reports, writer.run).text(),
        writer.partition,
        {QUEUE: len(names)} if names else {},
    )


def commit(
    world: Queue, batch: SinkBatch, given: list[Receipt], port: FakePort | None = None, *, skip: bool = False
) -> Verdict:
    """Commit as the outbox does. ``port`` sends the rows for which several tasks found the same message."""
    tokens = [parse_token(batch, receipt) for receipt in given]
    settled = []
    for messages in commit_report.count_contested(tokens).values():
        writer = Writer(SINK, batch.batch_id, 1 + max(token.partition for token in tokens), tokens[0].run)
        settling = port or FakePort(world, lambda: "ok")
        work = QueueWriter(settling, writer, writer.partition)
        settle(settling, work, "the queue", messages)
        settling.release()
        settled.append(work.report())
    slot = commit_history.slot_of(batch.batch_id)
    committed = Committed(world.committed, world.history.get(slot, 0))
    verdict = judge(batch, tokens, {QUEUE: world.bookmark}, [committed], settled, skip=skip)
    for bookmark in verdict.bookmarks.values():
        world.bookmark = bookmark
    if verdict.differs is None:
        world.committed = max(world.committed, batch.batch_id)
        world.history[slot] = commit_history.with_batch(committed.history, batch.batch_id)
    return verdict


def written(world: Queue, batch: int, names: list[str], partition: int = 0, run: str = "") -> Receipt:
    return attempt(FakePort(world, lambda: "ok"), Writer(SINK, batch, partition, run), names, random.Random(0))
