"""Requests about routes and messages, and the parsing of their answers. Pure.

Field values are strings, as Java writes them. Requests have every field that the server's header class marks CFNotNull, because a
server answers with an unexplained NullPointerException if such a field is missing. Numbers in parentheses are request codes.
Source: the classes *RequestHeader, SendMessageProcessor, PullMessageProcessor, AdminBrokerProcessor, ClientRequestProcessor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from orderedmq.conditions import MessageCondition
from orderedmq.errors import MessageError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import Bytes, RemotingCommand
from orderedmq.rocketmq.wire.request import Request, ignore_answer, int_field, require_type, types_in
from orderedmq.rocketmq.wire.route import ABOUT_QUEUE, ClusterInfo, Route, exists, parse_cluster, parse_route, parse_topics
from orderedmq.rows.filters import ALL, Filter

#: The topic whose settings are the template for topics that a send creates (TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC).
DEFAULT_TOPIC: Final = "TBW102"
DEFAULT_TOPIC_QUEUES: Final = 4

#: The field that names the request's broker for a Proxy (AbstractRemotingActivity). Brokers ignore it. A send has ``n`` instead.
BROKER_NAME: Final = "bname"

#: The field of a broker's or a Proxy's answer with its region (MessageConst.PROPERTY_MSG_REGION).
_REGION: Final = "MSG_REGION"
#: The flag of a pull that contains its subscription (PullSysFlag).
_SUBSCRIPTION: Final = 4


def java_text(value: bool | int) -> str:
    """Return a value as Java writes it: booleans are in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- nameserver


def topic_route(topic: str) -> Request[Route]:
    """Request a topic's route (105). Raises TopicError MISSING if the nameserver has none.

    An answer with a region comes from a Proxy (AbstractRemotingActivity.writeResponse), because a nameserver's answer has no fields.
    """
    return Request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        f"request for the route of topic {topic}",
        f"topic {topic!r}",
        lambda response: parse_route(topic, response.body, by_proxy=_REGION in response.ext),
        {"topic": topic, "acceptStandardJsonOnly": "true"},
    )


def cluster_info() -> Request[ClusterInfo]:
    """Request every broker that the nameserver knows (106)."""
    return Request(
        RequestCode.GET_BROKER_CLUSTER_INFO,
        "request for the cluster's brokers",
        "the cluster",
        lambda response: parse_cluster(response.body),
    )


def topic_list() -> Request[tuple[str, ...]]:
    """Request every topic name that the nameserver lists (206). `route.user_topics` selects the users' topics."""
    return Request(
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        "request for the list of topics",
        "the list of topics",
        lambda response: parse_topics(response.body),
    )


def topic_stats(topic: str) -> Request[None]:
    """Check that a broker has a topic (202). Raises TopicError MISSING if it does not. The statistics in the answer are ignored."""
    return Request(
        RequestCode.GET_TOPIC_STATS_INFO,
        f"request for the statistics of topic {topic}",
        f"topic {topic!r}",
        ignore_answer,
        {"topic": topic},
    )


def broker_config() -> Request[tuple[int, Mapping[str, str]]]:
    """Request a broker's version (MQVersion) and its settings (26). The broker writes the settings as Java properties."""

    def parse(response: RemotingCommand) -> tuple[int, Mapping[str, str]]:
        lines = bytes(response.body).decode("utf-8", "replace").splitlines()
        return response.version, {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}

    return Request(RequestCode.GET_BROKER_CONFIG, "request for the broker's settings", "the broker's settings", parse)


# --- sending


class SendStatus(Enum):
    """How safely a message is stored (SendStatus). All values but SEND_OK mean that a replica or the disk has not confirmed the message."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where messages were stored. ``queue_offset`` is the first message's. The other messages of a batch follow without a gap.

    ``position``: the last message's offset in the broker's commit log; None if the answer does not say it.
    """

    status: SendStatus
    queue_id: int
    queue_offset: int
    position: int | None = None


#: The producer group in a send. Brokers do not check that it exists (MixAll.CLIENT_INNER_PRODUCER_GROUP).
PRODUCER_GROUP: Final = "CLIENT_INNER_PRODUCER"
#: A queue id that no topic has: Java's largest int.
_NO_QUEUE: Final = 2**31 - 1
_STORED: Final = frozenset(ResponseCode(status.value) for status in SendStatus)


