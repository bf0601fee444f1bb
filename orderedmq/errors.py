"""The errors that a user can meet: one small tree of classes. Each error has a named condition.

Rules: a message is one line that can be read alone, because Spark wraps it in a traceback. Its first sentence says what happened and where
(the topic, the broker, the queue), with the cause after a colon if it is known. It begins with a small letter, because it follows the
condition. The sentences after it say what to do; they begin with a capital letter, and the last one has no full stop. They are for users of
Spark, of Python and of the command alike: where a flag of the command has another name than the option, it follows in brackets, as in
"namesrvAddr (--namesrv)". An error of a library or of the system (sqlite3, OSError, struct) becomes one of these errors before a user sees it.
A text that several places need is a function here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar, Final, Generic, Literal, Self, TypeVar

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

#: The kinds of failed requests, for exit codes and HTTP.
Kind = Literal["usage", "missing", "refused"]

#: Why another run of the same query blocks this one, and what to do. The caller adds the moment at which to start it again.
FORMER_RUN: Final = (
    "it is paused or slow to end, or the query was started twice on one checkpointLocation. End that process, or start this "
    "query again when"
)
#: What to do about an old copy of a checkpoint.
NEWEST_CHECKPOINT: Final = "Restore the newest checkpoint, or start with a new one"


class OrderedMQError(Exception):
    """The base of all errors of this package.

    ``condition`` is ``FAMILY.SUB`` and stays the same across versions: match on it, not on the text.
    """

    family: ClassVar[str]
    #: The conditions of this class's errors. Empty for a class that is never raised itself.
    conditions: ClassVar[type[StrEnum] | tuple[()]] = ()
    #: True if the same call may succeed later although nothing else changes. This is the only distinction between errors that pass and
    #: permanent ones: who waits for an error to pass asks for it, and sets a limit to the wait.
    retriable: ClassVar[bool] = False
    #: True if the cause is an exception raised by the user's code. Only its traceback explains it.
    from_users_code: bool = False
    sub: StrEnum

    def __init__(self, sub: StrEnum, message: str) -> None:
        if type(sub) is not self.conditions:
            raise AssertionError(f"{type(self).__name__} has no condition {sub!r}")
        self.sub = sub
        self.message = message
        super().__init__(f"[{self.condition}] {self.message}")

    @property
    def condition(self) -> str:
        """The stable name of the error, such as ORDEREDMQ_LOCK.LOST."""
        return f"{self.family}.{self.sub}"

    def during(self, step: str) -> Self:
        """Return this error with ``step``, a clause that says what failed and where, before its message."""
        return type(self)(self.sub, f"{step}: {self.message}")

    def __reduce__(self) -> tuple[type[OrderedMQError], tuple[StrEnum, str]]:
        return type(self), (self.sub, self.message)


class ErrorOf(OrderedMQError, Generic[C]):
    """An error whose condition is a member of ``C``. mypy refuses any other condition."""

    sub: C

    def __init__(self, sub: C, message: str) -> None:
        super().__init__(sub, message)


class OptionError(ErrorOf[OptionCondition]):
    """An option is unknown, missing, has a value of the wrong type, or contradicts another option."""

    family = "ORDEREDMQ_OPTION"
    conditions = OptionCondition


class SchemaError(ErrorOf[SchemaCondition]):
    """A column is missing, has the wrong type, or is not a column of messages."""

    family = "ORDEREDMQ_SCHEMA"
    conditions = SchemaCondition


class MessageError(ErrorOf[MessageCondition]):
    """A row cannot become a message."""

    family = "ORDEREDMQ_MESSAGE"
    conditions = MessageCondition


class TopicError(ErrorOf[TopicCondition]):
    """A topic does not exist or exists already, or its name or number of queues is wrong."""

    family = "ORDEREDMQ_TOPIC"
    conditions = TopicCondition


class GroupError(ErrorOf[GroupCondition]):
    """A group has an invalid name, does not exist, is in use, is another one than before, has a newer format, or its members disagree."""

    family = "ORDEREDMQ_GROUP"
    conditions = GroupCondition


class OffsetError(ErrorOf[OffsetCondition]):
    """An offset is malformed or beyond the end of its queue, or a range begins after its end."""

    family = "ORDEREDMQ_OFFSET"
    conditions = OffsetCondition


class LockError(ErrorOf[LockCondition]):
    """A queue has another owner."""

    family = "ORDEREDMQ_LOCK"
    conditions = LockCondition


class DataLossError(ErrorOf[DataLossCondition]):
    """Messages that a reader needs were deleted, or cannot be read."""

    family = "ORDEREDMQ_DATA_LOSS"
    conditions = DataLossCondition
    #: The first offset after the loss, if known.
    resume_at: int | None = None


class SinkError(ErrorOf[SinkCondition]):
    """A write cannot be published."""

    family = "ORDEREDMQ_SINK"
    conditions = SinkCondition


class ListenerError(ErrorOf[ListenerCondition]):
    """A listener leaves a queue's range in a state that cannot be committed, or is used in a wrong way."""

    family = "ORDEREDMQ_LISTENER"
    conditions = ListenerCondition


