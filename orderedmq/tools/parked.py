"""The parked messages of a group: finds its parking lots, lists their content, and gives commands (`parking.Command`) to their owners.

Rules: `parking`. A lot is read from the group's offset in the lot to the lot's end, as the queue's owner reads it. The command
never moves or deletes a parked message: it appends commands to the lot, which the queue's owner carries out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from orderedmq import pulls
from orderedmq.broker import Broker, PullSettings
from orderedmq.conditions import GroupCondition, OptionCondition, TopicCondition
from orderedmq.errors import DataLossError, GroupError, OptionError, TopicError
from orderedmq.model import PARKED_COMMAND, MessageQueue
from orderedmq.parking import (
    AT_ONCE,
    DROPPED,
    HELD,
    LOT_COLUMNS,
    Command,
    CommandAction,
    Lot,
    Ticket,
    corrected,
    is_message,
    lane_key,
    leader_of,
    origin,
    parked_queue,
)
from orderedmq.schema import PRODUCER_COLUMNS

State = Literal["waiting", "held", "replaced", "dropped", "dead_letter"]

#: Seconds for which a list of the topics is reused.
LISTING_AGE: Final = 10.0
#: Maximum attempts to read a lot whose owner removes messages at the same time.
_TRIES: Final = 3
#: Maximum number of topics or queues that an error names.
_CHOICES: Final = 8


class LotReader:
    """Reads the parking lots of groups. It reads each message once, because each `look` resumes where the previous one ended."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: The lots, each with the anchor of its topic (`Log.anchor`).
        self._lots: dict[tuple[str, MessageQueue], tuple[Lot, str]] = {}
        self._listed: tuple[float, list[str]] | None = None

    def look(self, group: str) -> dict[MessageQueue, Lot]:
        """Return the group's lots that are not empty, by the queue whose messages they contain. Raises the errors of `pulls`."""
        lots: dict[MessageQueue, Lot] = {}
        parked = [queue for topic in self._topics(group) for queue in self._queues(topic)]
        for attempt in range(_TRIES):
            try:
                lots = dict(self._read(group, parked))
                break
            except (DataLossError, TopicError):
                # The owner may have moved the group's offset since it was read, and the broker may have deleted the messages before it.
                # Or the lot itself was deleted.
                if attempt == _TRIES - 1:
                    raise
        self._lots = {place: lot for place, lot in self._lots.items() if place[0] != group or place[1] in lots}
        return {leader_of(group, queue): lot for queue, lot in lots.items()}

    def _topics(self, group: str) -> list[str]:
        now = time.monotonic()
        if self._listed is None or now >= self._listed[0] + LISTING_AGE:
            self._listed = now, [topic.name for topic in self._broker.log.topics()]
        return [name for name in self._listed[1] if (of := origin(name)) is not None and of[0] == group]

    def _queues(self, topic: str) -> list[MessageQueue]:
        try:
            return self._broker.log.queues(topic)
        except TopicError as error:
            if error.sub != TopicCondition.MISSING:
                raise
            # The topic was deleted after it was listed.
            return []

    def _read(self, group: str, parked: Sequence[MessageQueue]) -> Iterator[tuple[MessageQueue, Lot]]:
        if not parked:
            return
        # Read as the group: the account may have no right to read under another name.
        log = self._broker.log.reading(PullSettings(group))
        # Read the offsets before the bounds, because offsets only grow.
        offsets = self._broker.groups.offsets(group, parked)
        for queue, at in self._broker.log.bounds(parked).items():
            begin = max(offsets.get(queue, at.min_offset), at.min_offset)
            if begin >= at.max_offset:
                continue
            lot, anchor = self._lots.get((group, queue), (None, ""))
            if lot is None or lot.begin != begin or lot.end > at.max_offset or log.is_another(queue.topic, anchor):
                # Get the anchor before the messages: if the lot is deleted and created again in between, the next call notices it.
                anchor = log.anchor(queue.topic, {queue: at.max_offset})
                lot = Lot(begin)
                self._lots[group, queue] = lot, anchor
            pulls.read_lot(log, lot, queue, at.max_offset)
            if lot.messages:
                yield queue, lot


