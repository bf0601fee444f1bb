"""Connections to brokers: the one place that knows which kinds there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from orderedmq.broker import Broker
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError

if TYPE_CHECKING:
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
    """A connection to the embedded broker in directory ``path``, or to the RocketMQ cluster of ``namesrv_addr`` ("host:port;host:port").

    A context manager. Nothing is created before the first topic. ``identity``: of the broker that the caller expects, refused otherwise
    (StoreError OTHER_MACHINE, RocketMQError
    OTHER_CLUSTER). ``map_size``: the embedded store's greatest size in bytes (default: 1 TiB of address space).
    Raises OptionError when none or both are given.
    """
    if (path is None) == (namesrv_addr is None):
        raise OptionError("CONFLICT", "connect needs either a path (the embedded broker) or namesrv_addr (a RocketMQ cluster)")
    if namesrv_addr is not None:
        from orderedmq.rocketmq.broker import RocketMQBroker

        return RocketMQBroker(namesrv_addr, identity=identity, credentials=credentials, tls=tls)
    assert path is not None
    from orderedmq.embedded.broker import EmbeddedBroker

    return EmbeddedBroker(Path(path), identity=identity, map_size=map_size)


def reach(endpoint: Endpoint, *, identity: str | None = None) -> Broker:
    """A connection to the broker that options name."""
    return connect(
        endpoint.path, namesrv_addr=endpoint.namesrv_addr, credentials=endpoint.credentials, tls=endpoint.tls, identity=identity
    )


_kept: dict[tuple[Endpoint, str], tuple[int, tuple[int, int], Broker]] = {}


def kept(endpoint: Endpoint, identity: str) -> Broker:
    """A connection that stays open for the life of this process: an executor's worker runs many short tasks.

    A store that was deleted and made anew at the same place, and a fork, lead to a new connection.
    """
    place = (0, 0)
    if endpoint.path is not None:
        try:
            status = os.stat(os.path.join(endpoint.path, "data.mdb"))
            place = (status.st_dev, status.st_ino)
        except FileNotFoundError:
            pass
    known = _kept.get((endpoint, identity))
    if known is not None:
        if known[:2] == (os.getpid(), place):
            return known[2]
        if known[0] == os.getpid():
            known[2].close()
    broker = reach(endpoint, identity=identity)
    _kept[(endpoint, identity)] = (os.getpid(), place, broker)
    return broker
