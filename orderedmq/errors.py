"""The errors that a user can meet: one small tree, each error with a named condition.

Rules: a message is one line that can be read alone, because Spark wraps it in a traceback. Its first sentence says what happened and where
(the topic, the broker, the queue), with the cause after a colon if it is known. It begins with a small letter, because it follows the
condition. The sentences after it say what to do; they begin with a capital letter, and the last one has no full stop. Nothing foreign (lmdb, OSError,
struct) reaches a user unmapped. A text that several places need is a function here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from orderedmq.conditions import (
    DataLossCondition,
    GroupCondition,
    JavaCondition,
    ListenerCondition,
    LockCondition,
    MessageCondition,
    OffsetCondition,
    OptionCondition,
    ProtocolCondition,
    RocketMQCondition,
    SchemaCondition,
    ServersCondition,
    SinkCondition,
    StoreCondition,
    StoreFullCondition,
    TopicCondition,
    UnavailableCondition,
)

C = TypeVar("C", bound=StrEnum)

#: Why another run of the same query is in the way, and what to do. A caller completes the sentence: when that run counts as gone.
FORMER_RUN: Final = (
    "it is paused or slow to end, or the query was started twice on one checkpointLocation. End that process, or start this "
    "query again when"
)
#: What to do about an old copy of a checkpoint.
NEWEST_CHECKPOINT: Final = "Restore the newest checkpoint, or start with a new one"


#: An account's options, and the environment variables from which the command takes them: any user of a machine sees arguments.
ACCOUNT: Final = {
    "accessKey": "ORDEREDMQ_ACCESS_KEY",
    "secretKey": "ORDEREDMQ_SECRET_KEY",
    "securityToken": "ORDEREDMQ_SECURITY_TOKEN",
}
#: Options for which the command has another name. Only names that are not plain words.
_NAMES: Final = {"namesrvAddr": "--namesrv", "topicQueueNums": "--queues", **ACCOUNT}
#: Plain words, which are a name only after "option".
_WORDS: Final = {"path": "--path", "namespace": "--namespace"}
_NAME: Final = re.compile(rf"\b(?:options? )?({'|'.join(_NAMES)})\b|\boption ({'|'.join(_WORDS)})\b")


class Remedy(NamedTuple):
    """What to do about an error, where more than a name differs between the options to set (Spark, Python) and the command.

    Both are sentences that begin with a verb in the imperative, without the full stop at the end.
    """

    options: str
    command: str


class OrderedMQError(Exception):
    """Base of all errors of this package.

    ``condition`` is ``FAMILY.SUB``, stable across versions: match on it, not on the text. ``message`` names options, ``typed`` says
    the same to users of the command. ``remedy`` becomes the last sentence of both.
    """

    family: ClassVar[str]
    #: The conditions that errors of this class can have; none for a class that is never raised itself.
    conditions: ClassVar[type[StrEnum] | tuple[()]] = ()
    #: True if the same call may succeed later without any other change.
    retriable: ClassVar[bool] = False
    #: True if the cause is an exception of the user's own code, which only its traceback explains.
    from_users_code: bool = False
    sub: StrEnum

    def __init__(self, sub: StrEnum, message: str, remedy: Remedy | None = None) -> None:
        if type(sub) is not self.conditions:
            raise AssertionError(f"{type(self).__name__} has no condition {sub!r}")
        self.sub = sub
        self.message = message if remedy is None else f"{message}. {remedy.options}"
        said = _NAME.sub(lambda found: _NAMES[found[1]] if found[1] else _WORDS[found[2]], message)
        self.typed = said if remedy is None else f"{said}. {remedy.command}"
        super().__init__(f"[{self.condition}] {self.message}")

    @property
    def condition(self) -> str:
        return f"{self.family}.{self.sub}"

    def __reduce__(self) -> tuple[type[OrderedMQError], tuple[StrEnum, str], dict[str, str]]:
        return type(self), (self.sub, self.message), {"typed": self.typed}


class ErrorOf(OrderedMQError, Generic[C]):
    """An error whose condition is a member of ``C``; mypy refuses any other."""

    sub: C

    def __init__(self, sub: C, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(sub, message, remedy)


class OptionError(ErrorOf[OptionCondition]):
    """An option is unknown, ill-typed, missing, or at odds with another."""

    family = "ORDEREDMQ_OPTION"
    conditions = OptionCondition


class SchemaError(ErrorOf[SchemaCondition]):
    """A column is missing, not a message's, or of the wrong type."""

    family = "ORDEREDMQ_SCHEMA"
    conditions = SchemaCondition


class MessageError(ErrorOf[MessageCondition]):
    """A row cannot become a message."""

    family = "ORDEREDMQ_MESSAGE"
    conditions = MessageCondition


class TopicError(ErrorOf[TopicCondition]):
    """A topic is missing, exists already, or its name or queue count is wrong."""

    family = "ORDEREDMQ_TOPIC"
    conditions = TopicCondition


class GroupError(ErrorOf[GroupCondition]):
    """A consumer group has a wrong name, is unknown or in use, or its members disagree."""

    family = "ORDEREDMQ_GROUP"
    conditions = GroupCondition


