"""How a client finds the brokers behind a Proxy."""

from __future__ import annotations

from typing import Any

from orderedmq.conditions import RocketMQCondition, TopicCondition
from orderedmq.errors import RocketMQError, TopicError
from orderedmq.rocketmq.net.behind_proxy import find_cluster
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import BrokerData, Route

ROUTE = Route("SELF_TEST_TOPIC", {name: BrokerData(name, "c", {0: "proxy:8080"}) for name in "ab"}, ())
NO_ROUTE = TopicError(TopicCondition.MISSING, "no topic")


class Proxy:
    def __init__(self, route: Route | TopicError = ROUTE) -> None:
        self.route = route
        self.asked: list[int] = []

    def __call__(self, request: Request[Any], /) -> Any:
        self.asked.append(request.code)
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            raise RocketMQError(RocketMQCondition.NOT_SUPPORTED, "request type 106 not supported")
        if isinstance(self.route, TopicError):
            raise self.route
        return self.route


def test_the_brokers_behind_a_proxy_are_those_of_a_topic_that_all_have() -> None:
    ask = Proxy()
    cluster = find_cluster(ask, None)
    assert cluster.behind_proxy
    assert cluster.brokers == ROUTE.brokers
    assert cluster.clusters == {"c": ("a", "b")}
    # A known answer is not requested again.
    ask.asked.clear()
    assert find_cluster(ask, True) == cluster
    assert ask.asked == [RequestCode.GET_ROUTEINFO_BY_TOPIC]


def test_a_proxy_whose_nameserver_knows_no_broker_has_an_empty_cluster() -> None:
    cluster = find_cluster(Proxy(NO_ROUTE), None)
    assert (cluster.behind_proxy, cluster.brokers) == (True, {})
