"""Asks brokers whether they can apply a filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orderedmq.conditions import OptionCondition, RocketMQCondition
from orderedmq.errors import OptionError, RocketMQError
from orderedmq.rocketmq.net.behind_proxy import raise_not_through_proxy
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import group_requests, rights
from orderedmq.rocketmq.wire.route import Route
from orderedmq.rows.filters import Filter


def require(client: Client, matching: Filter, topics: Iterable[str], route: Callable[[str], Route]) -> None:
    """Check that all brokers of the topics support a filter. ``route`` returns a topic's route.

    Each broker checks SQL. Tags need no check. Raises OptionError INVALID or UNSUPPORTED, RocketMQError.
    """
    if not matching.sql:
        return
    deadline = Deadline.after(REQUEST_TIMEOUT)
    if client.behind_proxy(deadline):
        # A Proxy accepts any SQL (ClientManagerActivity.checkClientConfig), and brokers ignore a filter with invalid SQL.
        raise_not_through_proxy("option filterSql")
    asked: set[str] = set()
    for topic in topics:
        wanted = group_requests.TopicSubscription(topic, matching.expression, matching.kind)
        request = group_requests.check_client_config("orderedmq", rights.TOOLS_GROUP, wanted)
        for name in sorted({queue.broker_name for queue in route(topic).reading_list()} - asked):
            asked.add(name)
            try:
                client.call(request, deadline, topic=topic, broker_name=name)
            except RocketMQError as error:
                raise _filter_error(error, matching, name) from error


def _filter_error(error: RocketMQError, matching: Filter, broker_name: str) -> RocketMQError | OptionError:
    """Return the error to raise when a broker refuses a filter (ClientManageProcessor.checkClientConfig)."""
    if error.sub == RocketMQCondition.FILTER:
        return OptionError(
            OptionCondition.INVALID, f"option filterSql {matching.sql!r} is not valid SQL for RocketMQ: {error.message}"
        )
    if error.sub == RocketMQCondition.SERVER_ERROR and "not support" in error.message:
        return OptionError(
            OptionCondition.UNSUPPORTED,
            f"option filterSql is not supported by broker {broker_name!r}, whose setting enablePropertyFilter is false. Set it to true and "
            "restart the broker, use tags, or filter the DataFrame (DataFrame.filter)",
        )
    return error