@dataclass
class ParkedKey:
    """A key with parked messages, or one message of it. A message that has no key (``key`` None) or was parked alone is a separate key.

    ``offset`` and ``ticket`` belong to its first message. ``places``: for each message that has not ended, its offset in the queue and its
    place in the lot; for a key whose messages have all ended, these. ``single``: whether commands concern only the message ``offset``.
    ``replaced``: whether an order has replaced the first message's body, which no listener has got since.
    """

    queue: MessageQueue
    key: str | None
    offset: int
    ticket: Ticket
    places: dict[int, int] = field(default_factory=dict)
    single: bool = False
    replaced: bool = False

    @property
    def messages(self) -> int:
        return len(self.places)

    @property
    def has_order(self) -> bool:
        return self.key is not None and not self.ticket.alone

    @property
    def state(self) -> State:
        if self.ticket.has_ended:
            return "dropped" if self.ticket.due == DROPPED else "dead_letter"
        if self.ticket.due == HELD:
            return "held"
        return "replaced" if self.replaced else "waiting"

    @property
    def due(self) -> int | None:
        """When the key is due, in ms since 1970. None: immediately, or never."""
        return self.ticket.due if self.ticket.due > AT_ONCE else None

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the key is due, 0 if it is due, None if it never will be due. ``now``: seconds since 1970."""
        return due_in(None if self.state == "held" else self.ticket.due, now)

    def message(self, offset: int) -> ParkedKey:
        """Return only the message at ``offset``."""
        return replace(self, offset=offset, places={offset: self.places[offset]}, single=True)

    def command(self, action: CommandAction, row: Mapping[str, Any] | None = None) -> Command:
        offset = self.offset if self.single or not self.has_order else -1
        return Command(action, self.key if self.has_order else None, offset, row)


def due_in(due: int | None, now: float) -> float | None:
    """Return the seconds until a due time (`Lot.next_due`), None if there is none. ``now``: seconds since 1970."""
    return None if due is None else max(0.0, due / 1000 - now)


def parked_keys(broker: Broker, group: str) -> list[ParkedKey]:
    """Return the group's parked keys, by queue and in the order in which they were parked. Raises GroupError MISSING."""
    lots = LotReader(broker).look(group)
    if not lots:
        broker.admin.group_offsets(group)
    return [key for queue in sorted(lots) for key in _keys(broker, group, queue, lots[queue])]


def _keys(broker: Broker, group: str, queue: MessageQueue, lot: Lot) -> list[ParkedKey]:
    """Return the keys of a lot. The lot is read a second time, because `Lot` does not keep the tickets."""
    keys: dict[object, ParkedKey] = {}
    log, parked = broker.log.reading(PullSettings(group)), parked_queue(group, queue)
    for rows in pulls.pulls(log, parked, lot.begin, lot.end, pulls.LOT_PULL, pulls.LOT_PULL_BYTES, LOT_COLUMNS):
        for place, key, properties in zip(*(rows.column(name).to_pylist() for name in LOT_COLUMNS), strict=True):
            noted = dict(properties)
            if not is_message(noted):
                continue
            own = Ticket.from_properties(noted)
            lane = lane_key(key, own.offset, own.alone)
            ticket = lot.ticket(place, lane, own)
            if ticket is None:
                continue
            replaced = noted.get(PARKED_COMMAND) == "replace"
            entry = keys.setdefault(lane, ParkedKey(queue, key, own.offset, ticket, replaced=replaced))
            if ticket.has_ended < entry.ticket.has_ended:
                entry.places.clear()
            # The key's first message is the one that comes first in the queue and has not ended. The lot may have another order.
            if (ticket.has_ended, own.offset) < (entry.ticket.has_ended, entry.offset):
                entry.offset, entry.ticket, entry.replaced = own.offset, ticket, replaced
            if ticket.has_ended == entry.ticket.has_ended:
                entry.places[own.offset] = place
    return list(keys.values())


def chosen(
    group: str, parked: Sequence[ParkedKey], keys: Sequence[str], offsets: Sequence[int], everything: bool, single: bool = False
) -> list[ParkedKey]:
    """Return the parked keys that a command names, or that have messages at ``offsets`` of their queues, if ``keys`` are given of these keys.

    ``single``: return only the messages at ``offsets``, or the first one of each key in a queue. Keys whose messages have all ended are left
    out. Raises OptionError CONFLICT or MISSING; GroupError NOT_PARKED; TopicError AMBIGUOUS if
    a key is parked from several topics, or if messages are parked from an offset of several queues.
    """
    if everything == bool(keys or offsets):
        raise OptionError(
            OptionCondition.CONFLICT if everything else OptionCondition.MISSING,
            "the command needs --key or --offset, once or several times, or --all instead of both",
        )
    parked = [parked_key for parked_key in parked if not parked_key.ticket.has_ended]
    if everything:
        return parked
    keys_chosen: list[ParkedKey] = []
    for offset in dict.fromkeys(offsets):
        those = [each for each in parked if offset in each.places and (not keys or each.key in keys)]
        _require(group, those, f"message at offset {offset}{f' of key {keys[0]!r}' if len(keys) == 1 else ''}")
        if len(those) > 1:
            raise TopicError(
                TopicCondition.AMBIGUOUS,
                f"messages are parked from offset {offset} of {len(those)} queues. Give --topic with "
                f"{_one_of([str(parked_key.queue) for parked_key in those])}",
            )
        keys_chosen += those
    for key in () if offsets else dict.fromkeys(keys):
        those = [parked_key for parked_key in parked if parked_key.key == key]
        _require(group, those, f"messages of key {key!r}")
        topics = sorted({parked_key.queue.topic for parked_key in those})
        if len(topics) > 1:
            raise TopicError(
                TopicCondition.AMBIGUOUS,
                f"messages of key {key!r} are parked from several topics. Give --topic with {_one_of(topics)}",
            )
        keys_chosen += those
    if not single:
        return keys_chosen
    if offsets:
        return [parked_key.message(offset) for parked_key, offset in zip(keys_chosen, dict.fromkeys(offsets), strict=True)]
    last_to_first = sorted(keys_chosen, key=lambda each: -each.offset)
    return list({(each.queue, each.key): each.message(each.offset) for each in last_to_first}.values())


