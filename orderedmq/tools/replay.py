"""Replays dead letters, which means to send them again.

Rules: a replay is a consumer of the dead-letter queues, in the group REPLAY_GROUP of the same broker. It is a separate owner and
holds the queues' locks, so two replays cannot run at the same time. It appends one piece of the letters to their topics under the
locks (`Groups.pass_on`). A replay of all letters also commits the group's offset, so that no later replay sends them again. If it dies
between the append and the commit, over a broker where these are not one transaction, the next one sends that piece again. A replay of
chosen letters records nothing: the next one that chooses them, or that sends all, sends them again.

A replay to the group alone appends the letters to its parking lots instead (`parking.given_back`), so that no other group gets them.

A replay sends the original message, without the properties of its failure, to the queue that its sharding key chooses now. Letters
have their keys as text. If a letter came from the queue that its key chooses as a number, and not from the queue that it chooses as
text, the producer hashed numbers. A replay of such a letter is refused until the user says how keys choose queues.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

import pyarrow as pa

from orderedmq.broker import Broker, Log
from orderedmq.conditions import GroupCondition, LockCondition, OffsetCondition, OptionCondition, TopicCondition
from orderedmq.errors import GroupError, LockError, MessageError, OffsetError, OptionError, TopicError
from orderedmq.model import MessageQueue, check_topic
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.parking import AT_ONCE, Command, Ticket, given_back, parked_queue
from orderedmq.routing.selector import KeyedSelectorName, Keying, keying_of
from orderedmq.routing.sharding_key import KeyType, is_number
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools.dead_letters import (
    ALL,
    REPLAY_GROUP,
    DeadLetter,
    LetterFilter,
    letter_queues,
    offset_and_bounds,
    read,
)
from orderedmq.tools.producer import append_chosen

_OTHER_TOPIC: Final = "Pass to_topic (--to-topic)"


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
    confirm: Callable[[Mapping[str, int]], None] = lambda _topics: None,
    to_group: bool = False,
) -> None:
    """Send the letters of ``queues`` that ``chosen`` selects and no replay of all letters has sent, at most ``limit`` letters.

    ``queues`` come from `letter_queues`. Letters chosen by offset are sent even if they were replayed before. ``done`` counts the letters
    sent; ``progress`` gets the number sent and the number to send. Before anything is sent, the topic and queue of every letter are
    determined, and ``confirm`` gets the number for each topic, and may raise an error. ``keying`` None: the key's text chooses the queue.
    Raises OffsetError, TopicError, MessageError BAD_KEY; OptionError MISSING if a letter's queue was chosen by a number, or if a letter
    chosen by offset is in quarantine; LockError HELD_BY_OTHER or LOST.
    """
    if to_group and (to_topic is not None or keying is not None):
        raise OptionError(
            OptionCondition.CONFLICT,
            "to_group (--to-group) gives letters back to the queues that they came from. Leave out the topic, the key type and the selector",
        )
    if to_topic is not None:
        check_topic(to_topic, writing=True)
        broker.log.topic(to_topic)
    # Each replay is another owner: the runs of one owner may have the same lock over RocketMQ (group.lock_rules).
    client = broker.groups.join(f"{REPLAY_GROUP}-{uuid.uuid4().hex}")
    try:
        answers = broker.groups.lock(REPLAY_GROUP, client, queues)
        tokens = [answer for answer in answers.values() if isinstance(answer, LockToken)]
        try:
            for queue, answer in answers.items():
                if isinstance(answer, Refusal):
                    raise LockError(
                        LockCondition.HELD_BY_OTHER,
                        f"the dead letters of {queue.topic} are being replayed by {answer.client_id or 'another process'}. Wait "
                        f"until that replay ends. If it was killed or is stuck, its lock ends in {answer.remaining:.0f} s at the latest",
                    )
            _Replay(broker, tokens, chosen, limit, to_topic, keying, done, progress, confirm, to_group).run()
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
    to_group: bool = False,
) -> Replayed:
    """Send dead letters of ``group`` again, as ``orderedmq dlq replay`` does; return how many were sent, and to which topics.

    ``chosen`` selects the letters; by default all that were not replayed yet and are not in quarantine. Only such a replay records
    what it has sent; letters that a filter selects are sent each time. ``limit`` is the maximum number of letters to send.
    ``to_topic`` is the topic to send them to (default: the topic that each came from).
    ``sharding_key_type`` ("text", "int" or "long") and ``selector`` ("hash" or "mod") are those of the producer whose messages
    became dead letters; they are needed if keys are numbers. ``to_group``: give the letters back to this group alone, after the messages
    of their keys that are parked there. ``progress`` gets the number of letters sent so far and the number to
    send. Raises OptionError INVALID for a limit below 1, CONFLICT; and the errors of `letter_queues` and `replay`.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OptionError(
            OptionCondition.INVALID, f"limit is {limit!r}, but must be a whole number from 1. Leave it out for all letters"
        )
    keying = keying_of(selector, sharding_key_type)
    queues, done = letter_queues(broker, group, chosen), Replayed()
    if queues:
        replay(
            broker, queues, chosen, done, limit=limit, to_topic=to_topic, keying=keying, progress=progress, to_group=to_group
        )
    return done


