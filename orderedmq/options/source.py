"""The reader's options.

Rules: as in declared.py. Checks that differ between a stream and a batch are made only once it is known which of the two Spark
runs. This module does not ask a broker. The reader checks later whether topics and queues exist and whether offsets name every
queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

from orderedmq.broker import DEFAULT_PULL, PullSettings
from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.options.allocation import Assignment, parse_allocation, parse_assignment
from orderedmq.options.declared import MAX_PULL_BATCH, Given
from orderedmq.options.endpoint import parse_endpoint
from orderedmq.options.failed_messages import parse_failed_messages
from orderedmq.options.filter import parse_filter
from orderedmq.options.offsets_json import LATEST, OFFSETS_EXAMPLE, parse_offsets_json
from orderedmq.options.values import (
    choice,
    conflict,
    integer,
    invalid,
    only_for_cluster,
    parse_bool,
    parse_duration,
    parse_group,
    parse_name,
    parse_size,
    parse_timestamp,
    parse_topic,
    shown,
)
from orderedmq.ownership.allocate import Allocation
from orderedmq.parking.rules import origin, read_as_a_stream
from orderedmq.rows.dead_letters import dead_letter_topic
from orderedmq.rows.filters import Filter

#: Seconds to wait for locks that another client holds. In a cluster, a killed owner's locks remain for up to 60 s.
LOCK_TIMEOUT: Final = 10.0
CLUSTER_LOCK_TIMEOUT: Final = 75.0

MessageModel = Literal["clustering", "broadcasting"]
ConsumeFrom = Literal["first", "last", "timestamp"]
StartKind = Literal["committed", "earliest", "latest", "json", "timestamp"]

_MODELS: Final[Mapping[str, MessageModel]] = {"clustering": "clustering", "broadcasting": "broadcasting"}
_CONSUME_FROM: Final[Mapping[str, ConsumeFrom]] = {
    "first": "first",
    "last": "last",
    "timestamp": "timestamp",
    "consume_from_first_offset": "first",
    "consume_from_last_offset": "last",
    "consume_from_timestamp": "timestamp",
}
_STARTING: Final[Mapping[str, StartKind]] = {"committed": "committed", "earliest": "earliest", "latest": "latest"}
_START_OF: Final[Mapping[ConsumeFrom, StartKind]] = {"first": "earliest", "last": "latest", "timestamp": "timestamp"}
#: Options of a cluster, and the reason why a store does not need them.
_ONLY_FOR_CLUSTER: Final[Mapping[tuple[str, ...], str]] = {
    ("pullThresholdForQueue", "pullThresholdSizeForQueue"): (
        "a task does not prefetch from a store, where pullBatchSize limits the rows of one read"
    ),
    ("verifyBodyCrc",): "a store always verifies the checksums of its messages",
}
_ADMISSION: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger")


@dataclass(frozen=True)
class StartingOffsets:
    """Where a query without a checkpoint begins.

    Only the kind ``json`` has ``offsets`` (next offset per queue, EARLIEST or LATEST). Only the kind ``timestamp`` has
    ``timestamp`` (µs since 1970). ``explicit``: the user set startingOffsets or startingTimestamp, which reset the group.
    """

    kind: StartKind
    offsets: Mapping[MessageQueue, int] | None = None
    timestamp: int | None = None
    explicit: bool = False


@dataclass(frozen=True)
class EndingOffsets:
    """Where a batch ends (exclusive). The kind ``json`` has ``offsets``; ``timestamp`` has ``timestamp`` (µs).

    An offset may be LATEST, or EARLIEST for a queue that is left out.
    """

    kind: Literal["latest", "json", "timestamp"] = "latest"
    offsets: Mapping[MessageQueue, int] | None = None
    timestamp: int | None = None


@dataclass(frozen=True)
class SourceOptions:
    """The checked options of a reader. Durations are in seconds, times in µs since 1970, sizes in bytes. A limit of None means no limit.

    Exactly one of ``topics`` (in the given order, without duplicates) and ``topic_pattern`` is set. ``consumer_group`` is None in
    broadcasting and in a batch without a group. ``allocation``: how the members of a shared group divide its queues. ``matching``
    None: all messages. ``consume_from``: where a group that has never committed begins. ``parking_lot``: maximum messages in a
    queue's parking lot, None without a lot. ``retry_topic``: whether the group's retry topic is also read.
    """

    endpoint: Endpoint
    topics: tuple[str, ...]
    topic_pattern: str | None
    matching: Filter | None
    consumer_group: str | None
    message_model: MessageModel
    assignment: Assignment
    allocation: Allocation
    lock_timeout: float
    starting: StartingOffsets
    ending: EndingOffsets
    consume_from: ConsumeFrom
    consume_timestamp: int | None
    fail_on_data_loss: bool
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay: float
    max_bytes_per_trigger: int | None
    pull_batch_size: int
    pull_settings: PullSettings
    include_properties: bool
    include_lock_token: bool
    parking_lot: int | None = None
    retry_topic: bool = False
    query_name: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None) -> Self:
        """Return the checked options of a reader. ``streaming`` None: not known yet, so checks that depend on it are skipped.

        Raises OptionError, or TopicError or GroupError for a bad name.
        """
        given = Given(options, "source")
        endpoint = parse_endpoint(given)
        _check_kind(given, streaming)
        topics, pattern = _topics(given)
        if streaming is True:
            _refuse_parking_lots(topics)
        model = given.value("messageModel", choice(_MODELS))
        group = _group(given, model, streaming)
        assignment = parse_assignment(given, model, streaming)
        allocation = parse_allocation(given, assignment, embedded=endpoint.embedded)
        failed = parse_failed_messages(given, endpoint, group, allocation, streaming)
        lock_token = given.value("includeLockToken", parse_bool)
        if lock_token and group is not None and streaming:
            # A listener gets the token. Refuse a group for which it could write no dead letters before the listener gets a message.
            dead_letter_topic(group)
        _require_read("allocateQueues", allocation.queues, topics, pattern, endpoint)
        consume_from, consume_timestamp = _consume_from(given)
        starting = _starting(given, model, group, consume_from, consume_timestamp, streaming)
        ending = _ending(given)
        for option, offsets in (("startingOffsets", starting.offsets), ("endingOffsets", ending.offsets)):
            _require_all_topics(option, offsets, topics, pattern, endpoint)
        _check_range(starting, ending)
        most = given.optional("maxOffsetsPerTrigger", integer(1, example=100000))
        least = given.optional("minOffsetsPerTrigger", integer(1))
        if most is not None and least is not None and least > most:
            raise conflict(f"option minOffsetsPerTrigger ({least}) is more than maxOffsetsPerTrigger ({most}). Lower it")
        if given.has("maxTriggerDelay") and least is None:
            raise OptionError(
                OptionCondition.MISSING, "option maxTriggerDelay limits the wait for a minimum. Set minOffsetsPerTrigger"
            )
        return cls(
            endpoint=endpoint,
            topics=topics,
            topic_pattern=pattern,
            matching=parse_filter(given, embedded=endpoint.embedded),
            consumer_group=group,
            message_model=model,
            assignment=assignment,
            allocation=allocation,
            lock_timeout=_lock_timeout(given, endpoint),
            starting=starting,
            ending=ending,
            consume_from=consume_from,
            consume_timestamp=consume_timestamp,
            fail_on_data_loss=given.value("failOnDataLoss", parse_bool),
            max_offsets_per_trigger=most,
            min_offsets_per_trigger=least,
            max_trigger_delay=given.value("maxTriggerDelay", parse_duration),
            max_bytes_per_trigger=given.optional("maxBytesPerTrigger", parse_size),
            pull_batch_size=given.value("pullBatchSize", integer(1, MAX_PULL_BATCH, 16384)),
            pull_settings=_pull_settings(given, endpoint, group),
            include_properties=given.value("includeProperties", parse_bool),
            include_lock_token=lock_token,
            parking_lot=failed.parking_lot,
            retry_topic=failed.retry_topic,
            query_name=given.optional("queryName", parse_name),
        )

    @property
    def failures(self) -> str:
        """The name of the option that decides where failed messages wait, "" for none. All members of a group need the same value."""
        return "parkingLot" if self.parking_lot is not None else "retryTopic" if self.retry_topic else ""

    def reads(self, topic: str) -> bool:
        return _is_read(topic, self.topics, self.topic_pattern)


def _pull_settings(given: Given, endpoint: Endpoint, group: str | None) -> PullSettings:
    if endpoint.embedded:
        for names, why in _ONLY_FOR_CLUSTER.items():
            for name in filter(given.has, names):
                raise only_for_cluster(name, why)
        return DEFAULT_PULL
    return PullSettings(
        group,
        given.value("pullThresholdForQueue", integer(1, example=65536)),
        given.value("pullThresholdSizeForQueue", parse_size),
        given.value("verifyBodyCrc", parse_bool),
    )


def _is_read(topic: str, topics: tuple[str, ...], pattern: str | None) -> bool:
    return topic in topics if pattern is None else re.fullmatch(pattern, topic) is not None


def _lock_timeout(given: Given, endpoint: Endpoint) -> float:
    chosen = given.optional("lockTimeout", parse_duration)
    if chosen is not None:
        return chosen
    return LOCK_TIMEOUT if endpoint.embedded else CLUSTER_LOCK_TIMEOUT


def _check_kind(given: Given, streaming: bool | None) -> None:
    if streaming is True:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.has(name):
                raise OptionError(OptionCondition.UNSUPPORTED, f"option {name} is not supported in a stream. Use spark.read")
    if streaming is False:
        for name in _ADMISSION:
            if given.has(name):
                raise OptionError(
                    OptionCondition.UNSUPPORTED,
                    f"option {name} is not supported in a batch, which has no trigger. Use endingOffsets, or spark.readStream",
                )


def _topics(given: Given) -> tuple[tuple[str, ...], str | None]:
    if given.has("topic") == given.has("topicPattern"):
        if given.has("topic"):
            raise conflict("options topic and topicPattern exclude each other. Drop one")
        raise OptionError(OptionCondition.MISSING, "option topic is missing. Set topic (one, or a,b), or topicPattern")
    return given.optional("topic", _topic_list) or (), given.optional("topicPattern", _pattern)


def _refuse_parking_lots(topics: tuple[str, ...]) -> None:
    """Raise TopicError RESERVED if a stream would read a parking lot, because the lot's owner moves and deletes messages in it."""
    for name in topics:
        found = origin(name)
        if found is not None:
            raise read_as_a_stream(name, *found)