def send(
    queue: MessageQueue,
    body: Bytes,
    properties: str,
    *,
    group: str,
    born: int,
    batch: bool = False,
    reconsume_times: int = 0,
    max_reconsume_times: int | None = None,
) -> Request[SendResult]:
    """Send one message (310), or with ``batch`` a body of several messages (320). ``born`` is in ms since the epoch.

    ``batch`` sets the code and also the field ``m``, because a broker stores a batch without ``m`` as one message whose body is the
    encoded batch. A batch's ``properties`` belong to its envelope and must not have a UNIQ_KEY. The template for a missing
    topic (``c``) is the topic itself, so that no broker recreates a deleted topic with other queues. Raises MessageError NULL_BODY
    for an empty body, to which 5.x would answer with a NullPointerException.

    A message of a retry topic has the number of its retries (``j``) and the maximum (``l``). Beyond the maximum, it becomes a
    dead letter.
    """
    if not len(body):
        raise MessageError(
            MessageCondition.NULL_BODY,
            f"a message for queue {queue} has an empty body, but RocketMQ requires at least one byte",
        )
    fields = {
        "a": group,
        "b": queue.topic,
        "c": queue.topic,
        "d": java_text(DEFAULT_TOPIC_QUEUES),
        "e": java_text(queue.queue_id),
        "f": "0",
        "g": java_text(born),
        "h": "0",
        "i": properties,
        "j": java_text(reconsume_times),
        "k": "false",
        "m": java_text(batch),
        "n": queue.broker_name,
    }
    if max_reconsume_times is not None:
        fields["l"] = java_text(max_reconsume_times)
    return Request(
        RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2,
        f"{'batch' if batch else 'message'} for queue {queue}",
        f"topic {queue.topic!r}",
        _send_result,
        fields,
        body,
        _STORED,
        repeatable=False,
    )


def nowhere(queue: MessageQueue) -> MessageQueue:
    """Return a queue of the same topic and broker that does not exist."""
    return queue._replace(queue_id=_NO_QUEUE)


def send_nowhere(queue: MessageQueue) -> Request[SendResult]:
    """Send a message that is not stored, because its queue does not exist. The broker checks the account's rights first."""
    return replace(send(nowhere(queue), b"\0", "", group=PRODUCER_GROUP, born=0), repeatable=True)


def refused_type(queue: MessageQueue) -> Request[str | None]:
    """Ask a Proxy whether it passes messages without properties on to the topic. Nothing is stored.

    The answer is None if it does, and otherwise the type that the topic's messages must have. Raises RocketMQUnavailableError if the
    Proxy does not know the type. A broker before 5.3.2 has no response
    code for the refusal of a queue that does not exist.
    """

    def parse(response: RemotingCommand) -> str | None:
        types = types_in(response.remark or "")
        return require_type(f"topic {queue.topic!r}", types[0]) if types is not None else None

    request = send_nowhere(queue)
    return Request(
        request.code,
        f"request for the type of the messages of topic {queue.topic}",
        request.resource,
        parse,
        request.ext,
        request.body,
        frozenset((ResponseCode.MESSAGE_ILLEGAL, ResponseCode.INVALID_PARAMETER)),
        re.compile("queueId"),
    )


def _send_result(response: RemotingCommand) -> SendResult:
    return SendResult(
        SendStatus(response.code),
        int_field(response, "queueId"),
        int_field(response, "queueOffset"),
        _position(response.ext.get("msgId", "")),
    )


def _position(ids: str) -> int | None:
    """Return the commit log's offset in the last of a broker's message ids, which ends with 16 hex digits of it."""
    try:
        return int(ids[-16:], 16)
    except ValueError:
        return None


# --- pulling


class PullStatus(Enum):
    """The outcome of a pull (PullStatus)."""

    FOUND = 0
    #: The queue has no message at this offset yet; or, if ``next_begin_offset`` is higher, the file of the consume queue is being deleted.
    NO_NEW_MESSAGE = 19
    #: No message up to ``next_begin_offset`` matches the filter. Continue there.
    NO_MATCHED_MESSAGE = 20
    #: The offset is below the first message or beyond the end. In an empty queue, this is the status for every offset but 0.
    OFFSET_ILLEGAL = 21


