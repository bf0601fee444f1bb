"""Reads the dead letters in %DLQ%<group>, and replays them, which means to send them again.

Rules: a replay is a consumer of the dead-letter queues, in the group REPLAY_GROUP of the same broker. It holds the queues' locks,
appends one piece of the letters to their topics and then records that they were sent. A replay of all letters commits its offset;
a replay of selected letters settles them individually. So no later replay sends these letters again, and two replays cannot run
at the same time. If a replay dies between the append and the record, the next one sends that piece again: letters are sent at
least once.

The embedded broker has one queue for the letters of a group. Each RocketMQ broker has a separate queue with separate offsets, and
a letter is stored at the broker of the original message. So a letter's offset identifies it only together with its broker.

A replay sends the original message, without the properties of its failure, to the queue that its sharding key chooses now. The
message has a property that counts its replays (`rows.dead_letters.REPLAYS`). If the count of a dead letter has reached
`LetterFilter.max_replays`, the letter is in quarantine: only a replay of letters in quarantine sends it, and other replays skip it.

Letters have their keys as text. If a letter came from the queue that its key chooses as a number, and not from the queue that it
chooses as text, the producer hashed numbers. A replay of such a letter is refused until the user says how keys choose queues.

This module is long because reading, counting and replaying letters use the same rules of which letters were replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orderedmq.broker import Broker, Log, QueueBounds
from orderedmq.conditions import LockCondition, OffsetCondition, OptionCondition, TopicCondition
from orderedmq.errors import (
    LockError,
    MessageError,
    OffsetError,
    OptionError,
    Remedy,
    RocketMQError,
    TopicError,
    no_such_offset,
)
from orderedmq.model import DEAD_LETTER_PREFIX, PRODUCER_SCHEMA, MessageQueue, OffsetRange, check_group, check_topic
from orderedmq.options.values import whole_number
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.pulls import pulls
from orderedmq.routing.selector import KeyedSelectorName, Keying, keying_of
from orderedmq.routing.sharding_key import KeyType, is_number
from orderedmq.rows import dead_letters as noted

#: The consumer group of replays. Its offset in a dead-letter queue is where the next replay of all letters begins.
REPLAY_GROUP: Final = "dlq-replay"
#: A message that becomes a dead letter again after this many replays is in quarantine.
MAX_REPLAYS: Final = 3
#: Maximum letters and bytes of bodies per commit. If the replay is killed between append and commit, up to this many are sent twice.
PIECE: Final = 500
PIECE_BYTES: Final = 8 * 1024 * 1024
#: The number of offsets per request when the replayed letters are counted.
_COUNTED: Final = 1 << 16
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

_OTHER_TOPIC: Final = Remedy("Pass to_topic", "Give --to-topic")
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

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter's key and error meet the conditions. `spans` applies ``since`` and ``offsets``."""
        return (not self.keys or letter.sharding_key in self.keys) and (not self.error or self.error in (letter.error or ""))

    def passes(self, letter: DeadLetter) -> bool:
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
    """Counts of a group's dead letters: those stored, those that no replay has sent or skipped, and all ever written."""

    stored: int
    waiting: int
    written: int


@dataclass
class Replayed:
    """The progress of a replay.

    ``quarantined``: the number of letters that it skipped because they are in quarantine. ``deleted``: the number of letters that
    retention deleted before a replay of all letters reached them.
    """

    letters: int = 0
    topics: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
    deleted: int = 0


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
    found = at_broker(every, chosen.at_broker)
    if chosen.offsets:
        require_one_broker(found)
    return found


def at_broker(queues: Sequence[MessageQueue], name: str | None) -> list[MessageQueue]:
    """Return the dead-letter queues at the broker ``name``, or all if it is None. Raises OptionError INVALID if the broker has none."""
    found = [queue for queue in queues if name in (None, queue.broker_name)]
    if queues and not found:
        names = ", ".join(queue.broker_name for queue in queues)
        raise OptionError(OptionCondition.INVALID, f"broker {name!r} has no queue of {queues[0].topic}. Name one of {names}")
    return found


