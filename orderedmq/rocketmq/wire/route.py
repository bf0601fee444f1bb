"""Routes, clusters and topic lists in the answers of nameservers, and what routes and brokers prove about a queue. Pure.

Every client must derive the same lists of queues from a route. Otherwise clients would disagree on the queue of a key and on how to
divide the queues. Source: TopicRouteData, MQClientInstance.topicRouteData2TopicPublishInfo and
topicRouteData2TopicSubscribeInfo, ClusterInfo, TopicList, TopicValidator.

A queue can be readable, unreadable, unknown or missing, and each of them can be mistaken for an empty queue, because brokers report
bounds for every queue (AdminBrokerProcessor.getMaxOffset).

- A queue in the route exists. Its messages cannot be read while the permission of its topic or broker forbids it, or while its number is
  not below readQueueNums (PullMessageProcessor). They are not lost.
- A queue that is not in the route may still exist. A route may be older than the queue, and a restarted nameserver knows only the brokers
  that have reported to it. A Proxy keeps routes for 20 s, those of deleted brokers and of topics that it could not find included. So a
  queue is missing only if the broker itself says so, in an answer that was requested after the queue was missed.
- A broker that no nameserver knows may have the queue. Nobody can say that the queue is missing until the broker answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from orderedmq.conditions import ProtocolCondition, RocketMQCondition, UnavailableCondition
from orderedmq.errors import ProtocolError, RocketMQError, RocketMQUnavailableError
from orderedmq.model import MAX_QUEUES, RETRY_PREFIX, MessageQueue, java_order
from orderedmq.rocketmq.wire.codes import MASTER_ID, ResponseCode
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import Bytes, RemotingCommand

_READ: Final = 4
#: The bit of a topic's permission without which producers leave its queues out of their lists. A broker stores messages all the same.
WRITE: Final = 2
#: Bits of a topic's topicSysFlag that a resize sets, far above RocketMQ's own (TopicSysFlag). Brokers write the flag to disk with the
#: numbers of queues, and nameservers have it in routes. They mean: the topic was resized, and a resize has stopped its producers.
RESIZED: Final = 1 << 20
PAUSED: Final = 1 << 21
_BROKER_ID = re.compile(r"-?[0-9]{1,19}")

#: The servers' own topics (TopicValidator).
SYSTEM_TOPICS: Final = frozenset(
    (
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    )
)
#: Prefixes of other system topics. Newer releases use the second prefix, as in RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC of 5.4.
SYSTEM_PREFIXES: Final = ("rmq_sys_", "RMQ_SYS_")
#: The prefix of the servers' own groups (MixAll.isSysConsumerGroup).
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
_REPLY_SUFFIX: Final = "_REPLY_TOPIC"
#: A broker's remarks about a pull that the permission of the topic or of the broker forbids.
FORBIDDEN: Final = re.compile(r"^the (topic|broker)\[.*\] pulling message is forbidden")
#: A broker's remark about a queue whose number is not below readQueueNums. Before 5.3.2 it has the code SYSTEM_ERROR.
_NO_SUCH_NUMBER: Final = re.compile(r"^queueId\[-?[0-9]+\] is illegal")
#: The remarks of `exists`.
ABOUT_QUEUE: Final = re.compile(f"{FORBIDDEN.pattern}|{_NO_SUCH_NUMBER.pattern}")
#: Why a queue in a route that has it as `RouteState.UNREADABLE` cannot be read.
ROUTE_FORBIDS: Final = "the route says that its permission forbids reading, or that its number is not below readQueueNums"


@dataclass(frozen=True)
class BrokerData:
    """A broker and the addresses ("host:port") of its replicas by broker id. Id 0 is the master, which may be missing.

    ``acting``: a replica acts as the master (enableSlaveActingMaster). It is listed as a replica here, because it has neither the
    master's locks nor its newest offsets, and the master may take over from it at any time.
    """

    name: str
    cluster: str
    addresses: Mapping[int, str]
    acting: bool = False

    @property
    def master(self) -> str | None:
        return self.addresses.get(MASTER_ID)

    def address(self, broker_id: int) -> str | None:
        """Return a replica's address. If the route lacks the replica, return the address of the master, or else the one with the lowest id.

        The route may lack a replica that a broker suggested, because routes change.
        """
        if broker_id in self.addresses:
            return self.addresses[broker_id]
        return self.addresses[min(self.addresses)] if self.addresses else None


@dataclass(frozen=True)
class QueueData:
    """How many queues a topic has at a broker. The numbers for reading and writing differ while a topic grows or shrinks."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0

    @property
    def all_queues(self) -> int:
        """The number of queues that exist. A broker stores messages also in queues that cannot be read (SendMessageProcessor)."""
        return max(self.read_queues, self.write_queues)

    @property
    def readable(self) -> bool:
        return bool(self.perm & _READ)

    @property
    def writable(self) -> bool:
        return bool(self.perm & WRITE)

    @property
    def resized(self) -> bool:
        return bool(self.sys_flag & RESIZED)

    @property
    def paused(self) -> bool:
        return bool(self.sys_flag & PAUSED)