class OffsetError(ErrorOf[OffsetCondition]):
    """An offset makes no sense: malformed, beyond the end, or a range that begins after its end."""

    family = "ORDEREDMQ_OFFSET"
    conditions = OffsetCondition


class LockError(ErrorOf[LockCondition]):
    """A queue has another owner."""

    family = "ORDEREDMQ_LOCK"
    conditions = LockCondition


class DataLossError(ErrorOf[DataLossCondition]):
    """Messages that were asked for are gone, or cannot be read."""

    family = "ORDEREDMQ_DATA_LOSS"
    conditions = DataLossCondition
    #: The first offset behind the loss, if known.
    behind: int | None = None


class SinkError(ErrorOf[SinkCondition]):
    """A write cannot be published."""

    family = "ORDEREDMQ_SINK"
    conditions = SinkCondition


class ListenerError(ErrorOf[ListenerCondition]):
    """A listener leaves a queue's range in a state that cannot be committed, or is not called as it has to be."""

    family = "ORDEREDMQ_LISTENER"
    conditions = ListenerCondition


class StoreError(ErrorOf[StoreCondition | StoreFullCondition]):
    """The embedded broker's directory cannot be used."""

    family = "ORDEREDMQ_STORE"
    conditions: ClassVar[type[StrEnum]] = StoreCondition


