"""The parking lot of a queue: where parked messages are stored, what their tickets contain, and who may change them. Pure.

Queue Q of a topic, read by group G, has the parking lot P(Q): the queue with the same broker and number in the topic
``%PARKED%<G>%<topic>``. Only the owner of Q parks messages in P and commits offsets of P, under Q's lock (`queue_token`). No other
state exists: a key is parked if P contains a message of this key between the group's offset in P and P's end.

A parked message has the columns of the original message and a Ticket in reserved properties. To park a message, the broker copies
it from Q, or from P if it is parked again. The place (queue and offset) of the original identifies the copy. A message is never parked
twice from the same place, so a batch that runs again parks no message twice. A place below the group's offset in its queue is settled: no
message is parked from there any more.

Operators do not change P directly, because only the owner of Q may do so. They append a command (`Command`) that tells the owner to try,
drop or hold a key, or what becomes of one of its messages. The owner carries it out when it next reads P. A command that replaces a message
is a copy of this message with the corrected body. It takes the message's place: it is restored, and copied if it is parked again. A dead
letter that is given back to the group is also such a copy, under an offset that no message of Q has (`given_back`).

This module is long because the forms of a lot's rows, and the rule by which `Lot` reads them, are one definition.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import DataLossCondition, GroupCondition, TopicCondition
from orderedmq.errors import DataLossError, GroupError, TopicError
from orderedmq.model import (
    MAX_NAME_LENGTH,
    PARKED_ALONE,
    PARKED_ATTEMPTS,
    PARKED_BORN,
    PARKED_COMMAND,
    PARKED_COUNT,
    PARKED_DUE,
    PARKED_ERROR,
    PARKED_FROM,
    PARKED_ID,
    PARKED_OFFSET,
    PARKED_PREFIX,
    PARKED_PROPERTIES,
    PARKED_STORED,
    MessageQueue,
    is_parked,
)
from orderedmq.ownership.lock import LockToken
from orderedmq.schema import MESSAGE_SCHEMA, PRODUCER_COLUMNS, PRODUCER_SCHEMA, PROPERTIES_TYPE
from orderedmq.text import MAX_ERROR_BYTES, clip

#: The due time of a message that is due as soon as no older message of its key is parked.
AT_ONCE: Final = 0
#: The due time of a message that is held until an operator releases it.
HELD: Final = -1
#: The due time of a message that an operator has dropped.
DROPPED: Final = -2
#: The due time of a message that becomes a dead letter because an operator has said so.
DEAD_LETTERED: Final = -3
#: The delays in seconds of RocketMQ's delay levels 1 to 18 (broker option messageDelayLevel).
DELAY_LEVELS: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
#: The level of the first retry of RocketMQ's concurrent consumer (ConsumeMessageConcurrentlyService: 3 + reconsumeTimes).
FIRST_LEVEL: Final = 3
#: The columns of a lot that `Lot.add` needs.
LOT_COLUMNS: Final = ("queue_offset", "sharding_key", "properties")
#: The columns of a message that `to_park` needs.
SOURCE_COLUMNS: Final = (*PRODUCER_COLUMNS, "message_id", "born_timestamp", "store_timestamp")
#: The columns of a lot that `restore` needs.
RESTORE_COLUMNS: Final = ("queue_offset", *PRODUCER_COLUMNS)

CommandAction = Literal["retry", "drop", "hold", "dead_letter", "replace", "return"]
#: The offsets of messages that were given back begin here. No queue has so many messages.
GIVEN_BACK: Final = 1 << 48
#: The property of a message whose body an operator has corrected: when this was done. It stays with the message.
CORRECTED: Final = "ORDEREDMQ_CORRECTED"
#: What a seek of a queue does with its parked messages. "keep": they come back when they are due. "drop": they are skipped. None: the
#: seek is refused if the queue has parked messages (GroupError PARKED).
AtSeek = Literal["keep", "drop"] | None


def parked_topic(group: str, topic: str) -> str:
    """Return the topic of the group's parking lots for ``topic``.

    Raises GroupError BAD_NAME if that name is too long for a topic, or if the group's name contains "%", which separates group and topic.
    """
    if "%" in group:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"consumer group {group!r} cannot have parking lots, whose names separate group and topic by '%'. Choose a group name "
            "without '%', or OrderPerQueue",
        )
    name = lot_name(group, topic)
    if len(name) > MAX_NAME_LENGTH:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"the parking lot of consumer group {group!r} for topic {topic!r} would be named {name!r}, which has {len(name)} characters, "
            f"but a topic's name may have {MAX_NAME_LENGTH}. Choose a shorter group name, or OrderPerQueue",
        )
    return name


def lot_name(group: str, topic: str) -> str:
    """Return what `parked_topic` returns, but do not check the name."""
    return f"{PARKED_PREFIX}{group}%{topic}"


def origin(name: str) -> tuple[str, str] | None:
    """Return the group and the topic of a topic of parking lots, or None for other topics. This is the inverse of `parked_topic`."""
    if not name.startswith(PARKED_PREFIX):
        return None
    group, _, topic = name[len(PARKED_PREFIX) :].partition("%")
    return (group, topic) if group and topic else None


def parked_queue(group: str, queue: MessageQueue) -> MessageQueue:
    """Return P(Q), the parking lot of ``queue``. Raises GroupError BAD_NAME."""
    return queue._replace(topic=parked_topic(group, queue.topic))


def leader_of(group: str, queue: MessageQueue) -> MessageQueue:
    """Return the queue whose parking lot in ``group`` is ``queue``, or ``queue`` itself if it is not a parking lot of the group."""
    parked_by = origin(queue.topic)
    return queue._replace(topic=parked_by[1]) if parked_by is not None and parked_by[0] == group else queue


def queue_token(token: LockToken) -> LockToken:
    """Return ``token`` or, if its queue is a parking lot, the token of the queue that the lot belongs to, whose lock protects the lot."""
    leader = leader_of(token.group, token.queue)
    return token if leader == token.queue else replace(token, queue=leader)


def lot_token(token: LockToken) -> LockToken:
    """Return the token for the parking lot of the token's queue. This is the inverse of `queue_token`."""
    return replace(token, queue=parked_queue(token.group, token.queue))


