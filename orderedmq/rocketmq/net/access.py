"""Finds all the rights that an account lacks, because a broker's refusal names only the first of them.

Each right is tested by a request that needs the right and changes nothing: a send to a queue that no topic has, a lock of no queue, a
search for a message that does not exist. This works with both generations of access control, so the caller need not know which
generation a broker has.

A Proxy that checks accounts (ACL 2.0) gives a topic's route only to an account with Pub, Sub or Get on the topic. To other
accounts, the Proxy also refuses the route of a topic that does not exist, and the route of behind_proxy.AT_EVERY_BROKER.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.net.behind_proxy import AT_EVERY_BROKER
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import group_requests, message_requests, rights
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.rights import MissingRight, Right

#: A key that no message has.
_NO_KEY: Final = "orderedmq-rights"


#: The rights that each client is known to have. They are not tested again.
_permitted: Final[weakref.WeakKeyDictionary[Client, set[tuple[Right, ...]]]] = weakref.WeakKeyDictionary()


def require(client: Client, wanted: Sequence[Right], whose: str, at_proxy: Sequence[Right] = ()) -> None:
    """Raise RocketMQError NO_PERMISSION if the account lacks a ``wanted`` right at a broker that has the right's topic.

    The error names every missing right. Rights are tested only if the client has an account, and only until the account is known to
    have them. ``whose`` says in the error who needs the rights, such as "a sink". ``at_proxy`` are rights to read the routes of
    further topics, which a Proxy that checks accounts may require. They are tested only if another right is missing.
    """
    known = _permitted.setdefault(client, set())
    if client.account is None or tuple(wanted) in known:
        return
    if (error := missing_rights_error(client, wanted, whose, at_proxy)) is not None:
        raise error
    known.add(tuple(wanted))


def explain(client: Client, error: BaseException, wanted: Sequence[Right], whose: str) -> BaseException:
    """Return ``error``; if it is NO_PERMISSION and the missing rights can be determined, an error that names all of them instead."""
    if not isinstance(error, RocketMQError) or error.sub != RocketMQCondition.NO_PERMISSION or client.account is None:
        return error
    try:
        return missing_rights_error(client, wanted, whose) or error
    except OrderedMQError:
        return error


def missing_rights_error(
    client: Client, wanted: Sequence[Right], whose: str, at_proxy: Sequence[Right] = ()
) -> RocketMQError | None:
    """Return the error that `require` raises; None if the account has all of ``wanted``."""
    # Use the names that servers know, because refusals and an administrator's commands contain these names.
    wanted = [right._replace(name=client.names.spelled(right.name)) for right in wanted]
    deadline = Deadline.after(REQUEST_TIMEOUT)
    of_group = [right for right in wanted if right.kind == "Group"]
    group = of_group[0].name if of_group else None
    reads_retries = any(right.action == "Get" for right in of_group)
    topics = list(dict.fromkeys(right.name for right in wanted if right.kind == "Topic"))
    missing: dict[Right, None] = {}
    acl = 0
    if refuses_routes(client, deadline):
        routes = {topic: _masters_by_proxy(client, topic, deadline) for topic in (*topics, AT_EVERY_BROKER)}
        wanted.append(Right("Topic", AT_EVERY_BROKER, "Get"))
        refused_routes = {topic for topic, found in routes.items() if found is None}
        missing.update({right: None for right in wanted if right.kind == "Topic" and right.name in refused_routes})
        every = {name: address for found in routes.values() for name, address in (found or {}).items()}
        masters = {topic: found or every for topic in topics if (found := routes[topic]) is not None}
        if (
            group is not None
            and not any(masters.values())
            and _proxy_refuses(client, group_requests.consumer_list(group), deadline)
        ):
            missing.update(dict.fromkeys(of_group))
        acl = 2
    else:
        masters = {topic: _masters(client, topic, deadline) for topic in topics}
        at_proxy = ()
    for topic, found in masters.items():
        actions = {right.action for right in wanted if right.kind == "Topic" and right.name == topic}
        for name, address in found.items():
            asked = _Broker(client, address, MessageQueue(topic, name, 0), group, deadline, reads_retries)
            for refused in asked.refusals(actions):
                acl = refused.acl
                missing.update({right: None for right in wanted if right == refused.right})
    if not missing:
        return None
    more = [right._replace(name=client.names.spelled(right.name)) for right in at_proxy]
    missing.update({right: None for right in more if _masters_by_proxy(client, right.name, deadline) is None})
    wanted += more
    named = [right for right in wanted if right in missing]
    resources = {(right.kind, right.name) for right in named}
    granted = rights.grant(acl, client.account, [right for right in wanted if (right.kind, right.name) in resources])
    return RocketMQError(
        RocketMQCondition.NO_PERMISSION,
        f"the account {client.account!r} lacks {rights.spell(named, acl)}. In all, {whose} needs {rights.spell(wanted, acl)}. {granted}",
    )


def _masters(client: Client, topic: str, deadline: float) -> dict[str, str]:
    """Return the addresses of the masters that have the topic, or of all masters if the topic does not exist yet."""
    try:
        brokers = client.route(topic, deadline).brokers
    except TopicError:
        brokers = client.cluster(deadline).brokers
    return {name: broker.master for name, broker in brokers.items() if broker.master is not None}


def refuses_routes(client: Client, deadline: float) -> bool:
    """Return whether a Proxy refuses to give this account the route of a missing topic, or the route that lists the brokers."""
    try:
        return client.behind_proxy(deadline) and _masters_by_proxy(client, _probe(), deadline) is None
    except RocketMQError as error:
        if not _is_refusal(error, RequestCode.GET_ROUTEINFO_BY_TOPIC):
            raise
        return True


def _masters_by_proxy(client: Client, topic: str, deadline: float) -> Mapping[str, str] | None:
    """Return the addresses of the masters that have the topic: empty if it does not exist, None if a Proxy refuses its route."""
    try:
        brokers = client.call_nameserver(message_requests.topic_route(topic), deadline).brokers
    except TopicError:
        return {}
    except RocketMQError as error:
        if not _is_refusal(error, RequestCode.GET_ROUTEINFO_BY_TOPIC):
            raise
        return None
    return {name: broker.master for name, broker in brokers.items() if broker.master is not None}


def _proxy_refuses(client: Client, request: Request[Any], deadline: float) -> bool:
    """Return whether a Proxy refuses a request that it does not pass on to a broker."""
    try:
        client.call_nameserver(request, deadline)
    except RocketMQUnavailableError:
        raise
    except OrderedMQError as error:
        return isinstance(error, RocketMQError) and _is_refusal(error, request.code)
    return False


def _is_refusal(error: RocketMQError, code: RequestCode) -> bool:
    """Return whether an error is about a missing right, and not about the account itself."""
    return error.sub == RocketMQCondition.NO_PERMISSION and rights.refusal(code, error.message) is not None


class _Broker:
    """Tests rights on one topic and a group at one broker."""

    def __init__(
        self,
        client: Client,
        address: str,
        queue: MessageQueue,
        group: str | None,
        deadline: float,
        reads_retries: bool,
    ) -> None:
        self._client = client
        self._address = address
        self._queue = queue
        self._group = group
        self._deadline = deadline
        #: Whether the right to read the group's retry topic is also tested.
        self._reads_retries = reads_retries

    def refusals(self, actions: Iterable[str]) -> list[MissingRight]:
        out = []
        if "Pub" in actions:
            out.append(self._refused(message_requests.send_nowhere(self._queue)))
        group = None
        if self._group is not None:
            group = self._refused(group_requests.consumer_list(self._group))
            group = group or self._refused(group_requests.lock(self._group, _probe(), ()))
            out.append(group)
            if self._reads_retries:
                out.append(self._refused(message_requests.max_offset(self._queue._replace(topic=RETRY_PREFIX + self._group))))
        if "Sub" in actions:
            out.append(self._refused(message_requests.query_message(self._queue.topic, _NO_KEY)) or self._subscribes(group))
        if "Get" in actions:
            out.append(self._refused(message_requests.max_offset(self._queue)))
        return [refused for refused in out if refused is not None]

    def _subscribes(self, group: MissingRight | None) -> MissingRight | None:
        """Return the refusal of Sub on the topic, if any.

        ACL 2.0 requires this right only for requests that also need Sub on the group. If Sub on the group was refused, test the right
        by a pull, because a broker checks the topic of a pull first.
        """
        if self._group is None:
            return None
        if group is not None:
            refused = self._refused(message_requests.pull(self._queue, self._group, 0, 1))
            return refused if refused is not None and refused.right is not None and refused.right.kind == "Topic" else None
        # Name a real broker, because a Proxy does not answer a request for a broker that does not exist.
        name, unused = _probe(), message_requests.nowhere(self._queue)
        refused = self._refused(group_requests.lock(self._group, name, [unused]))
        if refused is None:
            self._refused(group_requests.unlock(self._group, name, [unused]))
        return refused

    def _refused(self, request: Request[Any]) -> MissingRight | None:
        try:
            self._client.call_address(self._address, request, self._deadline)
        except RocketMQUnavailableError:
            raise
        except RocketMQError as error:
            if error.sub == RocketMQCondition.NO_PERMISSION:
                return rights.refusal(request.code, error.message)
        except OrderedMQError:
            # The topic or group does not exist. A broker reports that only to an account that has the right.
            pass
        return None


def _probe() -> str:
    return f"orderedmq-rights-{uuid.uuid4().hex}"
