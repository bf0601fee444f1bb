"""Checks before anything is changed or read whether brokers will do it: the rights of the account, and filters by SQL.

What is written by an account that may not read could not be found again. Each right is tested by a request that needs the right and changes
nothing: a send to a queue that no topic has, a lock of such a queue, a search for a message that does not exist. This works with both
generations of access control, so the caller need not know which generation a broker has. The first refusal is the error.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from orderedmq.conditions import OptionCondition, RocketMQCondition
from orderedmq.errors import OptionError, OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.behind_proxy import raise_not_through_proxy
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import group_requests, message_requests, rights
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.rights import Action, Right
from orderedmq.rocketmq.wire.route import Route
from orderedmq.rows.filters import Filter

#: A key that no message has.
_NO_KEY: Final = "orderedmq-rights"
#: The rights that each client is known to have. They are not tested again.
_permitted: Final[weakref.WeakKeyDictionary[Client, set[tuple[Right, ...]]]] = weakref.WeakKeyDictionary()


def require_rights(client: Client, needed: Sequence[Right]) -> None:
    """Raise RocketMQError NO_PERMISSION, a broker's refusal, if the account lacks a ``needed`` right at a broker with the right's topic.

    Rights are tested only if the client has an account, and only until the account is known to have them.
    """
    permitted = _permitted.setdefault(client, set())
    if client.account is None or tuple(needed) in permitted:
        return
    deadline = Deadline.after(REQUEST_TIMEOUT)
    group = next((right.name for right in needed if right.kind == "Group"), None)
    for topic in dict.fromkeys(right.name for right in needed if right.kind == "Topic"):
        actions = {right.action for right in needed if right.kind == "Topic" and right.name == topic}
        for name, address in _masters(client, topic, deadline).items():
            for request in _requests(MessageQueue(topic, name, 0), actions, group):
                _test(client, address, request, deadline)
    permitted.add(tuple(needed))


def _masters(client: Client, topic: str, deadline: float) -> dict[str, str]:
    """Return the addresses of the masters that have the topic, or of all masters if the topic does not exist yet."""
    try:
        brokers = client.route(topic, deadline).brokers
    except TopicError:
        brokers = client.cluster(deadline).brokers
    return {name: broker.master for name, broker in brokers.items() if broker.master is not None}


def _requests(queue: MessageQueue, actions: set[Action], group: str | None) -> Iterator[Request[Any]]:
    """Return requests that need these actions on the queue's topic, and a consumer's rights on the group."""
    if "Pub" in actions:
        yield message_requests.send_nowhere(queue)
    if group is not None:
        # With ACL 2.0 a lock needs Sub on the group and on the topic. Name a real broker, because a Proxy does not answer a request for
        # a broker that does not exist.
        owner, unused = f"orderedmq-rights-{uuid.uuid4().hex}", [message_requests.nowhere(queue)] if "Sub" in actions else []
        yield group_requests.lock(group, owner, unused)
        yield group_requests.unlock(group, owner, unused)
        yield group_requests.consumer_list(group)
    if "Sub" in actions:
        yield message_requests.query_message(queue.topic, _NO_KEY)
    if "Get" in actions:
        yield message_requests.max_offset(queue)


def _test(client: Client, address: str, request: Request[Any], deadline: float) -> None:
    try:
        client.call_address(address, request, deadline)
    except RocketMQUnavailableError:
        raise
    except RocketMQError as error:
        # A topic that may not be written to at the moment is not a missing right.
        if error.sub == RocketMQCondition.NO_PERMISSION and rights.is_missing_right(error.message):
            raise
    except OrderedMQError:
        # The topic or group does not exist. A broker reports that only to an account that has the right.
        pass


def require_filter(client: Client, matching: Filter, topics: Iterable[str], route: Callable[[str], Route]) -> None:
    """Check that all brokers of the topics support a filter. ``route`` returns a topic's route.

    Each broker checks SQL. Tags need no check. Raises OptionError INVALID or UNSUPPORTED, RocketMQError.
    """
    if not matching.sql:
        return
    deadline = Deadline.after(REQUEST_TIMEOUT)
    if client.behind_proxy(deadline):
        # A Proxy accepts any SQL (ClientManagerActivity.checkClientConfig), and brokers ignore a filter with invalid SQL.
        raise_not_through_proxy("option filterSql")
    brokers_asked: set[str] = set()
    for topic in topics:
        subscription = group_requests.TopicSubscription(topic, matching.expression, matching.kind)
        request = group_requests.check_client_config("orderedmq", rights.TOOLS_GROUP, subscription)
        for name in sorted({queue.broker_name for queue in route(topic).reading_list()} - brokers_asked):
            brokers_asked.add(name)
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
