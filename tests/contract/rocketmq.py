"""RocketMQ for the contract suite: a cluster of each release, emptied before each test, and a clock that tests move.

Brokers use their own clocks. To move the clock, the suite therefore makes the clients' grants older and unlocks, under the owner's
name, each lock that was not renewed for its lifetime. Other clients cannot tell this from expiry. No test waits for a lock, and no
lock expires because the machine is slow. tests/live/rocketmq/test_locks.py tests that locks expire by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orderedmq.broker import Broker
from orderedmq.endpoint import Endpoint
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LOCK_LIFE, ClientIdentity
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.group.lock_rules import lock_names
from orderedmq.rocketmq.group.locks import HeldLock, HeldLocks
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.messages.topic_changes import delete_at_broker
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire import admin_requests, group_requests
from orderedmq.rocketmq.wire.route import user_topics
from tests.contract.support import FakeClock
from tests.quick_spark import QUICK_SERVER
from tests.waits import soon

#: Features that RocketMQ lacks, with the reason; see `support.needs`.
LACKS: Final = {
    "clock": "locks and messages get their times from the servers' clocks, which tests can neither set nor predict to the millisecond",
    "reboot": "servers keep no boot id, and their locks are lost when they restart",
    "trim": "messages are deleted by age, in whole files that hold all topics; no request deletes messages of one queue",
    "topic settings": "retention and compression are settings of the servers, not of a topic",
    "chunks": "queues have no chunks, and no request returns a queue's size in bytes",
    "empty recreation": "if an empty topic is deleted and created again, nothing distinguishes it from the former topic",
    "empty values": "a message's property must have a value",
    "owners": "brokers do not report who owns a lock, so a dead owner is not noticed and the lock of a non-member cannot be released",
    "epochs": "brokers do not report whether another client had a lock that was released, or not confirmed for 30 s",
    "lineage": "brokers do not record earlier owners, so each grant begins a tenure",
    "linger": "a lock that is not released lives until its time ends, but its former owner no longer counts it as held",
    "membership age": "a membership lasts as long as its connection, or 120 s without a heartbeat, not as long as a lock",
    "unused groups": "a broker lists every group that ever had a member, and forgets everything about a group that is deleted",
    "long groups": "a group's name has 120 characters at most",
    "atomic resizes": "each producer learns a new number of queues at another time, so a topic takes no messages while it is resized",
    "selectors of topics": "brokers do not record which selectors have chosen the queues of a topic",
    "sizes": "brokers do not report the size of messages, so sizes beyond the first few messages are estimates",
}

#: Features that single versions lack in addition.
LACKS_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "4.9.7": {
        "offsets of topics": "before 5.0, a broker keeps the offsets of a deleted topic and accepts new ones",
        "resizes": "before 5.0, a broker keeps the record of a deleted topic's resizes",
    }
}


def lacks(version: str) -> Mapping[str, str]:
    """Return the features that a version lacks, with the reason."""
    return {**LACKS, **LACKS_OF.get(version, {})}


class Granted(HeldLocks):
    """The grants of a connection's clients, including grants that the clients forgot while the broker still has them."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[HeldLock] = []

    def put(self, held: HeldLock) -> None:
        super().put(held)
        self.all.append(held)


@dataclass
class LockClock(FakeClock):
    """A clock that moves only the age of a cluster's locks. Servers use their own clocks, so other times are approximate."""

    address: str = ""
    granted: list[Granted] = field(default_factory=list, repr=False)

    def pass_(self, seconds: float) -> None:
        super().pass_(seconds)
        for held in self._held():
            held.confirmed -= seconds
            held.fence_read -= seconds
        self.end(LOCK_LIFE)
        # Messages written before and after this call must get different times.
        time.sleep(0.002)

    def end(self, age: float) -> None:
        """Unlock every lock that was not renewed for ``age`` seconds."""
        newest: dict[tuple[str, str, MessageQueue], float] = {}
        for held in self._held():
            lock = held.token.group, held.name, held.token.queue
            newest[lock] = max(held.confirmed, newest.get(lock, held.confirmed))
        over: dict[tuple[str, str], list[MessageQueue]] = {}
        now = time.monotonic()
        for (group, name, queue), confirmed in newest.items():
            if now - confirmed > age:
                over.setdefault((group, name), []).append(queue)
        if over:
            with Client(self.address) as client:
                _unlock(client, over)

    def _held(self) -> list[HeldLock]:
        return [held for granted in self.granted for held in granted.all]


