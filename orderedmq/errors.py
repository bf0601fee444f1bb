"""The errors that a user can meet: one small tree, each error with a named condition.

Rules: the message is one line that stands alone (Spark wraps it in a traceback) and says what, where, the likely cause and the
remedy. Nothing foreign (lmdb, OSError, struct) reaches a user unmapped. A condition that is not listed in its class is a bug.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class Remedy(NamedTuple):
    """What to do about an error, in two wordings: the options to set (Spark, Python), and what to type for the command."""

    options: str
    command: str


class OrderedMQError(Exception):
    """Base of all errors of this package.

    ``condition`` is ``FAMILY.SUB``, stable across versions: match on it, not on the text. The remedy in ``message`` names
    options, the one in ``typed`` says what to type for the command.
    """

    family: ClassVar[str]
    conditions: ClassVar[frozenset[str]] = frozenset()
    #: True if the same call may succeed later without any other change.
    retriable: ClassVar[bool] = False
    #: True if the cause is an exception of the user's own code, which only its traceback explains.
    from_users_code: bool = False

    def __init__(self, sub: str, message: str, remedy: Remedy | None = None) -> None:
        if sub not in self.conditions:
            raise AssertionError(f"{type(self).__name__} has no condition {sub!r}")
        self.sub = sub
        self.message = message if remedy is None else f"{message}; {remedy.options}"
        self.typed = message if remedy is None else f"{message}; {remedy.command}"
        super().__init__(f"[{self.condition}] {self.message}")

    @property
    def condition(self) -> str:
        return f"{self.family}.{self.sub}"

    def __reduce__(self) -> tuple[type[OrderedMQError], tuple[str, str], dict[str, str]]:
        return type(self), (self.sub, self.message), {"typed": self.typed}


class OptionError(OrderedMQError):
    """An option is unknown, ill-typed, missing, or at odds with another."""

    family = "ORDEREDMQ_OPTION"
    conditions = frozenset(("UNKNOWN", "CONFLICT", "INVALID", "MISSING", "UNSUPPORTED"))


class SchemaError(OrderedMQError):
    """A column is missing, not a message's, or of the wrong type."""

    family = "ORDEREDMQ_SCHEMA"
    conditions = frozenset(("MISSING_COLUMN", "UNKNOWN_COLUMN", "WRONG_TYPE"))


class MessageError(OrderedMQError):
    """A row cannot become a message."""

    family = "ORDEREDMQ_MESSAGE"
    conditions = frozenset(
        (
            "BAD_KEY",
            "BAD_PROPERTY",
            "BAD_QUEUE_ID",
            "KEY_TOO_LONG",
            "NULL_BODY",
            "NULL_KEY",
            "NULL_TOPIC",
            "PROPERTIES_TOO_LARGE",
            "SEVERAL_TAGS",
            "TOO_LARGE",
        )
    )


class TopicError(OrderedMQError):
    """A topic is missing, exists already, or its name or queue count is wrong."""

    family = "ORDEREDMQ_TOPIC"
    conditions = frozenset(("MISSING", "EXISTS", "BAD_NAME", "RESERVED", "QUEUE_COUNT", "NO_SUCH_QUEUE", "AMBIGUOUS"))


class GroupError(OrderedMQError):
    """A consumer group has a wrong name, is unknown or in use, or its members disagree."""

    family = "ORDEREDMQ_GROUP"
    conditions = frozenset(("MISSING", "BAD_NAME", "IN_USE", "DISAGREES"))


class OffsetError(OrderedMQError):
    """An offset makes no sense: malformed, beyond the end, or a range that begins after its end."""

    family = "ORDEREDMQ_OFFSET"
    conditions = frozenset(("INVALID", "NEWER_FORMAT", "BEGIN_AFTER_END", "BEYOND_END", "INCOMPLETE"))


class LockError(OrderedMQError):
    """A queue has another owner."""

    family = "ORDEREDMQ_LOCK"
    conditions = frozenset(("HELD_BY_OTHER", "LOST"))


class DataLossError(OrderedMQError):
    """Messages that were asked for are gone, or cannot be read."""

    family = "ORDEREDMQ_DATA_LOSS"
    conditions = frozenset(("AGED_OUT", "TOPIC_RECREATED", "TOPIC_DELETED", "QUEUE_DELETED", "BEYOND_END", "UNREADABLE"))
    #: The first offset behind the loss, if known.
    behind: int | None = None


def aged_out(queue: object, begin: int, least: int) -> DataLossError:
    """Messages [begin, least) of a queue were deleted by retention."""
    error = DataLossError(
        "AGED_OUT",
        f"messages {begin} to {least - 1} ({least - begin}) of queue {queue} were deleted by retention before they were read",
        Remedy(
            "keep messages longer or read sooner; failOnDataLoss=false goes on behind them with a warning",
            "run the command again; it begins behind them",
        ),
    )
    error.behind = least
    return error


def missing_topic(topic: str) -> TopicError:
    """No topic has that name."""
    return TopicError(
        "MISSING",
        f"no topic {topic!r}",
        Remedy(
            f"create it (orderedmq topic create {topic} --queues N, or the sink's option topicQueueNums)",
            "orderedmq topic list shows all",
        ),
    )


def topic_exists(topic: str, queues: int) -> TopicError:
    """A topic of that name exists already."""
    return TopicError(
        "EXISTS",
        f"topic {topic!r} exists with {queues} queues",
        Remedy("choose another name, or use it as it is", "choose another name, or give --if-not-exists to use it as it is"),
    )


def in_use(group: str, why: str) -> GroupError:
    """A group cannot be changed from outside while a client uses it."""
    return GroupError(
        "IN_USE",
        f"group {group!r} is in use: {why}",
        Remedy("stop that query first, or pass force=True", "stop that query first, or give --force"),
    )


