"""Helpers of the contract's tests: queues, rows, and assertions of refusals. They are independent of the kind of broker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa
import pytest

from orderedmq.broker import Broker
from orderedmq.errors import OrderedMQError
from orderedmq.model import DEAD_LETTER_PREFIX, RESERVED_PROPERTIES, MessageQueue, OffsetRange
from orderedmq.ownership.lock import ClientIdentity, Instant, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.schema import DEFAULT_COLUMNS, PRODUCER_SCHEMA
from tests.waits import until

SECOND = 1_000_000
BIG = 9000  # rows: too many for merging, so they stay in a separate chunk
EVERYTHING = 1 << 40


@dataclass
class FakeClock:
    """A machine's clocks, which tests move. ``seconds`` since boot, ``micros`` since the Unix epoch."""

    seconds: float = 1000.0
    micros: int = 1_700_000_000_000_000
    boot: str = "boot-1"

    def instant(self) -> Instant:
        return Instant(self.boot, self.seconds)

    def wall(self) -> int:
        return self.micros

    def pass_(self, seconds: float) -> None:
        self.seconds += seconds
        self.micros += int(seconds * SECOND)

    def reboot(self) -> None:
        self.boot, self.seconds = self.boot + "'", 3.0


class Place(Protocol):
    """One broker, to which a test makes any number of connections."""

    clock: FakeClock
    #: Features that this kind of broker lacks, with the reason; see `needs`.
    lacks: Mapping[str, str]

    def connect(self) -> Broker: ...
    def connecting(self) -> str:
        """Return code with which another process opens a connection ``broker`` whose clock shows this place's current time."""
        ...

    def ended(self, client: ClientIdentity, group: str) -> None:
        """Free the locks in ``group`` that a client held when its process was killed."""
        ...

    def close(self) -> None:
        """Close the connections and clean up after the test."""
        ...


def needs(*features: str) -> pytest.MarkDecorator:
    """Mark a test that needs these features. It is skipped, with the reason, for kinds of brokers that lack one by nature.

    The features are keys of a kind's ``lacks``. For a feature in `Capabilities`, tests check the capability instead.
    """
    return pytest.mark.needs(*features)


def queues_of(broker: Broker, topic: str = "orders") -> list[MessageQueue]:
    return broker.log.queues(topic)


def rows(values: Sequence[Any], **columns: Any) -> pa.RecordBatch:
    """Return messages with these columns. Bodies that are numbers or text are converted to bytes."""
    bodies = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    arrays: dict[str, pa.Array] = {"body": pa.array(bodies, pa.binary())}
    for name, column in columns.items():
        arrays[name] = pa.array(column, PRODUCER_SCHEMA.field(name).type)
    return pa.record_batch(arrays)


def pull(
    broker: Broker, queue: MessageQueue, offset: int = 0, columns: tuple[str, ...] = DEFAULT_COLUMNS, **limits: int
) -> pa.RecordBatch:
    return broker.log.pull(queue, offset, limits.get("messages", EVERYTHING), limits.get("size", EVERYTHING), columns)


def read(
    broker: Broker, queue: MessageQueue, offset: int | None = None, columns: tuple[str, ...] = ("queue_offset", "body")
) -> list:
    """Return all messages from ``offset`` (default: the first existing one) as rows of Python values."""
    bounds = broker.log.bounds([queue])[queue]
    at = bounds.min_offset if offset is None else offset
    out: list = []
    while at < bounds.max_offset:
        batch = pull(broker, queue, at, columns)
        assert batch.num_rows
        out += batch.to_pylist()
        at += batch.num_rows
    return out


def users_properties(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without properties that a broker adds. If a row has no other properties, its properties are None."""
    out = []
    for row in found:
        pairs = [(name, value) for name, value in row["properties"] or () if name not in RESERVED_PROPERTIES]
        out.append({**row, "properties": pairs or None})
    return out


def bodies(broker: Broker, queue: MessageQueue, offset: int | None = None) -> list[str]:
    return [row["body"].decode() for row in read(broker, queue, offset, ("body",))]


@contextlib.contextmanager
def refused(condition: str, *words: object) -> Iterator[None]:
    """Assert that the code in the block is refused under ``condition``, with a message of one line that contains these words."""
    with pytest.raises(OrderedMQError) as caught:
        yield
    assert caught.value.condition == f"ORDEREDMQ_{condition}", str(caught.value)
    assert "\n" not in str(caught.value)
    for word in words:
        assert str(word) in caught.value.message


def locked(broker: Broker, group: str, client: ClientIdentity, queues: Sequence[MessageQueue]) -> list[LockToken]:
    """Lock all of these queues, assert that none is refused, and return the tokens in the order of the queues."""
    out = broker.groups.lock(group, client, queues)
    tokens = [out[queue] for queue in queues]
    assert all(isinstance(one, LockToken) for one in tokens), out
    return tokens  # type: ignore[return-value]


def state(broker: Broker, topics: Sequence[str]) -> Mapping[str, Any]:
    """Return everything that a reader can see, so that a test can assert that a refusal changed nothing."""
    out: dict[str, Any] = {"topics": broker.log.topics(), "groups": broker.admin.groups()}
    for topic in topics:
        for queue in broker.log.queues(topic):
            out[str(queue)] = (broker.log.bounds([queue])[queue], read(broker, queue))
    for group in broker.admin.groups():
        out[group] = broker.admin.group_offsets(group)
        out[f"{group} locks"] = [(lock.queue, lock.client_id, lock.epoch, lock.held) for lock in broker.admin.locks(group)]
    return out


def span(begin: int, end: int) -> OffsetRange:
    return OffsetRange(begin, end)


SHARED: Final = Subscription("shared", "orders", "averagely")


def beat(broker: Broker, client: ClientIdentity, group: str = "g", subscription: Subscription = SHARED) -> list[str]:
    return [member.client_id for member in broker.groups.heartbeat(group, client, subscription)]


def ids(broker: Broker, group: str = "g") -> list[str]:
    return [member.client_id for member in broker.groups.members(group)]


def known(*clients: ClientIdentity) -> list[str]:
    return sorted(client.client_id for client in clients)


def joined(broker: Broker, client: ClientIdentity, group: str = "g") -> int:
    [one] = [member for member in broker.groups.members(group) if member.client_id == client.client_id]
    return one.joined


def gone(broker: Broker, kind: str, client: ClientIdentity, group: str = "g") -> None:
    """Wait until a killed client is no longer a member. A store notices immediately; RocketMQ, when the connection ends."""
    timeout = 60.0 if kind.startswith("rocketmq") else 0.0
    until(lambda: client.client_id not in ids(broker, group), f"{client.client_id} is no longer a member", timeout)


def kill(process: subprocess.Popen) -> None:
    """Kill a process without reaping it, so that it is a zombie."""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def letters(offsets: Sequence[int], **columns: Any) -> pa.RecordBatch:
    return rows([f"body {offset}" for offset in offsets], **columns)


def aside(broker: Broker, group: str = "g") -> list[str]:
    [queue] = queues_of(broker, DEAD_LETTER_PREFIX + group)
    return bodies(broker, queue)


def commit_beyond_end(broker: Broker, queue: MessageQueue, group: str) -> None:
    """Commit an offset that the queue does not have, as if the broker had lost its last messages."""
    client = broker.groups.join("former")
    [token] = locked(broker, group, client, [queue])
    broker.groups.commit({token: broker.log.bounds([queue])[queue].max_offset + 20})
    broker.groups.unlock([token])
    broker.groups.leave(client)