def delay(parkings: int) -> int:
    """Return the delay in seconds of a message that was put into the lot ``parkings`` times before: 10 s, 30 s, 1 min … 2 h."""
    return DELAY_LEVELS[min(FIRST_LEVEL - 1 + parkings, len(DELAY_LEVELS) - 1)]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The state of a parked message, which it contains in its properties.

    ``offset``: its offset in its queue. ``attempts``: the total of failed calls. ``parkings``: how often it was parked because it failed.
    ``due``: a time in ms since 1970, or AT_ONCE, HELD, DROPPED or DEAD_LETTERED. ``alone``: whether a listener without order parked it,
    so that newer messages of its key do not wait for it. ``message_id``, ``born`` and ``stored`` (µs since 1970) are those of the
    original message. The broker that parks the message fills them in.
    """

    offset: int
    attempts: int
    parkings: int
    due: int
    error: str = ""
    message_id: str = ""
    born: int = 0
    stored: int = 0
    alone: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether an operator has dropped the message or made it a dead letter."""
        return self.due in (DROPPED, DEAD_LETTERED)

    def is_due(self, now: int) -> bool:
        """Whether the key whose first message has this ticket is due at ``now``, in ms since 1970."""
        return self.due != HELD and self.due <= now

    def to_properties(self) -> dict[str, str]:
        """Return the reserved properties of the parked message, except PARKED_FROM."""
        return {
            PARKED_OFFSET: str(self.offset),
            PARKED_ATTEMPTS: str(self.attempts),
            PARKED_COUNT: str(self.parkings),
            PARKED_DUE: str(self.due),
            PARKED_ERROR: clip(self.error, MAX_ERROR_BYTES),
            PARKED_ID: self.message_id,
            PARKED_BORN: str(self.born),
            PARKED_STORED: str(self.stored),
            **({PARKED_ALONE: "true"} if self.alone else {}),
        }

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> Ticket:
        """Return the inverse of ``to_properties``. Raises KeyError or ValueError for a message that was not parked."""
        return cls(
            int(properties[PARKED_OFFSET]),
            int(properties[PARKED_ATTEMPTS]),
            int(properties[PARKED_COUNT]),
            int(properties[PARKED_DUE]),
            properties.get(PARKED_ERROR, ""),
            properties.get(PARKED_ID, ""),
            int(properties.get(PARKED_BORN, 0)),
            int(properties.get(PARKED_STORED, 0)),
            PARKED_ALONE in properties,
        )