@dataclass(frozen=True)
class Route:
    """A topic's brokers and queues. ``order_conf`` has (broker, number of queues) from its order configuration at the nameserver.

    ``by_proxy``: the route comes from a Proxy, and every broker's address is that of the Proxy.
    """

    topic: str
    brokers: Mapping[str, BrokerData]
    queues: tuple[QueueData, ...]
    order_conf: tuple[tuple[str, int], ...] = ()
    by_proxy: bool = False

    @property
    def paused(self) -> bool:
        """Whether a resize has stopped the topic's producers."""
        return any(data.paused for data in self.queues)

    @property
    def closed(self) -> int:
        """The number of queues that take no more messages since a resize."""
        return sum(max(0, data.read_queues - data.write_queues) for data in self.queues if data.resized)

    def publish_list(self) -> tuple[MessageQueue, ...]:
        """Return the queues from which producers choose, in the order of the indices that selectors compute.

        With an order configuration, these are its queues, including those of absent brokers, so that a key never changes its queue.
        Otherwise they are the queues of writable brokers that have a master, sorted by broker name.
        """
        if self.order_conf:
            return tuple(MessageQueue(self.topic, name, i) for name, count in self.order_conf for i in range(count))
        queues = []
        for data in sorted(self.queues, key=lambda data: java_order(data.broker_name)):
            broker = self.brokers.get(data.broker_name)
            if data.writable and broker is not None and broker.master is not None:
                queues += [MessageQueue(self.topic, data.broker_name, i) for i in range(data.write_queues)]
        return tuple(queues)

    def subscribe_set(self) -> tuple[MessageQueue, ...]:
        """Return the queues that consumers divide, sorted. They include brokers without a master, because replicas can be read."""
        return self._sorted((data, data.read_queues) for data in self.queues if data.readable)

    def reading_list(self) -> tuple[MessageQueue, ...]:
        """Return `subscribe_set` with the queues whose permission forbids reading at the moment.

        They keep their messages, so a reader that left them out would take them for deleted.
        """
        return self._sorted((data, data.read_queues) for data in self.queues)

    def all_queues(self) -> tuple[MessageQueue, ...]:
        """Return every queue of the topic, sorted, also those for reading only or for writing only."""
        return self._sorted((data, data.all_queues) for data in self.queues)

    def _sorted(self, counts: Iterable[tuple[QueueData, int]]) -> tuple[MessageQueue, ...]:
        queues = {MessageQueue(self.topic, data.broker_name, i) for data, count in counts for i in range(count)}
        return tuple(sorted(queues, key=lambda queue: (java_order(queue.broker_name), queue.queue_id)))

    def with_unknown(self, before: Route, names: Iterable[str]) -> Route:
        """Return this route, extended by the brokers ``names`` and their queues from the route ``before``.

        The nameserver does not know these brokers at the moment. If there is an order configuration, it has their queues anyway.
        """
        former = {name: before.brokers[name] for name in names if name in before.brokers and name not in self.brokers}
        queues = tuple(data for data in before.queues if data.broker_name in former)
        return replace(self, brokers={**self.brokers, **former}, queues=(*self.queues, *queues))


