"""Lets a client work through a RocketMQ Proxy, which does not know all requests.

A Proxy's remoting port passes on the requests of producers and consumers, but not those of administrators
(RemotingProtocolServer.registerRemotingServer). In its routes, every broker has the Proxy's address, so each request names its
broker. A Proxy does not answer a request for the cluster's brokers, so they are taken from the route of a topic that exists at every
broker.

A Proxy in local mode passes nothing on (LocalMessageService.request), although it answers requests for routes. It runs inside a broker
that has its own port, so clients do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn, Protocol, TypeVar

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.message_requests import cluster_info, max_offset, topic_route
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import ClusterInfo

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
    """Return every broker. ``proxied`` says whether the server is a Proxy; None if that is not known.

    Raises RocketMQError NOT_SUPPORTED for a Proxy in local mode, and the errors of ``ask``.
    """
    if not proxied:
        try:
            return ask(cluster_info())
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NOT_SUPPORTED:
                raise
    brokers = ask(topic_route(AT_EVERY_BROKER)).brokers
    if not proxied:
        _refuse_local_mode(ask, sorted(brokers))
    clusters: dict[str, tuple[str, ...]] = {}
    for name, broker in sorted(brokers.items()):
        clusters[broker.cluster] = (*clusters.get(broker.cluster, ()), name)
    return ClusterInfo(brokers, clusters, behind_proxy=True)


def _refuse_local_mode(ask: Ask, brokers: Sequence[str]) -> None:
    """Raise RocketMQError NOT_SUPPORTED if the Proxy answers a test request with an error or not at all, as in local mode."""
    for name in brokers[:1]:
        try:
            ask(max_offset(MessageQueue(AT_EVERY_BROKER, name, 0)))
        except OrderedMQError as error:
            if isinstance(error, RocketMQError) and error.denied:
                # A broker refused the request, or a Proxy that checks accounts did. Neither is a sign of local mode.
                return
            raise RocketMQError(
                RocketMQCondition.NOT_SUPPORTED,
                f"namesrvAddr leads to a RocketMQ Proxy that passes no requests on to broker {name!r}. If the Proxy runs in local mode, "
                "name the nameserver's address instead (usually port 9876), or run the Proxy in cluster mode. Otherwise the broker is "
                f"down: {error.message}",
            ) from None


def raise_not_through_proxy(what: str) -> NoReturn:
    raise RocketMQError(
        RocketMQCondition.NOT_SUPPORTED,
        f"{what} is not possible through a RocketMQ Proxy, which passes on only requests of producers and consumers. Name the nameserver's "
        "address (usually port 9876) instead of the Proxy's",
    )