@dataclass(frozen=True, slots=True)
class Parking:
    """A message to be parked: its ticket, and the place from which it is copied, which is an offset in Q or P(Q)."""

    source: MessageQueue
    at: int
    ticket: Ticket

    @property
    def place(self) -> str:
        """The place as text, as in the parked message's property PARKED_FROM: ``Q:17`` or ``P:4``."""
        return f"{'P' if is_parked(self.source) else 'Q'}:{self.at}"


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's command for a parked key: try it now, hold it, drop its messages, or make them dead letters.

    With ``offset``, the command is for one message of the key, the one at this offset of the queue. If ``key`` is None, this message has
    no key or was parked alone. A command is a message of the lot itself, and applies to the messages before it. ``row``: with "replace" the
    corrected message (`corrected`), with "return" the one that is given back; other commands have none.
    """

    action: CommandAction
    key: str | None
    offset: int = -1
    row: Mapping[str, Any] | None = None

    def to_properties(self) -> dict[str, str]:
        """Return the properties of the message in a parking lot that carries the command."""
        return {PARKED_COMMAND: self.action, PARKED_OFFSET: str(self.offset)}


def corrected(row: Mapping[str, Any], body: bytes, when: str) -> dict[str, Any]:
    """Return a parked message (PRODUCER_COLUMNS) with a corrected body, as a command contains it. ``when``: the time, for people.

    The error of the former body is left out, so that RocketMQ has room for the properties that are added.
    """
    former = dict(row["properties"])
    ticket = replace(Ticket.from_properties(former), error="")
    own = {name: value for name, value in former.items() if name not in PARKED_PROPERTIES}
    return {**row, "body": body, "properties": {**own, **ticket.to_properties(), CORRECTED: when}}


def given_back(offset: int, replays: int) -> int:
    """Return the offset under which the message at ``offset`` is parked after it was a dead letter. Modulo GIVEN_BACK it is ``offset``.

    The message comes after the others of its key in the lot, which are processed in the order of offsets, and its next letter is another.
    """
    return min(replays, 1 << 14) * GIVEN_BACK + offset % GIVEN_BACK


# -- messages in a lot ---------------------------------------------------------------------------------------------------------


def lane_key(key: str | None, offset: int, alone: bool = False) -> object:
    """Return the key within which a message is ordered: its sharding key, or its offset in the queue if it has none.

    ``alone``: a listener without order parked the message (`Ticket`), so its offset is returned even if it has a sharding key.
    """
    return offset if key is None or alone else key


@dataclass(slots=True)
class KeyInLot:
    """A key that has parked messages.

    ``due``: the due time of the key's first message that has not ended (`Ticket.has_ended`). ``begin``: that message's offset in the
    lot. ``offsets``: the offsets that all of the key's messages have in the queue, ascending. ``ended``: how many of these have ended.
    """

    due: int
    begin: int
    offsets: list[int] = field(default_factory=list)
    ended: int = 0


class Lot:
    """The keys in a range of a parking lot. The messages of the range are added in order.

    Two messages of the lot may have the same offset in the queue, because a task that was moving messages to the end of the lot died
    before it had finished. The first copy counts. But when the message is parked again, it is copied from the place of the last copy,
    because it was already parked from the place of the first.

    The messages of a key may be stored in another order than in the queue: the successor of a dead owner may park a message that belongs
    between messages that were parked earlier. Messages are processed in the order of the queue.

    An operator's command (`Command`) applies to the messages that were in the lot when it was given, including messages that a task was
    moving at that time. If the first message of a key is dropped, made a dead letter or replaced, the key is due at once.
    """

    def __init__(self, begin: int) -> None:
        #: The messages from ``begin`` up to ``end`` were added.
        self.begin = self.end = begin
        self.keys: dict[object, KeyInLot] = {}
        #: A message's offset in the queue → its first copy's offset in the lot, or that of the command which has replaced it; and its last
        #: copy's offset if it has several copies. A copy of a body that was replaced does not count.
        self.places: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        #: The greatest offset in the queue, or -1 if no message is parked, except those that were given back.
        self.max_offset = -1
        #: Whether the lot contains operators' commands. `_commands` has those of each key: the offset in the lot, the offset of the message
        #: (-1: all of the key), and the action. `_replaced` has the offset in the lot of the last one that replaces a message.
        self.commanded = False
        #: The number of failed calls of the keys' first messages in the lot, and when the oldest of these messages was stored, in µs
        #: since 1970.
        self.retries = 0
        self.oldest: int | None = None
        self._commands: dict[object, list[tuple[int, int, str]]] = {}
        self._replaced: dict[int, int] = {}
        #: The due times of messages that have ended, by their offsets in the queue.
        self._ended: dict[int, int] = {}
        #: For each key, the offset in the queue of the message whose offset in the lot is `KeyInLot.begin`.
        self._heads: dict[object, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the next rows of the lot, which have at least LOT_COLUMNS."""
        if not rows.num_rows:
            return
        at, keys = rows.column("queue_offset").to_pylist(), rows.column("sharding_key").to_pylist()
        offsets, dues = _numbers(rows, PARKED_OFFSET, -1), _numbers(rows, PARKED_DUE, AT_ONCE)
        commands = pc.map_lookup(rows.column("properties"), PARKED_COMMAND, "first")
        self.commanded = self.commanded or commands.null_count < len(commands)
        sources = _places_in_lot(rows) if self.commanded else [-1] * len(at)
        heads: list[int] = []
        every = zip(at, keys, offsets, dues, commands.to_pylist(), sources, _alone(rows), strict=True)
        for number, (place, key, offset, due, command, source, alone) in enumerate(every):
            lane = lane_key(key, offset, alone)
            if command is not None and command != "return":
                self._command(lane, offset, place, command)
            elif offset in self.places:
                if source >= self._replaced.get(offset, -1):
                    self.copies[offset] = place
            else:
                if lane not in self.keys:
                    heads.append(number)
                self._message(lane, place, offset, due, source)
        self.end = at[-1] + 1
        if heads:
            properties = rows.column("properties")
            self._sum(properties if len(heads) == len(properties) else properties.take(pa.array(heads)))

    def _sum(self, heads: pa.MapArray) -> None:
        """Add ``heads`` to `retries` and `oldest`.

        A head is the first message of its key in the lot, even if a later owner of the queue parked an older message of the key after it.
        """
        attempts, stored = (pc.map_lookup(heads, name, "first").cast(pa.int64()) for name in (PARKED_ATTEMPTS, PARKED_STORED))
        self.retries += pc.sum(attempts).as_py() or 0
        oldest = pc.min(stored.filter(pc.greater(stored, 0))).as_py()
        if oldest is not None:
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def _command(self, lane: object, offset: int, place: int, action: str) -> None:
        self._commands.setdefault(lane, []).append((place, offset, action))
        parked = self.keys.get(lane)
        concerned = [] if parked is None else parked.offsets if offset < 0 else [offset] if offset in parked.offsets else []
        if action == "replace":
            self._replaced[offset] = place
        if parked is None or not concerned:
            return
        if action in _DUE:
            parked.due = _DUE[action]
        elif action == "replace":
            self._replace(lane, parked, offset)
        else:
            for each in concerned:
                self._ended.setdefault(each, _ENDS[action])
            parked.ended = sum(each in self._ended for each in parked.offsets)
            if self._heads.get(lane) in self._ended:
                # The key continues with its first message that has not ended.
                head = next((each for each in parked.offsets if each not in self._ended), None)
                parked.due = _ENDS[action] if head is None else AT_ONCE
                if head is not None:
                    parked.begin, self._heads[lane] = self.places[head], head

    def _message(self, lane: object, place: int, offset: int, due: int, source: int) -> None:
        self.places[offset] = place
        if offset < GIVEN_BACK:
            self.max_offset = max(self.max_offset, offset)
        parked = self.keys.get(lane)
        if parked is None:
            parked = self.keys[lane] = KeyInLot(due, place)
        # A task was moving the message when these commands were given.
        actions = [action for at, of, action in self._commands.get(lane, ()) if 0 <= source < at and of in (-1, offset)]
        end = next((_ENDS[action] for action in actions if action in _ENDS), None)
        is_first = parked.ended == len(parked.offsets)
        insort(parked.offsets, offset)
        if end is not None:
            self._ended[offset] = end
            parked.ended += 1
            parked.due = end if is_first else parked.due
            return
        if is_first:
            dues = [due, *(_DUE[action] for action in actions if action in _DUE)]
            parked.due, parked.begin, self._heads[lane] = dues[-1], place, offset
        elif offset < self._heads[lane]:
            parked.begin, self._heads[lane] = place, offset
        if "replace" in actions:
            self._replace(lane, parked, offset)

    def _replace(self, lane: object, parked: KeyInLot, offset: int) -> None:
        self.places[offset] = self._replaced[offset]
        self.copies.pop(offset, None)
        if self._heads.get(lane) == offset:
            parked.due, parked.begin = AT_ONCE, self.places[offset]

    @property
    def messages(self) -> int:
        return len(self.places)

    def next_due(self) -> int | None:
        """Return when the first key is due, in ms since 1970, or None if no key will be due. A lot with commands is due immediately."""
        if self.commanded:
            return AT_ONCE
        return min((key.due for key in self.keys.values() if key.due != HELD), default=None)

    def ticket(self, place: int, lane: object, ticket: Ticket) -> Ticket | None:
        """Return the ticket of the message at ``place``, changed by the operators' commands, or None for a second copy."""
        if self.places.get(ticket.offset) != place:
            return None
        if ticket.offset in self._ended:
            return replace(ticket, due=self._ended[ticket.offset])
        parked = self.keys[lane]
        return replace(ticket, due=parked.due) if place == parked.begin else ticket

    def place(self, offset: int) -> int:
        """Return where in the lot the message with this offset in the queue is copied from when it is parked again."""
        return self.copies.get(offset, self.places[offset])