@dataclass(frozen=True)
class ClusterInfo:
    """All brokers by name, and the broker names of each cluster. ``behind_proxy``: every address is that of the Proxy."""

    brokers: Mapping[str, BrokerData]
    clusters: Mapping[str, tuple[str, ...]]
    behind_proxy: bool = False

    def united(self, other: ClusterInfo) -> ClusterInfo:
        """Return the brokers and replicas that either of two nameservers knows. If their addresses differ, this one's count."""
        brokers = {**other.brokers, **self.brokers}
        for name in self.brokers.keys() & other.brokers.keys():
            brokers[name] = replace(brokers[name], addresses={**other.brokers[name].addresses, **brokers[name].addresses})
        clusters = {
            name: tuple(dict.fromkeys((*self.clusters.get(name, ()), *other.clusters.get(name, ()))))
            for name in (*self.clusters, *other.clusters)
        }
        return ClusterInfo(brokers, clusters, self.behind_proxy)


def parse_route(topic: str, body: Bytes, *, by_proxy: bool = False) -> Route:
    """Return the route of ``topic`` (TopicRouteData). ``by_proxy``: the answer comes from a Proxy.

    Raises RocketMQError STATIC_TOPIC if the topic's queues move between brokers, and ProtocolError PROTOCOL if the answer is malformed.
    """
    fields = loads_object(body)
    if field(fields, "topicQueueMappingByBroker", dict, {}):
        raise RocketMQError(
            RocketMQCondition.STATIC_TOPIC,
            f"topic {topic!r} is a static topic, whose logical queues move between brokers. This is not supported. Use a normal topic",
        )
    queues = tuple(_queues(_dict(data)) for data in field(fields, "queueDatas", list, []))
    read_only = {data.broker_name for data in queues if not data.writable}
    brokers = [_without_acting_master(_dict(data), read_only) for data in field(fields, "brokerDatas", list, [])]
    conf = _order_conf(field(fields, "orderTopicConf", str, ""))
    counts = [data.read_queues + data.write_queues for data in queues] + [count for _, count in conf]
    if sum(counts) > 2 * MAX_QUEUES:
        raise ProtocolError(
            ProtocolCondition.PROTOCOL, f"topic {topic!r} has {sum(counts)} queues, which is more than possible"
        )
    return Route(topic, {broker.name: broker for broker in reversed(brokers)}, queues, conf, by_proxy)


def parse_cluster(body: Bytes) -> ClusterInfo:
    """Return every broker that a nameserver knows (ClusterInfo). Raises ProtocolError PROTOCOL."""
    fields = loads_object(body)
    brokers = {name: _broker(_dict(data)) for name, data in field(fields, "brokerAddrTable", dict, {}).items()}
    clusters = {name: string_tuple(names) for name, names in field(fields, "clusterAddrTable", dict, {}).items()}
    return ClusterInfo(brokers, clusters)


def parse_topics(body: Bytes) -> tuple[str, ...]:
    """Return every topic name that a nameserver lists (TopicList). Raises ProtocolError PROTOCOL."""
    return string_tuple(loads_object(body).get("topicList"))


def user_topics(names: Iterable[str], cluster: ClusterInfo) -> tuple[str, ...]:
    """Return the users' topics among ``names``, sorted. Dead letter topics are included; retry topics and the servers' own are not.

    A nameserver also lists the names of clusters and brokers, because the servers have topics with these names.
    """
    own = SYSTEM_TOPICS | cluster.clusters.keys() | cluster.brokers.keys() | {name + _REPLY_SUFFIX for name in cluster.clusters}
    return tuple(sorted(name for name in set(names) - own if not name.startswith((*SYSTEM_PREFIXES, RETRY_PREFIX))))


def string_tuple(values: object) -> tuple[str, ...]:
    """Return a JSON array of strings; None counts as an empty array. Raises ProtocolError PROTOCOL for any other value."""
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a list of names is malformed: {str(values)[:100]!r}")
    return tuple(values)


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"an object is expected instead of {str(value)[:100]!r}")
    return value


