"""Requests that make, change and delete topics and groups, each to one server: the caller asks every server that it takes. Pure.

Source: AdminBrokerProcessor, DefaultRequestProcessor (nameserver), SubscriptionGroupConfig, MixAll.
"""

from __future__ import annotations

import json

from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import DEFAULT_TOPIC, text
from orderedmq.rocketmq.wire.request import Request, nothing


def create_topic(topic: str, queues: int, *, perm: int = 6) -> Request[None]:
    """Make a topic with ``queues`` queues for reading and writing, or give it as many; to every master (17).

    Lowering the number takes the upper queues out of the route at once, with whatever is in them.
    """
    return Request(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        f"creation of topic {topic} with {queues} queues",
        f"topic {topic!r}",
        nothing,
        {
            "topic": topic,
            "defaultTopic": DEFAULT_TOPIC,
            "readQueueNums": text(queues),
            "writeQueueNums": text(queues),
            "perm": text(perm),
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        },
    )


def delete_topic(topic: str) -> Request[None]:
    """Delete a topic's messages; to every master, and then `delete_topic_in_nameserver` (215).

    A 5.x broker with timerWheelEnable=false has deleted it and answers SERVER_ERROR with a NullPointerException.
    """
    return Request(
        RequestCode.DELETE_TOPIC_IN_BROKER,
        f"deletion of topic {topic} at a broker",
        f"topic {topic!r}",
        nothing,
        {"topic": topic},
    )


def delete_topic_in_nameserver(topic: str) -> Request[None]:
    """Forget a topic's route; to every nameserver, when every master has deleted the topic (216)."""
    return Request(
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        f"deletion of the route of topic {topic}",
        f"topic {topic!r}",
        nothing,
        {"topic": topic},
    )


def create_group(group: str) -> Request[None]:
    """Make a consumer group, with every setting at its default; to every master (200). Settings of one that exists are overwritten."""
    config = {
        "groupName": group,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
    }
    return Request(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        f"creation of group {group}",
        f"group {group!r}",
        nothing,
        body=json.dumps(config).encode(),
    )


def delete_group(group: str) -> Request[None]:
    """Delete a consumer group with its offsets; at every master (207). 4.9 calls the flag another name."""
    return Request(
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        f"deletion of group {group}",
        f"group {group!r}",
        nothing,
        {"groupName": group, "cleanOffset": "true", "removeOffset": "true"},
    )


def groups() -> Request[tuple[str, ...]]:
    """Every consumer group that a broker knows, its own included, sorted (201)."""
    return Request(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        "request for the list of groups",
        "the list of groups",
        lambda response: tuple(sorted(field(loads_object(response.body), "subscriptionGroupTable", dict))),
    )


def broker_config() -> Request[dict[str, str]]:
    """A broker's settings by name (26); Java's properties without escapes, as the broker writes them."""
    return Request(RequestCode.GET_BROKER_CONFIG, "request for the broker's settings", "the broker's settings", _properties)


def _properties(response: RemotingCommand) -> dict[str, str]:
    try:
        lines = str(response.body, "utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ProtocolError("PROTOCOL", f"settings are not UTF-8: {error.reason}") from None
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}