def unreadable(queue: object, offset: int, why: str) -> DataLossError:
    """A stored message cannot be read, now or later."""
    error = DataLossError(
        "UNREADABLE",
        f"message {offset} of queue {queue} cannot be read: {why}; its producer sent it so, or the broker's commit log is damaged; "
        "failOnDataLoss=false goes on without it, with a warning",
    )
    error.behind = offset + 1
    return error


def beyond_end(queue: object, end: int, known: str, cause: str) -> DataLossError:
    """A queue ends before an offset that it once had, as ``known`` says ("this query has read up to 30")."""
    return DataLossError(
        "BEYOND_END",
        f"queue {queue} ends at {end}, {known}: {cause}",
        Remedy("failOnDataLoss=false goes on at its end with a warning", "run the command again to see what is left"),
    )


def queue_deleted(queue: object, known: str) -> DataLossError:
    """A queue does not exist any more. ``known`` says what was about to be read of it."""
    return DataLossError(
        "QUEUE_DELETED",
        f"queue {queue} was deleted, or taken out of its topic; {known}; failOnDataLoss=false goes on without it",
    )


def recreated(topic: str) -> DataLossError:
    """A topic was deleted and created again since the offsets were written."""
    return DataLossError(
        "TOPIC_RECREATED",
        f"topic {topic!r} was deleted and created again since this query last read it, its former messages are gone: start with a new "
        "checkpointLocation, or set failOnDataLoss=false to go on at the new topic's beginning",
    )


class SinkError(OrderedMQError):
    """A write cannot be published."""

    family = "ORDEREDMQ_SINK"
    conditions = frozenset(
        (
            "REPLAY_DIFFERS",
            "BATCH_TOO_OLD",
            "OUT_OF_ORDER",
            "KEY_CONFLICT",
            "TOKEN_GONE",
            "ORDER_BUFFER_FULL",
            "SELECTOR_FAILED",
            "MODE",
        )
    )


class ListenerError(OrderedMQError):
    """An orderly listener leaves a queue's range in a state that cannot be committed."""

    family = "ORDEREDMQ_LISTENER"
    conditions = frozenset(("UNCOMMITTED",))


class StoreError(OrderedMQError):
    """The embedded broker's directory cannot be used."""

    family = "ORDEREDMQ_STORE"
    conditions = frozenset(
        (
            "MISSING",
            "NEWER_FORMAT",
            "NOT_A_STORE",
            "NOT_EMPTY",
            "OTHER_MACHINE",
            "REPLACED",
            "NETWORK_FILE_SYSTEM",
            "PERMISSION",
            "PLATFORM",
            "CORRUPT",
            "IO",
        )
    )


class StoreFullError(StoreError):
    """No room in the store or on its disk. Nothing was changed; the same call works once there is room."""

    conditions = frozenset(("FULL",))
    retriable = True


def no_store(path: object) -> StoreError:
    """A directory has no store, or is missing."""
    return StoreError(
        "MISSING",
        f"no store at {path}",
        Remedy(
            "set option path to an existing one (orderedmq topic create makes it, or writing with topicQueueNums), or use namesrvAddr for a "
            "RocketMQ cluster",
            "give --path with the directory of one, make one with orderedmq topic create TOPIC --queues N, or give --namesrv for a RocketMQ "
            "cluster",
        ),
    )


def map_full(path: object, size: int) -> StoreFullError:
    """A store has reached its greatest size."""
    return StoreFullError(
        "FULL",
        f"the store at {path} has reached its greatest size of {size} bytes; nothing was changed",
        Remedy(
            "set a retention or delete topics, or open it with a larger map_size",
            "set a retention (orderedmq topic alter TOPIC --retention-time 7d) or delete topics (orderedmq topic delete TOPIC)",
        ),
    )


class JavaError(OrderedMQError):
    """Spark needs a Java runtime and the machine has none that is new enough."""

    family = "ORDEREDMQ_JAVA"
    conditions = frozenset(("MISSING", "TOO_OLD"))


class RocketMQError(OrderedMQError):
    """A RocketMQ server refuses a request, or cannot serve what was asked."""

    family = "ORDEREDMQ_ROCKETMQ"
    conditions = frozenset(
        (
            "ADDRESS",
            "CLOSED",
            "FILTER",
            "INVALID_PARAMETER",
            "MESSAGE_ILLEGAL",
            "NO_PERMISSION",
            "NOT_SUPPORTED",
            "OTHER_CLUSTER",
            "SERVER_ERROR",
            "STATIC_TOPIC",
            "TLS",
        )
    )


class ProtocolError(RocketMQError):
    """Bytes do not follow RocketMQ's remoting protocol, or a frame is too large."""

    conditions = frozenset(("PROTOCOL", "FRAME_TOO_LARGE"))


class RocketMQUnavailableError(RocketMQError):
    """A RocketMQ server is busy, away, or did not answer. Nothing was done unless ``outcome_unknown``."""

    conditions = frozenset(("BUSY", "CONNECTION_LOST", "GO_AWAY", "NO_BROKER", "TIMEOUT", "UNAVAILABLE", "UNREACHABLE"))
    retriable = True

    @property
    def outcome_unknown(self) -> bool:
        """Whether the server may have carried out the request: it was on its way, and no answer came."""
        return self.sub in ("CONNECTION_LOST", "TIMEOUT")


class ServersError(OrderedMQError):
    """RocketMQ cannot be started on this machine: there are no jars, or a server does not come up."""

    family = "ORDEREDMQ_SERVERS"
    conditions = frozenset(("NO_JARS", "PORT_IN_USE", "FOLDER_IN_USE", "NOT_READY", "DIED"))