class PullResult(NamedTuple):
    """The result of a pull: the stored messages, concatenated in ``body``, the next offset to pull, and the queue's bounds [min, max).

    ``filtered``: all messages from the pull's offset to ``next_begin_offset`` exist, and none of them matches the filter.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    body: Bytes
    filtered: bool = False


_PULLED: Final = frozenset(ResponseCode(status.value) for status in PullStatus)


def pull(
    queue: MessageQueue,
    group: str,
    offset: int,
    max_messages: int,
    *,
    matching: Filter | None = None,
) -> Request[PullResult]:
    """Request messages from ``offset`` on (11). The broker returns at most 32 messages or 256 KiB, unless it is configured otherwise.

    The broker answers immediately, even if it has no messages. The request contains the subscription, so the group needs no heartbeat.
    If a filter's SQL does not parse, the broker returns all messages, so check the SQL first (`group_requests.check_client_config`).
    """
    return Request(
        RequestCode.PULL_MESSAGE,
        f"pull from queue {queue}",
        f"topic {queue.topic!r}, group {group!r}",
        _pull_result,
        {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "queueOffset": str(offset),
            "maxMsgNums": str(max_messages),
            "sysFlag": str(_SUBSCRIPTION),
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": ALL if matching is None else matching.expression,
            "subVersion": "0",
            "expressionType": "TAG" if matching is None else matching.kind,
            BROKER_NAME: queue.broker_name,
        },
        accepts=_PULLED,
    )


def is_there(queue: MessageQueue, group: str) -> Request[bool]:
    """Ask the queue's broker whether the queue exists, by a pull. Raises TopicError MISSING if the topic does not exist there."""
    request = pull(queue, group, 0, 1)
    return Request(
        request.code,
        f"request for the existence of queue {queue}",
        request.resource,
        exists,
        request.ext,
        accepts=_PULLED,
        absent=ABOUT_QUEUE,
    )


def _pull_result(response: RemotingCommand) -> PullResult:
    return PullResult(
        PullStatus(response.code),
        int_field(response, "nextBeginOffset"),
        int_field(response, "minOffset"),
        int_field(response, "maxOffset"),
        int_field(response, "suggestWhichBrokerId", 0),
        response.body,
        # The code alone is not enough: a broker also sends it for messages that are being deleted, and a replica for every wrong offset.
        response.code == ResponseCode.PULL_RETRY_IMMEDIATELY and response.remark == "NO_MATCHED_MESSAGE",
    )


def query_message(topic: str, key: str) -> Request[None]:
    """Search the topic for a key (12). This only tests the account's right to search, and the result is ignored."""
    return Request(
        RequestCode.QUERY_MESSAGE,
        f"search for a key in topic {topic}",
        f"topic {topic!r}",
        ignore_answer,
        {"topic": topic, "key": key, "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "0"},
        accepts=frozenset((ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)),
    )


# --- offsets of a queue. For a topic or queue that does not exist, brokers answer as for an empty one, so check the route first.


def _queue_number(code: RequestCode, what: str, queue: MessageQueue, name: str, **more: str) -> Request[int]:
    return Request(
        code,
        f"request for the {what} of queue {queue}",
        f"topic {queue.topic!r}",
        lambda response: int_field(response, name),
        {"topic": queue.topic, "queueId": java_text(queue.queue_id), BROKER_NAME: queue.broker_name, **more},
    )


def max_offset(queue: MessageQueue) -> Request[int]:
    """Request the offset that the next message will get (30). An acknowledged message counts only after some ms."""
    return _queue_number(RequestCode.GET_MAX_OFFSET, "end", queue, "offset")


def version_of(queue: MessageQueue) -> Request[int]:
    """Request the version of a queue's broker (MQVersion). Each answer of a broker contains its version, which a Proxy passes on."""
    return replace(max_offset(queue), parse=lambda response: response.version)


def min_offset(queue: MessageQueue) -> Request[int]:
    """Request the offset of the first message that is still stored (31)."""
    return _queue_number(RequestCode.GET_MIN_OFFSET, "beginning", queue, "offset")


def search_offset(queue: MessageQueue, timestamp: int) -> Request[int]:
    """Request the offset for a store time in ms since the epoch (29).

    From 5.1.1 on, this is the offset of the first message stored at or after the time. Before 5.1.1, it is the offset of the *nearest*
    message, which may be earlier. In both cases it may be outside the queue's bounds.
    """
    return _queue_number(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        f"offset at {timestamp}",
        queue,
        "offset",
        timestamp=java_text(timestamp),
        boundaryType="lower",
    )
