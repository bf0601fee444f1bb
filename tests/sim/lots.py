"""The parking lots of the simulated broker: what lies in them, by the rules of parking.rules, and orders of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from orderedmq.model import PARKED_DUE, PARKED_FROM, PARKED_OFFSET, MessageQueue, is_parked
from orderedmq.ownership.lock import LockToken
from orderedmq.parking.lot import LOT_COLUMNS, lane_key
from orderedmq.parking.rules import DROPPED, HELD, AtSeek, Order, Put, Ticket, parked_queue
from orderedmq.schema import PROPERTIES_TYPE
from tests.sim.world import GROUP, World


@dataclass(slots=True)
class Entry:
    """What lies at a place of a lot: a copy of the message ``offset`` of the queue with its ticket, or an order."""

    place: int
    offset: int
    key: str | None
    ticket: Ticket | None = None
    order: Order | None = None
    #: Where the message was copied from, as text (`Put.place`), and that place in the lot if it was there (-1: in the queue).
    source: str = ""
    moved_from: int = -1

    @property
    def lane(self) -> object:
        return lane_key(self.key, self.offset)

    def properties(self) -> list[tuple[str, str]]:
        """Return the properties that `Lot` reads."""
        if self.order is not None:
            return list(self.order.to_properties().items())
        assert self.ticket is not None
        return [(PARKED_OFFSET, str(self.offset)), (PARKED_DUE, str(self.ticket.due)), (PARKED_FROM, self.source)]


@dataclass(slots=True)
class Head:
    """A parked key by the specification: its messages in the queue's order, when the first is due, and those that were dropped."""

    due: int
    offsets: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)

    def is_due(self, now: int) -> bool:
        return self.due == DROPPED or (self.due != HELD and self.due <= now)