def _unlock(client: Client, locks: Mapping[tuple[str, str], list[MessageQueue]]) -> None:
    deadline = soon()
    for broker in client.cluster(deadline).brokers.values():
        for (group, name), queues in locks.items():
            client.call_address(str(broker.master), group_requests.unlock(group, name, queues), deadline)


class Servers:
    """The cluster of the version that is being tested."""

    def __init__(self) -> None:
        self._running: Cluster | None = None

    def start(self, folder: Path, version: str) -> None:
        """Start a cluster of a version. Raises ServersError if its jars cannot be downloaded."""
        self._running = Cluster(folder, version, jvm=QUICK_SERVER, properties={"flushConsumerOffsetInterval": 100})
        self._running.start()

    def cluster(self) -> Cluster:
        assert self._running is not None
        return self._running

    def stop(self) -> None:
        self.cluster().stop()
        self._running = None


servers: Final = Servers()


class RocketMQPlace:
    """A cluster of one version, which is emptied of users' topics and groups first."""

    def __init__(self, version: str) -> None:
        self.lacks: Mapping[str, str] = lacks(version)
        self._cluster = servers.cluster()
        self._connections: list[Broker] = []
        self._clock = LockClock(micros=time.time_ns() // 1000, address=self._cluster.address)
        self.clock: FakeClock = self._clock
        with Client(self._cluster.address) as client:
            _empty(client)

    def connect(self) -> Broker:
        broker = RocketMQBroker(Endpoint(None, self._cluster.address))
        self._clock.granted.append(Granted())
        broker.groups._locks = self._clock.granted[-1]
        # Tests look immediately at changes by other clients, so nothing is cached; tests/live/rocketmq/test_groups.py tests the cache.
        broker.groups.fence_age = 0.0
        self._connections.append(broker)
        return broker

    def connecting(self) -> str:
        return f"from orderedmq.connections import connect\nbroker = connect(namesrv_addr={self._cluster.address!r})\n"

    def ended(self, client: ClientIdentity, group: str) -> None:
        queues = [MessageQueue("orders", broker.name, number) for broker in self._cluster.brokers for number in range(8)]
        with Client(self._cluster.address) as connection:
            _unlock(connection, {(group, name): queues for name in lock_names(client.client_id)})

    def close(self) -> None:
        for broker in self._connections:
            broker.close()
        self._clock.end(float("-inf"))


def _empty(client: Client) -> None:
    """Delete every topic and group except the servers' own."""
    # Allow for locks that a failed test left, which expire after their lifetime.
    deadline = soon(LOCK_LIFE + 30)
    cluster = client.cluster(deadline)
    names = client.topics(deadline)
    topics = {*user_topics(names, cluster), *(name for name in names if name.startswith("%RETRY%"))}
    for broker in cluster.brokers.values():
        master = str(broker.master)
        # A lock that was not released outlives its group and its topic.
        queues = [MessageQueue(topic, broker.name, number) for topic in {*topics, "orders"} for number in range(8)]
        for group in {*client.call_address(master, admin_requests.groups(), deadline), "g", "h"}:
            while len(client.call_address(master, group_requests.lock(group, "cleaner", queues), deadline)) < len(queues):
                time.sleep(0.05)
            client.call_address(master, group_requests.unlock(group, "cleaner", queues), deadline)
        for topic in topics:
            delete_at_broker(client, master, topic)
        # Before 5.3, a group may have offsets without settings.
        offsets = client.call_address(master, group_requests.all_consumer_offsets(), deadline)
        for group in {*client.call_address(master, admin_requests.groups(), deadline), *offsets}:
            if not group.startswith(_SERVERS_GROUPS):
                client.call_address(master, admin_requests.delete_group(group), deadline)
    for nameserver in client.nameservers:
        for topic in topics:
            client.call_address(nameserver, admin_requests.delete_topic_in_nameserver(topic), deadline)


_SERVERS_GROUPS = ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_")