_DUE: Final = {"retry": AT_ONCE, "hold": HELD}
_ENDS: Final = {"drop": DROPPED, "dead_letter": DEAD_LETTERED}
_WITH_MESSAGE: Final = ("replace", "return")


def to_park(rows: pa.RecordBatch, parkings: Sequence[Parking]) -> pa.RecordBatch:
    """Return the rows (PRODUCER_COLUMNS) to append to the lot. ``rows`` (SOURCE_COLUMNS) has one message for each parking."""
    properties = []
    columns = [rows.column(name).to_pylist() for name in ("properties", "message_id")]
    times = [rows.column(name).cast(pa.int64()).to_pylist() for name in ("born_timestamp", "store_timestamp")]
    for parking, own, message_id, born, stored in zip(parkings, *columns, *times, strict=True):
        names = dict(own or ())
        if PARKED_OFFSET in names:
            then = Ticket.from_properties(names)
            message_id, born, stored = then.message_id, then.born, then.stored
        ticket = replace(parking.ticket, message_id=message_id or "", born=born or 0, stored=stored or 0)
        mine = {name: value for name, value in names.items() if name not in PARKED_PROPERTIES}
        properties.append(list({**mine, **ticket.to_properties(), PARKED_FROM: parking.place}.items()))
    arrays = [
        pa.array(properties, PROPERTIES_TYPE)
        if name == "properties"
        else rows.column(name).cast(PRODUCER_SCHEMA.field(name).type)
        for name in PRODUCER_COLUMNS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=PRODUCER_SCHEMA)


