"""Opens connections to brokers. Only this module knows which kinds of broker exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from orderedmq.broker import Broker
from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import CredentialsSource, Endpoint, TlsOptions
from orderedmq.errors import OptionError
from orderedmq.options.values import parse_store_path


def connect(
    path: str | Path | None = None,
    *,
    namesrv_addr: str | None = None,
    credentials: CredentialsSource | None = None,
    tls: TlsOptions | None = None,
    identity: str | None = None,
    namespace: str | None = None,
    namespace_v2: str | None = None,
) -> Broker:
    """Return a connection to the embedded broker in directory ``path``, or to the RocketMQ cluster of ``namesrv_addr``.

    ``namesrv_addr`` is "host:port;host:port". The options ``credentials``, ``tls``, ``namespace`` and ``namespace_v2`` are for a cluster.
    With a namespace, the connection sees only topics and groups of the namespace, under names without its prefix. ``credentials`` is an
    account, or a `CredentialsFile` or a callable from which it is taken before each connection and after a server refuses the account.
    ``identity`` is the `Broker.identity` that the caller expects. Any other broker is refused (StoreError OTHER_MACHINE, RocketMQError
    OTHER_CLUSTER).

    As a context manager, the connection closes itself at the end. A store is opened at first use, which may raise StoreError MISSING;
    ``admin.create_topic`` creates a missing store. Raises OptionError CONFLICT if neither or both of ``path`` and ``namesrv_addr`` are
    given, and INVALID or UNSUPPORTED if ``path`` is no local directory.
    """
    if (path is None) == (namesrv_addr is None):
        raise OptionError(
            OptionCondition.CONFLICT,
            'connect needs either a path (the embedded broker) or namesrv_addr (a RocketMQ cluster). Write connect("folder") or '
            'connect(namesrv_addr="host:9876")',
        )
    folder = None if path is None else parse_store_path(os.fspath(path), "path")
    return reach(Endpoint(folder, namesrv_addr, credentials, tls, namespace, namespace_v2), identity=identity)


def reach(endpoint: Endpoint, *, identity: str | None = None) -> Broker:
    """Return a connection to the broker at ``endpoint``. ``identity``: see `connect`."""
    if endpoint.path is None:
        from orderedmq.rocketmq.broker import RocketMQBroker

        return RocketMQBroker(endpoint, identity=identity)
    from orderedmq.embedded.broker import EmbeddedBroker

    return EmbeddedBroker(Path(endpoint.path), identity=identity)


#: Open connections with the process that opened them. The most recently used one is last.
_cached: dict[tuple[Endpoint, str], tuple[int, Broker]] = {}
#: Each open store has open files, which a process may have only so many of. A Spark worker of tests may open many stores, one per test.
_MOST_STORES: Final = 16


def cached(endpoint: Endpoint, identity: str) -> Broker:
    """Return a connection that this process keeps open for later calls, because an executor's worker runs many short tasks.

    A child opens its own connection after a fork. At most 16 stores stay open; the least recently used one is closed first.
    """
    connection = _cached.pop((endpoint, identity), None)
    if connection is not None and connection[0] == os.getpid():
        # Put it back at the end, because it is now the most recently used one.
        _cached[(endpoint, identity)] = connection
        return connection[1]
    broker = reach(endpoint, identity=identity)
    if endpoint.path is not None:
        _close_oldest()
    _cached[(endpoint, identity)] = (os.getpid(), broker)
    return broker


def _close_oldest() -> None:
    """Close the least recently used stores, so that one more may be opened."""
    stores = [key for key, (pid, _) in _cached.items() if key[0].path is not None and pid == os.getpid()]
    for key in stores[: max(0, len(stores) - _MOST_STORES + 1)]:
        _cached.pop(key)[1].close()
