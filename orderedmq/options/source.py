"""The reader's options.

Rules: as in values.py. Checks that differ between a stream and a batch are made only once it is known which of the two Spark
runs. This module does not ask a broker. The reader checks later whether topics and queues exist and whether offsets name every
queue.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from orderedmq.broker import MAX_MESSAGES, PullSettings
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.values import (
    LATEST,
    OFFSETS_EXAMPLE,
    choice,
    conflict,
    integer,
    invalid,
    option,
    parse_bool,
    parse_duration,
    parse_group,
    parse_name,
    parse_offsets_json,
    parse_size,
    parse_timestamp,
    parse_topic,
    shown,
)
from orderedmq.ownership.allocate import STRATEGIES
from orderedmq.parking import origin, read_as_a_stream
from orderedmq.rows.dead_letters import dead_letter_topic
from orderedmq.rows.filters import ALL, Filter

MessageModel = Literal["clustering", "broadcasting"]
Assignment = Literal["exclusive", "shared"]
ConsumeFrom = Literal["first", "last", "timestamp"]
StartKind = Literal["committed", "earliest", "latest", "json", "timestamp"]

MAX_PULL_BATCH: Final = 1024 * 1024
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
_NO_PREFETCH: Final = "a task does not prefetch from a store, where pullBatchSize limits the rows of one read"
_ADMISSION: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger")
_STRATEGY: Final = "allocateMessageQueueStrategy"


@dataclass(frozen=True)
class StartingOffsets:
    """Where a query without a checkpoint begins.

    Only the kind ``json`` has ``offsets`` (next offset per queue, EARLIEST or LATEST). Only the kind ``timestamp`` has
    ``timestamp`` (µs since 1970). ``explicit``: the user set startingOffsets or startingTimestamp. They
    reset the group of an exclusive query, except startingOffsets=committed.
    """

    kind: StartKind
    offsets: Mapping[MessageQueue, int] | None = None
    timestamp: int | None = None
    explicit: bool = False

    @property
    def option(self) -> str:
        """The option that says where to begin, as errors name it."""
        if self.kind == "timestamp":
            return "startingTimestamp" if self.explicit else "consumeTimestamp"
        return "startingOffsets" if self.explicit else "consumeFromWhere"


@dataclass(frozen=True)
class EndingOffsets:
    """Where a batch ends (exclusive). The kind ``json`` has ``offsets``; ``timestamp`` has ``timestamp`` (µs).

    An offset may be LATEST, or EARLIEST for a queue that is left out.
    """

    kind: Literal["latest", "json", "timestamp"] = "latest"
    offsets: Mapping[MessageQueue, int] | None = None
    timestamp: int | None = None


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


def parse_tags(text: str, option: str) -> Filter | None:
    for tag in () if text == ALL else (part.strip() for part in text.split("||")):
        # Java ignores empty tags and accepts any other text as a tag, so what is meant as a list or as a pattern would silently make a
        # query read nothing.
        if not tag or any(character in tag for character in (ALL, "|", ",")):
            raise invalid(
                option,
                f"{shown(text)} is not an expression of tags, which are separated by || and have no patterns. Write for example A || B, or "
                f"{ALL} for all",
            )
    return Filter.by_tags(text)


def _sql(text: str, option: str) -> Filter:
    if not text:
        raise invalid(option, "the expression is empty. Write for example TAGS = 'a' AND amount > 5, or drop the option")
    return Filter(sql=text)


def _consume_from_where(text: str, option: str) -> ConsumeFrom:
    if text.lower() not in _CONSUME_FROM:
        raise invalid(option, f"{shown(text)} is not one of first, last, timestamp. Write for example first")
    return _CONSUME_FROM[text.lower()]


def _starting_offsets(text: str, option: str) -> StartingOffsets:
    kind = _STARTING.get(text.lower())
    if kind:
        return StartingOffsets(kind, explicit=True)
    if not text.startswith(("{", "[")):
        raise invalid(option, f"{shown(text)} is not committed, earliest, latest or JSON such as {OFFSETS_EXAMPLE}")
    return StartingOffsets("json", offsets=parse_offsets_json(text, option), explicit=True)


def _ending_offsets(text: str, option: str) -> EndingOffsets:
    if text.lower() == "latest":
        return EndingOffsets()
    if not text.startswith(("{", "[")):
        raise invalid(option, f"{shown(text)} is not latest or JSON such as {OFFSETS_EXAMPLE.replace('-2', '-1')}")
    return EndingOffsets("json", offsets=parse_offsets_json(text, option))


@dataclass(frozen=True, kw_only=True)
class SourceOptions(BrokerOptions):
    """The checked options of a reader. Durations are in seconds, times in µs since 1970, sizes in bytes. A limit of None means no limit.

    Exactly one of ``topics`` (in the given order, without duplicates) and ``topic_pattern`` is set. ``consumer_group`` is None in
    broadcasting and in a batch without a group.
    """

    topics: tuple[str, ...] = option(
        _topic_list,
        "topic to read, or several topics: a,b",
        name="topic",
        absent=(),
        shown="this or topicPattern is required",
    )
    topic_pattern: str | None = option(
        _pattern, "regular expression that the whole name of a topic must match", shown="this or topic is required"
    )
    tags: Filter | None = option(
        parse_tags,
        "read only messages with one of these tags: A || B, or * for all. Offsets, limits and lag also count the other messages",
        shown="all messages",
    )
    filter_sql: Filter | None = option(
        _sql,
        "with namesrvAddr, instead of tags: read only messages whose properties match this RocketMQ SQL: TAGS = 'A' AND amount > 5. The "
        "brokers need enablePropertyFilter=true",
        shown="all messages",
    )
    consumer_group: str | None = option(
        parse_group,
        "consumer group whose locks and offsets the query uses",
        shown="required by a stream with messageModel=clustering",
    )
    query_name: str | None = option(
        parse_name,
        "name by which the command shows this query as owner and member, because Spark does not pass a query's name to its source",
        shown="on the embedded broker Spark's name of the query once a batch has run, else the beginning of an id",
    )
    message_model: MessageModel = option(
        choice(get_args(MessageModel)),
        "clustering: use the group's locks and offsets; broadcasting: every query reads every message",
        "clustering",
    )
    assignment: Assignment = option(
        choice(get_args(Assignment)),
        "exclusive: the query owns all queues of its topics, or none; shared: the group's queries divide the queues",
        "exclusive",
    )
    allocate_message_queue_strategy: str = option(
        choice(STRATEGIES),
        "with assignment=shared: how queues are divided. All queries of the group need the same value: "
        "AVG|AVG_BY_CIRCLE|CONSISTENT_HASH",
        "AVG",
    )
    #: In a cluster, a killed owner's locks remain for up to 60 s.
    lock_timeout: float = option(
        parse_duration, "how long to wait for queue locks that another client holds", "10s", cluster="75s"
    )
    starting_offsets: StartingOffsets | None = option(
        _starting_offsets,
        'where a query without a checkpoint begins: committed, earliest, latest or JSON such as {"orders": {"embedded": {"0": 23, "1": -2}}}',
        shown="committed with a consumerGroup, else as consumeFromWhere says",
    )
    ending_offsets: EndingOffsets = option(_ending_offsets, "batch only: where to end (exclusive), latest or JSON", "latest")
    starting_timestamp: int | None = option(
        parse_timestamp,
        "begin at the first message stored at this time or later: ISO-8601 (UTC without a zone) or ms since 1970",
    )
    ending_timestamp: int | None = option(
        parse_timestamp, "batch only: end before the first message stored at this time or later, in the same formats"
    )
    consume_from_where: ConsumeFrom = option(
        _consume_from_where,
        "where to begin if the group has never committed, or without a group: first|last|timestamp",
        "first",
    )
    consume_timestamp: int | None = option(
        parse_timestamp, "the time for consumeFromWhere=timestamp, in the formats of startingTimestamp"
    )
    fail_on_data_loss: bool = option(
        parse_bool, "fail if unread messages were deleted; false: continue with a warning that counts them", "true"
    )
    max_offsets_per_trigger: int | None = option(
        integer(1, example=100000),
        "stream only: maximum messages per micro-batch, counted before filtering and without parked messages",
        shown="no limit",
    )
    min_offsets_per_trigger: int | None = option(
        integer(1), "stream only: minimum messages per micro-batch, for which a trigger waits", shown="no waiting"
    )
    max_trigger_delay: float = option(parse_duration, "stream only: maximum wait for minOffsetsPerTrigger", "15m")
    max_bytes_per_trigger: int | None = option(
        parse_size,
        "stream only: maximum bytes per micro-batch, such as 64m, without parked messages",
        shown="no limit",
    )
    pull_batch_size: int = option(
        integer(1, MAX_PULL_BATCH, 16384), f"maximum rows in a RecordBatch, 1 to {MAX_PULL_BATCH}", "16384"
    )
    pull_threshold_for_queue: int = option(
        integer(1, example=MAX_MESSAGES),
        "with namesrvAddr: maximum messages that a task prefetches per queue",
        str(MAX_MESSAGES),
        only_cluster=_NO_PREFETCH,
    )
    pull_threshold_size_for_queue: int = option(
        parse_size,
        "with namesrvAddr: maximum bytes that a task prefetches per queue, approximately",
        "100m",
        only_cluster=_NO_PREFETCH,
    )
    verify_body_crc: bool = option(
        parse_bool,
        "with namesrvAddr: verify the checksum that a broker stored with each body. A message whose body differs is unreadable",
        "false",
        only_cluster="a store always verifies the checksums of its messages",
    )
    include_properties: bool = option(parse_bool, "add the column properties", "false")
    include_key_sequence: bool = option(
        parse_bool,
        "add the column key_sequence, which grows along the messages of a key and which `process_in_order` needs",
        "false",
    )
    include_lock_token: bool = option(parse_bool, "add the column lock_token, which `consume_orderly` needs", "false")
    parking_lot: bool = option(
        parse_bool,
        "stream only: also read, when due, messages that `consume_orderly` with OrderPerKey has parked. Adds the columns lock_token and ticket",
        "false",
    )
    parking_lot_max_messages: int = option(
        integer(1, example=10000),
        "with parkingLot: number of parked messages per queue above which no more keys are parked",
        "10000",
    )

    @property
    def matching(self) -> Filter | None:
        """The filter of messages, None for all messages. The brokers check SQL."""
        return self.tags if self.filter_sql is None else self.filter_sql

    @property
    def starting(self) -> StartingOffsets:
        """Where the query begins without a checkpoint."""
        if self.starting_timestamp is not None:
            return StartingOffsets("timestamp", timestamp=self.starting_timestamp, explicit=True)
        if self.starting_offsets is not None:
            return self.starting_offsets
        return self.never_committed if self.consumer_group is None else StartingOffsets("committed")

    @property
    def never_committed(self) -> StartingOffsets:
        """Where a query begins in queues without an offset of its group."""
        return StartingOffsets(_START_OF[self.consume_from_where], timestamp=self.consume_timestamp)

    @property
    def ending(self) -> EndingOffsets:
        """Where a batch ends."""
        if self.ending_timestamp is not None:
            return EndingOffsets("timestamp", timestamp=self.ending_timestamp)
        return self.ending_offsets

    @property
    def pull_settings(self) -> PullSettings:
        return PullSettings(
            self.consumer_group, self.pull_threshold_for_queue, self.pull_threshold_size_for_queue, self.verify_body_crc
        )

    def reads(self, topic: str) -> bool:
        if self.topic_pattern is None:
            return topic in self.topics
        return re.fullmatch(self.topic_pattern, topic) is not None

    def check(self, given: Collection[str], streaming: bool | None) -> None:
        """Raise OptionError, TopicError or GroupError if the options do not fit together. ``streaming`` None: not known yet."""
        super().check(given, streaming)
        _check_kind(given, streaming)
        _check_topics(self, given, streaming)
        _check_group(self, streaming)
        _check_assignment(self, given, streaming)
        _check_parking(self, given, streaming)
        _check_filter(self, given)
        _check_range(self, given, streaming)
        _check_admission(self, given)


def _check_kind(given: Collection[str], streaming: bool | None) -> None:
    if streaming is True:
        for name in ("endingOffsets", "endingTimestamp"):
            if name in given:
                raise OptionError(OptionCondition.UNSUPPORTED, f"option {name} is not supported in a stream. Use spark.read")
    if streaming is False:
        for name in _ADMISSION:
            if name in given:
                raise OptionError(
                    OptionCondition.UNSUPPORTED,
                    f"option {name} is not supported in a batch, which has no trigger. Use endingOffsets, or spark.readStream",
                )


def _check_topics(options: SourceOptions, given: Collection[str], streaming: bool | None) -> None:
    """Also raises TopicError RESERVED if a stream would read a parking lot, whose owner moves and deletes messages in it."""
    if "topic" in given and "topicPattern" in given:
        raise conflict("options topic and topicPattern exclude each other. Drop one")
    if "topic" not in given and "topicPattern" not in given:
        raise OptionError(OptionCondition.MISSING, "option topic is missing. Set topic (one, or a,b), or topicPattern")
    for name in options.topics if streaming else ():
        parked = origin(name)
        if parked is not None:
            raise read_as_a_stream(name, *parked)


def _check_group(options: SourceOptions, streaming: bool | None) -> None:
    model, group = options.message_model, options.consumer_group
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
    if options.include_lock_token and group is not None and streaming:
        # A listener gets the token. Refuse a group for which it could write no dead letters before the listener gets a message.
        dead_letter_topic(group)


def _check_assignment(options: SourceOptions, given: Collection[str], streaming: bool | None) -> None:
    """A strategy that the assignment does not use is refused, because a user who sets it expects an effect."""
    if options.assignment != "shared":
        if _STRATEGY in given:
            raise conflict(f"option {_STRATEGY} needs assignment=shared, not {options.assignment}. Set it, or drop {_STRATEGY}")
        return
    if options.message_model == "broadcasting":
        raise conflict(
            "option assignment=shared has no meaning with messageModel=broadcasting, where every query sees everything. "
            "Drop it, or use messageModel=clustering"
        )
    if streaming is False:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option assignment=shared is not supported in a batch, which owns no queue. Drop it, or use spark.readStream",
        )


def _check_parking(options: SourceOptions, given: Collection[str], streaming: bool | None) -> None:
    if not options.parking_lot and "parkingLotMaxMessages" in given:
        raise conflict(
            "option parkingLotMaxMessages limits a parking lot, but parkingLot is false. Set parkingLot=true, or drop parkingLotMaxMessages"
        )
    if options.parking_lot and streaming is False:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option parkingLot is not supported in a batch, which has no locks. Use spark.readStream, or `orderedmq parked list`",
        )
    if options.parking_lot and options.consumer_group is None:
        raise conflict(
            "option parkingLot needs a consumer group, to which the parked messages belong. Set consumerGroup, or drop parkingLot"
        )


def _check_filter(options: SourceOptions, given: Collection[str]) -> None:
    if "tags" in given and "filterSql" in given:
        raise conflict("options tags and filterSql exclude each other. Drop one, or write the tags into the SQL: TAGS = 'a'")
    if "filterSql" in given and options.endpoint.embedded:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option filterSql is not supported by the embedded broker, because RocketMQ's brokers evaluate it. Filter the DataFrame instead "
            "(DataFrame.filter), or use tags",
        )


def _check_range(options: SourceOptions, given: Collection[str], streaming: bool | None) -> None:
    """Check where the query begins and ends."""
    where = options.consume_from_where
    if where == "timestamp" and "consumeTimestamp" not in given:
        raise OptionError(OptionCondition.MISSING, "option consumeFromWhere=timestamp needs a time. Set consumeTimestamp")
    if where != "timestamp" and "consumeTimestamp" in given:
        raise conflict(
            f"option consumeTimestamp needs consumeFromWhere=timestamp, not {where}. Set it, or drop consumeTimestamp"
        )
    starting, ending = options.starting, options.ending
    if "consumeFromWhere" in given and starting.explicit and starting.kind != "committed":
        raise conflict(f"options consumeFromWhere and {starting.option} both say where to begin. Drop one")
    if "startingTimestamp" in given and "startingOffsets" in given:
        raise conflict("options startingTimestamp and startingOffsets exclude each other. Drop one")
    if "endingTimestamp" in given and "endingOffsets" in given:
        raise conflict("options endingTimestamp and endingOffsets exclude each other. Drop one")
    if starting.kind == "committed" and options.message_model == "broadcasting":
        raise conflict(
            "option startingOffsets=committed has no meaning with messageModel=broadcasting, where no group commits. "
            "Use earliest, latest or JSON"
        )
    if starting.kind == "committed" and options.consumer_group is None and streaming is not None:
        raise OptionError(
            OptionCondition.MISSING, "option startingOffsets=committed needs a group. Set consumerGroup, or use earliest"
        )
    if starting.kind == "latest" and streaming is False:
        name = "startingOffsets=latest" if starting.explicit else "consumeFromWhere=last"
        raise conflict(f"option {name} leaves nothing for a batch to read. Use earliest or a time")
    for option_name, offsets in (("startingOffsets", starting.offsets), ("endingOffsets", ending.offsets)):
        _require_all_topics(options, option_name, offsets)
    if starting.timestamp is not None and ending.timestamp is not None and starting.timestamp > ending.timestamp:
        raise conflict(f"option {starting.option} is after endingTimestamp. Exchange them")
    for queue, begin in (starting.offsets or {}).items():
        end = (ending.offsets or {}).get(queue, LATEST)
        if 0 <= end < begin:
            raise conflict(f"option startingOffsets begins {queue} at {begin}, after endingOffsets at {end}. Lower it")


def _check_admission(options: SourceOptions, given: Collection[str]) -> None:
    most, least = options.max_offsets_per_trigger, options.min_offsets_per_trigger
    if most is not None and least is not None and least > most:
        raise conflict(f"option minOffsetsPerTrigger ({least}) is more than maxOffsetsPerTrigger ({most}). Lower it")
    if "maxTriggerDelay" in given and least is None:
        raise OptionError(
            OptionCondition.MISSING, "option maxTriggerDelay limits the wait for a minimum. Set minOffsetsPerTrigger"
        )


def _require_read(options: SourceOptions, option: str, queues: Iterable[MessageQueue]) -> None:
    """Raise OptionError if the topic of a queue is not read, or if a queue of the embedded broker names another broker."""
    for queue in queues:
        if not options.reads(queue.topic):
            which = "topic" if options.topic_pattern is None else "topicPattern"
            raise conflict(f"option {option} names {shown(queue.topic)}, which is not in {which}. Drop it")
        if options.endpoint.embedded and queue.broker_name != EMBEDDED_BROKER:
            raise invalid(
                option,
                f"the broker named {shown(queue.broker_name)} does not exist. The embedded broker's name is {EMBEDDED_BROKER}",
            )


def _require_all_topics(options: SourceOptions, option: str, offsets: Mapping[MessageQueue, int] | None) -> None:
    """Raise OptionError unless the offsets name only topics that are read, and every topic that the option topic names."""
    if offsets is None:
        return
    _require_read(options, option, offsets)
    named = {queue.topic for queue in offsets}
    for topic in options.topics:
        if topic not in named:
            raise invalid(option, f"topic {shown(topic)} is missing. Name every queue of every topic")