class StoreError(ErrorOf[StoreCondition | StoreFullCondition]):
    """The embedded broker's directory cannot be used."""

    family = "ORDEREDMQ_STORE"
    conditions: ClassVar[type[StrEnum]] = StoreCondition


class StoreFullError(StoreError):
    """The store or its disk is full. Nothing was changed, and the same call works when there is space again."""

    conditions = StoreFullCondition
    retriable = True
    sub: StoreFullCondition

    def __init__(self, sub: StoreFullCondition, message: str) -> None:
        super().__init__(sub, message)


class JavaError(ErrorOf[JavaCondition]):
    """The machine has no Java runtime that is new enough for Spark, or Java could not write an archive of Spark's classes."""

    family = "ORDEREDMQ_JAVA"
    conditions = JavaCondition


class RocketMQError(ErrorOf[RocketMQCondition | ProtocolCondition | UnavailableCondition]):
    """A RocketMQ server refuses a request or cannot carry it out."""

    family = "ORDEREDMQ_ROCKETMQ"
    conditions: ClassVar[type[StrEnum]] = RocketMQCondition

    @property
    def denied(self) -> bool:
        """Whether the account lacks a right, or the server does not know this kind of request."""
        return self.sub in (RocketMQCondition.NO_PERMISSION, RocketMQCondition.NOT_SUPPORTED)


class ProtocolError(RocketMQError):
    """Received bytes do not follow RocketMQ's remoting protocol, or a frame is too large."""

    conditions = ProtocolCondition
    sub: ProtocolCondition

    def __init__(self, sub: ProtocolCondition, message: str) -> None:
        super().__init__(sub, message)


class RocketMQUnavailableError(RocketMQError):
    """A RocketMQ server is busy, unreachable, or did not answer. It has changed nothing, unless ``outcome_unknown`` is true."""

    conditions = UnavailableCondition
    retriable = True
    sub: UnavailableCondition

    def __init__(self, sub: UnavailableCondition, message: str) -> None:
        super().__init__(sub, message)

    @property
    def outcome_unknown(self) -> bool:
        """Whether the server may have carried out the request, because it was sent but not answered."""
        return self.sub in (UnavailableCondition.CONNECTION_LOST, UnavailableCondition.TIMEOUT)


class ServersError(ErrorOf[ServersCondition]):
    """RocketMQ cannot be started on this machine, because its jars are missing or a server does not start."""

    family = "ORDEREDMQ_SERVERS"
    conditions = ServersCondition


def aged_out(queue: object, begin: int, least: int) -> DataLossError:
    """Return the error for messages [begin, least) of a queue that retention deleted."""
    error = DataLossError(
        DataLossCondition.AGED_OUT,
        f"messages {begin} to {least - 1} ({least - begin}) of queue {queue} were deleted by retention before they were read. "
        "Keep messages longer or read sooner. To begin after them, set failOnDataLoss=false or run the command again",
    )
    error.resume_at = least
    return error


