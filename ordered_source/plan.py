"""Planning on the driver for both readers: the schema, the topics, where reading begins and ends, and messages that were lost before that."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from pyspark.sql.types import StructType

from ordered_source.columns import KEY_SEQUENCE, LOCK_TOKEN, TICKET, full_schema
from orderedmq.broker import Broker, Log, QueueBounds, TopicInfo
from orderedmq.conditions import OffsetCondition, OptionCondition, TopicCondition
from orderedmq.connections import reach
from orderedmq.errors import DataLossError, OffsetError, OptionError, TopicError, aged_out, beyond_end
from orderedmq.model import RESERVED_PREFIXES, MessageQueue
from orderedmq.options.parse import parse
from orderedmq.options.source import EndingOffsets, SourceOptions, StartingOffsets
from orderedmq.options.values import EARLIEST, LATEST
from orderedmq.parking import parked_topic
from orderedmq.routing.generations import Generations
from orderedmq.spark_support import concise

logger = logging.getLogger("orderedmq")


@concise
def planned_schema(options: Mapping[str, str]) -> StructType:
    """Check options, store and topics, and return the schema of a ``load()`` without a user's schema."""
    parsed = parse(SourceOptions, options, streaming=None)
    with reach(parsed.endpoint) as broker:
        check(broker, parsed)
    optional = {
        "properties": parsed.include_properties,
        KEY_SEQUENCE: parsed.include_key_sequence,
        LOCK_TOKEN: parsed.include_lock_token or parsed.parking_lot,
        TICKET: parsed.parking_lot,
    }
    return full_schema(*(name for name, included in optional.items() if included))


def check(broker: Broker, options: SourceOptions) -> None:
    """Check topics, rights and filter before any side effect.

    Raises TopicError MISSING, RocketMQError NO_PERMISSION, OptionError for a filter that a broker cannot apply, GroupError
    BAD_NAME for a group whose parking lots cannot be named.
    """
    names = topics(broker, options)
    if not names:
        raise TopicError(
            TopicCondition.MISSING, f"no topic matches topicPattern {options.topic_pattern!r} yet. Create one first"
        )
    _require_rights(broker, options, [topic.name for topic in names])
    if options.matching is not None:
        broker.log.require_filter(options.matching, [topic.name for topic in names])


def generations(broker: Broker, columns: Collection[str], queues: Collection[MessageQueue]) -> dict[MessageQueue, Generations]:
    """Return the generations of these queues, if the columns need them.

    Call this after the ends of the queues are known, so that all resizes that concern the messages have been recorded.
    """
    topics = {queue.topic for queue in queues} if KEY_SEQUENCE in columns else set()
    resizes = {topic: broker.log.resizes([topic]) for topic in topics}
    return {queue: Generations.of(queue, resizes.get(queue.topic, ())) for queue in queues}


def _require_rights(broker: Broker, options: SourceOptions, names: list[str]) -> None:
    if options.parking_lot:
        assert options.consumer_group is not None
        names = names + [parked_topic(options.consumer_group, name) for name in names]
    broker.log.require_rights(names, options.consumer_group)


def topics(broker: Broker, options: SourceOptions) -> list[TopicInfo]:
    """Return the topics that the options select. Raises TopicError MISSING if a topic that the option topic names does not exist."""
    if options.topic_pattern is None:
        return [broker.log.topic(name) for name in sorted(options.topics)]
    return [topic for topic in broker.log.topics() if selects(options, topic.name)]


def selects(options: SourceOptions, topic: str) -> bool:
    """Return whether the option topic names the topic, or topicPattern matches it."""
    # A dead-letter topic is read only if an option names it, because a pattern such as ".*" means the user's topics.
    return options.reads(topic) and (options.topic_pattern is None or not topic.startswith(RESERVED_PREFIXES))


def queues_of(broker: Broker, topics: Sequence[TopicInfo]) -> list[MessageQueue]:
    return [queue for topic in topics for queue in broker.log.queues(topic.name)]