def _broker(fields: dict[str, Any]) -> BrokerData:
    addresses: dict[int, str] = {}
    for broker_id, address in field(fields, "brokerAddrs", dict, {}).items():
        if not _BROKER_ID.fullmatch(broker_id) or not isinstance(address, str):
            raise ProtocolError(
                ProtocolCondition.PROTOCOL, f"a broker's address is malformed: {broker_id[:40]!r}: {str(address)[:100]!r}"
            )
        addresses[int(broker_id)] = address
    return BrokerData(field(fields, "brokerName", str), field(fields, "cluster", str, ""), addresses)


def _without_acting_master(fields: dict[str, Any], read_only: Collection[str]) -> BrokerData:
    """Return a broker in which a replica that acts as the master is listed as a replica.

    If the master is absent, a nameserver (supportActingMaster) gives the master's id to the first replica, and makes the queues
    read-only (RouteInfoManager.pickupTopicRouteData).
    """
    broker = _broker(fields)
    if not fields.get("enableActingMaster") or broker.master is None or broker.name not in read_only:
        return broker
    addresses = dict(broker.addresses)
    address = addresses.pop(MASTER_ID)
    return BrokerData(broker.name, broker.cluster, {max(addresses, default=MASTER_ID) + 1: address, **addresses}, acting=True)


def _queues(fields: dict[str, Any]) -> QueueData:
    data = QueueData(
        field(fields, "brokerName", str),
        field(fields, "readQueueNums", int, 0),
        field(fields, "writeQueueNums", int, 0),
        field(fields, "perm", int, 0),
        field(fields, "topicSysFlag", int, 0),
    )
    if min(data.read_queues, data.write_queues) < 0:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"broker {data.broker_name!r} has a negative number of queues")
    return data


def _order_conf(text: str) -> tuple[tuple[str, int], ...]:
    """Return ``broker-a:4;broker-b:4`` as pairs of broker and number of queues."""
    pairs = []
    for item in text.rstrip(";").split(";") if text else ():
        name, _, rest = item.partition(":")
        count = rest.partition(":")[0]
        if not name or not re.fullmatch(r"[0-9]{1,6}", count):
            raise ProtocolError(ProtocolCondition.PROTOCOL, f"an order configuration is malformed: {text[:200]!r}")
        pairs.append((name, int(count)))
    return tuple(pairs)


class RouteState(Enum):
    """What a route shows about a queue."""

    READABLE = "readable"
    #: The queue exists, but its messages cannot be read at the moment.
    UNREADABLE = "unreadable"
    #: The route does not have the queue. This alone does not prove that it does not exist.
    UNKNOWN = "unknown"


def state_of(queue: MessageQueue, route: Route | None) -> RouteState:
    """Return what the topic's route shows about a queue. ``route`` is None if the topic was not found."""
    for data in route.queues if route is not None else ():
        if data.broker_name == queue.broker_name and queue.queue_id < data.all_queues:
            readable = data.readable and queue.queue_id < data.read_queues
            return RouteState.READABLE if readable else RouteState.UNREADABLE
    return RouteState.UNKNOWN


def exists(response: RemotingCommand) -> bool:
    """Return whether a queue exists, from its broker's answer to a pull.

    For a topic that does not exist, a broker has a separate code.
    """
    refused = response.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.INVALID_PARAMETER)
    return not (refused and _NO_SUCH_NUMBER.match(response.remark or ""))


def not_readable(queue: object, why: str) -> RocketMQUnavailableError:
    """Return the error for a queue that exists and cannot be read. ``why``: a clause."""
    return RocketMQUnavailableError(
        UnavailableCondition.NOT_READABLE,
        f"{queue} cannot be read at the moment, but its messages are not lost: {why}. Allow reading (mqadmin updateTopicPerm -p 6, or "
        "brokerPermission=6 in the settings of the broker), or raise the topic's readQueueNums (mqadmin updateTopic -r)",
    )