def missing_package(feature: str, package: str, extra: str, instead: str = "") -> OptionError:
    """Return the error for a feature whose package is not installed.

    ``extra``: the extra that has the package. ``instead``: what else can be done.
    """
    return OptionError(
        OptionCondition.MISSING,
        f"{feature} needs the package {package}. Run pip install 'orderedmq[{extra}]'{instead and f', or {instead}'}",
    )


def of_other_kind(of: str, remedy: str) -> OffsetError:
    """Return the error for a checkpoint that belongs to ``of``, which is another kind of broker than the options name."""
    return OffsetError(
        OffsetCondition.INVALID,
        f"the checkpoint's offsets belong to {of}, which the options do not name. {remedy} again, or start with a new checkpointLocation: "
        "the query then begins where startingOffsets says",
    )


def stays_here(address: object) -> OptionError:
    """Return the error for a connection to ``address`` that is pickled for another process, or used in one after a fork."""
    return OptionError(
        OptionCondition.UNSUPPORTED,
        f"a connection to {address} can only be used in the process that made it, and so can its log, groups, outbox and admin, and a "
        "Producer. Call orderedmq.connect inside the function that runs in another process, or in __init__ of a listener's class",
    )


def topic_exists(topic: str, queues: int) -> TopicError:
    """Return the error for a new topic whose name is taken."""
    return TopicError(
        TopicCondition.EXISTS,
        f"topic {topic!r} exists with {queues} queues. Choose another name, or use the topic as it is (--if-not-exists)",
    )


