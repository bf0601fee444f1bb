"""An account's rights, in the terms of the broker's access control. Pure.

RocketMQ has two generations of access control. ACL 1.0 (``aclEnable``, plain_acl.yml: 4.4 to 5.3.2) has rights to publish and to
subscribe, and administrators. ACL 2.0 (``authorizationEnabled``, mqadmin createAcl: from 5.3.0 on) has more actions. The brokers
define which right a request needs: PlainAccessValidator.parse, DefaultAuthorizationContextBuilder, RocketMQAction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from orderedmq.model import DEAD_LETTER_PREFIX
from orderedmq.parking import parked_topic

Kind = Literal["Topic", "Group"]
Action = Literal["Pub", "Sub", "Get"]

#: The group for pulls without a group. Every broker has it from the start (MixAll.TOOLS_CONSUMER_GROUP).
TOOLS_GROUP: Final = "TOOLS_CONSUMER"

#: A broker's remark if the account is known, but lacks a right: by ACL 2.0, by ACL 1.0, and by ACL 1.0 for an administrator's request.
_MISSING: Final = re.compile(
    r"User:\S+ has no permission to access (?:Topic|Group|Cluster):|No default permission for (?:topic|group):|Need admin permission"
)
#: A Proxy's remark if it refuses an account, or if the account lacks a right (DefaultAuthenticationHandler, AclAuthorizationHandler).
_BY_PROXY: Final = re.compile(
    r"User:\S+ (is not found|is disabled|has no permission to access )|check signature failed|username cannot be null"
)


class Right(NamedTuple):
    """One action on one topic or group."""

    kind: Kind
    name: str
    action: Action


def is_missing_right(remark: str) -> bool:
    """Whether a remark says that the account is known, but lacks a right."""
    return _MISSING.search(remark) is not None


def is_refusal(remark: str) -> bool:
    """Whether a Proxy's remark refuses an account. Such an answer has no specific code (AbstractRemotingActivity.writeErrResponse)."""
    return _BY_PROXY.match(remark) is not None


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
