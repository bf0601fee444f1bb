"""A cluster as in production: two nameservers, two masters and a replica of each, all reached through proxies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.probe import ask, find_free_port
from orderedmq.rocketmq.local.servers import BrokerServer, NameServer, Server
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.proxy import Network
from tests.waits import until

#: Roles of the masters. With SYNC, an acknowledged message is on disk and, while the replica runs, also at the replica.
SYNC: Final = {"brokerRole": "SYNC_MASTER", "flushDiskType": "SYNC_FLUSH"}
ASYNC: Final = {"brokerRole": "ASYNC_MASTER", "flushDiskType": "ASYNC_FLUSH"}
#: Small message files, so that a broker on a full disk soon needs a new file and notices that there is no room.
SMALL: Final = {"mappedFileSizeCommitLog": 4 << 20, "slaveReadEnable": True}

_SEND = 10
_UPDATE_TOPIC = 17
_UPDATE_CONFIG = 25
_PUT_KV = 100
_ROUTE = 105


class OrderingNameServer(NameServer):
    """A nameserver that returns the order configuration of topics, which names their queues even while brokers are away."""

    heap = ("-Xms32m", "-Xmx96m", "-XX:TieredStopAtLevel=1")

    def properties(self) -> dict[str, object]:
        return {**super().properties(), "orderMessageEnable": True}


class Member(BrokerServer):
    """A master or a replica, which reports to all nameservers."""

    heap = ("-Xms128m", "-Xmx256m")
    namesrvs: list[OrderingNameServer]

    def ready(self) -> bool:
        """Return whether all running nameservers route clients to this broker. The broker reports at its start and at each call."""
        for namesrv in self.namesrvs:
            if namesrv.running and not namesrv.broken:
                self._namesrv = namesrv.address
                if not super().ready():
                    return False
        return True


class ReplicatedCluster:
    """A context manager. ``address`` names both nameservers. The proxies in ``network`` are ordered masters first, then replicas."""

    def __init__(self, folder: Path, role: Mapping[str, object], *, version: str = DEFAULT_VERSION) -> None:
        self.version = version
        self.namesrvs = [OrderingNameServer(folder / f"namesrv-{n}", version, find_free_port(), QUICK_SERVER) for n in range(2)]
        self.address = ";".join(one.address for one in self.namesrvs)
        self.masters = [self._broker(folder / f"broker-{letter}", role) for letter in "ab"]
        slave = {"brokerId": 1, "brokerRole": "SLAVE", "flushDiskType": role["flushDiskType"]}
        self.replicas = [self._broker(folder / "replicas" / master.name, slave) for master in self.masters]

    def _broker(self, home: Path, role: Mapping[str, object]) -> Member:
        settings: dict[str, Any] = {**SMALL, "namesrvAddr": self.address, **role}
        made = Member(
            home, self.version, find_free_port(-2, 0, 1), self.namesrvs[0].address, "replicated", settings, QUICK_SERVER
        )
        made.namesrvs = self.namesrvs
        return made

    @property
    def brokers(self) -> list[Member]:
        return [*self.masters, *self.replicas]

    @property
    def servers(self) -> list[Server]:
        return [*self.namesrvs, *self.brokers]

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.launch()
            for server in self.servers:
                server.wait()
            self.network = Network(self.address, [broker.address for broker in self.brokers], remember=False)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.network.close()
        self._stop()

    def _stop(self) -> None:
        for server in self.servers:
            server.kill()

    # -- actions of an administrator, sent to the servers without the client that is tested ---------------------------------------

    def topic(self, name: str, queues: int, *, ordered: bool = False) -> None:
        """Create a topic at both masters, with or without an order configuration."""
        if ordered:
            conf = ";".join(f"{master.name}:{queues}" for master in self.masters)
            for namesrv in self.namesrvs:
                code, _ = ask(namesrv.address, _PUT_KV, {"namespace": "ORDER_TOPIC_CONFIG", "key": name, "value": conf})
                assert code == 0
        for master in self.masters:
            self.set_queues(master, name, queues, queues)
        for namesrv in self.namesrvs:
            until(lambda: self._brokers_of(namesrv, name) == 2, f"{name} is known")  # noqa: B023 (called at once)

    def set_queues(self, master: Member, topic: str, read: int, write: int) -> None:
        fields = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(read),
            "writeQueueNums": str(write),
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        code, _ = ask(master.address, _UPDATE_TOPIC, fields)
        assert code == 0

    def permit(self, master: Member, permission: int) -> None:
        """Set a master's permission: 6 is read and write, 4 is read. The master reports it to the nameservers immediately."""
        code, _ = ask(master.address, _UPDATE_CONFIG, body=b"brokerPermission=%d\n" % permission)
        assert code == 0

    def fill(self, master: Member, topic: str, size: int = 256 << 10, most: int = 80) -> int | None:
        """Send messages that nobody reads until the master refuses one. Return how many it accepted, or None if it refused none."""
        fields = {"producerGroup": "filler", "topic": topic, "defaultTopic": "TBW102", "defaultTopicQueueNums": "1"}
        fields |= {"queueId": "0", "sysFlag": "0", "bornTimestamp": "1", "flag": "0", "properties": "", "batch": "false"}
        for count in range(most):
            with contextlib.suppress(OSError):
                code, _ = ask(master.address, _SEND, fields, b"x" * size, timeout=10.0)
                # These codes mean that the message is stored, even if the replica does not have it.
                if code in (0, 10, 11, 12):
                    continue
            return count
        return None

    @staticmethod
    def _brokers_of(namesrv: OrderingNameServer, topic: str) -> int:
        code, body = ask(namesrv.address, _ROUTE, {"topic": topic})
        return body.count(b'"readQueueNums"') if code == 0 else 0
