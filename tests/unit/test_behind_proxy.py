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

ROUTE = Route("SELF_TEST_TOPIC", {name: BrokerData(name, "c", {0: "proxy:8080"}) for name in "ab"}, ())
AWAY = RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")
NO_ROUTE = TopicError(TopicCondition.MISSING, "no topic")


class Proxy:
    """A Proxy that answers a request for the end of a queue with ``passed_on``, and for the broker b with ``second``, if that is given."""

    def __init__(
        self, passed_on: int | OrderedMQError, second: int | OrderedMQError | None = None, route: Route | TopicError = ROUTE
    ) -> None:
        self.passed_on = passed_on
        self.second = passed_on if second is None else second
        self.route = route
        self.asked: list[int] = []

    def __call__(self, request: Request[Any], /) -> Any:
        self.asked.append(request.code)
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            raise RocketMQError(RocketMQCondition.NOT_SUPPORTED, "request type 106 not supported")
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            if isinstance(self.route, TopicError):
                raise self.route
            return self.route
        answer = self.second if request.ext["bname"] == "b" else self.passed_on
        if isinstance(answer, OrderedMQError):
            raise answer
        return answer


@pytest.mark.parametrize("answer", [7, RocketMQError(RocketMQCondition.NO_PERMISSION, "denied")])
def test_the_brokers_behind_a_proxy_are_those_of_a_topic_that_all_have(answer: int | OrderedMQError) -> None:
    """The check whether a Proxy passes requests on works without any rights."""
    ask = Proxy(answer)
    found = find_cluster(ask, None, ask)
    assert found.behind_proxy
    assert found.brokers == ROUTE.brokers
    assert found.clusters == {"c": ("a", "b")}
    # A known answer is not requested again.
    ask.asked.clear()
    assert find_cluster(ask, True, ask) == found
    assert ask.asked == [RequestCode.GET_ROUTEINFO_BY_TOPIC]


@pytest.mark.parametrize("error", [AWAY, NO_ROUTE])
def test_does_not_take_a_missing_broker_behind_a_proxy_for_local_mode(error: OrderedMQError) -> None:
    ask = Proxy(error, 7)
    assert find_cluster(ask, None, ask).brokers == ROUTE.brokers
    ask = Proxy(error)
    with pytest.raises(RocketMQUnavailableError, match=r"a, b may be away.*local mode") as caught:
        find_cluster(ask, None, ask)
    assert caught.value.sub == UnavailableCondition.NO_BROKER


def test_a_proxy_whose_nameserver_knows_no_broker_has_an_empty_cluster() -> None:
    ask = Proxy(7, route=NO_ROUTE)
    found = find_cluster(ask, None, ask)
    assert (found.behind_proxy, found.brokers) == (True, {})


@pytest.mark.holds("through a Proxy")
def test_refuses_a_proxy_in_local_mode() -> None:
    ask = Proxy(RocketMQError(RocketMQCondition.SERVER_ERROR, "request is not implemented in LocalMessageService"))
    with pytest.raises(RocketMQError, match=r"local mode.*nameserver's address") as caught:
        find_cluster(ask, None, ask)
    assert caught.value.sub == RocketMQCondition.NOT_SUPPORTED
