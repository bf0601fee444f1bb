"""Requests about routes and messages, and what their answers say. Pure.

Fields are texts as Java writes them. Every field that a server's header class marks CFNotNull is sent: a missing one is answered by a
NullPointerException and not by a word. Source: the classes *RequestHeader, SendMessageProcessor, PullMessageProcessor,
AdminBrokerProcessor, ClientRequestProcessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from orderedmq.core.filters import ALL, Filter
from orderedmq.errors import MessageError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import route
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import Bytes, RemotingCommand
from orderedmq.rocketmq.wire.request import Request, nothing, number

#: The topic whose settings a topic gets that is made by a send (TopicValidator.AUTO_CREATE_TOPIC_KEY_TOPIC).
DEFAULT_TOPIC: Final = "TBW102"
DEFAULT_TOPIC_QUEUES: Final = 4

#: Flags of a pull (PullSysFlag).
_COMMIT_OFFSET: Final = 1
_SUSPEND: Final = 2
_SUBSCRIPTION: Final = 4

#: Seconds between a broker's looks at the pulls that it holds back: an answer may be that much late (PullRequestHoldService).
HOLD_SWEEP: Final = 5.0


def text(value: bool | int) -> str:
    """As Java writes it: a truth in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- nameserver


def topic_route(topic: str) -> Request[route.Route]:
    """Where a topic's queues are (105). TopicError MISSING if the nameserver has none."""
    return Request(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        f"request for the route of topic {topic}",
        f"topic {topic!r}",
        lambda response: route.parse_route(topic, response.body),
        {"topic": topic, "acceptStandardJsonOnly": "true"},
    )


def cluster_info() -> Request[route.ClusterInfo]:
    """Every broker that the nameserver knows (106)."""
    return Request(
        RequestCode.GET_BROKER_CLUSTER_INFO,
        "request for the cluster's brokers",
        "the cluster",
        lambda response: route.parse_cluster(response.body),
    )


def topic_list() -> Request[tuple[str, ...]]:
    """Every name that the nameserver has as a topic (206); see `route.user_topics`."""
    return Request(
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        "request for the list of topics",
        "the list of topics",
        lambda response: route.parse_topics(response.body),
    )


def topic_stats(topic: str) -> Request[None]:
    """Whether a broker has a topic: TopicError MISSING if not (202). What it tells beyond that is of no use here."""
    return Request(
        RequestCode.GET_TOPIC_STATS_INFO,
        f"request for the numbers of topic {topic}",
        f"topic {topic!r}",
        nothing,
        {"topic": topic},
    )


# --- sending


class SendStatus(Enum):
    """How safe a stored message is. All but SEND_OK are about the replica or the disk that was waited for (SendStatus)."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where messages were stored: of a batch ``queue_offset`` is the first one's, the others follow without a gap.

    ``message_id`` is the offset message id; a batch has several, joined by commas.
    """

    status: SendStatus
    queue_id: int
    queue_offset: int
    message_id: str


_STORED: Final = frozenset(ResponseCode(status.value) for status in SendStatus)


def send(
    queue: MessageQueue,
    body: Bytes,
    properties: str,
    *,
    group: str,
    born: int,
    flag: int = 0,
    sys_flag: int = 0,
    batch: bool = False,
) -> Request[SendResult]:
    """One message (310), or with ``batch`` a body of several in SEND_BATCH_MESSAGE's form (320); ``born`` in ms since the epoch.

    Code and field ``m`` come from the same argument: a batch that is not marked as one is stored as a single message, whose body
    is the encoded batch. A batch's ``properties`` are its envelope's: no UNIQ_KEY in there. The topic itself is named as the template
    (``c``) for one that is missing, so no broker makes a deleted topic anew with other queues. Raises MessageError NULL_BODY for a body
    without a byte, which 5.x answers with a NullPointerException.
    """
    if not len(body):
        raise MessageError(
            "NULL_BODY", f"a message for queue {queue} has no body: RocketMQ takes none without at least one byte"
        )
    fields = {
        "a": group,
        "b": queue.topic,
        "c": queue.topic,
        "d": text(DEFAULT_TOPIC_QUEUES),
        "e": text(queue.queue_id),
        "f": text(sys_flag),
        "g": text(born),
        "h": text(flag),
        "i": properties,
        "j": "0",
        "k": "false",
        "m": text(batch),
    }
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


def _send_result(response: RemotingCommand) -> SendResult:
    return SendResult(
        SendStatus(response.code),
        number(response, "queueId"),
        number(response, "queueOffset"),
        response.ext.get("msgId", ""),
    )


def send_back(
    queue: MessageQueue,
    group: str,
    commit_log_offset: int,
    *,
    delay_level: int,
    message_id: str = "",
    max_reconsume_times: int = 16,
) -> Request[None]:
    """Have the broker that holds a message put a copy into %RETRY%<group>, or with ``delay_level`` -1 into %DLQ%<group> (36).

    ``commit_log_offset`` is the message's physical offset. GroupError MISSING if the group is unknown and may not be made.
    """
    return Request(
        RequestCode.CONSUMER_SEND_MSG_BACK,
        f"message of queue {queue} sent back by group {group}",
        f"group {group!r}",
        nothing,
        {
            "offset": text(commit_log_offset),
            "group": group,
            "delayLevel": text(delay_level),
            "originMsgId": message_id,
            "originTopic": queue.topic,
            "unitMode": "false",
            "maxReconsumeTimes": text(max_reconsume_times),
        },
        repeatable=False,
    )


