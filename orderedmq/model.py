"""The model of messages: queues, offset ranges, names and limits. `schema` has the Arrow schema.

Rules: a message is a row and a chunk is a RecordBatch, and no code here loops over messages. A position is the offset of the *next*
message, so a range is half-open: [begin, end). Names and sizes follow RocketMQ (TopicValidator, MessageSysFlag; broker default
``maxMessageSize`` 4 MiB, properties as a Java short: 32767 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from orderedmq.conditions import GroupCondition, TopicCondition
from orderedmq.errors import GroupError, TopicError, did_you_mean

#: The broker name of the embedded broker. In a RocketMQ cluster each broker has its own name.
EMBEDDED_BROKER: Final = "embedded"

MAX_NAME_LENGTH: Final = 127
#: No message has a greater offset.
MAX_OFFSET: Final = 2**63 - 1
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
MAX_PROPERTIES_BYTES: Final = 32767
#: A sharding key is stored as a property of the message. This limit leaves space for the other properties.
MAX_KEY_BYTES: Final = 4096
MAX_QUEUES: Final = 65536
#: 9999-12-31T23:59:59.999Z in ms since 1970: no later moment is accepted or shown.
LAST_MS: Final = 253_402_300_799_999
#: The default compression of topics. It halves the size of JSON bodies, and so the time for which writes wait for the disk (`make bench`).
DEFAULT_COMPRESSION: Final = "lz4"
#: The message types of a topic of RocketMQ 5 (TopicMessageType).
MESSAGE_TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
#: The prefixes of topics that belong to a consumer group: retries, dead letters and parked messages. Users may only read them.
RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
PARKED_PREFIX: Final = "%PARKED%"
RESERVED_PREFIXES: Final = (RETRY_PREFIX, DEAD_LETTER_PREFIX, PARKED_PREFIX)
#: The property with which a sink marks its messages over RocketMQ, where they are visible before the batch is committed. Its name is
#: short because every message has it.
SINK_STAMP: Final = "OMQ"
#: Properties of a message in a parking lot (`parking.Ticket`, `parking.Command`).
PARKED_OFFSET: Final = "OMQ_PARKED_OFFSET"
PARKED_ATTEMPTS: Final = "OMQ_PARKED_ATTEMPTS"
PARKED_COUNT: Final = "OMQ_PARKED_COUNT"
PARKED_DUE: Final = "OMQ_PARKED_DUE"
PARKED_ERROR: Final = "OMQ_PARKED_ERROR"
PARKED_ID: Final = "OMQ_PARKED_ID"
PARKED_BORN: Final = "OMQ_PARKED_BORN"
PARKED_STORED: Final = "OMQ_PARKED_STORED"
PARKED_FROM: Final = "OMQ_PARKED_FROM"
PARKED_COMMAND: Final = "OMQ_PARKED_COMMAND"
PARKED_ALONE: Final = "OMQ_PARKED_ALONE"
PARKED_PROPERTIES: Final = (
    PARKED_OFFSET, PARKED_ATTEMPTS, PARKED_COUNT, PARKED_DUE, PARKED_ERROR, PARKED_ID, PARKED_BORN, PARKED_STORED, PARKED_FROM,
    PARKED_COMMAND, PARKED_ALONE,
)  # fmt: skip
#: Properties that only RocketMQ, a client or a column may set (``MessageConst``). Every broker drops them from a user's properties,
#: because they would delay, wrap or misplace a message. A sink's mark (`SINK_STAMP`) is also dropped, because a copy of a message is not
#: the message that the sink sent.
RESERVED_PROPERTIES: Final = frozenset(
    (
        "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "MIN_OFFSET", "MAX_OFFSET",
        "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG", "RECONSUME_TIME", "MSG_REGION", "TRACE_ON",
        "UNIQ_KEY", "EXTEND_UNIQ_INFO", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "INNER_NUM", "INNER_BASE", "DUP_INFO", "CLUSTER",
        "INSTANCE_ID", "__SHARDINGKEY",
        "CHECK_IMMUNITY_TIME_IN_SECONDS", "TRAN_PREPARED_QUEUE_OFFSET", "__transactionId__", "TRANSACTION_CHECK_TIMES",
        "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "MSG_TYPE",
        "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "PROPERTY_FORWARD_QUEUE_ID", "REDIRECT",
        "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "TRACE_CONTEXT",
        "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES",
        "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL",
        "__BORNHOST", "BORN_TIMESTAMP", "__CRC32#", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID",
        SINK_STAMP, *PARKED_PROPERTIES,
    )
)  # fmt: skip
#: Names with this prefix are also reserved. Clients use such properties internally and never store them.
TRANSIENT_PREFIX: Final = "__RMQ.TRANSIENT."


def is_reserved(name: str) -> bool:
    """Return whether a property's name is reserved, so that a user may not set it."""
    return name in RESERVED_PROPERTIES or name.startswith(TRANSIENT_PREFIX)