def command_rows(commands: Sequence[Command]) -> pa.RecordBatch:
    """Return the rows (PRODUCER_COLUMNS) of operators' commands to append to the lot."""
    rows = []
    for command in commands:
        row = {"body": b"", "sharding_key": command.key, **(command.row or {})}
        rows.append({**row, "properties": list({**row.get("properties", {}), **command.to_properties()}.items())})
    return pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA)


def is_message(properties: Mapping[str, str]) -> bool:
    """Whether a row of the lot with these properties is a message, although it may also be a command."""
    return properties.get(PARKED_COMMAND, "replace") in _WITH_MESSAGE


def restore(rows: pa.RecordBatch, queue: MessageQueue, lot: Lot) -> tuple[pa.RecordBatch, list[tuple[int, Ticket]]]:
    """Return the original messages of these rows of the lot (RESTORE_COLUMNS), and the place and ticket of each.

    The messages have all columns of MESSAGE_SCHEMA, as they were when they were sent to ``queue``, and ``reconsume_times`` is the
    number of their failed calls. ``lot`` has the keys of the whole range that is read. Commands and second copies are left out.
    """
    at, keys = rows.column("queue_offset").to_pylist(), rows.column("sharding_key").to_pylist()
    chosen: list[int] = []
    tickets: list[tuple[int, Ticket]] = []
    properties: list[list[tuple[str, str]]] = []
    for number, (place, key, items) in enumerate(zip(at, keys, rows.column("properties").to_pylist(), strict=True)):
        named = dict(items)
        if not is_message(named):
            continue
        own = Ticket.from_properties(named)
        ticket = lot.ticket(place, lane_key(key, own.offset, own.alone), own)
        if ticket is None:
            continue
        chosen.append(number)
        tickets.append((lot.place(own.offset), ticket))
        properties.append([(name, value) for name, value in items if name not in PARKED_PROPERTIES])
    restored = rows.take(pa.array(chosen, pa.int64()))
    of = [ticket for _, ticket in tickets]
    values: dict[str, Sequence[object]] = {
        "topic": [queue.topic] * len(of),
        "broker_name": [queue.broker_name] * len(of),
        "queue_id": [queue.queue_id] * len(of),
        "queue_offset": [origin_of.offset % GIVEN_BACK for origin_of in of],
        "message_id": [origin_of.message_id for origin_of in of],
        "born_timestamp": [origin_of.born for origin_of in of],
        "store_timestamp": [origin_of.stored for origin_of in of],
        "reconsume_times": [origin_of.attempts for origin_of in of],
        "properties": properties,
    }
    arrays = [
        pa.array(values[field.name], field.type) if field.name in values else restored.column(field.name)
        for field in MESSAGE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA), tickets


