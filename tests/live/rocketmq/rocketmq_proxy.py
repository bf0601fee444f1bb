"""RocketMQ's own Proxy (rocketmq-proxy) as a server of the tests. In contrast, proxy.py is a TCP proxy that breaks connections."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from orderedmq.broker import Broker
from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError
from orderedmq.pulls import pulls
from orderedmq.rocketmq.local.jars import PROXY_MODULES, VERSIONS, fetch_jars
from orderedmq.rocketmq.local.probe import HOST, ask, find_free_port
from orderedmq.rocketmq.local.servers import Cluster, Server
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from tests.quick_spark import QUICK_SERVER

_GET_ROUTE: Final = 105


def bodies(broker: Broker, topic: str) -> dict[int, list[str]]:
    """Return the bodies of each queue of all brokers, in order."""
    out: dict[int, list[str]] = {}
    for number, (queue, at) in enumerate(broker.log.bounds(broker.log.queues(topic)).items()):
        pulled = pulls(broker.log, queue, at.min_offset, at.max_offset, 1000, 1 << 24, ("body",))
        out[number] = [body.decode() for batch in pulled for body in batch.column(0).to_pylist()]
    return out


class ProxyServer(Server):
    """A Proxy in front of a cluster, in cluster mode. ``home/proxy.json`` has its settings."""

    main = "org.apache.rocketmq.proxy.ProxyStartup"
    kind = "proxy"
    heap = ("-Xms64m", "-Xmx256m")

    def __init__(
        self,
        home: Path,
        cluster: Cluster,
        settings: Mapping[str, object],
        *,
        credentials: Credentials | None = None,
        tls: bool = False,
        jvm: Sequence[str] = QUICK_SERVER,
    ) -> None:
        """``credentials`` are an administrator's, for settings that require an account. ``tls``: whether to also accept TLS."""
        # The Proxy is always of the newest release, whatever release the brokers have.
        super().__init__(home, VERSIONS[-1], find_free_port(), jvm)
        if tls:
            # The Proxy generates the certificate. gRPC on the same port would need OpenSSL, which the jars lack.
            self._jvm = (*jvm, "-Dtls.server.mode=permissive")
            settings = {**settings, "enableRemotingLocalProxyGrpc": False}
        self._cluster = cluster
        self._grpc_port = find_free_port()
        self._credentials = credentials
        self._settings = settings

    def jars(self) -> Path:
        return fetch_jars(self.version, PROXY_MODULES)

    def properties(self) -> dict[str, object]:
        return {
            "rocketMQClusterName": self._cluster.name,
            "proxyClusterName": self._cluster.name,
            "namesrvAddr": self._cluster.address,
            "proxyMode": "CLUSTER",
            "grpcServerPort": self._grpc_port,
            "remotingListenPort": self.port,
            "remotingAccessAddr": HOST,
            # Short intervals, so that a topic that a test creates is visible soon.
            "topicRouteServiceCacheRefreshSeconds": 1,
            "topicConfigCacheRefreshSeconds": 1,
            **self._settings,
        }

    def configure(self) -> list[str]:
        file = self.home / "proxy.json"
        file.write_text(json.dumps(self.properties()))
        return ["-pc", str(file)]

    def ready(self) -> bool:
        """Return whether the Proxy knows the brokers."""
        topic = self._cluster.broker.name
        try:
            if self._credentials is not None:
                with Client(self.address, credentials=self._credentials) as client:
                    return bool(client.route(topic, Deadline.after(3.0)).brokers)
            code, body = ask(self.address, _GET_ROUTE, {"topic": topic})
            return code == 0 and self.address.encode() in body
        except (OSError, OrderedMQError):
            return False
