"""The conditions of errors. Each class in `orderedmq.errors` has its own enumeration, so mypy refuses a condition of another class.

Users see a condition as ``FAMILY.MEMBER``. Rules: a member's value is its name, and no member is ever renamed or removed.
"""

from __future__ import annotations

from enum import StrEnum


class OptionCondition(StrEnum):
    UNKNOWN = "UNKNOWN"
    CONFLICT = "CONFLICT"
    INVALID = "INVALID"
    MISSING = "MISSING"
    UNSUPPORTED = "UNSUPPORTED"


class SchemaCondition(StrEnum):
    MISSING_COLUMN = "MISSING_COLUMN"
    UNKNOWN_COLUMN = "UNKNOWN_COLUMN"
    WRONG_TYPE = "WRONG_TYPE"


class MessageCondition(StrEnum):
    BAD_KEY = "BAD_KEY"
    BAD_PROPERTY = "BAD_PROPERTY"
    BAD_QUEUE_ID = "BAD_QUEUE_ID"
    KEY_TOO_LONG = "KEY_TOO_LONG"
    NULL_BODY = "NULL_BODY"
    NULL_KEY = "NULL_KEY"
    NULL_TOPIC = "NULL_TOPIC"
    PROPERTIES_TOO_LARGE = "PROPERTIES_TOO_LARGE"
    SEVERAL_TAGS = "SEVERAL_TAGS"
    TOO_LARGE = "TOO_LARGE"


class TopicCondition(StrEnum):
    MISSING = "MISSING"
    EXISTS = "EXISTS"
    BAD_NAME = "BAD_NAME"
    RESERVED = "RESERVED"
    QUEUE_COUNT = "QUEUE_COUNT"
    NO_SUCH_QUEUE = "NO_SUCH_QUEUE"
    AMBIGUOUS = "AMBIGUOUS"


class GroupCondition(StrEnum):
    MISSING = "MISSING"
    BAD_NAME = "BAD_NAME"
    IN_USE = "IN_USE"
    DISAGREES = "DISAGREES"
    CHANGED = "CHANGED"
    PARKED = "PARKED"
    NOT_PARKED = "NOT_PARKED"
    NEWER_FORMAT = "NEWER_FORMAT"


class OffsetCondition(StrEnum):
    INVALID = "INVALID"
    NEWER_FORMAT = "NEWER_FORMAT"
    BEGIN_AFTER_END = "BEGIN_AFTER_END"
    BEYOND_END = "BEYOND_END"
    INCOMPLETE = "INCOMPLETE"


class LockCondition(StrEnum):
    HELD_BY_OTHER = "HELD_BY_OTHER"
    LOST = "LOST"
    MALFORMED = "MALFORMED"


class DataLossCondition(StrEnum):
    AGED_OUT = "AGED_OUT"
    TOPIC_RECREATED = "TOPIC_RECREATED"
    TOPIC_DELETED = "TOPIC_DELETED"
    QUEUE_DELETED = "QUEUE_DELETED"
    BEYOND_END = "BEYOND_END"
    UNREADABLE = "UNREADABLE"


class SinkCondition(StrEnum):
    REPLAY_DIFFERS = "REPLAY_DIFFERS"
    BATCH_TOO_OLD = "BATCH_TOO_OLD"
    OUT_OF_ORDER = "OUT_OF_ORDER"
    QUEUES_AWAY = "QUEUES_AWAY"
    KEY_CONFLICT = "KEY_CONFLICT"
    TOKEN_GONE = "TOKEN_GONE"
    ORDER_BUFFER_FULL = "ORDER_BUFFER_FULL"
    SELECTOR_FAILED = "SELECTOR_FAILED"
    TARGET_BUSY = "TARGET_BUSY"
    MODE = "MODE"


class ListenerCondition(StrEnum):
    NOT_AWAITED = "NOT_AWAITED"
    UNCOMMITTED = "UNCOMMITTED"


class StoreCondition(StrEnum):
    MISSING = "MISSING"
    OTHER_FORMAT = "OTHER_FORMAT"
    NOT_A_STORE = "NOT_A_STORE"
    NOT_EMPTY = "NOT_EMPTY"
    OTHER_MACHINE = "OTHER_MACHINE"
    REPLACED = "REPLACED"
    NETWORK_FILE_SYSTEM = "NETWORK_FILE_SYSTEM"
    PERMISSION = "PERMISSION"
    PLATFORM = "PLATFORM"
    CORRUPT = "CORRUPT"
    IO = "IO"


class StoreFullCondition(StrEnum):
    FULL = "FULL"


class JavaCondition(StrEnum):
    MISSING = "MISSING"
    TOO_NEW = "TOO_NEW"
    TOO_OLD = "TOO_OLD"
    NO_ARCHIVE = "NO_ARCHIVE"


class RocketMQCondition(StrEnum):
    ADDRESS = "ADDRESS"
    CLOSED = "CLOSED"
    FILTER = "FILTER"
    INVALID_PARAMETER = "INVALID_PARAMETER"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    NO_PERMISSION = "NO_PERMISSION"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    OTHER_CLUSTER = "OTHER_CLUSTER"
    SERVER_ERROR = "SERVER_ERROR"
    STATIC_TOPIC = "STATIC_TOPIC"
    TLS = "TLS"


class ProtocolCondition(StrEnum):
    PROTOCOL = "PROTOCOL"
    FRAME_TOO_LARGE = "FRAME_TOO_LARGE"


class UnavailableCondition(StrEnum):
    ACCOUNT_RENEWED = "ACCOUNT_RENEWED"
    BUSY = "BUSY"
    CONNECTION_LOST = "CONNECTION_LOST"
    GO_AWAY = "GO_AWAY"
    NOT_READABLE = "NOT_READABLE"
    NO_BROKER = "NO_BROKER"
    TIMEOUT = "TIMEOUT"
    UNAVAILABLE = "UNAVAILABLE"
    UNREACHABLE = "UNREACHABLE"


class ServersCondition(StrEnum):
    NO_JARS = "NO_JARS"
    PORT_IN_USE = "PORT_IN_USE"
    FOLDER_IN_USE = "FOLDER_IN_USE"
    NOT_READY = "NOT_READY"
    DIED = "DIED"


class DemoCondition(StrEnum):
    FOLDER_IN_USE = "FOLDER_IN_USE"
    JOB_FAILED = "JOB_FAILED"


class QueryTestCondition(StrEnum):
    NOT_A_QUERY = "NOT_A_QUERY"
    NOT_KILLED = "NOT_KILLED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
