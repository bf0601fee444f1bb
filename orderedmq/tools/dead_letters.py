"""Reads, selects and counts the dead letters in %DLQ%<group>, and says which of them were replayed (`tools.replay`).

Rules: a replay of all letters commits the offset of REPLAY_GROUP in the dead-letter queues, and the letters before it count as replayed.
A replay of selected letters copies them and records nothing. Each message counts its replays (`rows.dead_letters.REPLAYS`). If the count
of a dead letter has reached `LetterFilter.max_replays`, the letter is in quarantine: only a replay of letters in quarantine sends it, and
other replays skip it.

The embedded broker has one queue for the letters of a group. Each RocketMQ broker has a separate queue with separate offsets, and
a letter is stored at the broker of the original message. So a letter's offset identifies it only together with its broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from orderedmq.broker import Broker, Log, QueueBounds
from orderedmq.conditions import OffsetCondition, OptionCondition, TopicCondition
from orderedmq.errors import (
    OffsetError,
    OptionError,
    RocketMQError,
    TopicError,
    no_such_offset,
)
from orderedmq.model import DEAD_LETTER_PREFIX, MessageQueue, check_group
from orderedmq.options.values import whole_number
from orderedmq.parking import GIVEN_BACK
from orderedmq.pulls import pulls
from orderedmq.rows import dead_letters as noted

#: The consumer group of replays. Its offset in a dead-letter queue is where the next replay of all letters begins.
REPLAY_GROUP: Final = "dlq-replay"
#: A message that becomes a dead letter again after this many replays is in quarantine.
MAX_REPLAYS: Final = 3
#: Maximum letters and bytes of bodies per commit. If the replay is killed between append and commit, up to this many are sent twice.
PIECE: Final = 500
PIECE_BYTES: Final = 8 * 1024 * 1024
#: Properties that describe a letter's origin and failure and do not belong to the original message.
NOTED: Final = frozenset(
    (
        noted.REAL_TOPIC,
        noted.REAL_QUEUE,
        noted.ORIGIN_BROKER,
        noted.ORIGIN_OFFSET,
        noted.ERROR,
        noted.RECONSUME_TIME,
        noted.ORIGIN_MESSAGE_ID,
    )
)

_COLUMNS: Final = ("queue_offset", "body", "tags", "keys", "sharding_key", "properties", "store_timestamp")


@dataclass(frozen=True)
class DeadLetter:
    """A message in a queue of %DLQ%<group>.

    ``offset`` and ``stored`` (µs since 1970) refer to the dead-letter queue. ``replays``: how often replays of the group's
    letters have sent the message. A field is None if the letter does not contain this information.
    """

    queue: MessageQueue
    offset: int
    origin: MessageQueue | None
    origin_offset: int | None
    body: bytes
    tags: str | None
    keys: str | None
    sharding_key: str | None
    error: str | None
    retries: int | None
    message_id: str | None
    stored: int
    properties: Mapping[str, str]

    @property
    def group(self) -> str:
        return self.queue.topic.removeprefix(DEAD_LETTER_PREFIX)

    @property
    def replays(self) -> int:
        return noted.replays(self.properties, self.group)

    def row(self) -> dict[str, Any]:
        """Return the message that a replay sends, as a row with the producer's columns."""
        return {
            "body": self.body,
            "tags": self.tags,
            "keys": self.keys,
            "sharding_key": self.sharding_key,
            "properties": list(noted.replayed_once_more(self.properties, self.group).items()),
        }


