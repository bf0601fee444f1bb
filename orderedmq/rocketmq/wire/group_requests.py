"""Requests about consumer groups: offsets, members, queue locks. Pure.

Numbers in parentheses are request codes.
Source: ConsumerManageProcessor, ClientManageProcessor, RebalanceLockManager, HeartbeatData, FilterAPI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import Bytes, RemotingCommand
from orderedmq.rocketmq.wire.message_requests import BROKER_NAME, java_text
from orderedmq.rocketmq.wire.request import Request, ignore_answer, int_field
from orderedmq.rocketmq.wire.route import string_tuple
from orderedmq.routing.sharding_key import java_string_hash
from orderedmq.rows.filters import ALL, canonical, tags_of

_SUCCESS = ResponseCode.SUCCESS
#: Matches the remark of a server for a group without members. A Proxy sends the text of a NullPointerException, which depends on its JVM.
_NO_MEMBERS: Final = re.compile(r"no consumer for this group|getAllClientId|\A\Z")
#: A broker's answers if the member is not connected, does not support the request, or did not answer in time.
_SILENT = (ResponseCode.CONSUMER_NOT_ONLINE, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, ResponseCode.CONSUME_MSG_TIMEOUT)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


# --- offsets


def _queue_of(group: str, queue: MessageQueue) -> dict[str, str]:
    return {
        "consumerGroup": group,
        "topic": queue.topic,
        "queueId": java_text(queue.queue_id),
        BROKER_NAME: queue.broker_name,
    }


def consumer_offset(group: str, queue: MessageQueue) -> Request[int | None]:
    """Request the group's offset (14); None if the group has never committed.

    A broker before 5.0 ignores ``setZeroIfNotFound``, and answers 0 instead of None if the queue is empty or its first message
    is recent. While an administrator's reset is pending, the answer is the offset of that reset.
    """
    return Request(
        RequestCode.QUERY_CONSUMER_OFFSET,
        f"request for the offset of group {group} in queue {queue}",
        f"group {group!r}, topic {queue.topic!r}",
        lambda response: int_field(response, "offset") if response.code == _SUCCESS else None,
        {**_queue_of(group, queue), "setZeroIfNotFound": "false"},
        accepts=frozenset((_SUCCESS, ResponseCode.QUERY_NOT_FOUND)),
    )


def update_consumer_offset(group: str, queue: MessageQueue, offset: int) -> Request[bool]:
    """Set the group's offset, forward or backward (15). The answer is False if the broker ignored the offset because a reset is pending.

    From 5.3.0 on, raises GroupError MISSING or TopicError MISSING if the group or the topic does not exist. A pull, a heartbeat or
    `admin_requests.create_group` creates the group. The broker writes the offset to disk within 5 s.
    """
    return Request(
        RequestCode.UPDATE_CONSUMER_OFFSET,
        f"commit of offset {offset} of group {group} in queue {queue}",
        f"group {group!r}, topic {queue.topic!r}",
        lambda response: "previously reset" not in (response.remark or ""),
        {**_queue_of(group, queue), "commitOffset": java_text(offset)},
    )


def all_consumer_offsets() -> Request[dict[str, dict[MessageQueue, int]]]:
    """Request all committed offsets of all groups at a broker (43). A broker's replicas send this request to copy the offsets.

    The queues in the answer have an empty broker name. Before 5.0, only this request distinguishes a group that has committed 0
    from a group that has never committed.
    """

    def parse(response: RemotingCommand) -> dict[str, dict[MessageQueue, int]]:
        by_group: dict[str, dict[MessageQueue, int]] = {}
        for name, offsets in field(loads_object(response.body), "offsetTable", dict, {}).items():
            topic, _, group = name.partition("@")
            if not isinstance(offsets, dict) or not all(
                queue.isdigit() and isinstance(at, int) for queue, at in offsets.items()
            ):
                raise ProtocolError(
                    ProtocolCondition.PROTOCOL, f"the offsets of {name[:100]!r} are malformed: {str(offsets)[:100]!r}"
                )
            by_group.setdefault(group, {}).update((MessageQueue(topic, "", int(queue)), at) for queue, at in offsets.items())
        return by_group

    return Request(RequestCode.GET_ALL_CONSUMER_OFFSET, "request for all offsets", "all consumer groups", parse)


# --- members


@dataclass(frozen=True)
class TopicSubscription:
    """A member's filter on a topic: a tag expression (``a || b``, ``*``), or SQL."""

    topic: str
    expression: str = "*"
    expression_type: str = "TAG"

    def tags(self) -> list[str]:
        """Return the tags of the expression; an empty list if it matches every message or is SQL."""
        return [] if self.expression_type != "TAG" else list(tags_of(self.expression))

    def same_as(self, other: TopicSubscription) -> bool:
        """Return whether both filters mean the same, even if they are written differently."""
        mine, theirs = (canonical(each.expression, each.expression_type) for each in (self, other))
        return (self.expression_type, mine) == (other.expression_type, theirs)

    def data(self, version: int) -> dict[str, Any]:
        """Return the SubscriptionData for a heartbeat. The broker compares tags by their hashes."""
        tags = self.tags()
        return {
            "topic": self.topic,
            "subString": self.expression,
            "tagsSet": tags,
            "codeSet": java_string_hash(pa.array(tags, pa.string())).tolist(),
            "subVersion": version,
            "expressionType": self.expression_type,
            "classFilterMode": False,
        }


def topic_subscription(topic: str, data: dict[str, Any]) -> TopicSubscription:
    """Return the subscription of a SubscriptionData that Java has written. Without a type, the expression consists of tags."""
    return TopicSubscription(
        topic, field(data, "subString", str, ALL) or ALL, field(data, "expressionType", str, "TAG") or "TAG"
    )