def other_readers(broker: Broker, group: str, topics: Collection[str]) -> list[str]:
    """Return the other groups that have offsets in these topics, so that they get what a replay sends there.

    Raises RocketMQError NO_PERMISSION if the account may not see all groups.
    """
    readers = []
    for name in broker.admin.groups():
        # A group may be deleted after it was listed.
        with contextlib.suppress(GroupError):
            if name not in (group, REPLAY_GROUP) and any(queue.topic in topics for queue in broker.admin.group_offsets(name)):
                readers.append(name)
    return readers


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
    confirm: Callable[[Mapping[str, int]], None]
    to_group: bool

    def run(self) -> None:
        broker, done = self.broker, self.done
        in_turn = not self.chosen.chooses and self.chosen.quarantined is False
        parts = [self._part(token, in_turn) for token in self.tokens]
        # Determine the topics and queues of all letters first, so that no letter can stop the replay half-way.
        targets: dict[str, list[MessageQueue]] = (
            {} if self.to_topic is None else {self.to_topic: broker.log.targets(self.to_topic)}
        )
        topics = Counter[str]()
        for piece in self._pieces(parts):
            self._check(piece, targets)
            topics.update(self.to_topic or _origin(letter).topic for letter in piece.letters)
            done.quarantined += len(piece.held)
        if topics:
            self.confirm(topics)
        for piece in self._pieces(parts):
            if piece.letters:
                self._send(piece, targets, piece.end if in_turn else None)
            elif in_turn:
                broker.groups.commit({piece.token: piece.end})
            done.letters += len(piece.letters)
            done.topics.update(self.to_topic or _origin(letter).topic for letter in piece.letters)
            self.progress(done.letters, topics.total())

    def _part(self, token: LockToken, in_turn: bool) -> _Part:
        broker, queue = self.broker, token.queue
        offset, at = offset_and_bounds(broker, queue)
        if offset > at.max_offset:
            where = f"--topic {queue.topic} --to earliest to replay all letters, or --to latest for those that come from now on"
            raise OffsetError(
                OffsetCondition.BEYOND_END,
                f"group {REPLAY_GROUP!r} is at {offset} in queue {queue}, which ends at {at.max_offset}: the topic was deleted and created "
                f"again, or its broker has lost letters. Run orderedmq group seek {REPLAY_GROUP} {where}",
            )
        upto = max(offset, at.min_offset)
        if in_turn:
            self.done.deleted += upto - offset
        # Letters in quarantine may also be before the offset, because replays of all letters have skipped them.
        begin = at.min_offset if self.chosen.offsets or self.chosen.quarantined is not False else upto
        return _Part(token, self.chosen.spans(broker.log, queue, begin, at.max_offset), upto)

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[_Piece]:
        remaining = self.limit
        for token, span, upto in ((token, span, upto) for token, spans, upto in parts for span in spans):
            for letters in read(self.broker.log, token.queue, *span):
                chosen = [letter for letter in letters if self.chosen.matches(letter)]
                if not self.chosen.offsets:
                    chosen = [letter for letter in chosen if not self.chosen.replayed(letter, upto)]
                sent = [letter for letter in chosen if self.chosen.passes(letter)]
                quarantined = [letter for letter in chosen if self.chosen.quarantined is False and self.chosen.holds(letter)]
                if remaining is not None and len(sent) >= remaining:
                    sent = sent[:remaining]
                    end = sent[-1].offset + 1
                    yield _Piece(token, end, sent, [letter for letter in quarantined if letter.offset < end])
                    return
                remaining = None if remaining is None else remaining - len(sent)
                yield _Piece(token, letters[-1].offset + 1, sent, quarantined)

    def _check(self, piece: _Piece, targets: dict[str, list[MessageQueue]]) -> None:
        if self.chosen.offsets and piece.held:
            letter = piece.held[0]
            raise OptionError(
                OptionCondition.MISSING,
                f"dead letter {letter.offset} is in quarantine: its message was replayed {letter.replays} times, and became a dead letter "
                "again each time. Set quarantined=None in the LetterFilter (--quarantined) to send it nevertheless, or raise max_replays "
                "(--max-replays)",
            )
        if self.to_group:
            lots = {parked_queue(letter.group, _place(letter)[0]) for letter in piece.letters}
            missing = sorted(lots - self.broker.log.bounds(sorted(lots)).keys())
            if missing:
                raise GroupError(
                    GroupCondition.NOT_PARKED,
                    f"group {piece.letters[0].group!r} has no parking lot {missing[0]}, because no query of it has parked a message there. "
                    "Replay without to_group (--to-group)",
                )
            return
        if self.to_topic is None:
            _find_targets(self.broker.log, piece.letters, targets)
        placed = _choose_queues(piece.letters, targets, self.to_topic, self.keying or Keying())
        if self.to_topic is None and self.keying is None:
            _check_text(placed, targets)

    def _send(self, piece: _Piece, targets: dict[str, list[MessageQueue]], offset: int | None) -> None:
        """Send the letters of a piece, and commit ``offset`` unless it is None. Raises LockError LOST."""
        groups, keying = self.broker.groups, self.keying or Keying()
        try:
            is_owner = not groups.renew(self.tokens)
            if is_owner and self.to_group:
                for queue, commands in _commands(piece.letters).items():
                    self.broker.admin.command_parked(piece.letters[0].group, queue, commands)
                return groups.commit({piece.token: offset}) if offset is not None else None
            if is_owner:
                return append_chosen(
                    self.broker.log,
                    targets,
                    lambda: _rows(_choose_queues(piece.letters, targets, self.to_topic, keying)),
                    lambda rows, among: groups.pass_on(piece.token, rows, among, offset),
                )
        except LockError as error:
            if error.sub != LockCondition.LOST:
                raise
        raise LockError(
            LockCondition.LOST,
            f"this replay of {piece.token.queue.topic} paused for too long, so another replay has begun and sends the remaining letters",
        )


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
            if error.sub != TopicCondition.MISSING:
                raise
            raise TopicError(
                error.sub,
                f"dead letter {letter.offset} came from topic {topic!r}, which no longer exists. {_OTHER_TOPIC}",
            ) from error


