"""An account's rights, in the terms of the broker's access control. Pure.

RocketMQ has two generations of access control. ACL 1.0 (``aclEnable``, plain_acl.yml: 4.4 to 5.3.2) has rights to publish and to
subscribe, and administrators. ACL 2.0 (``authorizationEnabled``, mqadmin createAcl: from 5.3.0 on) has more actions. The brokers
define which right a request needs: PlainAccessValidator.parse, DefaultAuthorizationContextBuilder, RocketMQAction. If they list several
actions for a request, an account needs only one of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from orderedmq.model import DEAD_LETTER_PREFIX
from orderedmq.parking import parked_topic
from orderedmq.rocketmq.wire.codes import RequestCode

Kind = Literal["Topic", "Group", "Cluster"]
Action = Literal["Pub", "Sub", "Create", "Update", "Delete", "Get", "List"]

#: The group for pulls without a group. Every broker has it from the start (MixAll.TOOLS_CONSUMER_GROUP).
TOOLS_GROUP: Final = "TOOLS_CONSUMER"

_ACL_2: Final = re.compile(
    r"User:(?P<account>\S+) has no permission to access (?P<kind>Topic|Group|Cluster):(?P<name>\S+) from "
)
_ACL_1: Final = re.compile(r"No default permission for (?P<kind>topic|group):(?P<name>[^\s,;]+)")
_ADMIN: Final = re.compile(r"Need admin permission")
#: A Proxy's remark if it refuses an account, or if the account lacks a right (DefaultAuthenticationHandler, AclAuthorizationHandler).
_BY_PROXY: Final = re.compile(
    r"User:\S+ (is not found|is disabled|has no permission to access )|check signature failed|username cannot be null"
)

#: The action that ACL 2.0 requires for a request. If one of several is enough, this is the one that the roles below need anyway.
_ACTIONS: Final[Mapping[RequestCode, Mapping[Kind, Action]]] = {
    RequestCode.SEND_MESSAGE_V2: {"Topic": "Pub", "Group": "Sub"},
    RequestCode.SEND_BATCH_MESSAGE: {"Topic": "Pub", "Group": "Sub"},
    RequestCode.PULL_MESSAGE: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.QUERY_MESSAGE: {"Topic": "Sub"},
    RequestCode.HEART_BEAT: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.UNREGISTER_CLIENT: {"Group": "Sub"},
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: {"Group": "Sub"},
    RequestCode.QUERY_CONSUMER_OFFSET: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.UPDATE_CONSUMER_OFFSET: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.LOCK_BATCH_MQ: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.UNLOCK_BATCH_MQ: {"Topic": "Sub", "Group": "Sub"},
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: {"Topic": "Get"},
    RequestCode.GET_MAX_OFFSET: {"Topic": "Get"},
    RequestCode.GET_MIN_OFFSET: {"Topic": "Get"},
    RequestCode.GET_TOPIC_STATS_INFO: {"Topic": "Get"},
    RequestCode.GET_TOPIC_CONFIG: {"Topic": "Get"},
    RequestCode.GET_CONSUMER_CONNECTION_LIST: {"Group": "Get"},
    RequestCode.GET_CONSUMER_RUNNING_INFO: {"Group": "Get"},
    RequestCode.UPDATE_AND_CREATE_TOPIC: {"Topic": "Create"},
    RequestCode.DELETE_TOPIC_IN_BROKER: {"Topic": "Delete"},
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"Group": "Create"},
    RequestCode.DELETE_SUBSCRIPTIONGROUP: {"Group": "Delete"},
}
#: The action that ACL 2.0 accepts instead of Sub.
_INSTEAD: Final[Mapping[RequestCode, Action]] = {
    RequestCode.QUERY_MESSAGE: "Get",
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: "Get",
    RequestCode.QUERY_CONSUMER_OFFSET: "Get",
    RequestCode.UPDATE_CONSUMER_OFFSET: "Update",
}


class Right(NamedTuple):
    """One action on one topic or group."""

    kind: Kind
    name: str
    action: Action


class MissingRight(NamedTuple):
    """The right that a broker found missing.

    ``acl`` is 1 or 2. ``right`` is None if ACL 1.0 requires an administrator. ``account`` is None unless the broker names it.
    ``instead`` is another action that the broker would accept for the same request.
    """

    acl: int
    right: Right | None
    account: str | None = None
    instead: Action | None = None


def refusal(code: RequestCode, remark: str) -> MissingRight | None:
    """Return the missing right that a broker's remark names.

    None if the remark has another subject, such as a wrong signature or a topic's permission.
    """
    if _ADMIN.search(remark):
        return MissingRight(1, None)
    second = _ACL_2.search(remark)
    match = second or _ACL_1.search(remark)
    if match is None:
        return None
    kinds: Mapping[str, Kind] = {"topic": "Topic", "group": "Group", "cluster": "Cluster"}
    kind = kinds[match["kind"].lower()]
    right = Right(kind, match["name"], _ACTIONS.get(code, {}).get(kind, "Get"))
    return MissingRight(1, right) if second is None else MissingRight(2, right, second["account"], _INSTEAD.get(code))


def is_missing_right(remark: str) -> bool:
    """Whether a remark says that the account is known, but lacks a right."""
    return any(pattern.search(remark) for pattern in (_ADMIN, _ACL_2, _ACL_1))


def is_refusal(remark: str) -> bool:
    """Whether a Proxy's remark refuses an account. Such an answer has no specific code (AbstractRemotingActivity.writeErrResponse)."""
    return _BY_PROXY.match(remark) is not None