class MessageQueue(NamedTuple):
    """One ordered queue of a topic. Sorts by topic, broker and number, as RocketMQ's class does."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


def is_parked(queue: MessageQueue) -> bool:
    """Return whether the queue is a parking lot of any group."""
    return queue.topic.startswith(PARKED_PREFIX)


def java_order(text: str) -> bytes:
    """Return a sort key that orders texts as Java's String.compareTo does: by UTF-16 units, not by code points."""
    return text.encode("utf-16-be", "surrogatepass")


class OffsetRange(NamedTuple):
    """Messages ``begin`` (inclusive) to ``end`` (exclusive) of one queue."""

    begin: int
    end: int

    @property
    def messages(self) -> int:
        return self.end - self.begin


def _bad_name(name: str) -> str | None:
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters, but at most {MAX_NAME_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return "may contain only letters, digits, '_', '-', '%' and '|'"
    return None


def check_topic(name: str, *, writing: bool) -> None:
    """Refuse an invalid topic name, and for a writer a topic that belongs to a consumer group.

    Raises TopicError BAD_NAME or RESERVED. Source: RocketMQ's TopicValidator.
    """
    why = _bad_name(name)
    if why:
        raise TopicError(TopicCondition.BAD_NAME, f"topic {name!r} {why}")
    if writing and name.startswith(RESERVED_PREFIXES):
        raise TopicError(
            TopicCondition.RESERVED,
            f"topic {name!r} belongs to a consumer group (retry, dead letters or parked messages) and cannot be created or written. "
            "Choose a name without that prefix",
        )


def check_queue_count(topic: str, queues: int) -> None:
    """Refuse a number of queues that no topic can have. Raises TopicError QUEUE_COUNT."""
    if not 1 <= queues <= MAX_QUEUES:
        raise TopicError(TopicCondition.QUEUE_COUNT, f"topic {topic!r} cannot have {queues} queues. Give 1 to {MAX_QUEUES}")


def check_group(name: str) -> None:
    """Refuse an invalid name of a consumer group. Raises GroupError BAD_NAME."""
    why = _bad_name(name)
    if why:
        raise GroupError(GroupCondition.BAD_NAME, f"consumer group {name!r} {why}")


def missing_topic(topic: str, names: Iterable[str] = ()) -> TopicError:
    """Return the error for a topic that does not exist. ``names``: those of the topics that exist, to suggest a similar one.

    Users cannot create a topic that belongs to a group. For such a topic, the error says when the broker creates it.
    """
    if topic.startswith(DEAD_LETTER_PREFIX):
        group = topic.removeprefix(DEAD_LETTER_PREFIX)
        return TopicError(
            TopicCondition.MISSING,
            f"topic {topic!r} does not exist: the broker makes it with the first dead letter of group {group!r}",
        )
    if topic.startswith(RETRY_PREFIX):
        group = topic.removeprefix(RETRY_PREFIX)
        return TopicError(
            TopicCondition.MISSING,
            f"topic {topic!r} does not exist: RocketMQ makes it when the first consumer of group {group!r} connects, and the embedded broker "
            "never does",
        )
    if topic.startswith(PARKED_PREFIX):
        return TopicError(
            TopicCondition.MISSING, f"topic {topic!r} does not exist: it is made when the first message is parked"
        )
    return TopicError(
        TopicCondition.MISSING,
        f"topic {topic!r} does not exist{did_you_mean(topic, names)}. Run orderedmq topic list to see all topics, or create it with "
        f"orderedmq topic create {topic} --queues N, or by writing to it with topicQueueNums (--queues)",
    )
