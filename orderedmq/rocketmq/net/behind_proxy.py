"""What a client of a RocketMQ Proxy does without the requests that a Proxy does not know.

A Proxy's remoting port passes on what producers and consumers send, and nothing that administrators do
(RemotingProtocolServer.registerRemotingServer). Its routes name the Proxy as the address of every broker, so each request names
its broker. It answers no request for the cluster's brokers: the route of a topic that every broker has lists them.

A Proxy in local mode passes on nothing (LocalMessageService.request), though it answers routes. It runs inside a broker that has
a port of its own, so clients do not need it.
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

#: A topic that each broker has from its first start (TopicConfigManager).
AT_EVERY_BROKER: Final = "SELF_TEST_TOPIC"
#: Seconds for which a Proxy may hold a request back before a broker has it: in its queue
#: (remotingWaitTimeMillsInSendQueue), and on the way.
HOLDS_BACK: Final = 6.0
#: Bytes of answers that a Proxy may have waiting for one connection. While it has more, it throws every further answer to this
#: connection away (AbstractRemotingActivity.writeResponse asks Channel.isWritable, which is Netty's WriteBufferWaterMark.DEFAULT).
#: An operator can raise it: -Dcom.rocketmq.remoting.write.buffer.high.water.mark and low.water.mark, both in bytes.
UNWRITTEN: Final = 64 * 1024
#: Bytes of an answer besides its body, at most: its header, and what Netty adds for each write that waits.
ANSWER_OVERHEAD: Final = 512

T = TypeVar("T")


def answered_together(size: int) -> int:
    """Return how many requests a Proxy answers for certain if all are in flight, and each answer has a body of ``size`` bytes.

    An answer is thrown away for those that wait before it, so there may be one more than fit.
    """
    return 1 + UNWRITTEN // (size + ANSWER_OVERHEAD)


class Ask(Protocol):
    """Sends a request to the server that ``namesrvAddr`` names, and returns the parsed answer."""

    def __call__(self, request: Request[T], /) -> T: ...


def find_cluster(ask: Ask, proxied: bool | None) -> ClusterInfo:
    """Return every broker. ``proxied``: whether a Proxy answers, if that is known.

    Raises RocketMQError NOT_SUPPORTED for a Proxy in local mode, and what ``ask`` raises.
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
    """A Proxy in local mode answers a request that it should pass on by an error, or not at all, depending on its release."""
    for name in brokers[:1]:
        try:
            ask(max_offset(MessageQueue(AT_EVERY_BROKER, name, 0)))
        except OrderedMQError as error:
            if isinstance(error, RocketMQError) and error.denied:
                # A broker refused what was passed on to it, or a Proxy that checks accounts did: neither shows local mode.
                return
            raise RocketMQError(
                RocketMQCondition.NOT_SUPPORTED,
                f"namesrvAddr leads to a RocketMQ Proxy that passes no requests on to broker {name!r}: it runs in local mode, so name the "
                "nameserver's address instead (usually port 9876), or run the Proxy in cluster mode; if it does, the broker is away: "
                f"{error.message}",
            ) from None


def raise_not_through_proxy(what: str) -> NoReturn:
    raise RocketMQError(
        RocketMQCondition.NOT_SUPPORTED,
        f"{what} is not possible through a RocketMQ Proxy, which passes on only what producers and consumers do: name the nameserver's "
        "address (usually port 9876) instead of the Proxy's",
    )