def _spell(right: Right, acl: int) -> str:
    """Return a right in the notation of mqadmin (``Topic:orders Pub``) or plain_acl.yml (ACL 1.0: ``topicPerms orders=PUB``)."""
    kind, name, action = right
    return f"{kind}:{name} {action}" if acl == 2 else f"{kind.lower()}Perms {name}={action.upper()}"


def explain(refused: MissingRight) -> str:
    """Return the sentences of an error: the right that the account lacks, and how to grant it."""
    if refused.right is None:
        return "The account lacks admin: true, which ACL 1.0 requires for this. Use an administrator's account"
    instead = f" (or {refused.instead})" if refused.instead is not None else ""
    lacks = f"The account lacks {_spell(refused.right, refused.acl)}{instead}"
    if refused.acl == 1:
        return f"{lacks}. Add that to the account in the brokers' plain_acl.yml"
    kind, name, action = refused.right
    return (
        f"{lacks}. Grant it with mqadmin updateAcl -c CLUSTER -s User:{refused.account or 'ACCOUNT'} -r {kind}:{name} -a {action} -d Allow. "
        "Add to -a the actions that the account already has on this resource"
    )


# --- rights that are checked before anything is changed


def of_sink(topic: str, group: str) -> list[Right]:
    """Return the rights that a query needs to write to a topic and to keep its bookmarks in a group."""
    return [Right("Topic", topic, "Pub"), *of_source([topic], group)]


def of_source(topics: Sequence[str], group: str | None) -> list[Right]:
    """Return the rights that a query needs to read topics as a group, or as TOOLS_CONSUMER if ``group`` is None."""
    return [
        *(Right("Topic", topic, action) for topic in topics for action in _READ),
        Right("Group", group or TOOLS_GROUP, "Sub"),
    ]


def of_dead_letters(group: str) -> list[Right]:
    """Return the rights that a listener needs in addition to those of a source, to find its earlier dead letters."""
    return of_source([DEAD_LETTER_PREFIX + group], group)


def of_parking(group: str, topic: str) -> list[Right]:
    """Return the rights that a listener with order per key needs in addition to those of a listener, to park messages of ``topic``.

    It also needs Create, or an administrator, if the parking lot's topic does not exist yet.
    """
    lots = parked_topic(group, topic)
    return [Right("Topic", lots, "Pub"), *of_source([lots], group)]


_READ: Final[tuple[Action, ...]] = ("Sub", "Get")