def beginnings(
    log: Log,
    starting: StartingOffsets,
    queues: Sequence[MessageQueue],
    bounds: Mapping[MessageQueue, QueueBounds],
    every: Iterable[MessageQueue],
) -> dict[MessageQueue, int]:
    """Return the offset at which to begin in each of ``queues`` according to ``starting``, whose kind is not "committed".

    ``every``: all queues of the topics, which include the queues that other members of the group own. Raises OffsetError INCOMPLETE or
    BEYOND_END, OptionError INVALID for a queue that does not exist.
    """
    match starting.kind:
        case "latest":
            return {queue: bounds[queue].max_offset for queue in queues}
        case "timestamp":
            assert starting.timestamp is not None
            return {queue: log.offset_at(queue, starting.timestamp) for queue in queues}
        case "json":
            return _named_offsets("startingOffsets", starting.offsets or {}, queues, bounds, every)
    return {queue: bounds[queue].min_offset for queue in queues}


def endings(
    log: Log,
    ending: EndingOffsets,
    queues: Sequence[MessageQueue],
    bounds: Mapping[MessageQueue, QueueBounds],
    every: Iterable[MessageQueue],
) -> dict[MessageQueue, int]:
    """Return the offset at which a batch read ends in each of ``queues`` (exclusive). Raises the errors of `beginnings`."""
    match ending.kind:
        case "timestamp":
            assert ending.timestamp is not None
            return {queue: log.offset_at(queue, ending.timestamp) for queue in queues}
        case "json":
            return _named_offsets("endingOffsets", ending.offsets or {}, queues, bounds, every)
    return {queue: bounds[queue].max_offset for queue in queues}


def _named_offsets(
    option: str,
    offsets: Mapping[MessageQueue, int],
    queues: Sequence[MessageQueue],
    bounds: Mapping[MessageQueue, QueueBounds],
    every: Iterable[MessageQueue],
) -> dict[MessageQueue, int]:
    missing = [str(queue) for queue in queues if queue not in offsets]
    if missing:
        raise OffsetError(
            OffsetCondition.INCOMPLETE,
            f"{option} must name every queue, but it lacks {', '.join(missing[:8])}. Use -2 for earliest and -1 for latest",
        )
    unknown = sorted(set(offsets).difference(every))
    if unknown:
        raise OptionError(OptionCondition.INVALID, f"{option} names queue {unknown[0]}, which does not exist")
    out: dict[MessageQueue, int] = {}
    for queue in queues:
        at, offset = bounds[queue], offsets[queue]
        if offset == EARLIEST:
            offset = at.min_offset
        elif offset == LATEST:
            offset = at.max_offset
        if offset > at.max_offset:
            raise OffsetError(
                OffsetCondition.BEYOND_END, f"{option} has offset {offset} for queue {queue}, which ends at {at.max_offset}"
            )
        out[queue] = offset
    return out


def check_position(
    queue: MessageQueue, position: int, at: QueueBounds, reader: str, cause: str, *, end: int | None = None
) -> tuple[int, DataLossError | None]:
    """Return the offset from which a reader at ``position`` can continue, and the error if messages were lost, otherwise None.

    ``reader``: the reader's name in the error ("this query"). ``cause``: why a queue of this broker can end too early
    (`Log.tail_loss`). ``end``: the end of the requested range (exclusive). Messages from there on do not count as lost.
    """
    least = at.min_offset if end is None else min(at.min_offset, end)
    if position < least:
        return least, aged_out(queue, position, least)
    if position > at.max_offset:
        return at.max_offset, beyond_end(queue, at.max_offset, f"{reader} has read up to {position}", cause)
    return position, None


def fail_or_warn(error: DataLossError, *, fail: bool) -> None:
    """Raise the error, or log it as a warning if the user accepts losses (``fail`` is failOnDataLoss)."""
    if fail:
        raise error
    logger.warning("failOnDataLoss=false accepts a loss: %s", error)