def _require(group: str, those: Sequence[ParkedKey], what: str) -> None:
    if not those:
        raise GroupError(
            GroupCondition.NOT_PARKED,
            f"group {group!r} has no parked {what}, or an order has already ended what was parked. Run orderedmq parked list {group} to "
            "see what is parked",
        )


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(names[:_CHOICES]) + (" …" if names[_CHOICES:] else "")


def give(broker: Broker, group: str, action: CommandAction, those: Sequence[ParkedKey], body: bytes | None = None) -> None:
    """Append a command for each key or message to the parking lot of its queue. ``body``: with "replace", the corrected body."""
    of_queues: dict[MessageQueue, list[Command]] = {}
    for parked_key in those:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        row = None if body is None else corrected(parked_row(broker, group, [parked_key]), body, now)
        of_queues.setdefault(parked_key.queue, []).append(parked_key.command(action, row))
    for queue, commands in of_queues.items():
        broker.admin.command_parked(group, queue, commands)


def parked_row(broker: Broker, group: str, messages: Sequence[ParkedKey]) -> dict[str, Any]:
    """Return the row of one parked message in the lot (PRODUCER_COLUMNS).

    Raises TopicError AMBIGUOUS for several messages, and the errors of `Log.pull` if the message's owner has just tried it.
    """
    if len(messages) > 1:
        named = _one_of([f"message {each.offset} of queue {each.queue}" for each in messages])
        raise TopicError(
            TopicCondition.AMBIGUOUS, f"a body is for one message, not {named}. Give --offset, and --topic with the queue"
        )
    [message] = messages
    log, lot = broker.log.reading(PullSettings(group)), parked_queue(group, message.queue)
    [row] = log.pull(lot, message.places[message.offset], 1, pulls.LOT_PULL_BYTES, PRODUCER_COLUMNS).to_pylist()
    return dict(row)


def repair_parked(
    broker: Broker,
    group: str,
    action: Literal["retry", "hold", "drop", "dead_letter", "replace"],
    *,
    key: str | None = None,
    offset: int | None = None,
    body: bytes | None = None,
    topic: str | None = None,
) -> list[tuple[MessageQueue, int]]:
    """Order the owners of parked messages what to do, as ``orderedmq parked`` does.

    ``action``: "retry" or "hold" the ``key``, or that of the message at ``offset`` of its queue. Or "drop" one message, make it a
    "dead_letter", or "replace" its body by ``body``, so that its key continues: the first message of ``key`` in each queue, or the one at
    ``offset``. Return the queues and offsets. Raises OptionError MISSING or INVALID; GroupError MISSING or NOT_PARKED; TopicError AMBIGUOUS
    if ``topic`` is needed; MessageError if the body is too large.
    """
    if (action == "replace") != (body is not None):
        raise OptionError(OptionCondition.INVALID, "repair_parked needs a body with replace, and only then")
    parked = [each for each in parked_keys(broker, group) if topic in (None, each.queue.topic)]
    keys, offsets = [] if key is None else [key], [] if offset is None else [offset]
    those = chosen(group, parked, keys, offsets, False, single=action not in ("retry", "hold"))
    if action == "replace":
        parked_row(broker, group, those)
    give(broker, group, action, those, body)
    return [(each.queue, each.offset) for each in those]


def order(action: CommandAction, those: Sequence[ParkedKey]) -> str:
    """Return what the owners are told to do, for people."""
    verb = {"dead_letter": "make dead letters of", "replace": "replace the body of"}.get(action, action)
    return f"{verb} {described(those)}"


def described(those: Sequence[ParkedKey]) -> str:
    """Return how many messages of which keys these are, for people."""
    if len(those) == 1 and those[0].single:
        return f"message {those[0].offset} of {f'key {those[0].key!r}' if those[0].has_order else f'queue {those[0].queue}'}"
    messages = sum(each.messages for each in those)
    text = f"{messages:,} parked message{'' if messages == 1 else 's'}"
    if len(those) == 1:
        return f"{text} of key {those[0].key!r}" if those[0].key is not None else f"{text} without a key"
    return f"{text} of {len(those):,} keys"


def owned(broker: Broker, group: str) -> Mapping[MessageQueue, bool]:
    """Return the queues in which the group has a lock, and whether the lock's owner is alive, as far as the broker knows."""
    return {lock.queue: lock.alive is not False for lock in broker.admin.locks(group) if lock.held}