def _places_in_lot(rows: pa.RecordBatch) -> list[int]:
    """Return the offset in the lot from which each row was copied, or -1 for a row that was copied from the queue."""
    sources = pc.map_lookup(rows.column("properties"), PARKED_FROM, "first").to_pylist()
    return [int(source[2:]) if source is not None and source.startswith("P:") else -1 for source in sources]


def _alone(rows: pa.RecordBatch) -> list[bool]:
    """Return for each row whether a listener without order parked it, so that newer messages of its key do not wait for it."""
    alone: list[bool] = pc.map_lookup(rows.column("properties"), PARKED_ALONE, "first").is_valid().to_pylist()
    return alone


def _numbers(rows: pa.RecordBatch, name: str, default: int) -> list[int]:
    numbers = pc.map_lookup(rows.column("properties"), name, "first").cast(pa.int64())
    out: list[int] = pc.fill_null(numbers, default).to_pylist()
    return out


# -- errors that protect parked messages and their order ---------------------------------------------------------------------


def has_parked(group: str, parked: Mapping[str, int]) -> GroupError:
    """Return the error for a query without parking lots: it would process newer messages of parked keys. ``parked``: counts by topic."""
    of = ", ".join(f"{count:,} of topic {topic!r}" for topic, count in sorted(parked.items()))
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has parked messages, {of}: a query without a parking lot would process newer messages of their keys first. Set "
        f"parkingLot=true and use consume_orderly(..., OrderPerKey()), or drop them (orderedmq group seek {group}, with --parked drop)",
    )


