"""A broker by what its user calls it: a directory, or a cluster's nameservers. Neither kind is imported before it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orderedmq.errors import OptionError

if TYPE_CHECKING:
    from orderedmq.broker import Broker
    from orderedmq.rocketmq.acl import Credentials
    from orderedmq.rocketmq.transport import TlsOptions


def connect(
    path: str | Path | None = None,
    *,
    namesrv_addr: str | None = None,
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    identity: str | None = None,
    map_size: int | None = None,
) -> Broker:
    """Open the embedded broker in directory ``path``, or connect to the RocketMQ cluster of ``namesrv_addr`` ("host:port;host:port").

    Nothing is created or asked before the first use. ``identity``: the `Broker.identity` that is expected, another is refused (StoreError
    OTHER_MACHINE, RocketMQError OTHER_CLUSTER). ``map_size``: a store's greatest size in bytes (default: 1 TiB of address space).
    Raises OptionError CONFLICT, RocketMQError ADDRESS.
    """
    if (path is None) == (namesrv_addr is None):
        raise OptionError("CONFLICT", "give either path, for the embedded broker, or namesrv_addr, for a RocketMQ cluster")
    if path is None:
        from orderedmq.rocketmq.broker import RocketMQBroker

        return RocketMQBroker(namesrv_addr or "", identity=identity, credentials=credentials, tls=tls)
    from orderedmq.embedded.broker import EmbeddedBroker

    return EmbeddedBroker(Path(path), identity=identity, map_size=map_size)
