"""Requests that create, change and delete topics and groups, and list groups. Pure.

Each docstring names the servers to which the caller must send the request. Numbers in parentheses are request codes.
Source: AdminBrokerProcessor, DefaultRequestProcessor (nameserver), SubscriptionGroupConfig, MixAll.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import DEFAULT_TOPIC, java_text
from orderedmq.rocketmq.wire.request import Request, ignore_answer

#: The topic attribute for the type of the topic's messages (TopicAttributes), and its default value.
_MESSAGE_TYPE: Final = "message.type"
NORMAL: Final = "NORMAL"


class TopicConfig(NamedTuple):
    """A topic's settings at a broker. ``message_type`` requires 5.0 or later. None means NORMAL for a new topic, or else no change."""

    read_queues: int
    write_queues: int
    perm: int = 6
    sys_flag: int = 0
    order: bool = False
    filter_type: str = "SINGLE_TAG"
    message_type: str | None = None


def create_topic(topic: str, queues: int, *, perm: int = 6, message_type: str | None = None) -> Request[None]:
    """Create a topic with ``queues`` read and write queues, or change their number (17). Send the request to every master.

    If the number of queues shrinks, the route immediately loses the queues with the highest ids, with their messages.
    """
    return put_topic(topic, TopicConfig(queues, queues, perm, message_type=message_type))


def put_topic(topic: str, config: TopicConfig) -> Request[None]:
    """Create a topic, or change its settings (17). The broker has written them to disk, and told the nameservers, when it answers."""
    return Request(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        f"creation of topic {topic} with {config.write_queues} queues",
        f"topic {topic!r}",
        ignore_answer,
        {
            "topic": topic,
            "defaultTopic": DEFAULT_TOPIC,
            "readQueueNums": java_text(config.read_queues),
            "writeQueueNums": java_text(config.write_queues),
            "perm": java_text(config.perm),
            "topicFilterType": config.filter_type,
            "topicSysFlag": java_text(config.sys_flag),
            "order": java_text(config.order),
            **({} if config.message_type is None else {"attributes": f"+{_MESSAGE_TYPE}={config.message_type}"}),
        },
    )


def topic_config(topic: str) -> Request[TopicConfig]:
    """Request a topic's settings (351). Send the request to a broker of version 5.0 or later that has the topic."""

    def parse(response: RemotingCommand) -> TopicConfig:
        fields = loads_object(response.body)
        return TopicConfig(
            field(fields, "readQueueNums", int),
            field(fields, "writeQueueNums", int),
            field(fields, "perm", int),
            field(fields, "topicSysFlag", int, 0),
            field(fields, "order", bool, False),
            field(fields, "topicFilterType", str, "SINGLE_TAG"),
            field(field(fields, "attributes", dict, {}), _MESSAGE_TYPE, str, NORMAL),
        )

    return Request(
        RequestCode.GET_TOPIC_CONFIG,
        f"request for the settings of topic {topic}",
        f"topic {topic!r}",
        parse,
        {"topic": topic},
    )


def delete_topic(topic: str) -> Request[None]:
    """Delete a topic and its messages (215). Send the request to every master, before `delete_topic_in_nameserver`.

    A 5.x broker with timerWheelEnable=false deletes the topic but answers SERVER_ERROR with a NullPointerException.
    """
    return Request(
        RequestCode.DELETE_TOPIC_IN_BROKER,
        f"deletion of topic {topic} at a broker",
        f"topic {topic!r}",
        ignore_answer,
        {"topic": topic},
    )


def delete_topic_in_nameserver(topic: str) -> Request[None]:
    """Delete a topic's route (216). Send the request to every nameserver, after every master has deleted the topic."""
    return Request(
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        f"deletion of the route of topic {topic}",
        f"topic {topic!r}",
        ignore_answer,
        {"topic": topic},
    )


def create_group(group: str) -> Request[None]:
    """Create a consumer group with default settings, or overwrite an existing group's settings (200). Send the request to every master."""
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
        ignore_answer,
        body=json.dumps(config).encode(),
    )


def delete_group(group: str, *, offsets: bool = True) -> Request[None]:
    """Delete a consumer group's settings and, with ``offsets``, also its offsets (207). Send the request to every master.

    4.9 has another name for the flag, so the request has both names.
    """
    flag = "true" if offsets else "false"
    return Request(
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        f"deletion of group {group}",
        f"group {group!r}",
        ignore_answer,
        {"groupName": group, "cleanOffset": flag, "removeOffset": flag},
    )


def groups() -> Request[tuple[str, ...]]:
    """Request the sorted names of all consumer groups at a broker, including the broker's own groups (201)."""
    return Request(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        "request for the list of groups",
        "the list of groups",
        lambda response: tuple(sorted(field(loads_object(response.body), "subscriptionGroupTable", dict))),
    )