def seek_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a seek that does not say what to do with the messages that are parked from the queues."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which a seek keeps or drops. Kept messages come back when "
        'they are due, and dropped messages are never processed. Pass parked="keep" or parked="drop" (--parked keep, --parked drop)',
    )


def copy_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a copy of the group's offsets that would leave out parked messages although the caller has not allowed this."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which are below its offsets: a group at the same offsets "
        "does not get them, and they stay parked in this group. Let a query of the group process them, or pass leave_parked=True "
        "(--leave-parked)",
    )


def change_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a query that was in ``group``, parked messages there, and is now in another group."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r}, to which this query's checkpoint belongs, has {messages:,} parked messages of {_queues(queues)}. In another group "
        f"the query would process newer messages of their keys first. Set consumerGroup={group} until they are processed, or drop them "
        "(orderedmq parked drop)",
    )


def delete_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for deleting a group with parked messages without force, because the messages would be lost."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which are lost if the group is deleted. Let a query of "
        "the group process them, or pass force=True (--force)",
    )


def lot_deleted(lot: MessageQueue, position: int) -> DataLossError:
    """Return the error for a parking lot that was deleted alone, by a tool of RocketMQ, while a query was running."""
    return DataLossError(
        DataLossCondition.QUEUE_DELETED,
        f"parking lot {lot} was deleted, but this query has read it up to {position}. Messages that were still parked in it are lost. Restart "
        "the query to continue with a new lot",
    )


def lots_left(topic: str, lots: Sequence[str], why: str) -> str:
    """Return an error's message after a topic was deleted, but its parking lots were not. ``why``: another error's message."""
    return f"topic {topic!r} is deleted, but not its parking lots ({', '.join(lots)}): {why}. Then delete the lots (orderedmq topic delete)"


def lots_kept(group: str, lots: Sequence[str], why: str) -> str:
    """Return an error's message after a group's settings were deleted, but its parking lots were not. ``why``: another error's message."""
    return (
        f"the parking lots of group {group!r} ({', '.join(lots)}) are not deleted, and its offsets are kept: {why}. Then delete the group "
        "again (orderedmq group delete)"
    )


def is_parking_lot(topic: str, group: str) -> TopicError:
    """Return the error for changing or deleting a topic of parking lots or its offsets, which only its group's queries may change."""
    return TopicError(
        TopicCondition.RESERVED,
        f"topic {topic!r} has the parked messages of consumer group {group!r}: it has no settings, grows and is deleted with the topic that "
        "the group reads, or is deleted with the group. Its messages are deleted when the group has processed them. Set the group's offsets of "
        "the topic that it reads",
    )


def read_as_a_stream(name: str, group: str, topic: str) -> TopicError:
    """Return the error for a stream of a topic of parking lots: it would lose messages in the lots' group, and miss some in another."""
    return TopicError(
        TopicCondition.RESERVED,
        f"option topic: topic {name!r} has the parked messages of consumer group {group!r}, and the group's query moves and deletes them. "
        f"Read topic {topic!r} with parkingLot=true to process them, or list them (orderedmq parked list {group}, or spark.read)",
    )


def _queues(queues: Sequence[object]) -> str:
    shown = ", ".join(str(queue) for queue in queues[:3])
    return f"queue {shown}" if len(queues) == 1 else f"queues {shown}{' and others' if len(queues) > 3 else ''}"
