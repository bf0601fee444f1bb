"""A sink's batches on real servers: each row once in its queue, whatever becomes of connections, answers, brokers and tasks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import OrderedMQError
from orderedmq.model import PRODUCER_SCHEMA, MessageQueue, OffsetRange
from orderedmq.rocketmq import admin_requests
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.log import RocketMQLog
from orderedmq.rocketmq.outbox import RocketMQOutbox
from orderedmq.rocketmq.queue_place import Timing
from orderedmq.rocketmq.servers import Cluster
from tests.rocketmq.proxy import Network

#: For locks that live 3 s.
QUICK = Timing(lock_trust=1.5, lock_renew=1.0, lock_wait=20.0, send_timeout=1.0, settle=0.4, patience=60.0)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def rows(names: Sequence[str], size: int = 0) -> pa.RecordBatch:
    """Rows whose key is their first letter, with bodies of at least ``size`` bytes."""
    columns: dict[str, Any] = {
        "body": [name.encode().ljust(size) for name in names],
        "sharding_key": [name[0] for name in names],
    }
    return pa.record_batch({name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in columns.items()})


def numbered(count: int, first: int = 0, keys: str = "abc") -> list[str]:
    return [f"{keys[number % len(keys)]}{number}" for number in range(first, first + count)]


class World:
    """A topic of three queues, seen without any proxy; outboxes may be behind one."""

    def __init__(self, cluster: Cluster, timing: Timing = Timing()) -> None:  # noqa: B008
        self.cluster = cluster
        self.timing = timing
        self.client = Client(cluster.address)
        self.log = RocketMQLog(self.client)
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.sink = f"s-{self.topic}"
        self._clients = [self.client]
        for master in self.masters():
            self.client.call_address(master, admin_requests.create_topic(self.topic, 3), soon())
        deadline = soon(20)
        while True:
            try:
                self.queues = self.log.queues(self.topic)
                break
            except OrderedMQError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        self.queue = self.queues[0]

    def masters(self) -> list[str]:
        return [str(broker.master) for broker in self.client.cluster(soon()).brokers.values()]

    def outbox(self, address: str | None = None, timing: Timing | None = None) -> RocketMQOutbox:
        """Of a process of its own."""
        client = Client(address or self.cluster.address)
        self._clients.append(client)
        return RocketMQOutbox(client, RocketMQLog(client), timing=timing or self.timing)

    def batch(self, number: int = 0) -> SinkBatch:
        return SinkBatch(self.sink, number)

    def write(
        self, names: Sequence[str], batch: int = 0, partition: int = 0, outbox: RocketMQOutbox | None = None, size: int = 0
    ) -> Receipt:
        """One attempt of a task that has these rows for the first queue."""
        staging = (outbox or self.outbox()).open(self.batch(batch), partition)
        staging.add(self.queue, rows(names, size))
        return staging.receipt()

    def bodies(self, queue: MessageQueue | None = None) -> list[str]:
        queue = queue or self.queue
        bounds = self.log.bounds([queue])[queue]
        out: list[str] = []
        at = bounds.min_offset
        while at < bounds.max_offset:
            found = self.log.pull(queue, at, 1 << 20, 1 << 30, ("body",))
            out += [body.decode().rstrip() for body in found.column(0).to_pylist()]
            at += found.num_rows
        return out

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


@pytest.fixture
def everywhere(every_version: Cluster, worlds: list[World]) -> World:
    worlds.append(World(every_version))
    return worlds[-1]


@pytest.fixture
def quick(quick_locks: Cluster, worlds: list[World]) -> World:
    worlds.append(World(quick_locks, QUICK))
    return worlds[-1]


@pytest.fixture
def network(quick: World) -> Iterator[Network]:
    with Network(quick.cluster.address, [broker.address for broker in quick.cluster.brokers]) as made:
        yield made


# --- every version


def test_a_batch_is_there_once_however_often_it_is_written(everywhere: World) -> None:
    world = everywhere
    names = numbered(200)
    first = world.write(names)
    assert world.bodies() == names
    # The same task again: Spark may deliver its rows in another order.
    again = world.write(names[100:] + names[:100])
    assert world.bodies() == names
    published = world.outbox().publish(world.batch(), [again, first])
    assert published == world.outbox().publish(world.batch(), [first]).__class__(False, {world.queue: OffsetRange(0, 200)})
    for receipt in (first, world.write(names)):
        assert world.outbox().publish(world.batch(), [receipt]).replayed
    more = numbered(50, 200)
    world.outbox().publish(world.batch(1), [world.write(more, 1)])
    assert world.outbox().publish(world.batch(), [world.write(names)]).replayed
    assert world.bodies() == names + more


def test_every_column_and_an_empty_body_arrive_and_are_known_again(everywhere: World) -> None:
    world = everywhere
    given = pa.RecordBatch.from_pylist(
        [
            {"body": b"", "tags": "t", "keys": "k1 k2", "sharding_key": "ä", "properties": [("x", "1"), ("OMQ_SINK", "other")]},
            {"body": b"\0" * 100_000, "tags": None, "keys": "", "sharding_key": None, "properties": None},
            {"body": b"a", "tags": None, "keys": None, "sharding_key": "k", "properties": [("y", "2"), ("CLUSTER", "no")]},
        ],
        PRODUCER_SCHEMA,
    )
    for _ in range(2):
        staging = world.outbox().open(world.batch(7), 3)
        staging.add(world.queue, given)
        world.outbox().publish(world.batch(7), [staging.receipt()])
    got = world.log.pull(world.queue, 0, 100, 1 << 30, PRODUCER_SCHEMA.names and tuple(PRODUCER_SCHEMA.names)).to_pylist()
    assert [(row["body"], row["tags"], row["keys"], row["sharding_key"]) for row in got] == [
        (b"", "t", "k1 k2", "ä"),
        (b"\0" * 100_000, None, None, None),
        (b"a", None, None, "k"),
    ]
    stamp = {"OMQ_SINK": world.sink, "OMQ_BATCH": "7", "OMQ_PARTITION": "3"}
    for number, row in enumerate(got):
        properties = dict(row["properties"])
        assert properties.items() >= {**stamp, "OMQ_SEQUENCE": str(number)}.items()
    assert dict(got[0]["properties"])["x"] == "1"