def heartbeat(
    client_id: str,
    group: str,
    subscriptions: Sequence[TopicSubscription],
    *,
    version: int,
) -> Request[None]:
    """Make the client a member of the group at this broker for 120 s, or until the connection ends (34).

    Membership belongs to the connection, so two client ids on one connection overwrite each other. The subscriptions replace those
    of the *whole group*, so the members must agree on the topics. ``version`` is the time of the last change of the subscriptions,
    in ms since the epoch. The client declares itself a push consumer.
    """
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "unitMode": False,
        "subscriptionDataSet": [subscription.data(version) for subscription in subscriptions],
    }
    return Request(
        RequestCode.HEART_BEAT,
        f"heartbeat of {client_id} in group {group}",
        f"group {group!r}, topics {', '.join(subscription.topic for subscription in subscriptions)}",
        ignore_answer,
        body=_json({"clientID": client_id, "producerDataSet": [], "consumerDataSet": [consumer]}),
    )


def unregister(client_id: str, group: str) -> Request[None]:
    """Leave the group (35). Send it on the connection on which the heartbeats were sent."""
    return Request(
        RequestCode.UNREGISTER_CLIENT,
        f"request of {client_id} to leave group {group}",
        f"group {group!r}",
        ignore_answer,
        {"clientID": client_id, "consumerGroup": group},
    )


def consumer_list(group: str) -> Request[tuple[str, ...]]:
    """Request the sorted client ids of the group's members at this broker (38); an empty tuple if there are none."""

    def parse(response: RemotingCommand) -> tuple[str, ...]:
        if response.code == _SUCCESS:
            return tuple(sorted(string_tuple(loads_object(response.body).get("consumerIdList"))))
        return ()

    return Request(
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
        f"request for the members of group {group}",
        f"group {group!r}",
        parse,
        {"consumerGroup": group},
        absent=_NO_MEMBERS,
    )


def subscriptions(group: str) -> Request[dict[str, TopicSubscription]]:
    """Request the group's subscriptions by topic (203). There are none if the group has no members."""

    def parse(response: RemotingCommand) -> dict[str, TopicSubscription]:
        if response.code != _SUCCESS:
            return {}
        table = field(loads_object(response.body), "subscriptionTable", dict, {})
        return {topic: topic_subscription(topic, data) for topic, data in table.items() if isinstance(data, dict)}

    return Request(
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        f"request for the subscriptions of group {group}",
        f"group {group!r}",
        parse,
        {"consumerGroup": group},
        accepts=frozenset((_SUCCESS, ResponseCode.CONSUMER_NOT_ONLINE)),
    )


def running_info(group: str, client_id: str) -> Request[Bytes | None]:
    """Request a member's ConsumerRunningInfo through a broker (307); None if the member is not connected or does not answer.

    The broker waits up to 10 s for the member. `orderedmq.rocketmq.group.running_info` parses the answer.
    """
    return Request(
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        f"request to member {client_id} of group {group}",
        f"group {group!r}",
        lambda response: response.body if response.code == _SUCCESS else None,
        {"consumerGroup": group, "clientId": client_id, "jstackEnable": "false"},
        accepts=frozenset((_SUCCESS, ResponseCode.SYSTEM_ERROR, *_SILENT)),
    )


def check_client_config(client_id: str, group: str, subscription: TopicSubscription) -> Request[None]:
    """Have the broker check a filter expression (46).

    Raises RocketMQError FILTER if the SQL does not parse, and SERVER_ERROR if the broker has disabled SQL. Check before the first
    pull, because a broker ignores a pull's expression that does not parse, and returns all messages.
    """
    body = {"clientId": client_id, "group": group, "subscriptionData": subscription.data(0)}
    return Request(
        RequestCode.CHECK_CLIENT_CONFIG,
        f"check of the expression {subscription.expression!r}",
        f"group {group!r}, topic {subscription.topic!r}",
        ignore_answer,
        body=_json(body),
    )


# --- queue locks


def lock(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Request[frozenset[MessageQueue]]:
    """Lock queues at the master of their broker (41). The answer has the requested queues that the client now holds.

    A lock lasts for 60 s at the broker, even if the connection ends, and is lost when the broker restarts. It does not prevent
    other clients from pulling.
    """

    def parse(response: RemotingCommand) -> frozenset[MessageQueue]:
        return frozenset(_queue(fields) for fields in field(loads_object(response.body), "lockOKMQSet", list, []))

    return Request(
        RequestCode.LOCK_BATCH_MQ,
        f"lock of queues by {client_id} of group {group}",
        f"group {group!r}",
        parse,
        body=_lock_body(group, client_id, queues),
    )


def unlock(group: str, client_id: str, queues: Iterable[MessageQueue]) -> Request[None]:
    """Unlock queues (42). A queue that another client holds stays locked."""
    return Request(
        RequestCode.UNLOCK_BATCH_MQ,
        f"unlock of queues by {client_id} of group {group}",
        f"group {group!r}",
        ignore_answer,
        body=_lock_body(group, client_id, queues),
    )


def _lock_body(group: str, client_id: str, queues: Iterable[MessageQueue]) -> bytes:
    names = [{"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id} for queue in queues]
    return _json({"consumerGroup": group, "clientId": client_id, "onlyThisBroker": False, "mqSet": names})


def _queue(fields: Any) -> MessageQueue:
    if not isinstance(fields, dict):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a queue is malformed: {str(fields)[:100]!r}")
    return MessageQueue(field(fields, "topic", str), field(fields, "brokerName", str), field(fields, "queueId", int))