class StoreFullError(StoreError):
    """No room in the store or on its disk. Nothing was changed; the same call works once there is room."""

    conditions = StoreFullCondition
    retriable = True
    sub: StoreFullCondition

    def __init__(self, sub: StoreFullCondition, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(sub, message, remedy)


class JavaError(ErrorOf[JavaCondition]):
    """Spark needs a Java runtime and the machine has none that is new enough; or Java made no archive of Spark's classes."""

    family = "ORDEREDMQ_JAVA"
    conditions = JavaCondition


class RocketMQError(ErrorOf[RocketMQCondition | ProtocolCondition | UnavailableCondition]):
    """A RocketMQ server refuses a request, or cannot serve what was asked."""

    family = "ORDEREDMQ_ROCKETMQ"
    conditions: ClassVar[type[StrEnum]] = RocketMQCondition

    @property
    def denied(self) -> bool:
        """Whether the account lacks the right, or the server does not know the request."""
        return self.sub in (RocketMQCondition.NO_PERMISSION, RocketMQCondition.NOT_SUPPORTED)


class ProtocolError(RocketMQError):
    """Bytes do not follow RocketMQ's remoting protocol, or a frame is too large."""

    conditions = ProtocolCondition
    sub: ProtocolCondition

    def __init__(self, sub: ProtocolCondition, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(sub, message, remedy)


class RocketMQUnavailableError(RocketMQError):
    """A RocketMQ server is busy, away, or did not answer. Nothing was done unless ``outcome_unknown``."""

    conditions = UnavailableCondition
    retriable = True
    sub: UnavailableCondition

    def __init__(self, sub: UnavailableCondition, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(sub, message, remedy)

    @property
    def outcome_unknown(self) -> bool:
        """Whether the server may have carried out the request: it was on its way, and no answer came."""
        return self.sub in (UnavailableCondition.CONNECTION_LOST, UnavailableCondition.TIMEOUT)


class ServersError(ErrorOf[ServersCondition]):
    """RocketMQ cannot be started on this machine: there are no jars, or a server does not come up."""

    family = "ORDEREDMQ_SERVERS"
    conditions = ServersCondition


def aged_out(queue: object, begin: int, least: int) -> DataLossError:
    """Messages [begin, least) of a queue were deleted by retention."""
    error = DataLossError(
        DataLossCondition.AGED_OUT,
        f"messages {begin} to {least - 1} ({least - begin}) of queue {queue} were deleted by retention before they were read",
        Remedy(
            "keep messages longer or read sooner; set failOnDataLoss=false to skip them with a warning",
            "run the command again; it begins behind them",
        ),
    )
    error.behind = least
    return error


def topic_exists(topic: str, queues: int) -> TopicError:
    """A topic of that name exists already."""
    return TopicError(
        TopicCondition.EXISTS,
        f"topic {topic!r} exists with {queues} queues",
        Remedy("choose another name, or use it as it is", "choose another name, or give --if-not-exists to use it as it is"),
    )


def no_such_queue(topic: str, queue: object, known: str = "") -> TopicError:
    """A topic lacks a queue. ``known`` says which queues it has, if that is known."""
    return TopicError(TopicCondition.NO_SUCH_QUEUE, f"topic {topic!r} has no queue {queue}{known and f'; {known}'}")


def cannot_shrink(topic: str, queues: int, wanted: int) -> TopicError:
    """A topic has more queues than are wanted."""
    return TopicError(
        TopicCondition.QUEUE_COUNT, f"topic {topic!r} has {queues} queues and cannot shrink to {wanted}; give a larger number"
    )


def missing_group(group: str, where: str) -> GroupError:
    """No group has that name. ``where`` it was looked for: in this store, in this cluster."""
    return GroupError(GroupCondition.MISSING, f"no consumer group {group!r} in {where} (orderedmq group list shows all)")


def in_use(group: str, why: str) -> GroupError:
    """A group cannot be changed from outside while a client uses it."""
    return GroupError(
        GroupCondition.IN_USE,
        f"group {group!r} is in use: {why}",
        Remedy("stop that query first, or pass force=True", "stop that query first, or give --force"),
    )


def not_an_offset(offset: int, queue: object, group: str) -> OffsetError:
    """A group cannot have a negative offset."""
    return OffsetError(
        OffsetCondition.INVALID, f"{offset} is not a valid offset of queue {queue} for group {group!r}; offsets begin at 0"
    )


def no_such_offset(queue: object, end: int, what: str) -> OffsetError:
    """A queue ends before what was asked for ("offset 30; give 20 or less")."""
    return OffsetError(OffsetCondition.BEYOND_END, f"queue {queue} ends at {end}, there is no {what}")


def outside_queue(queue: object, offset: int, end: int) -> OffsetError:
    """A group cannot be moved to an offset that its queue does not have."""
    return OffsetError(OffsetCondition.BEYOND_END, f"offset {offset} of queue {queue} is not between 0 and its end {end}")


def lost(
    group: str, queue: object, epoch: int, when: str, life: str = "its lock lives", resumes: str = "without a gap"
) -> LockError:
    """A query has lost the lock of a queue. ``life``: how long locks hold without a renewal; ``resumes``: how a restart does."""
    return _lost(f"group {group!r} lost queue {queue} (epoch {epoch}) {when}", life, resumes)


def lost_by_listener(queue: object) -> LockError:
    """A task has lost the lock of a queue that its listener consumes."""
    what = f"queue {queue} was lost while a listener consumed it, so the task stopped before its next message"
    return _lost(what, "its lock lives", "without a gap and repeats this task's work")


def _lost(what: str, life: str, resumes: str) -> LockError:
    return LockError(
        LockCondition.LOST,
        f"{what}: this query was paused or cut off for longer than {life}, or its lock was released or the group reset; restart the "
        f"query; it resumes {resumes}",
    )


def unreadable(queue: object, offset: int, why: str) -> DataLossError:
    """A stored message cannot be read, now or later."""
    error = DataLossError(
        DataLossCondition.UNREADABLE,
        f"message {offset} of queue {queue} cannot be read: {why}; set failOnDataLoss=false to skip it with a warning",
    )
    error.behind = offset + 1
    return error


def beyond_end(queue: object, end: int, known: str, cause: str) -> DataLossError:
    """A queue ends before an offset that it once had, as ``known`` says ("this query has read up to 30")."""
    return DataLossError(
        DataLossCondition.BEYOND_END,
        f"queue {queue} ends at {end}, {known}: {cause}",
        Remedy("set failOnDataLoss=false to resume at its end with a warning", "run the command again to see what is left"),
    )


def queue_deleted(queue: object, known: str) -> DataLossError:
    """A queue does not exist any more. ``known`` says what was about to be read of it."""
    return DataLossError(
        DataLossCondition.QUEUE_DELETED,
        f"queue {queue} was deleted, or taken out of its topic; {known}; set failOnDataLoss=false to continue without it",
    )


def topic_deleted(topic: str, known: str) -> DataLossError:
    """A topic does not exist any more. ``known`` says what was read of it."""
    return DataLossError(
        DataLossCondition.TOPIC_DELETED,
        f"topic {topic!r} was deleted; {known}; set failOnDataLoss=false to continue without it",
    )


def recreated(topic: str) -> DataLossError:
    """A topic was deleted and created again since the offsets were written."""
    return DataLossError(
        DataLossCondition.TOPIC_RECREATED,
        f"topic {topic!r} was deleted and created again since this query last read it, its former messages are gone: start with a new "
        "checkpointLocation, or set failOnDataLoss=false to resume at the new topic's beginning",
    )


def rows_gone(partition: int, token: str) -> SinkError:
    """Staged rows of a task are not there any more."""
    return SinkError(
        SinkCondition.TOKEN_GONE,
        f"the rows that partition {partition} staged are not in the store any more (token {token}): the write took longer than a week, or "
        "another run of the batch was published; restart the query",
    )


def no_store(path: object) -> StoreError:
    """A directory has no store, or is missing."""
    return StoreError(
        StoreCondition.MISSING,
        f"no store at {path}",
        Remedy(
            "set option path to an existing one (orderedmq topic create makes it, or writing with topicQueueNums), or use namesrvAddr for a "
            "RocketMQ cluster",
            "give --path with the directory of one, make one with orderedmq topic create TOPIC --queues N, or give --namesrv for a RocketMQ "
            "cluster",
        ),
    )


def map_full(path: object, size: int) -> StoreFullError:
    """The entries of a store have reached their greatest size."""
    return StoreFullError(
        StoreFullCondition.FULL,
        f"the entries of the store at {path} have reached their greatest size of {size} bytes; nothing was changed",
        Remedy(
            "set a retention or delete topics",
            "set a retention (orderedmq topic alter TOPIC --retention-time 7d) or delete topics (orderedmq topic delete TOPIC)",
        ),
    )
