"""RocketMQ for the contract suite: a cluster of each version, emptied before each test, whose queue locks live 3 s instead of 60."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from orderedmq.broker import Broker
from orderedmq.errors import ServersError
from orderedmq.lock import HOLDER_TRUST, LOCK_LIFE
from orderedmq.model import MessageQueue
from orderedmq.rocketmq import admin_requests, group_requests
from orderedmq.rocketmq.admin import delete_at_broker
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.client import Client
from orderedmq.rocketmq.route import user_topics
from orderedmq.rocketmq.servers import Cluster
from tests.contract.support import FakeClock
from tests.quick_spark import QUICK_SERVER

#: Seconds that a queue lock lives at the servers, and how much faster than the contract's time real time runs.
SERVERS_LOCK_LIFE: Final = 3.0
SPEED: Final = LOCK_LIFE / SERVERS_LOCK_LIFE

#: What RocketMQ cannot do, and why: see `support.needs`.
LACKS: Final = {
    "clock": "locks and messages have the time of the servers' own clocks, which no test sets or hits to the millisecond",
    "reboot": "servers keep no boot id: their locks are gone when they restart",
    "trim": "messages are deleted by age, in whole files of all topics together; no request deletes some of one queue",
    "topic settings": "retention and compression are settings of the servers, not of a topic",
    "chunks": "a queue is not kept in chunks, and no request tells how many bytes it has",
    "empty recreation": "a topic that was empty, deleted and created again has nothing that tells it from the former one",
    "empty values": "a message's property cannot be there without a value",
    "owners": "a broker does not say whose a lock is: nobody knows that its owner is dead, and nobody can take it from who is no member",
    "epochs": "a lock that was given back, or not confirmed for 30 s, proves nothing: brokers cannot say whether another had it since",
    "lineage": "brokers do not know who had a lock before: each grant begins a tenure",
    "linger": "a lock that is not given back lives until its time is over; to its owner it is gone",
    "membership age": "a member lives for as long as its connection, or 120 s without a heartbeat, not for as long as a lock",
    "unused groups": "a broker keeps a group that once had a member, and all that is known of a group goes when it is deleted",
    "long groups": "a group's name has 120 characters at most",
    "sizes": "brokers do not tell how many bytes some messages have: what lies behind the first few is an estimate",
}

#: What some versions cannot.
LACKS_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "4.9.7": {"offsets of topics": "before 5.0 a broker keeps the offsets of a topic that is gone, and takes new ones"}
}


def lacks(version: str) -> Mapping[str, str]:
    """What a version cannot do, and why."""
    return {**LACKS, **LACKS_OF.get(version, {})}


class PassingClock(FakeClock):
    """Time that really passes, 20 times as fast as it says. What is written at servers has their time, so numbers are about right only."""

    def pass_(self, seconds: float) -> None:
        # Nothing lives longer than a lock, so a long time is no different from what ends that.
        time.sleep(min(seconds, LOCK_LIFE + 2) / SPEED)
        super().pass_(seconds)


class Servers:
    """The clusters of the session, one version after the other: the next one boots while the tests of another run."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "contract-cluster")
        self._folder: Path | None = None
        self._waiting: list[str] = []
        self._starting: dict[str, Future[Cluster]] = {}

    @property
    def prepared(self) -> bool:
        return self._folder is not None

    def prepare(self, folder: Path, versions: Iterable[str]) -> None:
        """Those that will be asked for, in that order."""
        self._folder, self._waiting = folder, list(versions)
        self._next()

    def _next(self) -> None:
        if self._waiting:
            version = self._waiting.pop(0)
            assert self._folder is not None
            self._starting[version] = self._pool.submit(_start, self._folder / version, version)

    def cluster(self, version: str) -> Cluster:
        """Skips the test where the jars cannot be had, but not in CI."""
        while version not in self._starting:
            self._next()
        try:
            found = self._starting[version].result()
        except ServersError as error:
            if error.sub == "NO_JARS" and os.environ.get("CI") != "true":
                pytest.skip(str(error))
            raise
        if len(self._starting) == 1:
            self._next()
        return found

    def stop(self, version: str) -> None:
        starting = self._starting.pop(version, None)
        if starting is not None and not starting.cancel() and starting.exception() is None:
            starting.result().stop()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for version in list(self._starting):
            self.stop(version)


def _start(folder: Path, version: str) -> Cluster:
    folder.mkdir()
    made = Cluster(folder, version, lock_life=SERVERS_LOCK_LIFE, jvm=QUICK_SERVER)
    made.start()
    return made


SERVERS: Final = Servers()


class RocketMQPlace:
    """A cluster of some version, without any user's topic or group."""

    def __init__(self, version: str) -> None:
        self.lacks: Mapping[str, str] = lacks(version)
        self._cluster = SERVERS.cluster(version)
        self._connections: list[Broker] = []
        self.clock: FakeClock = PassingClock(micros=time.time_ns() // 1000)
        with Client(self._cluster.address) as client:
            _empty(client)

    def connect(self) -> Broker:
        broker = RocketMQBroker(self._cluster.address)
        broker.groups.trust = HOLDER_TRUST / SPEED
        # Tests look at once at what others did; what is believed for a moment is tests/rocketmq/test_groups.py's.
        broker.groups.believed = 0.0
        self._connections.append(broker)
        return broker

    def connecting(self) -> str:
        return (
            "from orderedmq.rocketmq.broker import RocketMQBroker\n"
            f"broker = RocketMQBroker({self._cluster.address!r})\n"
            f"broker.groups.trust = {HOLDER_TRUST / SPEED}\n"
        )

    def close(self) -> None:
        for broker in self._connections:
            broker.close()


def _empty(client: Client) -> None:
    """Delete every topic and group that is not the servers' own."""
    deadline = time.monotonic() + 30
    cluster = client.cluster(deadline)
    names = client.topics(deadline)
    topics = {*user_topics(names, cluster), *(name for name in names if name.startswith("%RETRY%"))}
    for broker in cluster.brokers.values():
        master = str(broker.master)
        # A lock outlives its group and its topic, where it was left.
        queues = [MessageQueue(topic, broker.name, number) for topic in {*topics, "orders"} for number in range(8)]
        for group in {*client.call_address(master, admin_requests.groups(), deadline), "g", "h"}:
            while len(client.call_address(master, group_requests.lock(group, "cleaner", queues), deadline)) < len(queues):
                time.sleep(0.05)
            client.call_address(master, group_requests.unlock(group, "cleaner", queues), deadline)
        for topic in topics:
            delete_at_broker(client, master, topic)
        # Before 5.3 there are groups that have offsets and no settings.
        offsets = client.call_address(master, group_requests.all_consumer_offsets(), deadline)
        for group in {*client.call_address(master, admin_requests.groups(), deadline), *offsets}:
            if not group.startswith(_SERVERS_GROUPS):
                client.call_address(master, admin_requests.delete_group(group), deadline)
    for nameserver in client.nameservers:
        for topic in topics:
            client.call_address(nameserver, admin_requests.delete_topic_in_nameserver(topic), deadline)


_SERVERS_GROUPS = ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_")
