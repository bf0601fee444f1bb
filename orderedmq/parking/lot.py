"""Parked messages as Arrow rows, as they are read from a parking lot and written to it. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.model import (
    PARKED_ALONE,
    PARKED_ATTEMPTS,
    PARKED_COMMAND,
    PARKED_DUE,
    PARKED_FROM,
    PARKED_OFFSET,
    PARKED_PROPERTIES,
    PARKED_STORED,
    MessageQueue,
)
from orderedmq.parking.rules import AT_ONCE, DROPPED, HELD, Command, Parking, Ticket
from orderedmq.schema import MESSAGE_SCHEMA, PRODUCER_COLUMNS, PRODUCER_SCHEMA, PROPERTIES_TYPE

#: The columns of a lot that `Lot.add` needs.
LOT_COLUMNS: Final = ("queue_offset", "sharding_key", "properties")
#: The columns of a message that `to_park` needs.
SOURCE_COLUMNS: Final = (*PRODUCER_COLUMNS, "message_id", "born_timestamp", "store_timestamp")
#: The columns of a lot that `restore` needs.
RESTORE_COLUMNS: Final = ("queue_offset", *PRODUCER_COLUMNS)


def lane_key(key: str | None, offset: int, alone: bool = False) -> object:
    """Return the key within which a message is ordered: its sharding key, or its offset in the queue if it has none.

    ``alone``: a listener without order parked the message (`rules.Ticket`), so its offset is returned even if it has a sharding key.
    """
    return offset if key is None or alone else key


@dataclass(slots=True)
class Parked:
    """A key that has parked messages.

    ``due``: the due time of the key's first message that no operator has dropped. ``begin``: that message's offset in the lot.
    ``offsets``: the offsets that all of the key's messages have in the queue, ascending. ``dropped``: how many of these messages are
    dropped.
    """

    due: int
    begin: int
    offsets: list[int] = field(default_factory=list)
    dropped: int = 0


class Lot:
    """The keys in a range of a parking lot. The messages of the range are added in order.

    Two messages of the lot may have the same offset in the queue, because a task that was moving messages to the end of the lot died
    before it had finished. The first copy counts. But when the message is parked again, it is copied from the place of the last copy,
    because it was already parked from the place of the first.

    The messages of a key may be stored in another order than in the queue: the successor of a dead owner may park a message that belongs
    between messages that were parked earlier. Messages are processed in the order of the queue.

    An operator's command (`Command`) applies to the messages that were in the lot when it was given, including messages that a task was
    moving at that time.
    """

    def __init__(self, begin: int) -> None:
        #: The messages from ``begin`` up to ``end`` were added.
        self.begin = self.end = begin
        self.keys: dict[object, Parked] = {}
        #: A message's offset in the queue → its first copy's offset in the lot, and its last copy's offset if it has several copies.
        self.places: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        #: The greatest offset in the queue, or -1 if no message is parked.
        self.max_offset = -1
        #: Whether the lot contains operators' commands. `_commands` has the last one of each key: its offset in the lot, and its action.
        self.commanded = False
        #: The number of failed calls of the keys' first messages in the lot, and when the oldest of these messages was stored, in µs
        #: since 1970.
        self.retries = 0
        self.oldest: int | None = None
        self._commands: dict[object, tuple[int, str]] = {}
        self._dropped: set[int] = set()
        #: For each key, the offset in the queue of the message whose offset in the lot is `Parked.begin`.
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
            if command is not None:
                self._command(lane, place, command)
            elif offset in self.places:
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

    def _command(self, lane: object, place: int, action: str) -> None:
        self._commands[lane] = place, action
        parked = self.keys.get(lane)
        if parked is not None:
            parked.due = _DUE[action]
            if action == "drop":
                self._dropped.update(parked.offsets)
                parked.dropped = len(parked.offsets)

    def _message(self, lane: object, place: int, offset: int, due: int, source: int) -> None:
        self.places[offset] = place
        self.max_offset = max(self.max_offset, offset)
        parked = self.keys.get(lane)
        if parked is None:
            parked = self.keys[lane] = Parked(due, place)
        commanded, action = self._commands.get(lane, (-1, ""))
        concerned = 0 <= source < commanded
        if parked.dropped == len(parked.offsets):
            parked.due, parked.begin, self._heads[lane] = _DUE[action] if concerned else due, place, offset
        elif offset < self._heads[lane]:
            parked.begin, self._heads[lane] = place, offset
        if concerned and action == "drop":
            self._dropped.add(offset)
            parked.dropped += 1
        insort(parked.offsets, offset)

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
        if ticket.offset in self._dropped:
            return replace(ticket, due=DROPPED)
        parked = self.keys[lane]
        return replace(ticket, due=parked.due) if place == parked.begin else ticket

    def place(self, offset: int) -> int:
        """Return where in the lot the message with this offset in the queue is copied from when it is parked again."""
        return self.copies.get(offset, self.places[offset])


_DUE: Final = {"retry": AT_ONCE, "hold": HELD, "drop": DROPPED}


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
    rows = [
        {"body": b"", "sharding_key": command.key, "properties": list(command.to_properties().items())} for command in commands
    ]
    return pa.RecordBatch.from_pylist(rows, schema=PRODUCER_SCHEMA)


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
        if PARKED_COMMAND in named:
            continue
        own = Ticket.from_properties(named)
        ticket = lot.ticket(place, lane_key(key, own.offset, own.alone), own)
        if ticket is None:
            continue
        chosen.append(number)
        tickets.append((lot.place(own.offset), ticket))
        properties.append([(name, value) for name, value in items if name not in PARKED_PROPERTIES])
    taken = rows.take(pa.array(chosen, pa.int64()))
    of = [ticket for _, ticket in tickets]
    values: dict[str, Sequence[object]] = {
        "topic": [queue.topic] * len(of),
        "broker_name": [queue.broker_name] * len(of),
        "queue_id": [queue.queue_id] * len(of),
        "queue_offset": [origin_of.offset for origin_of in of],
        "message_id": [origin_of.message_id for origin_of in of],
        "born_timestamp": [origin_of.born for origin_of in of],
        "store_timestamp": [origin_of.stored for origin_of in of],
        "reconsume_times": [origin_of.attempts for origin_of in of],
        "properties": properties,
    }
    arrays = [
        pa.array(values[field.name], field.type) if field.name in values else taken.column(field.name)
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
