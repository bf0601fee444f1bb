"""Finds all the rights that an account lacks; a broker's refusal names only the first.

Each right is tested by a request that needs it and changes nothing: a send to a queue that no topic has, a lock of no queue, a
search for a message that does not exist. This works with both generations of access control, so the caller need not know which
one a broker has.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import group_requests, message_requests, rights
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.rights import Refusal, Right

#: A queue id that no topic has (MAX_QUEUES).
_NO_QUEUE: Final = 2**31 - 1
#: A name that no message's key and no producer group has.
_NO_KEY: Final = "orderedmq-rights"


#: Rights that each client is known to have: they are not tested again.
_permitted: Final[weakref.WeakKeyDictionary[Client, set[tuple[Right, ...]]]] = weakref.WeakKeyDictionary()


def require(client: Client, wanted: Sequence[Right], whose: str) -> None:
    """Raise RocketMQError NO_PERMISSION if the account lacks a right of ``wanted`` at a broker of their topics.

    The error names every missing right. Rights are tested only if the client has an account, and only until it is known to have
    them. ``whose``: who needs the rights, for the error: "a sink".
    """
    known = _permitted.setdefault(client, set())
    if client.account is None or tuple(wanted) in known:
        return
    if (error := missing_rights_error(client, wanted, whose)) is not None:
        raise error
    known.add(tuple(wanted))


def explain(client: Client, error: BaseException, wanted: Sequence[Right], whose: str) -> BaseException:
    """Return ``error``, or in place of NO_PERMISSION an error that names every missing right, if they can be found out."""
    if not isinstance(error, RocketMQError) or error.sub != RocketMQCondition.NO_PERMISSION or client.account is None:
        return error
    try:
        return missing_rights_error(client, wanted, whose) or error
    except OrderedMQError:
        return error


def missing_rights_error(client: Client, wanted: Sequence[Right], whose: str) -> RocketMQError | None:
    """Return the error that names the rights of ``wanted`` that the account lacks; None if it has them all."""
    # As servers know the names: their refusals have these, and so has what an administrator types.
    wanted = [right._replace(name=client.names.spelled(right.name)) for right in wanted]
    deadline = Deadline.after(REQUEST_TIMEOUT)
    of_group = [right for right in wanted if right.kind == "Group"]
    group = of_group[0].name if of_group else None
    reads_retries = any(right.action == "Get" for right in of_group)
    missing: dict[Right, None] = {}
    acl = 0
    for topic in dict.fromkeys(right.name for right in wanted if right.kind == "Topic"):
        actions = {right.action for right in wanted if right.kind == "Topic" and right.name == topic}
        for name, address in _masters(client, topic, deadline).items():
            asked = _Broker(client, address, MessageQueue(topic, name, 0), group, deadline, reads_retries)
            for refused in asked.refusals(actions):
                acl = refused.acl
                missing.update({right: None for right in wanted if right == refused.right})
    if not missing:
        return None
    named = [right for right in wanted if right in missing]
    resources = {(right.kind, right.name) for right in named}
    granted = rights.grant(acl, client.account, [right for right in wanted if (right.kind, right.name) in resources])
    return RocketMQError(
        RocketMQCondition.NO_PERMISSION,
        f"the account {client.account!r} lacks {rights.spell(named, acl)}; {whose} needs {rights.spell(wanted, acl)} in all; {granted}",
    )


def _masters(client: Client, topic: str, deadline: float) -> dict[str, str]:
    """Return the addresses of the masters that have the topic; of all masters if it does not exist yet."""
    try:
        brokers = client.route(topic, deadline).brokers
    except TopicError:
        brokers = client.cluster(deadline).brokers
    return {name: broker.master for name, broker in brokers.items() if broker.master is not None}


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
        #: Whether the right to read the group's retry topic is tested, too.
        self._reads_retries = reads_retries

    def refusals(self, actions: Iterable[str]) -> list[Refusal]:
        out = []
        if "Pub" in actions:
            out.append(self._refused(_send(self._queue)))
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

    def _subscribes(self, group: Refusal | None) -> Refusal | None:
        """Return the refusal of Sub on the topic, if any.

        ACL 2.0 requires it only for requests that need Sub on the group, too. If Sub on the group was refused, a pull is the
        test, since its topic is checked first.
        """
        if self._group is None:
            return None
        if group is not None:
            refused = self._refused(message_requests.pull(self._queue, self._group, 0, 1))
            return refused if refused is not None and refused.right is not None and refused.right.kind == "Topic" else None
        # A Proxy does not answer a request for a broker that there is not.
        name, unused = _probe(), self._queue._replace(queue_id=_NO_QUEUE)
        refused = self._refused(group_requests.lock(self._group, name, [unused]))
        if refused is None:
            self._refused(group_requests.unlock(self._group, name, [unused]))
        return refused

    def _refused(self, request: Request[Any]) -> Refusal | None:
        try:
            self._client.call_address(self._address, request, self._deadline)
        except RocketMQUnavailableError:
            raise
        except RocketMQError as error:
            if error.sub == RocketMQCondition.NO_PERMISSION:
                return rights.refusal(request.code, error.message)
        except OrderedMQError:
            # The topic or group does not exist. A broker says so only to an account that has the right.
            pass
        return None


def _send(queue: MessageQueue) -> Request[Any]:
    """Return the send of a message that every broker refuses for its queue, after it has checked the account's rights."""
    nowhere = queue._replace(queue_id=_NO_QUEUE)
    request = message_requests.send(nowhere, b"?", "", group=_NO_KEY, born=time.time_ns() // 1_000_000)
    # Nothing is stored, so it may be done twice.
    return replace(request, repeatable=True)


def _probe() -> str:
    return f"orderedmq-rights-{uuid.uuid4().hex}"