def require_one_broker(queues: Sequence[MessageQueue]) -> None:
    """Raise OptionError MISSING if several brokers have letters, so that an offset does not identify a letter."""
    if len(queues) > 1:
        names = ", ".join(queue.broker_name for queue in queues)
        raise OptionError(
            OptionCondition.MISSING,
            f"each broker numbers its dead letters from 0, and {len(queues)} brokers have letters of {queues[0].topic}",
            Remedy(f"Name one of {names} with at_broker", f"Give --at-broker with one of {names}"),
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
            found = [letter for letter in piece if chosen.passes(letter)][:limit]
            yield found
            limit -= len(found)
            if not limit:
                return


def _letter(queue: MessageQueue, row: dict[str, Any]) -> DeadLetter:
    found = dict(row["properties"] or ())
    topic, number = found.get(noted.REAL_TOPIC), _number(found.get(noted.REAL_QUEUE))
    known = topic is not None and number is not None
    return DeadLetter(
        queue=queue,
        offset=row["queue_offset"],
        origin=MessageQueue(topic or "", found.get(noted.ORIGIN_BROKER, ""), number or 0) if known else None,
        origin_offset=_number(found.get(noted.ORIGIN_OFFSET)),
        body=row["body"],
        tags=row["tags"],
        keys=row["keys"],
        sharding_key=row["sharding_key"],
        error=found.get(noted.ERROR) or None,
        retries=_number(found.get(noted.RECONSUME_TIME)),
        message_id=found.get(noted.ORIGIN_MESSAGE_ID),
        stored=row["store_timestamp"],
        properties={name: value for name, value in found.items() if name not in NOTED},
    )


def _number(text: str | None) -> int | None:
    return None if text is None else whole_number(text)


def replayed_to(broker: Broker, queue: MessageQueue) -> int:
    """Return the offset at which the next replay of all letters begins."""
    offset, at = _offset_and_bounds(broker, queue)
    return at.min_offset if offset > at.max_offset else max(offset, at.min_offset)


def _offset_and_bounds(broker: Broker, queue: MessageQueue) -> tuple[int, QueueBounds]:
    """Return the offset of `REPLAY_GROUP` and the queue's bounds.

    An offset beyond the end belongs to a former topic of this name, because RocketMQ before 5.0 keeps the offsets in a deleted topic, or
    the broker has lost letters. Until a user decides, letters count as not replayed, and a replay is refused.
    """
    # Read the end last, so that a replay that is running cannot move the offset beyond it.
    offset = broker.groups.offsets(REPLAY_GROUP, [queue]).get(queue, 0)
    return offset, broker.log.bounds([queue])[queue]


def replayed(broker: Broker, queue: MessageQueue, letters: Sequence[DeadLetter], chosen: LetterFilter, upto: int) -> set[int]:
    """Return which of these letters, given in order, were replayed. ``upto``: see `replayed_to`."""
    if not letters:
        return set()
    alone = broker.groups.settled(REPLAY_GROUP, queue, OffsetRange(letters[0].offset, letters[-1].offset + 1))
    return {one.offset for one in letters if one.offset in alone or (one.offset < upto and not chosen.holds(one))}


def waiting(broker: Broker, queue: MessageQueue, upto: int, end: int) -> int:
    """Return the number of letters that no replay has sent or skipped. ``upto``: see `replayed_to`."""
    parts = [OffsetRange(begin, min(begin + _COUNTED, end)) for begin in range(upto, end, _COUNTED)]
    return max(end - upto, 0) - sum(len(broker.groups.settled(REPLAY_GROUP, queue, part)) for part in parts)


def count(broker: Broker, group: str) -> LetterCount | None:
    """Return how many dead letters the group has; None if the account may not read them."""
    try:
        bounds = broker.log.bounds(broker.log.queues(DEAD_LETTER_PREFIX + group))
        left = sum(waiting(broker, queue, replayed_to(broker, queue), at.max_offset) for queue, at in bounds.items())
        stored = sum(at.max_offset - at.min_offset for at in bounds.values())
        return LetterCount(stored, left, sum(at.max_offset for at in bounds.values()))
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        return LetterCount(0, 0, 0)
    except RocketMQError as error:
        if not error.denied:
            raise
        return None


def replay(
    broker: Broker,
    queues: Sequence[MessageQueue],
    chosen: LetterFilter,
    done: Replayed,
    *,
    limit: int | None = None,
    to_topic: str | None = None,
    keying: Keying | None = None,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> None:
    """Send the letters of ``queues`` that ``chosen`` selects and that were not replayed yet, at most ``limit`` letters.

    ``queues`` come from `letter_queues`. Letters chosen by offset are sent even if they were replayed before. ``done`` counts the
    letters sent; ``progress`` gets the number sent and the number to send. Before anything is sent, the topic and queue of every
    letter are determined. ``keying`` None: the key's text chooses the queue. Raises OffsetError, TopicError, MessageError
    BAD_KEY; OptionError MISSING if a letter's queue was chosen by a number, or if a letter chosen by offset is in quarantine;
    LockError HELD_BY_OTHER or LOST.
    """
    if to_topic is not None:
        check_topic(to_topic, writing=True)
        broker.log.topic(to_topic)
    client = broker.groups.join(REPLAY_GROUP)
    try:
        answers = broker.groups.lock(REPLAY_GROUP, client, queues)
        tokens = [answer for answer in answers.values() if isinstance(answer, LockToken)]
        try:
            for queue, answer in answers.items():
                if isinstance(answer, Refusal):
                    raise LockError(
                        LockCondition.HELD_BY_OTHER,
                        f"the dead letters of {queue.topic} are being replayed by {answer.client_id or answer.holder}. Wait until that "
                        f"replay ends. If it is stuck, its lock ends in {answer.remaining:.0f} s at the latest",
                    )
            _Replay(broker, tokens, chosen, limit, to_topic, keying, done, progress).run()
        finally:
            broker.groups.unlock(tokens)
    finally:
        broker.groups.leave(client)


def replay_dead_letters(
    broker: Broker,
    group: str,
    chosen: LetterFilter = ALL,
    *,
    limit: int | None = None,
    to_topic: str | None = None,
    sharding_key_type: KeyType | None = None,
    selector: KeyedSelectorName | None = None,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Replayed:
    """Send dead letters of ``group`` again, as ``orderedmq dlq replay`` does; return how many were sent, and to which topics.

    ``chosen`` selects the letters; by default all that were not replayed yet and are not in quarantine. ``limit`` is the maximum
    number of letters to send. ``to_topic`` is the topic to send them to (default: the topic that each came from).
    ``sharding_key_type`` ("text", "int" or "long") and ``selector`` ("hash" or "mod") are those of the producer whose messages
    became dead letters; they are needed if keys are numbers. ``progress`` gets the number of letters sent so far and the number to
    send. Raises OptionError INVALID for a limit below 1, CONFLICT; and the errors of `letter_queues` and `replay`.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OptionError(
            OptionCondition.INVALID, f"limit is {limit!r}, but must be a whole number from 1. Leave it out for all letters"
        )
    keying = keying_of(selector, sharding_key_type)
    queues, done = letter_queues(broker, group, chosen), Replayed()
    if queues:
        replay(broker, queues, chosen, done, limit=limit, to_topic=to_topic, keying=keying, progress=progress)
    return done


class _Part(NamedTuple):
    """The ranges of one queue that a replay searches for letters. ``upto``: see `replayed_to`."""

    token: LockToken
    spans: Sequence[tuple[int, int]]
    upto: int


class _Piece(NamedTuple):
    """The next letters of a queue to send, all of them before ``end``. ``held``: letters left out because they are in quarantine."""

    token: LockToken
    end: int
    letters: list[DeadLetter]
    held: list[DeadLetter]


@dataclass
class _Replay:
    broker: Broker
    tokens: Sequence[LockToken]
    chosen: LetterFilter
    limit: int | None
    to_topic: str | None
    keying: Keying | None
    done: Replayed
    progress: Callable[[int, int], None]

    def run(self) -> None:
        broker, done = self.broker, self.done
        in_turn = not self.chosen.chooses and self.chosen.quarantined is False
        parts = [self._part(token, in_turn) for token in self.tokens]
        # Determine the topics and queues of all letters first, so that no letter can stop the replay half-way.
        targets: dict[str, list[MessageQueue]] = (
            {} if self.to_topic is None else {self.to_topic: broker.log.targets(self.to_topic)}
        )
        total = 0
        for piece in self._pieces(parts):
            self._check(piece, targets)
            total += len(piece.letters)
            done.quarantined += len(piece.held)
        for piece in self._pieces(parts):
            if piece.letters:
                self._send(piece, targets)
            if in_turn:
                broker.groups.commit({piece.token: piece.end})
            elif piece.letters:
                broker.groups.settle(piece.token, [letter.offset for letter in piece.letters])
            done.letters += len(piece.letters)
            done.topics.update(self.to_topic or _origin(letter).topic for letter in piece.letters)
            self.progress(done.letters, total)

    def _part(self, token: LockToken, in_turn: bool) -> _Part:
        broker, queue = self.broker, token.queue
        offset, at = _offset_and_bounds(broker, queue)
        if offset > at.max_offset:
            where = f"--topic {queue.topic} --to earliest to replay all letters, or --to latest for those that come from now on"
            raise OffsetError(
                OffsetCondition.BEYOND_END,
                f"group {REPLAY_GROUP!r} is at {offset} in queue {queue}, which ends at {at.max_offset}: the topic was deleted and created "
                f"again, or its broker has lost letters. Run orderedmq group seek {REPLAY_GROUP} {where}",
            )
        upto = max(offset, at.min_offset)
        if in_turn:
            self.done.deleted += waiting(broker, queue, offset, upto)
        # Letters in quarantine may also be before the offset, because replays of all letters have skipped them.
        begin = at.min_offset if self.chosen.offsets or self.chosen.quarantined is not False else upto
        return _Part(token, self.chosen.spans(broker.log, queue, begin, at.max_offset), upto)

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[_Piece]:
        left = self.limit
        for token, span, upto in ((token, span, upto) for token, spans, upto in parts for span in spans):
            for letters in read(self.broker.log, token.queue, *span):
                found = [letter for letter in letters if self.chosen.matches(letter)]
                if not self.chosen.offsets:
                    before = replayed(self.broker, token.queue, found, self.chosen, upto)
                    found = [letter for letter in found if letter.offset not in before]
                sent = [letter for letter in found if self.chosen.passes(letter)]
                held = [letter for letter in found if self.chosen.quarantined is False and self.chosen.holds(letter)]
                if left is not None and len(sent) >= left:
                    sent = sent[:left]
                    end = sent[-1].offset + 1
                    yield _Piece(token, end, sent, [letter for letter in held if letter.offset < end])
                    return
                left = None if left is None else left - len(sent)
                yield _Piece(token, letters[-1].offset + 1, sent, held)

    def _check(self, piece: _Piece, targets: dict[str, list[MessageQueue]]) -> None:
        if self.chosen.offsets and piece.held:
            letter = piece.held[0]
            raise OptionError(
                OptionCondition.MISSING,
                f"dead letter {letter.offset} is in quarantine: its message was replayed {letter.replays} times, and became a dead letter "
                "again each time",
                Remedy(
                    "Set quarantined=None in the LetterFilter to send it nevertheless, or raise max_replays",
                    "Give --quarantined to send it nevertheless, or raise --max-replays",
                ),
            )
        if self.to_topic is None:
            _find_targets(self.broker.log, piece.letters, targets)
        placed = _choose_queues(piece.letters, targets, self.to_topic, self.keying or Keying())
        if self.to_topic is None and self.keying is None:
            _check_text(placed, targets)

    def _send(self, piece: _Piece, targets: Mapping[str, list[MessageQueue]]) -> None:
        if self.broker.groups.renew(self.tokens):
            raise LockError(
                LockCondition.LOST,
                f"this replay of {piece.token.queue.topic} paused for too long, so another replay has begun and sends the remaining letters",
            )
        _send(self.broker.log, _choose_queues(piece.letters, targets, self.to_topic, self.keying or Keying()))


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


def _find_targets(log: Log, letters: Sequence[DeadLetter], targets: dict[str, list[MessageQueue]]) -> None:
    """Add to ``targets`` the queues of each topic that letters came from. Raises TopicError."""
    for letter in letters:
        topic = _origin(letter).topic
        if topic in targets:
            continue
        check_topic(topic, writing=True)
        try:
            targets[topic] = log.targets(topic)
        except TopicError as error:
            raise TopicError(
                error.sub,
                f"dead letter {letter.offset} came from topic {topic!r}, which no longer exists",
                _OTHER_TOPIC,
            ) from error


def _origin(letter: DeadLetter) -> MessageQueue:
    if letter.origin is None:
        raise TopicError(
            TopicCondition.MISSING, f"dead letter {letter.offset} does not say from which topic it came", _OTHER_TOPIC
        )
    return letter.origin


def _choose_queues(
    letters: Sequence[DeadLetter], targets: Mapping[str, list[MessageQueue]], to_topic: str | None, keying: Keying
) -> list[tuple[MessageQueue, DeadLetter]]:
    """Return each letter with the queue that it goes to. Raises MessageError BAD_KEY."""
    chosen: dict[int, MessageQueue] = {}
    keyed = [letter for letter in letters if letter.sharding_key is not None]
    for topic, of_topic in groupby(
        sorted(keyed, key=lambda letter: to_topic or _origin(letter).topic), lambda letter: to_topic or _origin(letter).topic
    ):
        those, queues = list(of_topic), targets[topic]
        keys = pa.array([letter.sharding_key for letter in those], pa.string())
        where = f"the dead letters for topic {topic!r} from {those[0].offset} on"
        for letter, number in zip(those, keying.queues_of(keys, len(queues), where).tolist()):
            chosen[letter.offset] = queues[number]
    placed = []
    for letter in letters:
        queue = chosen.get(letter.offset)
        if queue is None:
            queues = targets[to_topic or _origin(letter).topic]
            queue = _old_queue(letter, queues)
        placed.append((queue, letter))
    return placed


def _old_queue(letter: DeadLetter, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return the queue that a letter came from; if it is not among ``queues``, the one at the position of its number."""
    if letter.origin is None:
        return queues[letter.offset % len(queues)]
    # A letter from RocketMQ's client does not name its broker, but is stored at the broker of its message.
    broker_name = letter.origin.broker_name or letter.queue.broker_name
    old = letter.origin._replace(topic=queues[0].topic, broker_name=broker_name)
    return old if old in queues else queues[old.queue_id % len(queues)]


#: The ways to choose a queue by a number. For an Integer that is not negative, mod and hash choose the same queue.
_BY_NUMBER: Final = (Keying("hash", "int"), Keying("hash", "long"), Keying("mod", "long"))


def _check_text(placed: Sequence[tuple[MessageQueue, DeadLetter]], targets: Mapping[str, list[MessageQueue]]) -> None:
    """Raise OptionError MISSING if a letter's key chooses the letter's original queue as a number, but another queue as text."""
    for queue, letter in placed:
        origin, key = letter.origin, letter.sharding_key
        if origin is None or key is None or _same(queue, origin) or not is_number(key):
            continue
        queues = targets[origin.topic]
        fitting = [
            keying
            for keying in _BY_NUMBER
            if (number := _queue_of(key, keying, len(queues))) is not None and _same(queues[number], origin)
        ]
        if fitting:
            options = [
                'selector="mod"' if keying.selector == "mod" else f'sharding_key_type="{keying.key_type}"' for keying in fitting
            ]
            typed = [
                "--selector mod" if keying.selector == "mod" else f"--sharding-key-type {keying.key_type}" for keying in fitting
            ]
            raise OptionError(
                OptionCondition.MISSING,
                f"dead letter {letter.offset} came from queue {origin}, which its key {key!r} chooses as a number, but as text the key chooses "
                f"{queue}",
                Remedy(
                    f"Say with {' or '.join(options)} how the producer's keys choose their queues, or pass "
                    'sharding_key_type="text" if the topic had another number of queues then',
                    f"Say with {' or '.join(typed)} how the producer's keys choose their queues, or give --sharding-key-type text if "
                    "the topic had another number of queues then",
                ),
            )


def _queue_of(key: str, keying: Keying, n: int) -> int | None:
    try:
        return int(keying.queues_of(pa.array([key]), n, "")[0])
    except MessageError:
        return None


def _same(queue: MessageQueue, origin: MessageQueue) -> bool:
    """Return whether both are the same queue. A letter from RocketMQ's client does not name its broker, so any broker matches."""
    return queue == (origin if origin.broker_name else origin._replace(broker_name=queue.broker_name))


def _send(log: Log, placed: list[tuple[MessageQueue, DeadLetter]]) -> None:
    """Append the letters to their queues, keeping their order within each queue."""
    rows: dict[MessageQueue, list[dict[str, Any]]] = {}
    for target, letter in placed:
        rows.setdefault(target, []).append(letter.row())
    log.append({target: pa.RecordBatch.from_pylist(found, schema=PRODUCER_SCHEMA) for target, found in rows.items()})