class Lots:
    """All parking lots of the group. ``key_of`` tells the sharding key of a message."""

    def __init__(self, world: World, key_of: Callable[[MessageQueue, int], str | None]) -> None:
        self.world = world
        self.key_of = key_of
        self.entries: dict[MessageQueue, list[Entry]] = {}
        #: The places of which there is a copy, and where the last one lies.
        self.known: dict[MessageQueue, dict[str, int]] = {}
        #: What lies before this place may have been deleted.
        self.begins: dict[MessageQueue, int] = {}

    # -- the broker ------------------------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether the topic of the lots exists: it is made with its first message."""
        return bool(self.entries)

    def end(self, lot: MessageQueue) -> int:
        return len(self.entries.get(lot, ()))

    def settled(self, put: Put) -> bool:
        """Whether the place of a put lies below the group's offset of its queue."""
        return put.at < self.world.group_offsets.get(put.source, 0)

    def parked_before(self, lot: MessageQueue, put: Put) -> bool:
        """Whether a copy that was made from this place lies in the lot. A seek may have dropped it."""
        return self.known.get(lot, {}).get(put.place, -1) >= self.world.group_offsets.get(lot, 0)

    def park(self, token: LockToken, puts: Sequence[Put]) -> list[bool]:
        """Do what `Groups.park` promises."""
        self.world.require_current(token)
        self.world.accepted(token)
        lot = parked_queue(GROUP, token.queue)
        out: list[bool] = []
        for put in puts:
            if put.source not in (token.queue, lot):
                self.world.fail(f"{put.source} is not parked under the lock of {token.queue}")
            if self.settled(put):
                self.world.reached["settled place refused"] += 1
                out.append(False)
            elif self.parked_before(lot, put):
                self.world.reached["same place again"] += 1
                out.append(True)
            else:
                self.known.setdefault(lot, {})[put.place] = self._append(lot, self._copy(lot, put))
                out.append(True)
        return out

    def _copy(self, lot: MessageQueue, put: Put) -> Entry:
        if not is_parked(put.source):
            return Entry(0, put.at, self.key_of(put.source, put.at), put.ticket, None, put.place)
        if not self.begins.get(lot, 0) <= put.at < self.end(lot):
            self.world.fail(f"{lot} has no message at {put.at} any more")
        was = self.entries[lot][put.at]
        if was.order is not None or was.offset != put.ticket.offset:
            self.world.fail(f"{lot} has another message at {put.at} than {put.ticket.offset}")
        return Entry(0, was.offset, was.key, put.ticket, None, put.place, put.at)

    def order(self, queue: MessageQueue, orders: Sequence[Order]) -> None:
        """Do what `Admin.order_parked` promises."""
        for one in orders:
            self._append(parked_queue(GROUP, queue), Entry(0, one.offset, one.key, None, one))

    def _append(self, lot: MessageQueue, entry: Entry) -> int:
        lying = self.entries.setdefault(lot, [])
        entry.place = len(lying)
        lying.append(entry)
        self.world.changes += 1
        return entry.place

    def sought(self, queue: MessageQueue, offset: int, parked: AtSeek) -> None:
        """Do with the queue's lot what ``group seek --parked`` does. ``offset``: where the queue is read from now."""
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
        """Return the rows (LOT_COLUMNS) of a lot from ``begin`` to ``end``."""
        if begin < self.begins.get(lot, 0):
            self.world.fail(f"{lot} is read from {begin} on, but it was deleted up to {self.begins[lot]}")
        lying = self.entries.get(lot, [])[begin:end]
        arrays = [
            pa.array([one.place for one in lying], pa.int64()),
            pa.array([one.key for one in lying], pa.string()),
            pa.array([one.properties() for one in lying], PROPERTIES_TYPE),
        ]
        return pa.RecordBatch.from_arrays(arrays, names=list(LOT_COLUMNS))

    def passed(self, lot: MessageQueue, before: int) -> None:
        """The group's offset moved on from ``before``: what lies before that may be deleted."""
        self.begins[lot] = before

    # -- the specification -----------------------------------------------------------------------------------------------------

    def live(self, queue: MessageQueue) -> list[Entry]:
        """Return what lies in the queue's lot from the group's offset to its end."""
        lot = parked_queue(GROUP, queue)
        return self.entries.get(lot, [])[self.world.group_offsets.get(lot, 0) :]

    def messages(self, queue: MessageQueue) -> list[Entry]:
        """Return the messages in the queue's lot. A copy counts when the one that it was made from does not lie there any more."""
        begin = self.world.group_offsets.get(parked_queue(GROUP, queue), 0)
        return [one for one in self.live(queue) if one.order is None and one.moved_from < begin]

    def lanes(self, lot: MessageQueue, begin: int, end: int) -> dict[object, Head]:
        """Return the keys that are parked from ``begin`` to ``end``.

        An order concerns the messages that lay in the lot when it was given, also those that were moved since.
        """
        out: dict[object, Head] = {}
        orders: dict[object, Entry] = {}
        seen: set[int] = set()
        for one in self.entries.get(lot, [])[begin:end]:
            head = out.get(one.lane)
            if one.order is not None:
                orders[one.lane] = one
                if head is not None:
                    head.due = _DUE[one.order.action]
                    if one.order.action == "drop":
                        head.dropped |= set(head.offsets)
                continue
            if one.offset in seen:
                continue
            seen.add(one.offset)
            assert one.ticket is not None
            given = orders.get(one.lane)
            action = given.order.action if given is not None and given.order and 0 <= one.moved_from < given.place else None
            if head is None:
                head = out[one.lane] = Head(0)
            if head.dropped.issuperset(head.offsets):
                # It is the first that is not dropped.
                head.due = one.ticket.due if action is None else _DUE[action]
            if action == "drop":
                head.dropped.add(one.offset)
            head.offsets.append(one.offset)
            head.offsets.sort()
        return out


_DUE: Final = {"retry": 0, "hold": HELD, "drop": DROPPED}
