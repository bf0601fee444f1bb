"""A RocketMQ cluster as a Broker: the four protocols over one client, which connects on first use.

A cluster is identified by the addresses of its brokers, as its nameserver reports them. These are the same on every machine, whatever
``localhost:9876`` means there. They differ even between two clusters that were installed from one template and have the same names.
Masters and replicas count alike, so a cluster is still recognised after a master has failed or a replica has become the master.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from orderedmq.broker import Broker
from orderedmq.conditions import RocketMQCondition
from orderedmq.endpoint import ROCKETMQ, Capabilities, Endpoint
from orderedmq.errors import RocketMQError
from orderedmq.rocketmq.admin import RocketMQAdmin
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire.namespaces import Namespaces
from orderedmq.rocketmq.wire.route import ClusterInfo

if TYPE_CHECKING:
    from orderedmq.rocketmq.group.groups import RocketMQGroups
    from orderedmq.rocketmq.sink.outbox import RocketMQOutbox

_MOST_ADDRESSES: Final = 4


class RocketMQBroker(Broker):
    """A connection to one cluster. Thread-safe."""

    def __init__(self, endpoint: Endpoint, *, identity: str | None = None) -> None:
        """``endpoint`` is the address of a cluster. Does no I/O. Raises RocketMQError ADDRESS.

        ``identity`` is the value of `identity` in another process. If the nameserver leads to another cluster here, the first use of the
        connection raises RocketMQError OTHER_CLUSTER. The endpoint's namespaces apply to all topics and groups, as in Java.
        """
        names = Namespaces(endpoint.namespace, endpoint.namespace_v2)
        self._client = Client(endpoint.namesrv_addr or "", credentials=endpoint.credentials, tls=endpoint.tls, names=names)
        self._expected = identity

    def __repr__(self) -> str:
        return f"<RocketMQBroker {';'.join(self._client.nameservers)}>"

    @property
    def capabilities(self) -> Capabilities:
        return ROCKETMQ

    @cached_property
    def identity(self) -> str:
        """Up to four masters and replicas as 8 hex digits each. It is short because every row may contain it.

        The value is determined only once, because brokers may come and go. Raises RocketMQUnavailableError, and RocketMQError
        OTHER_CLUSTER if the nameserver knows no broker.
        """
        brokers = sorted(
            _brokers(self._client.known_cluster(Deadline.after(REQUEST_TIMEOUT), lambda known: bool(known.brokers)))
        )
        if not brokers:
            raise RocketMQError(
                RocketMQCondition.OTHER_CLUSTER,
                f"{self!r}: the nameserver knows no broker. Start a broker, or name another nameserver",
            )
        return ",".join(brokers[:_MOST_ADDRESSES])

    @cached_property
    def _checked(self) -> Client:
        """The client, after the check that it leads to at least one master or replica of the expected cluster.

        One is enough, because the others may come, go, and be down while a query runs.
        """
        if self._expected is not None:
            expected = frozenset(self._expected.split(","))
            here = _brokers(
                self._client.known_cluster(
                    Deadline.after(REQUEST_TIMEOUT), lambda known: not expected.isdisjoint(_brokers(known))
                )
            )
            if expected.isdisjoint(here):
                raise RocketMQError(
                    RocketMQCondition.OTHER_CLUSTER,
                    f"on this machine, the nameserver {';'.join(self._client.nameservers)} leads to "
                    f"{', '.join(here.values()) or 'no broker'}, but where the query was planned it led to other brokers. Use a "
                    "namesrvAddr that leads to the same cluster on every machine. If the brokers have moved, start the query again",
                )
        return self._client

    @cached_property
    def log(self) -> RocketMQLog:
        return RocketMQLog(self._checked)

    @cached_property
    def groups(self) -> RocketMQGroups:
        from orderedmq.rocketmq.group.groups import RocketMQGroups

        return RocketMQGroups(self._checked, self.log)

    @cached_property
    def outbox(self) -> RocketMQOutbox:
        from orderedmq.rocketmq.sink.outbox import RocketMQOutbox

        return RocketMQOutbox(self._checked, self.log)

    @cached_property
    def admin(self) -> RocketMQAdmin:
        return RocketMQAdmin(self._checked, self.log)

    def close(self) -> None:
        """Leave all groups and give back their locks, as far as brokers can be reached, and close every connection.

        In a child after a fork this does nothing, because the connections belong to the parent.
        """
        if not self._client.is_own:
            return
        groups = self.__dict__.get("groups")
        try:
            if groups is not None:
                groups.close()
        finally:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _brokers(cluster: ClusterInfo) -> dict[str, str]:
    """Return ``cluster/name@address`` of each master and replica, by its hash of 8 hex digits.

    A Proxy does not report the addresses of brokers, so only their names identify the brokers behind it.
    """
    names = {
        f"{broker.cluster}/{broker.name}@{'proxy' if cluster.behind_proxy else address}"
        for broker in cluster.brokers.values()
        for address in broker.addresses.values()
    }
    return {blake2b(name.encode(), digest_size=4).hexdigest(): name for name in sorted(names)}
