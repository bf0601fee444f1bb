"""Reads the dead letters in %DLQ%<group>, and replays them: sends them again.

Rules: a replay is a consumer of the dead-letter queue, in the group REPLAY_GROUP of the same broker. Under the queue's lock it
appends a piece of the letters to their topics and then commits its offset. So letters that were sent are not sent again, and
two replays do not run at once. A replay that dies between append and commit sends that piece again: at least once, never lost.
A letter becomes its original message, without the properties of its failure, in the queue that its sharding key chooses now.
Letters have keys as text. If a key is a number, and the number but not the text chooses the queue that the letter came from,
its producer did not choose by the text: then a replay is refused until the user says how keys choose queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from orderedmq.broker import Broker, Log
from orderedmq.conditions import LockCondition, OffsetCondition, OptionCondition, TopicCondition
from orderedmq.errors import LockError, MessageError, OffsetError, OptionError, RocketMQError, TopicError, no_such_offset
from orderedmq.model import DEAD_LETTER_PREFIX, PRODUCER_SCHEMA, MessageQueue, check_group, check_topic
from orderedmq.options.values import whole_number
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.pulls import pulls
from orderedmq.routing.selector import Keying
from orderedmq.routing.sharding_key import is_number
from orderedmq.rows import dead_letters as noted

#: The group whose offset of a dead-letter queue says how far the letters were replayed.
REPLAY_GROUP: Final = "dlq-replay"
#: Maximum letters between two commits, which are sent twice if the replay is killed there; maximum bytes of their bodies.
PIECE: Final = 500
PIECE_BYTES: Final = 8 * 1024 * 1024
#: Properties that tell a letter's origin and failure, and are not the message's own.
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
    """A message in %DLQ%<group>.

    ``offset`` and ``stored`` (µs) are those of the dead-letter queue. None: the letter does not say.
    """

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

    def row(self) -> dict[str, Any]:
        """Return the original message, in the producer's columns."""
        return {
            "body": self.body,
            "tags": self.tags,
            "keys": self.keys,
            "sharding_key": self.sharding_key,
            "properties": list(self.properties.items()) or None,
        }


@dataclass(frozen=True)
class LetterCount:
    """The dead letters of a group: those that are stored, those that a replay of all would send, and all that were ever written."""

    stored: int
    waiting: int
    written: int


@dataclass
class Replayed:
    """The progress of a replay.

    ``ahead``: offsets of letters that it sent, and that a replay of all will send again. ``deleted``: how many letters retention has
    deleted before a replay of all reached them.
    """

    letters: int = 0
    topics: Counter[str] = field(default_factory=Counter)
    ahead: list[int] = field(default_factory=list)
    deleted: int = 0


def dead_letter_queue(broker: Broker, group: str) -> MessageQueue | None:
    """Return the queue of the group's dead letters; None if it never had one. Raises GroupError BAD_NAME or MISSING."""
    check_group(group)
    try:
        return broker.log.queues(DEAD_LETTER_PREFIX + group)[0]
    except TopicError as error:
        if error.sub != TopicCondition.MISSING:
            raise
        broker.admin.group_offsets(group)
        return None


def read(log: Log, queue: MessageQueue, begin: int, end: int) -> Iterator[list[DeadLetter]]:
    """Yield the letters from ``begin`` to ``end``, piece by piece. Raises DataLossError if they are gone."""
    index = _COLUMNS.index("store_timestamp")
    for batch in pulls(log, queue, begin, end, PIECE, PIECE_BYTES, _COLUMNS):
        yield [
            _letter(row) for row in batch.set_column(index, "store_timestamp", batch.column(index).cast(pa.int64())).to_pylist()
        ]


def _letter(row: dict[str, Any]) -> DeadLetter:
    found = dict(row["properties"] or ())
    topic, number = found.get(noted.REAL_TOPIC), _number(found.get(noted.REAL_QUEUE))
    known = topic is not None and number is not None
    return DeadLetter(
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
    first = broker.log.bounds([queue])[queue].min_offset
    return max(broker.groups.offsets(REPLAY_GROUP, [queue]).get(queue, first), first)


def count(broker: Broker, group: str) -> LetterCount | None:
    """Return how many dead letters the group has; None if the account may not see them."""
    try:
        queue = broker.log.queues(DEAD_LETTER_PREFIX + group)[0]
        at = broker.log.bounds([queue])[queue]
        return LetterCount(at.max_offset - at.min_offset, at.max_offset - replayed_to(broker, queue), at.max_offset)
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
    queue: MessageQueue,
    offsets: Sequence[int] | None,
    to_topic: str | None,
    done: Replayed,
    progress: Callable[[int], None],
    keying: Keying | None = None,
) -> None:
    """Send the letters at ``offsets``, or all that were not replayed yet; ``done`` counts what is sent.

    Nothing is sent unless every letter has a topic and a queue to go to. A replay by offset commits only up to the first letter
    not sent. ``keying`` None: queues are chosen by the key's text. Raises OffsetError, TopicError, MessageError BAD_KEY,
    OptionError MISSING if a letter's queue was chosen by a number, LockError HELD_BY_OTHER or LOST.
    """
    if to_topic is not None:
        check_topic(to_topic, writing=True)
        broker.log.topic(to_topic)
    client = broker.groups.join(REPLAY_GROUP)
    try:
        answer = broker.groups.lock(REPLAY_GROUP, client, [queue])[queue]
        if isinstance(answer, Refusal):
            raise LockError(
                LockCondition.HELD_BY_OTHER,
                f"the dead letters of {queue.topic} are being replayed by {answer.client_id or answer.holder}: wait for it; its lock ends in "
                f"{answer.remaining:.0f} s at the latest if it is stuck",
            )
        try:
            _replay(broker, queue, answer, offsets, to_topic, done, progress, keying)
        finally:
            broker.groups.unlock([answer])
    finally:
        broker.groups.leave(client)


