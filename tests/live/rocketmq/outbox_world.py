"""A topic and a sink that belong to one test, for tests of batches that are written to real servers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Self

import pyarrow as pa
import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import OrderedMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.sink.broker_lock import LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.outbox import RocketMQOutbox
from orderedmq.rocketmq.wire import admin_requests
from tests.contract import support
from tests.waits import soon, until

#: Timing for locks that live 3 s.
QUICK = LockTiming(lock_trust=1.5, lock_renew=1.0, lock_wait=60.0, lock_yield=1.0, send_timeout=1.0, settle=0.4, patience=60.0)
#: Timing for locks that live 60 s, with a short send timeout.
SHORT_SENDS = LockTiming(lock_yield=1.0, send_timeout=1.0, settle=0.4)


def rows(names: Sequence[str], size: int = 0) -> pa.RecordBatch:
    """Return rows whose sharding key is their first letter, with bodies of at least ``size`` bytes."""
    return support.rows([name.encode().ljust(size) for name in names], sharding_key=[name[0] for name in names])


def numbered(count: int, first: int = 0, keys: str = "abc") -> list[str]:
    return [f"{keys[number % len(keys)]}{number}" for number in range(first, first + count)]


class World:
    """A topic of three queues. The test reads it directly; outboxes may go through a proxy."""

    def __init__(self, cluster: Cluster, timing: LockTiming = LockTiming(), message_type: str | None = None) -> None:  # noqa: B008
        self.cluster = cluster
        self.timing = timing
        self.client = Client(cluster.address)
        self.log = RocketMQLog(self.client)
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.sink = f"s-{self.topic}"
        self._clients = [self.client]
        for master in self.masters():
            self.client.call_address(master, admin_requests.create_topic(self.topic, 3, message_type=message_type), soon())
        self.queues: list[MessageQueue] = until(self._queues, f"topic {self.topic} exists")
        self.queue = self.queues[0]

    def _queues(self) -> list[MessageQueue]:
        try:
            return self.log.queues(self.topic)
        except OrderedMQError:
            return []

    def masters(self) -> list[str]:
        return [str(broker.master) for broker in self.client.whole_cluster(soon()).brokers.values()]

    def outbox(self, address: str | None = None, timing: LockTiming | None = None) -> RocketMQOutbox:
        """Return an outbox with a separate client, as in a separate process."""
        client = Client(address or self.cluster.address)
        self._clients.append(client)
        return RocketMQOutbox(client, RocketMQLog(client), timing=timing or self.timing)

    def batch(self, number: int = 0, job: str = "") -> SinkBatch:
        return SinkBatch(self.sink, number, job=job, topic=self.topic)

    def write(
        self,
        names: Sequence[str],
        batch: int = 0,
        partition: int = 0,
        outbox: RocketMQOutbox | None = None,
        size: int = 0,
        job: str = "",
    ) -> Receipt:
        """Run one attempt of a task that writes these rows to the first queue. Return its receipt."""
        staging = (outbox or self.outbox()).open(self.batch(batch, job), partition)
        staging.add(self.queue, rows(names, size))
        return staging.receipt()

    def bodies(self, queue: MessageQueue | None = None) -> list[str]:
        queue = queue or self.queue
        bounds = self.log.bounds([queue])[queue]
        out: list[str] = []
        at = bounds.min_offset
        while at < bounds.max_offset:
            batch = self.log.pull(queue, at, 1 << 20, 1 << 30, ("body",))
            out += [body.decode().rstrip() for body in batch.column(0).to_pylist()]
            at += batch.num_rows
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()


def spoil(monkeypatch: pytest.MonkeyPatch, fates: dict[int, Callable[[], None]]) -> list[int]:
    """Call ``fates[n]`` before the n-th send, counted from 1 over all queues. Return a list that collects the sends' numbers."""
    real = RocketMQQueue.send
    sends: list[int] = []
    guard = threading.Lock()

    def send(self: RocketMQQueue, body: SendBody) -> Callable[[], int]:
        with guard:
            sends.append(len(sends) + 1)
            fate = fates.get(sends[-1])
            if fate is not None:
                fate()
        return real(self, body)

    monkeypatch.setattr(RocketMQQueue, "send", send)
    return sends