def _origin(letter: DeadLetter) -> MessageQueue:
    if letter.origin is None:
        raise TopicError(
            TopicCondition.MISSING, f"dead letter {letter.offset} does not say from which topic it came. {_OTHER_TOPIC}"
        )
    return letter.origin


def _place(letter: DeadLetter) -> tuple[MessageQueue, int]:
    """Return the queue and the offset that a letter came from. A letter from RocketMQ's client names neither its broker nor the offset."""
    origin = _origin(letter)
    if letter.origin_offset is None:
        raise TopicError(
            TopicCondition.MISSING,
            f"dead letter {letter.offset} does not say from which offset it came. Leave out to_group (--to-group)",
        )
    return origin._replace(broker_name=origin.broker_name or letter.queue.broker_name), letter.origin_offset


def _commands(letters: Sequence[DeadLetter]) -> dict[MessageQueue, list[Command]]:
    """Return the commands that give letters back to the queues that they came from."""
    commands: dict[MessageQueue, list[Command]] = {}
    for letter in letters:
        queue, offset = _place(letter)
        row = letter.row()
        at = given_back(offset, letter.replays + 1)
        ticket = Ticket(at, 0, 0, AT_ONCE, "", letter.message_id or "", letter.stored, letter.stored)
        row["properties"] = {**dict(row["properties"]), **ticket.to_properties()}
        commands.setdefault(queue, []).append(Command("return", letter.sharding_key, at, row))
    return commands


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
                'selector="mod" (--selector mod)'
                if keying.selector == "mod"
                else f'sharding_key_type="{keying.key_type}" (--sharding-key-type {keying.key_type})'
                for keying in fitting
            ]
            raise OptionError(
                OptionCondition.MISSING,
                f"dead letter {letter.offset} came from queue {origin}, which its key {key!r} chooses as a number, but as text the key chooses "
                f'{queue}. Say with {" or ".join(options)} how the producer\'s keys choose their queues, or pass sharding_key_type="text" if '
                "the topic had another number of queues then",
            )


def _queue_of(key: str, keying: Keying, n: int) -> int | None:
    try:
        return int(keying.queues_of(pa.array([key]), n, "")[0])
    except MessageError:
        return None


def _same(queue: MessageQueue, origin: MessageQueue) -> bool:
    """Return whether both are the same queue. A letter from RocketMQ's client does not name its broker, so any broker matches."""
    return queue == (origin if origin.broker_name else origin._replace(broker_name=queue.broker_name))


def _rows(placed: Sequence[tuple[MessageQueue, DeadLetter]]) -> dict[MessageQueue, pa.RecordBatch]:
    """Return the letters as the rows of each queue, in their order."""
    rows: dict[MessageQueue, list[dict[str, Any]]] = {}
    for target, letter in placed:
        rows.setdefault(target, []).append(letter.row())
    return {target: pa.RecordBatch.from_pylist(letters, schema=PRODUCER_SCHEMA) for target, letters in rows.items()}
