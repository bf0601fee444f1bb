"""How a client finds the brokers behind a Proxy, and recognises a Proxy in local mode, which does not pass requests on."""

from __future__ import annotations

from typing import Any

import pytest

from orderedmq.conditions import RocketMQCondition, TopicCondition, UnavailableCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.rocketmq.net.behind_proxy import find_cluster
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, Route

ROUTE = Route("SELF_TEST_TOPIC", {"a": BrokerData("a", "c", {0: "proxy:8080"})}, ())


class Proxy:
    """A Proxy that answers a request for the end of a queue with ``passed_on``."""

    def __init__(self, passed_on: int | OrderedMQError) -> None:
        self.passed_on = passed_on
        self.asked: list[int] = []

    def __call__(self, request: Request[Any], /) -> Any:
        self.asked.append(request.code)
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            raise RocketMQError(RocketMQCondition.NOT_SUPPORTED, "request type 106 not supported")
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return ROUTE
        if isinstance(self.passed_on, OrderedMQError):
            raise self.passed_on
        return self.passed_on


@pytest.mark.parametrize("answer", [7, RocketMQError(RocketMQCondition.NO_PERMISSION, "denied")])
def test_the_brokers_behind_a_proxy_are_those_of_a_topic_that_all_have(answer: int | OrderedMQError) -> None:
    """The check whether a Proxy passes requests on works without any rights."""
    ask = Proxy(answer)
    found = find_cluster(ask, None)
    assert found.behind_proxy
    assert found.brokers == ROUTE.brokers
    assert found.clusters == {"c": ("a",)}
    # A known answer is not requested again.
    ask.asked.clear()
    assert find_cluster(ask, True) == found
    assert ask.asked == [RequestCode.GET_ROUTEINFO_BY_TOPIC]


@pytest.mark.holds("through a Proxy")
@pytest.mark.parametrize(
    "error",
    [
        RocketMQError(RocketMQCondition.SERVER_ERROR, "request is not implemented in LocalMessageService"),
        RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer"),
        TopicError(TopicCondition.MISSING, "no topic"),
    ],
)
def test_a_proxy_that_passes_nothing_on_is_refused_by_name(error: OrderedMQError) -> None:
    with pytest.raises(RocketMQError, match=r"local mode.*nameserver's address") as caught:
        find_cluster(Proxy(error), None)
    assert caught.value.sub == RocketMQCondition.NOT_SUPPORTED