def no_such_queue(topic: str, queue: object, known: str = "") -> TopicError:
    """Return the error for a queue that the topic lacks. ``known`` is a clause that says which queues it has, if that is known."""
    return TopicError(TopicCondition.NO_SUCH_QUEUE, f"topic {topic!r} has no queue {queue}{known and f': {known}'}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a clause that suggests the most similar of ``names``, or "" if none of them is similar."""
    similar = difflib.get_close_matches(name, names, 1, 0.7)
    return f" (did you mean {similar[0]!r}?)" if similar else ""


def missing_group(group: str, where: str, names: Iterable[str]) -> GroupError:
    """Return the error for an unknown group. ``where``: "this store" or "this cluster". ``names``: those of its groups."""
    return GroupError(
        GroupCondition.MISSING,
        f"consumer group {group!r} does not exist in {where}{did_you_mean(group, names)}. Run orderedmq group list to see all groups",
    )


def in_use(group: str, why: str) -> GroupError:
    """Return the error for a change of a group that clients use. ``why``: a clause that says who uses it."""
    return GroupError(
        GroupCondition.IN_USE, f"group {group!r} is in use: {why}. Stop that query first, or pass force=True (--force)"
    )


def not_an_offset(offset: int, queue: object, group: str) -> OffsetError:
    """Return the error for a negative offset of a group."""
    return OffsetError(
        OffsetCondition.INVALID,
        f"{offset} is not a valid offset of queue {queue} for group {group!r}, because offsets begin at 0",
    )


def no_such_offset(queue: object, end: int, what: str) -> OffsetError:
    """Return the error for an offset after the end of a queue. ``what``: what is missing, such as "offset 30. Give 20 or less"."""
    return OffsetError(OffsetCondition.BEYOND_END, f"queue {queue} ends at {end}, so it has no {what}")


def outside_queue(queue: object, offset: int, end: int) -> OffsetError:
    """Return the error for moving a group to an offset that its queue does not have."""
    return OffsetError(OffsetCondition.BEYOND_END, f"offset {offset} of queue {queue} is not between 0 and its end {end}")


def lost(
    group: str, queue: object, epoch: int, when: str, life: str = "its lock lives", resumes: str = "without a gap"
) -> LockError:
    """Return the error for a query that lost the lock of a queue.

    ``when``: a clause such as "before …". ``life`` completes "for longer than …". ``resumes`` says how a restarted query resumes.
    """
    return _lost(f"group {group!r} lost queue {queue} (epoch {epoch}) {when}", life, resumes)


def lost_by_listener(queue: object) -> LockError:
    """Return the error for a task that lost the lock of a queue that its listener consumes."""
    what = f"queue {queue} was lost while a listener consumed it, so the task stopped before its next message"
    return _lost(what, "its lock lives", "without a gap and repeats this task's work")


def _lost(what: str, life: str, resumes: str) -> LockError:
    return LockError(
        LockCondition.LOST,
        f"{what}: this query was paused or cut off for longer than {life}, or its lock was released, or the group was reset. Restart "
        f"the query. It resumes {resumes}",
    )


def unreadable(queue: object, offset: int, why: str) -> DataLossError:
    """Return the error for a stored message that can never be read."""
    error = DataLossError(
        DataLossCondition.UNREADABLE,
        f"message {offset} of queue {queue} cannot be read: {why}. Set failOnDataLoss=false to skip it with a warning",
    )
    error.resume_at = offset + 1
    return error


def beyond_end(queue: object, end: int, known: str, cause: str) -> DataLossError:
    """Return the error for a queue that ends before an offset that it once had.

    ``known``: a clause such as "this query has read up to 30". ``cause``: a clause that says why.
    """
    return DataLossError(
        DataLossCondition.BEYOND_END,
        f"queue {queue} ends at {end}, but {known}: {cause}. Set failOnDataLoss=false to resume at its end with a warning, or run the "
        "command again to see what is left",
    )


def queue_deleted(queue: object, known: str) -> DataLossError:
    """Return the error for a queue that no longer exists. ``known``: a clause that says what the reader has read or needs."""
    return DataLossError(
        DataLossCondition.QUEUE_DELETED,
        f"queue {queue} was deleted or removed from its topic, but {known}. Set failOnDataLoss=false to continue without it",
    )


def topic_deleted(topic: str, known: str) -> DataLossError:
    """Return the error for a topic that no longer exists. ``known``: a clause that says what the reader has read or needs."""
    return DataLossError(
        DataLossCondition.TOPIC_DELETED,
        f"topic {topic!r} was deleted, but {known}. Set failOnDataLoss=false to continue without it",
    )


def recreated(topic: str) -> DataLossError:
    """Return the error for a topic that was deleted and created again since the offsets were written."""
    return DataLossError(
        DataLossCondition.TOPIC_RECREATED,
        f"topic {topic!r} was deleted and created again since this query last read it, so its former messages are gone. Start with a new "
        "checkpointLocation, or set failOnDataLoss=false to resume at the new topic's beginning",
    )


def rows_gone(partition: int, token: str) -> SinkError:
    """Return the error for staged rows of a task that the store no longer has."""
    return SinkError(
        SinkCondition.TOKEN_GONE,
        f"the rows that partition {partition} staged are no longer in the store (token {token}): the write took longer than a week, "
        "another run of the batch was published, or two other runs have begun since. Restart the query",
    )


def no_store(path: object) -> StoreError:
    """Return the error for a directory that is missing or has no store."""
    return StoreError(
        StoreCondition.MISSING,
        f"there is no store at {path}. Set path to an existing store, make one with orderedmq topic create TOPIC --queues N or by writing "
        "with topicQueueNums (--queues), or set namesrvAddr (--namesrv) for a RocketMQ cluster",
    )


def kind_of(error: OrderedMQError) -> Kind:
    """Return "usage" if the request itself is wrong, "missing" if it names something that does not exist, else "refused"."""
    misnamed = (TopicCondition.BAD_NAME, TopicCondition.RESERVED, TopicCondition.AMBIGUOUS, GroupCondition.BAD_NAME)
    if isinstance(error, OptionError) or error.sub in misnamed:
        return "usage"
    absent = (StoreCondition.MISSING, TopicCondition.MISSING, TopicCondition.NO_SUCH_QUEUE, GroupCondition.MISSING)
    # The class is also checked, because members of different enumerations are equal if their texts are equal.
    if isinstance(error, StoreError | TopicError | GroupError) and error.sub in absent:
        return "missing"
    return "refused"