def _topic_list(text: str, option: str) -> tuple[str, ...]:
    topics = tuple(name.strip() for name in text.split(","))
    for index, name in enumerate(topics):
        if not name:
            raise invalid(option, f"{shown(text)} has an empty name. Write for example orders, or orders,invoices")
        parse_topic(name, option, writing=False)
        if name in topics[:index]:
            raise invalid(option, f"{shown(name)} is named twice. Name each topic once")
    return topics


def _pattern(text: str, option: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        why = error.msg if isinstance(error, re.error) else "it is too large"
        raise invalid(option, f"{shown(text)} is not a regular expression ({why}). Write for example orders-.*") from error
    if not text:
        raise invalid(option, "the pattern is empty. Write for example orders-.*")
    return text


def _group(given: Given, model: MessageModel, streaming: bool | None) -> str | None:
    group = given.optional("consumerGroup", parse_group)
    if model == "broadcasting" and group is not None:
        raise conflict(
            "option consumerGroup has no meaning with messageModel=broadcasting, where every query sees everything and the "
            "checkpoint holds its offsets. Drop consumerGroup, or use messageModel=clustering"
        )
    if model == "clustering" and group is None and streaming is True:
        raise OptionError(
            OptionCondition.MISSING,
            "option consumerGroup is missing. Set consumerGroup to the group whose locks and offsets the query uses, "
            "or messageModel=broadcasting for a query without a group",
        )
    return group


def _consume_from(given: Given) -> tuple[ConsumeFrom, int | None]:
    where = given.value("consumeFromWhere", _consume_from_where)
    timestamp = given.optional("consumeTimestamp", parse_timestamp)
    if where == "timestamp" and timestamp is None:
        raise OptionError(OptionCondition.MISSING, "option consumeFromWhere=timestamp needs a time. Set consumeTimestamp")
    if where != "timestamp" and timestamp is not None:
        raise conflict(
            f"option consumeTimestamp needs consumeFromWhere=timestamp, not {where}. Set it, or drop consumeTimestamp"
        )
    if given.has("consumeFromWhere"):
        for name in ("startingOffsets", "startingTimestamp"):
            if given.has(name) and (given.text(name) or "").lower() != "committed":
                raise conflict(f"options consumeFromWhere and {name} both say where to begin. Drop one")
    return where, timestamp


def _consume_from_where(text: str, option: str) -> ConsumeFrom:
    if text.lower() not in _CONSUME_FROM:
        raise invalid(option, f"{shown(text)} is not one of first, last, timestamp. Write for example first")
    return _CONSUME_FROM[text.lower()]


def _starting(
    given: Given,
    model: MessageModel,
    group: str | None,
    consume_from: ConsumeFrom,
    consume_timestamp: int | None,
    streaming: bool | None,
) -> StartingOffsets:
    if given.has("startingTimestamp") and given.has("startingOffsets"):
        raise conflict("options startingTimestamp and startingOffsets exclude each other. Drop one")
    timestamp = given.optional("startingTimestamp", parse_timestamp)
    if timestamp is not None:
        return StartingOffsets("timestamp", timestamp=timestamp, explicit=True)
    starting = given.optional("startingOffsets", _starting_offsets)
    if starting is None:
        if group is not None:
            return StartingOffsets("committed")
        starting = StartingOffsets(_START_OF[consume_from], timestamp=consume_timestamp)
    if starting.kind == "committed" and model == "broadcasting":
        raise conflict(
            "option startingOffsets=committed has no meaning with messageModel=broadcasting, where no group commits. "
            "Use earliest, latest or JSON"
        )
    if starting.kind == "committed" and group is None and streaming is not None:
        raise OptionError(
            OptionCondition.MISSING, "option startingOffsets=committed needs a group. Set consumerGroup, or use earliest"
        )
    if starting.kind == "latest" and streaming is False:
        name = "startingOffsets=latest" if starting.explicit else "consumeFromWhere=last"
        raise conflict(f"option {name} leaves nothing for a batch to read. Use earliest or a time")
    return starting


def _starting_offsets(text: str, option: str) -> StartingOffsets:
    kind = _STARTING.get(text.lower())
    if kind:
        return StartingOffsets(kind, explicit=True)
    if not text.startswith(("{", "[")):
        raise invalid(option, f"{shown(text)} is not committed, earliest, latest or JSON such as {OFFSETS_EXAMPLE}")
    return StartingOffsets("json", offsets=parse_offsets_json(text, option), explicit=True)


def _ending(given: Given) -> EndingOffsets:
    if given.has("endingTimestamp") and given.has("endingOffsets"):
        raise conflict("options endingTimestamp and endingOffsets exclude each other. Drop one")
    timestamp = given.optional("endingTimestamp", parse_timestamp)
    if timestamp is not None:
        return EndingOffsets("timestamp", timestamp=timestamp)
    return given.optional("endingOffsets", _ending_offsets) or EndingOffsets()


def _ending_offsets(text: str, option: str) -> EndingOffsets:
    if text.lower() == "latest":
        return EndingOffsets()
    if not text.startswith(("{", "[")):
        raise invalid(option, f"{shown(text)} is not latest or JSON such as {OFFSETS_EXAMPLE.replace('-2', '-1')}")
    return EndingOffsets("json", offsets=parse_offsets_json(text, option))


def _require_read(
    option: str, queues: Iterable[MessageQueue], topics: tuple[str, ...], pattern: str | None, endpoint: Endpoint
) -> None:
    """Raise OptionError if the topic of a queue is not read, or if a queue of the embedded broker names another broker."""
    for queue in queues:
        if not _is_read(queue.topic, topics, pattern):
            which = "topic" if pattern is None else "topicPattern"
            raise conflict(f"option {option} names {shown(queue.topic)}, which is not in {which}. Drop it")
        if endpoint.embedded and queue.broker_name != EMBEDDED_BROKER:
            raise invalid(
                option,
                f"the broker named {shown(queue.broker_name)} does not exist. The embedded broker's name is {EMBEDDED_BROKER}",
            )


def _require_all_topics(
    option: str, offsets: Mapping[MessageQueue, int] | None, topics: tuple[str, ...], pattern: str | None, endpoint: Endpoint
) -> None:
    """Raise OptionError unless the offsets name only topics that are read, and every topic that the option topic names."""
    if offsets is None:
        return
    _require_read(option, offsets, topics, pattern, endpoint)
    named = {queue.topic for queue in offsets}
    for topic in topics:
        if topic not in named:
            raise invalid(option, f"topic {shown(topic)} is missing. Name every queue of every topic")


def _check_range(starting: StartingOffsets, ending: EndingOffsets) -> None:
    if starting.timestamp is not None and ending.timestamp is not None and starting.timestamp > ending.timestamp:
        raise conflict("option startingTimestamp is after endingTimestamp. Exchange them")
    for queue, begin in (starting.offsets or {}).items():
        end = (ending.offsets or {}).get(queue, LATEST)
        if 0 <= end < begin:
            raise conflict(f"option startingOffsets begins {queue} at {begin}, after endingOffsets at {end}. Lower it")