def _replay(
    broker: Broker,
    queue: MessageQueue,
    token: LockToken,
    offsets: Sequence[int] | None,
    to_topic: str | None,
    done: Replayed,
    progress: Callable[[int], None],
    keying: Keying | None,
) -> None:
    at, begin = broker.log.bounds([queue])[queue], replayed_to(broker, queue)
    if offsets is None:
        done.deleted = begin - broker.groups.offsets(REPLAY_GROUP, [queue]).get(queue, 0)
    spans = [(begin, at.max_offset)] if offsets is None else _spans(queue, offsets, at.min_offset, at.max_offset)
    # Find the topics and queues of all letters first, so that none of them stops the replay half-way.
    targets: dict[str, list[MessageQueue]] = {} if to_topic is None else {to_topic: broker.log.targets(to_topic)}
    for span in spans:
        for piece in read(broker.log, queue, *span):
            if to_topic is None:
                _find_targets(broker.log, piece, targets)
            placed = _choose_queues(piece, targets, to_topic, keying or Keying())
            if to_topic is None and keying is None:
                _check_text(placed, targets)
    for span in spans:
        for piece in read(broker.log, queue, *span):
            if broker.groups.renew([token]):
                raise LockError(
                    LockCondition.LOST,
                    f"this replay of {queue.topic} paused for too long, and another one began, which goes on from here",
                )
            _send(broker.log, _choose_queues(piece, targets, to_topic, keying or Keying()))
            first, last = piece[0].offset, piece[-1].offset
            if first <= begin <= last:
                begin = last + 1
                broker.groups.commit({token: begin})
            done.letters += len(piece)
            done.topics.update(to_topic or _origin(letter).topic for letter in piece)
            progress(len(piece))
    if offsets is not None:
        done.ahead = [offset for offset in sorted(set(offsets)) if offset >= begin]


def _spans(queue: MessageQueue, offsets: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
    """Return offsets as ranges. Raises OffsetError for an offset without a letter."""
    spans: list[tuple[int, int]] = []
    for offset in sorted(set(offsets)):
        if offset >= end:
            raise no_such_offset(queue, end, f"dead letter {offset}")
        if offset < first:
            raise OffsetError(OffsetCondition.INVALID, f"queue {queue} begins at {first}, dead letter {offset} was deleted")
        if spans and spans[-1][1] == offset:
            spans[-1] = (spans[-1][0], offset + 1)
        else:
            spans.append((offset, offset + 1))
    return spans


def _find_targets(log: Log, letters: Sequence[DeadLetter], targets: dict[str, list[MessageQueue]]) -> None:
    """Add the queues of each topic that letters came from. Raises TopicError."""
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
                f"dead letter {letter.offset} came from topic {topic!r}, which does not exist any more; give --to-topic",
            ) from error


def _origin(letter: DeadLetter) -> MessageQueue:
    if letter.origin is None:
        raise TopicError(
            TopicCondition.MISSING, f"dead letter {letter.offset} does not say from which topic it came; give --to-topic"
        )
    return letter.origin


def _choose_queues(
    letters: Sequence[DeadLetter], targets: Mapping[str, list[MessageQueue]], to_topic: str | None, keying: Keying
) -> list[tuple[MessageQueue, DeadLetter]]:
    """Return each letter with the queue that it is sent to. Raises MessageError BAD_KEY."""
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
            queue = queues[(letter.origin.queue_id if letter.origin else letter.offset) % len(queues)]
        placed.append((queue, letter))
    return placed


#: How a producer may have chosen by a number. For an Integer that is not negative, mod chooses as the hash does.
_BY_NUMBER: Final = (Keying("hash", "int"), Keying("hash", "long"), Keying("mod", "long"))


def _check_text(placed: Sequence[tuple[MessageQueue, DeadLetter]], targets: Mapping[str, list[MessageQueue]]) -> None:
    """Raises OptionError MISSING if a letter's key, as a number, chooses the queue that it came from, but as text another."""
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
            how = " or ".join(
                "--selector mod" if keying.selector == "mod" else f"--sharding-key-type {keying.key_type}" for keying in fitting
            )
            raise OptionError(
                OptionCondition.MISSING,
                f"dead letter {letter.offset} came from queue {origin}, which its key {key!r} chooses as a number; as text it would go to "
                f"{queue}: say how the producer's keys choose their queues: {how}, or --sharding-key-type text if the topic had another "
                "number of queues then",
            )


def _queue_of(key: str, keying: Keying, n: int) -> int | None:
    try:
        return int(keying.queues_of(pa.array([key]), n, "")[0])
    except MessageError:
        return None


def _same(queue: MessageQueue, origin: MessageQueue) -> bool:
    """Whether both are the same queue. A letter from RocketMQ's own client does not name its broker, so any broker matches."""
    return queue == (origin if origin.broker_name else origin._replace(broker_name=queue.broker_name))


def _send(log: Log, placed: list[tuple[MessageQueue, DeadLetter]]) -> None:
    """Append letters to their queues, in their order within each queue."""
    rows: dict[MessageQueue, list[dict[str, Any]]] = {}
    for target, letter in placed:
        rows.setdefault(target, []).append(letter.row())
    log.append({target: pa.RecordBatch.from_pylist(found, schema=PRODUCER_SCHEMA) for target, found in rows.items()})