@dataclass(frozen=True)
class LetterFilter:
    """Selects dead letters of a group: those that meet all conditions. A condition that is empty or None selects every letter.

    ``keys``: the sharding key is one of these. ``error``: the letter's error contains this text (case-sensitive). ``since``: the
    letter was stored at this time or later (µs since 1970). ``offsets``: its offset is one of these, at one broker.
    ``quarantined``: whether it is in quarantine. ``at_broker``: it is stored at this broker.
    """

    keys: frozenset[str] = frozenset()
    error: str | None = None
    since: int | None = None
    offsets: frozenset[int] = frozenset()
    quarantined: bool | None = None
    max_replays: int = MAX_REPLAYS
    at_broker: str | None = None

    @property
    def chooses(self) -> bool:
        """Whether the filter has a condition on keys, errors, times or offsets."""
        return bool(self.keys or self.error or self.since is not None or self.offsets)

    def holds(self, letter: DeadLetter) -> bool:
        """Whether the letter is in quarantine."""
        return letter.replays >= self.max_replays

    def replayed(self, letter: DeadLetter, upto: int) -> bool:
        """Whether a replay of all letters has sent the letter. ``upto``: see `replayed_to`."""
        return letter.offset < upto and not self.holds(letter)

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter's key and error meet the conditions. `spans` applies ``since`` and ``offsets``."""
        return (not self.keys or letter.sharding_key in self.keys) and (not self.error or self.error in (letter.error or ""))

    def passes(self, letter: DeadLetter) -> bool:
        """Return whether the letter is chosen, also by its quarantine."""
        return self.matches(letter) and (self.quarantined is None or self.quarantined == self.holds(letter))

    def spans(self, log: Log, queue: MessageQueue, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of [begin, end) that may contain selected letters. Raises OffsetError if a selected offset has no letter."""
        if self.offsets:
            return _spans(queue, sorted(self.offsets), begin, end)
        return [(begin if self.since is None else max(begin, min(log.offset_at(queue, self.since), end)), end)]


#: The letters that a replay of all letters sends.
ALL: Final = LetterFilter(quarantined=False)


@dataclass(frozen=True)
class LetterCount:
    """Counts of a group's dead letters: those stored, those that no replay of all letters has reached, and all ever written."""

    stored: int
    waiting: int
    written: int


def letter_queues(broker: Broker, group: str, chosen: LetterFilter = LetterFilter()) -> list[MessageQueue]:
    """Return the queues that may contain the chosen dead letters; an empty list if the group never had a letter.

    Raises GroupError BAD_NAME or MISSING; OptionError INVALID if the broker that ``chosen`` names has no letters of the group,
    MISSING if letters are chosen by their offsets and several brokers have letters.
    """
    check_group(group)
    try:
        every = broker.log.queues(DEAD_LETTER_PREFIX + group)
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        broker.admin.group_offsets(group)
        return []
    queues = at_broker(every, chosen.at_broker)
    if chosen.offsets:
        require_one_broker(queues)
    return queues


def at_broker(queues: Sequence[MessageQueue], name: str | None) -> list[MessageQueue]:
    """Return the dead-letter queues at the broker ``name``, or all if it is None. Raises OptionError INVALID if the broker has none."""
    chosen = [queue for queue in queues if name in (None, queue.broker_name)]
    if queues and not chosen:
        names = ", ".join(queue.broker_name for queue in queues)
        raise OptionError(OptionCondition.INVALID, f"broker {name!r} has no queue of {queues[0].topic}. Name one of {names}")
    return chosen


def require_one_broker(queues: Sequence[MessageQueue]) -> None:
    """Raise OptionError MISSING if several brokers have letters, so that an offset does not identify a letter."""
    if len(queues) > 1:
        names = ", ".join(queue.broker_name for queue in queues)
        raise OptionError(
            OptionCondition.MISSING,
            f"each broker numbers its dead letters from 0, and {len(queues)} brokers have letters of {queues[0].topic}. Name one of "
            f"{names} with at_broker (--at-broker)",
        )


def read(log: Log, queue: MessageQueue, begin: int, end: int) -> Iterator[list[DeadLetter]]:
    """Yield the letters from ``begin`` to ``end``, piece by piece. Raises DataLossError if they were deleted."""
    index = _COLUMNS.index("store_timestamp")
    for batch in pulls(log, queue, begin, end, PIECE, PIECE_BYTES, _COLUMNS):
        yield [
            _letter(queue, row)
            for row in batch.set_column(index, "store_timestamp", batch.column(index).cast(pa.int64())).to_pylist()
        ]


def find(log: Log, queue: MessageQueue, chosen: LetterFilter, begin: int, end: int, limit: int) -> Iterator[list[DeadLetter]]:
    """Yield the letters from ``begin`` to ``end`` that ``chosen`` selects, piece by piece, at most ``limit`` letters."""
    if not chosen.chooses and chosen.quarantined is None:
        end = min(end, begin + limit)
    for span in chosen.spans(log, queue, begin, end):
        for piece in read(log, queue, *span):
            letters = [letter for letter in piece if chosen.passes(letter)][:limit]
            yield letters
            limit -= len(letters)
            if not limit:
                return


def _letter(queue: MessageQueue, row: dict[str, Any]) -> DeadLetter:
    properties = dict(row["properties"] or ())
    topic, number = properties.get(noted.REAL_TOPIC), _number(properties.get(noted.REAL_QUEUE))
    has_origin = topic is not None and number is not None
    return DeadLetter(
        queue=queue,
        offset=row["queue_offset"],
        origin=MessageQueue(topic or "", properties.get(noted.ORIGIN_BROKER, ""), number or 0) if has_origin else None,
        origin_offset=None if (at := _number(properties.get(noted.ORIGIN_OFFSET))) is None else at % GIVEN_BACK,
        body=row["body"],
        tags=row["tags"],
        keys=row["keys"],
        sharding_key=row["sharding_key"],
        error=properties.get(noted.ERROR) or None,
        retries=_number(properties.get(noted.RECONSUME_TIME)),
        message_id=properties.get(noted.ORIGIN_MESSAGE_ID),
        stored=row["store_timestamp"],
        properties={name: value for name, value in properties.items() if name not in NOTED},
    )


def _number(text: str | None) -> int | None:
    return None if text is None else whole_number(text)


def replayed_to(broker: Broker, queue: MessageQueue) -> int:
    """Return the offset at which the next replay of all letters begins."""
    offset, at = offset_and_bounds(broker, queue)
    return at.min_offset if offset > at.max_offset else max(offset, at.min_offset)


def offset_and_bounds(broker: Broker, queue: MessageQueue) -> tuple[int, QueueBounds]:
    """Return the offset of `REPLAY_GROUP` and the queue's bounds.

    An offset beyond the end belongs to a former topic of this name, because RocketMQ before 5.0 keeps the offsets in a deleted topic, or
    the broker has lost letters. Until a user decides, letters count as not replayed, and a replay is refused.
    """
    # Read the end last, so that a replay that is running cannot move the offset beyond it.
    offset = broker.groups.offsets(REPLAY_GROUP, [queue]).get(queue, 0)
    return offset, broker.log.bounds([queue])[queue]


def count(broker: Broker, group: str) -> LetterCount | None:
    """Return how many dead letters the group has; None if the account may not read them."""
    try:
        bounds = broker.log.bounds(broker.log.queues(DEAD_LETTER_PREFIX + group))
        unreplayed = sum(max(at.max_offset - replayed_to(broker, queue), 0) for queue, at in bounds.items())
        stored = sum(at.max_offset - at.min_offset for at in bounds.values())
        return LetterCount(stored, unreplayed, sum(at.max_offset for at in bounds.values()))
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        return LetterCount(0, 0, 0)
    except RocketMQError as error:
        if not error.denied:
            raise
        return None


def _spans(queue: MessageQueue, offsets: Iterable[int], first: int, end: int) -> list[tuple[int, int]]:
    """Return ascending offsets as ranges. Raises OffsetError for an offset without a letter."""
    spans: list[tuple[int, int]] = []
    for offset in offsets:
        if offset >= end:
            raise no_such_offset(queue, end, f"dead letter {offset}")
        if offset < first:
            raise OffsetError(OffsetCondition.INVALID, f"queue {queue} begins at {first}: dead letter {offset} was deleted")
        if spans and spans[-1][1] == offset:
            spans[-1] = (spans[-1][0], offset + 1)
        else:
            spans.append((offset, offset + 1))
    return spans
