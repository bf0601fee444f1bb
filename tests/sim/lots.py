"""The parking lots of the simulated broker: their content by the rules of parking, and commands of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from orderedmq.errors import aged_out
from orderedmq.model import PARKED_DUE, PARKED_FROM, PARKED_OFFSET, MessageQueue, is_parked
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import (
    DROPPED,
    HELD,
    LOT_COLUMNS,
    AtSeek,
    Command,
    CommandAction,
    Parking,
    Ticket,
    lane_key,
    parked_queue,
)
from orderedmq.schema import PROPERTIES_TYPE
from tests.sim.world import GROUP, World


@dataclass(slots=True)
class Entry:
    """The content of one place in a lot: a copy of the queue's message ``offset`` with its ticket, or an operator's command."""

    place: int
    offset: int
    key: str | None
    ticket: Ticket | None = None
    command: Command | None = None
    #: The place that the message was copied from, as text (`Put.place`), and the number of this place in the lot (-1: in the queue).
    source: str = ""
    moved_from: int = -1

    @property
    def lane(self) -> object:
        return lane_key(self.key, self.offset)

    def ordered(self, action: CommandAction) -> Command:
        """Return an operator's command for the message's key."""
        return Command(action, self.key, self.offset if self.key is None else -1)

    def properties(self) -> list[tuple[str, str]]:
        """Return the properties that `Lot` reads."""
        if self.command is not None:
            return list(self.command.to_properties().items())
        assert self.ticket is not None
        return [(PARKED_OFFSET, str(self.offset)), (PARKED_DUE, str(self.ticket.due)), (PARKED_FROM, self.source)]


@dataclass(slots=True)
class Head:
    """A parked key by the specification: its messages in queue order, when the first one is due, and the dropped messages."""

    due: int
    offsets: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)

    def is_due(self, now: int) -> bool:
        return self.due == DROPPED or (self.due != HELD and self.due <= now)


class Lots:
    """All parking lots of the group. ``key_of`` returns the sharding key of a message."""

    def __init__(self, world: World, key_of: Callable[[MessageQueue, int], str | None]) -> None:
        self.world = world
        self.key_of = key_of
        self.entries: dict[MessageQueue, list[Entry]] = {}
        #: For each place that was copied, the place of its latest copy.
        self.known: dict[MessageQueue, dict[str, int]] = {}
        #: The first place that must still exist. Entries before it may have been deleted.
        self.begins: dict[MessageQueue, int] = {}

    # -- the broker ------------------------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether the topic of the lots exists. It is created with its first message."""
        return bool(self.entries)

    def end(self, lot: MessageQueue) -> int:
        return len(self.entries.get(lot, ()))

    def settled(self, parking: Parking) -> bool:
        """Whether a message's place is below the group's offset of the queue or lot that it is parked from."""
        return parking.at < self.world.group_offsets.get(parking.source, 0)

    def parked_before(self, lot: MessageQueue, parking: Parking) -> bool:
        """Whether a copy of this place is in the lot. A seek may have dropped it."""
        return self.known.get(lot, {}).get(parking.place, -1) >= self.world.group_offsets.get(lot, 0)

    def park(self, token: LockToken, parkings: Sequence[Parking]) -> list[bool]:
        """Do what `Groups.park` promises."""
        self.world.require_current(token)
        self.world.accepted(token)
        lot = parked_queue(GROUP, token.queue)
        out: list[bool] = []
        for parking in parkings:
            if parking.source not in (token.queue, lot):
                self.world.fail(f"{parking.source} was parked under the lock of {token.queue}")
            if self.settled(parking):
                self.world.reached["settled place refused"] += 1
                out.append(False)
            elif self.parked_before(lot, parking):
                self.world.reached["same place again"] += 1
                out.append(True)
            else:
                self.known.setdefault(lot, {})[parking.place] = self._append(lot, self._copy(lot, parking))
                out.append(True)
        return out

    def _copy(self, lot: MessageQueue, parking: Parking) -> Entry:
        if not is_parked(parking.source):
            return Entry(0, parking.at, self.key_of(parking.source, parking.at), parking.ticket, None, parking.place)
        if not self.begins.get(lot, 0) <= parking.at < self.end(lot):
            self.world.fail(f"{lot} has no message at {parking.at} any more")
        was = self.entries[lot][parking.at]
        if was.command is not None or was.offset != parking.ticket.offset:
            self.world.fail(f"{lot} has a message other than {parking.ticket.offset} at {parking.at}")
        return Entry(0, was.offset, was.key, parking.ticket, None, parking.place, parking.at)

    def command(self, queue: MessageQueue, commands: Sequence[Command]) -> None:
        """Do what `Admin.command_parked` promises."""
        for one in commands:
            self._append(parked_queue(GROUP, queue), Entry(0, one.offset, one.key, None, one))

    def _append(self, lot: MessageQueue, entry: Entry) -> int:
        lying = self.entries.setdefault(lot, [])
        entry.place = len(lying)
        lying.append(entry)
        self.world.changes += 1
        return entry.place

    def sought(self, queue: MessageQueue, offset: int, parked: AtSeek) -> None:
        """Change the queue's lot as ``group seek --parked`` does. ``offset``: the queue's new offset."""
        lying = [one.offset for one in self.messages(queue)]
        if not lying:
            return
        self.world.reached[f"seek with --parked {parked}"] += 1
        self.world.reached["lot ahead of its queue"] += parked == "keep" and max(lying) >= offset
        lot = parked_queue(GROUP, queue)
        if parked == "drop":
            self.world.group_offsets[lot] = self.end(lot)
        self.world.ledger.lot_sought(lot, self.world.group_offsets.get(lot, 0))

    def pull(self, lot: MessageQueue, begin: int, end: int) -> pa.RecordBatch:
        """Return the rows of a lot from ``begin`` to ``end``, with the columns LOT_COLUMNS."""
        if begin < self.begins.get(lot, 0):
            if self.world.keys is not None and not self.world.keys.strict:
                # The other run of the same checkpoint has committed a later batch, while this one was paused.
                raise aged_out(lot, begin, self.begins[lot])
            self.world.fail(f"{lot} is read from {begin} on, but it was deleted below {self.begins[lot]}")
        lying = self.entries.get(lot, [])[begin:end]
        arrays = [
            pa.array([one.place for one in lying], pa.int64()),
            pa.array([one.key for one in lying], pa.string()),
            pa.array([one.properties() for one in lying], PROPERTIES_TYPE),
        ]
        return pa.RecordBatch.from_arrays(arrays, names=list(LOT_COLUMNS))

    def passed(self, lot: MessageQueue, before: int) -> None:
        """Record that the group's offset has moved on from ``before``, so that earlier entries may be deleted."""
        self.begins[lot] = before

    # -- the specification -----------------------------------------------------------------------------------------------------

    def live(self, queue: MessageQueue) -> list[Entry]:
        """Return the entries in the queue's lot from the group's offset to the end."""
        lot = parked_queue(GROUP, queue)
        return self.entries.get(lot, [])[self.world.group_offsets.get(lot, 0) :]

    def messages(self, queue: MessageQueue) -> list[Entry]:
        """Return the messages in the queue's lot. A copy counts only after the group's offset has passed the entry that it copies."""
        begin = self.world.group_offsets.get(parked_queue(GROUP, queue), 0)
        return [one for one in self.live(queue) if one.command is None and one.moved_from < begin]

    def lanes(self, lot: MessageQueue, begin: int, end: int) -> dict[object, Head]:
        """Return the keys that are parked from ``begin`` to ``end``.

        A command applies to the messages that were in the lot when it was given, including messages that were moved since.
        """
        out: dict[object, Head] = {}
        #: The last command of each key that drops it, and the last other one.
        commands: dict[tuple[object, bool], Entry] = {}

        def given(entry: Entry, *, drops: bool) -> str | None:
            last = commands.get((entry.lane, drops))
            return last.command.action if last is not None and last.command and 0 <= entry.moved_from < last.place else None

        seen: set[int] = set()
        for one in self.entries.get(lot, [])[begin:end]:
            head = out.get(one.lane)
            if one.command is not None:
                commands[one.lane, one.command.action == "drop"] = one
                if head is not None and one.command.action == "drop":
                    head.due = DROPPED
                    head.dropped |= set(head.offsets)
                elif head is not None:
                    head.due = _DUE[one.command.action]
                continue
            if one.offset in seen:
                continue
            seen.add(one.offset)
            assert one.ticket is not None
            action = given(one, drops=True) or given(one, drops=False)
            if head is None:
                head = out[one.lane] = Head(0)
            if head.dropped.issuperset(head.offsets):
                # This message is the first of its key that is not dropped.
                head.due = one.ticket.due if action is None else _DUE.get(action, DROPPED)
            if action == "drop":
                head.dropped.add(one.offset)
            head.offsets.append(one.offset)
            head.offsets.sort()
        return out


_DUE: Final = {"retry": 0, "hold": HELD}