# --- pulling


class PullStatus(Enum):
    """What a pull found (PullStatus)."""

    FOUND = 0
    #: Nothing at this offset yet.
    NO_NEW_MESSAGE = 19
    #: Nothing that the filter lets through: go on at ``next_begin_offset``.
    NO_MATCHED_MESSAGE = 20
    #: The offset is below the first message or behind the end; also any offset but 0 of a queue that is empty.
    OFFSET_ILLEGAL = 21


@dataclass(frozen=True, slots=True)
class PullResult:
    """Stored messages, one behind the other, in ``body``; where to go on; the queue's bounds [min, max).

    ``offset_delta`` is to be added to the messages' own offsets (static topics; else 0). ``filtered``: all messages below
    ``next_begin_offset`` are there, and do not match.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    offset_delta: int
    body: Bytes
    filtered: bool = False


_PULLED: Final = frozenset(ResponseCode(status.value) for status in PullStatus)


def pull(
    queue: MessageQueue,
    group: str,
    offset: int,
    max_messages: int,
    *,
    suspend: float = 0.0,
    matching: Filter | None = None,
    commit_offset: int | None = None,
) -> Request[PullResult]:
    """Messages from ``offset`` on (11), 32 messages or 256 KiB at most unless the broker is set otherwise.

    ``suspend``: seconds for which the broker may hold the answer back until there is a message; it comes up to `HOLD_SWEEP` later
    than that, so the deadline must lie behind both. The subscription goes with the request, so the group needs no heartbeat;
    SQL that is none lets everything through there, so have it checked before (`group_requests.check_client_config`).
    ``commit_offset`` is committed on the way, by a master only.
    """
    sys_flag = _SUBSCRIPTION | (_SUSPEND if suspend > 0 else 0) | (_COMMIT_OFFSET if commit_offset is not None else 0)
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
            "sysFlag": str(sys_flag),
            "commitOffset": str(commit_offset or 0),
            "suspendTimeoutMillis": str(int(suspend * 1000)),
            "subscription": ALL if matching is None else matching.expression,
            "subVersion": "0",
            "expressionType": "TAG" if matching is None else matching.kind,
        },
        accepts=_PULLED,
    )


def _pull_result(response: RemotingCommand) -> PullResult:
    return PullResult(
        PullStatus(response.code),
        number(response, "nextBeginOffset"),
        number(response, "minOffset"),
        number(response, "maxOffset"),
        number(response, "suggestWhichBrokerId", 0),
        number(response, "offsetDelta", 0),
        response.body,
        # The same code stands for messages that are just being deleted; a slave has it for every wrong offset, too.
        response.code == ResponseCode.PULL_RETRY_IMMEDIATELY and response.remark == "NO_MATCHED_MESSAGE",
    )


def view_message(topic: str, commit_log_offset: int) -> Request[Bytes]:
    """The one stored message at a physical offset of the broker (33). A wrong offset gives anything, or SERVER_ERROR."""
    return Request(
        RequestCode.VIEW_MESSAGE_BY_ID,
        f"request for the message at offset {commit_log_offset} of the commit log",
        f"topic {topic!r}",
        lambda response: response.body,
        {"topic": topic, "offset": text(commit_log_offset)},
    )


def query_message(topic: str, key: str) -> Request[None]:
    """Whether a message of the topic has a key (12); asked for the right to ask, so what is found is not looked at."""
    return Request(
        RequestCode.QUERY_MESSAGE,
        f"search for a key in topic {topic}",
        f"topic {topic!r}",
        nothing,
        {"topic": topic, "key": key, "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "0"},
        accepts=frozenset((ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)),
    )


# --- offsets of a queue; a topic or queue that does not exist counts as an empty one, so look at the route first


def _queue_number(code: RequestCode, what: str, queue: MessageQueue, name: str, **more: str) -> Request[int]:
    return Request(
        code,
        f"request for the {what} of queue {queue}",
        f"topic {queue.topic!r}",
        lambda response: number(response, name),
        {"topic": queue.topic, "queueId": text(queue.queue_id), **more},
    )


def max_offset(queue: MessageQueue) -> Request[int]:
    """The offset that the next message gets (30). It lags some ms behind what was acknowledged."""
    return _queue_number(RequestCode.GET_MAX_OFFSET, "end", queue, "offset")


def min_offset(queue: MessageQueue) -> Request[int]:
    """The offset of the first message that is still there (31)."""
    return _queue_number(RequestCode.GET_MIN_OFFSET, "beginning", queue, "offset")


def search_offset(queue: MessageQueue, timestamp: int) -> Request[int]:
    """The offset for a time of storing in ms since the epoch (29).

    From 5.1.1 on it is the first message stored at or after it; before, the *nearest*, which may lie before it. Either may lie
    outside of the queue's bounds.
    """
    return _queue_number(
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        f"offset at {timestamp}",
        queue,
        "offset",
        timestamp=text(timestamp),
        boundaryType="lower",
    )


def earliest_store_time(queue: MessageQueue) -> Request[int]:
    """When the first message was stored, in ms since the epoch; -1 for an empty queue (32)."""
    return _queue_number(RequestCode.GET_EARLIEST_MSG_STORETIME, "first time", queue, "timestamp")
