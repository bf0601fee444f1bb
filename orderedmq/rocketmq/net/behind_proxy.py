"""Lets a client work through a RocketMQ Proxy, which does not know all requests.

A Proxy's remoting port passes on the requests of producers and consumers, but not those of administrators
(RemotingProtocolServer.registerRemotingServer). In its routes, every broker has the Proxy's address, so each request names its
broker. A Proxy does not answer a request for the cluster's brokers, so they are taken from the route of a topic that exists at every
broker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final, NoReturn, Protocol, TypeVar

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import RocketMQError, TopicError
from orderedmq.rocketmq.wire.message_requests import cluster_info, topic_route
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, ClusterInfo

#: A topic that every broker has from its first start on (TopicConfigManager).
AT_EVERY_BROKER: Final = "SELF_TEST_TOPIC"
#: The maximum seconds between a request to a Proxy and its arrival at a broker: the time in the Proxy's queue
#: (remotingWaitTimeMillsInSendQueue), and the time on the network.
HOLDS_BACK: Final = 6.0
#: The bytes of answers that may wait in a Proxy for one connection. While more are waiting, the Proxy drops every further answer to this
#: connection (AbstractRemotingActivity.writeResponse asks Channel.isWritable, which is Netty's WriteBufferWaterMark.DEFAULT).
#: An operator can raise this limit with -Dcom.rocketmq.remoting.write.buffer.high.water.mark and low.water.mark, both in bytes.
UNWRITTEN: Final = 64 * 1024
#: The maximum bytes of an answer in addition to its body: its header, and the bytes that Netty counts for each waiting write.
ANSWER_OVERHEAD: Final = 512

T = TypeVar("T")


def answered_together(size: int) -> int:
    """Return how many requests in flight a Proxy is certain to answer, if the body of each answer has ``size`` bytes.

    The Proxy drops an answer because of the bytes that wait before it, so the last answer may exceed the limit.
    """
    return 1 + UNWRITTEN // (size + ANSWER_OVERHEAD)


class Ask(Protocol):
    """Sends a request to the server that ``namesrvAddr`` names, and returns the parsed answer."""

    def __call__(self, request: Request[T], /) -> T: ...


def find_cluster(ask: Ask, proxied: bool | None) -> ClusterInfo:
    """Return every broker. ``proxied`` says whether the server is a Proxy; None if that is not known. Raises the errors of ``ask``."""
    if not proxied:
        try:
            return ask(cluster_info())
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NOT_SUPPORTED:
                raise
    brokers: Mapping[str, BrokerData] = {}
    # The topic is missing while the Proxy's nameserver knows no broker, as after a restart.
    with contextlib.suppress(TopicError):
        brokers = ask(topic_route(AT_EVERY_BROKER)).brokers
    clusters: dict[str, tuple[str, ...]] = {}
    for name, broker in sorted(brokers.items()):
        clusters[broker.cluster] = (*clusters.get(broker.cluster, ()), name)
    return ClusterInfo(brokers, clusters, behind_proxy=True)


def raise_not_through_proxy(what: str) -> NoReturn:
    raise RocketMQError(
        RocketMQCondition.NOT_SUPPORTED,
        f"{what} is not possible through a RocketMQ Proxy, which passes on only requests of producers and consumers. Name the nameserver's "
        "address (usually port 9876) instead of the Proxy's",
    )
