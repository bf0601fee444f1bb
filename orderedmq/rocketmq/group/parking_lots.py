"""Parking lots at the brokers: the topics %PARKED%<group>%<topic>, and the messages that are parked in them (parking).

`orderedmq.rocketmq.append` parks each message once. A copy names the place of its message (property PARKED_FROM). To find a copy, the lot
is searched for this place, from the group's offset to the lot's end. This process remembers the messages that it has read or sent, and
reads only the others.

Only the queue's lock, which is checked before each request, prevents other processes from parking. Two processes that park at the same
time may park a message twice. `parking.Lot` counts only the first copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import PullSettings, QueueBounds
from orderedmq.conditions import MessageCondition, RocketMQCondition, TopicCondition
from orderedmq.errors import (
    GroupError,
    MessageError,
    OrderedMQError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
    aged_out,
    beyond_end,
)
from orderedmq.model import PARKED_ERROR, PARKED_FROM, PARKED_PROPERTIES, MessageQueue, is_reserved
from orderedmq.parking import SOURCE_COLUMNS, Lot, Parking, leader_of, origin, parked_queue, to_park
from orderedmq.pulls import pulls, pulls_at, read_lot
from orderedmq.rocketmq.append.broker_port import BrokerPort
from orderedmq.rocketmq.append.once import Appender
from orderedmq.rocketmq.codec.encode import SendBody, encode, property_columns
from orderedmq.rocketmq.codec.stored_message import KEYS, MAX_SENT_BYTES, SHARDING_KEY, TAGS, UNIQ_KEY
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.topic_changes import await_registration, delete_topic, queue_counts
from orderedmq.rocketmq.net import checks
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import admin_requests, rights
from orderedmq.schema import PROPERTIES_TYPE, concat_batches
from orderedmq.text import clip

#: Seconds for creating lots at other brokers. These brokers may be away, and their lots are not needed now.
_OTHERS_TIMEOUT: Final = 2.0
#: Approximate bytes of bodies that are copied together, and the number of messages copied first, while their size is not known.
_COPY_BYTES: Final = 16 * 1024 * 1024
_FIRST_COPY: Final = 64
_MOST_COPIED: Final = 4096
_NO_LIMIT: Final = 1 << 40
#: Maximum number of settled messages that are remembered.
_MOST_SETTLED: Final = 10_000
#: Bytes of the two separators of a property.
_SEPARATORS: Final = 2
_COLUMNS: Final = {"tags": TAGS, "keys": KEYS, "sharding_key": SHARDING_KEY}


@dataclass
class _Contents:
    """What this process knows of a lot from the offset ``begin`` up to ``end``.

    ``places`` maps the place from which a message was copied to the offset of its copy. If the message was parked again after it had been
    processed, this is the offset of the last copy. ``last``: the message id of the lot's last known message; "" if none was read.
    """

    begin: int
    end: int
    places: dict[str, int] = field(default_factory=dict)
    last: str = ""


class ParkingLots:
    """Parks messages of a group's queues. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, offsets: GroupOffsets) -> None:
        self._client = client
        self._log = log
        self._offsets = offsets
        self._contents: dict[MessageQueue, _Contents] = {}
        self._locks: defaultdict[MessageQueue, threading.Lock] = defaultdict(threading.Lock)

    def park(
        self, group: str, queue: MessageQueue, parkings: Sequence[Parking], require_lock: Callable[[], None]
    ) -> list[bool]:
        """See `RocketMQGroups.park`. ``require_lock`` raises an error if the queue's lock is lost."""
        lot = parked_queue(group, queue)
        for parking in parkings:
            if parking.source not in (queue, lot):
                raise ValueError(f"{parking.source} is neither queue {queue} nor its parking lot {lot}")
        if not parkings:
            return []
        # Check the rights first, because messages that are parked without them could not be found again.
        checks.require_rights(self._client, rights.of_parking(group, queue.topic))
        with self._locks[lot]:
            settled = self._offsets.read(group, [queue, lot])
            answers = [parking.at >= settled.get(parking.source, 0) for parking in parkings]
            by_place: dict[str, Parking] = {}
            for parking, is_parked in zip(parkings, answers, strict=True):
                if is_parked:
                    by_place.setdefault(parking.place, parking)
            if by_place:
                self._park(group, queue, lot, by_place, settled.get(lot, 0), require_lock)
        return answers

    def _park(
        self,
        group: str,
        queue: MessageQueue,
        lot: MessageQueue,
        by_place: Mapping[str, Parking],
        settled: int,
        require_lock: Callable[[], None],
    ) -> None:
        """Append the messages in ``by_place`` that are not yet in the lot. ``by_place``: messages by their places."""
        port = BrokerPort(self._client, lot, require_lock=require_lock)
        for deleted in (False, True):
            copies = _Copies(self, port, group, queue, by_place, settled)
            try:
                Appender(port, copies).run()
                port.await_readable(copies.end)
                return
            except TopicError as error:
                # The lot was deleted. Create it again, but only once.
                if error.sub != TopicCondition.MISSING or deleted:
                    raise
                self._log.forget(lot.topic)
                self._contents.pop(lot, None)
                settled = self._offsets.read(group, [lot]).get(lot, 0)

    # -- the topic

    def _require(self, group: str, queue: MessageQueue, lot: MessageQueue, parkings: Sequence[Parking]) -> None:
        """Check that the messages exist, and create the lot's topic if it is missing, or extend it if it lacks this queue.

        Raises DataLossError AGED_OUT or BEYOND_END.
        """
        if not parkings:
            return
        bounds = self._log.bounds([queue, lot])
        for parking in parkings:
            there = bounds.get(parking.source) or self._log.bounds_of(parking.source)
            if parking.at < there.min_offset:
                raise aged_out(parking.source, parking.at, there.min_offset)
            if parking.at >= there.max_offset:
                raise beyond_end(
                    parking.source, there.max_offset, f"message {parking.at} was to be parked", self._log.tail_loss
                )
        if lot not in bounds:
            self._make(group, queue, lot)

    def _make(self, group: str, queue: MessageQueue, lot: MessageQueue) -> None:
        """Give the lot's topic as many queues at each broker as the topic of ``queue`` has. Only the lot's broker must be reachable."""
        counts, lot_counts = queue_counts(self._log, queue.topic), queue_counts(self._log, lot.topic)
        counts[lot.broker_name] = max(counts.get(lot.broker_name, 0), lot.queue_id + 1)
        for broker_name, queues in counts.items():
            if queues > lot_counts.get(broker_name, 0):
                here = broker_name == lot.broker_name
                try:
                    self._make_at(broker_name, queue.topic, lot.topic, queues, GROUP_TIMEOUT if here else _OTHERS_TIMEOUT)
                except RocketMQUnavailableError:
                    if here:
                        raise
        await_registration(lambda: lot.queue_id < queue_counts(self._log, lot.topic).get(lot.broker_name, 0), lot.topic)
        if self._offsets.read(group, [lot]).get(lot):
            # Before 5.0, a broker keeps the offset of an earlier topic of the same name, which would hide parked messages.
            self._offsets.write(group, {lot: 0})

    def _make_at(self, broker_name: str, topic: str, lots: str, queues: int, seconds: float) -> None:
        request = admin_requests.create_topic(lots, queues)
        try:
            self._client.call(request, Deadline.after(seconds), topic=topic, broker_name=broker_name)
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NO_PERMISSION:
                raise
            command = f"mqadmin updateTopic -c CLUSTER -t {lots} -r {queues} -w {queues}"
            raise RocketMQError(
                error.sub, f"{error.message}. Alternatively, have an administrator create the parking lots with {command}"
            ) from error

    # -- searching

    def _look(self, log: RocketMQLog, lot: MessageQueue, settled: int) -> _Contents:
        """Read new messages, and return the knowledge of the lot from the group's offset ``settled`` to the lot's end."""
        bounds = self._log.bounds([lot]).get(lot, QueueBounds(0, 0))
        least = max(bounds.min_offset, min(settled, bounds.max_offset))
        contents = self._contents.pop(lot, None)
        fits = contents is not None and contents.begin <= least <= contents.end <= bounds.max_offset
        if contents is None or not fits or least - contents.begin > _MOST_SETTLED:
            contents = _Contents(least, least)
        # The last known message shows whether the lot was deleted and created again since that message was read.
        check = bool(contents.last) and contents.end > bounds.min_offset
        at = contents.end - 1 if check else contents.end
        for rows in pulls(log, lot, at, bounds.max_offset, _MOST_COPIED, _NO_LIMIT, ("message_id", "properties")):
            ids = rows.column("message_id")
            if check and ids[0].as_py() != contents.last:
                return self._look(log, lot, settled)
            places = pc.map_lookup(rows.column("properties"), PARKED_FROM, "first").to_pylist()
            contents.places.update({place: at + number for number, place in enumerate(places) if place is not None})
            at += rows.num_rows
            contents.end, contents.last, check = at, ids[-1].as_py(), False
        self._contents[lot] = contents
        return contents


class _Copies:
    """The messages to park, as `Outgoing` messages: all in ``wanted`` (messages by their places) that are not in the lot yet."""

    def __init__(
        self,
        lots: ParkingLots,
        port: BrokerPort,
        group: str,
        queue: MessageQueue,
        by_place: Mapping[str, Parking],
        settled: int,
    ) -> None:
        """``port``: the port of the lot. ``settled``: the group's offset in the lot.

        A copy below ``settled`` was processed, or dropped by a seek, so it is no longer parked.
        """
        self._lots = lots
        self._group = group
        self._queue = queue
        self._port = port
        self._lot = port.queue
        self._by_place = by_place
        self._settled = settled
        self._log = lots._log.reading(PullSettings(group))
        self._contents = _Contents(0, 0)
        self._waiting: list[Parking] = []
        # The UNIQ_KEYs of the messages that are being sent.
        self._keys: pa.Array = pa.array([], pa.string())
        #: The offset after the lot's last known message.
        self.end = 0

    def look(self) -> bool:
        before = len(self._waiting)
        self._contents = self._lots._look(self._log, self._lot, self._settled)
        places, self.end = self._contents.places, max(self.end, self._contents.end)
        self._waiting = [parking for place, parking in self._by_place.items() if places.get(place, -1) < self._settled]
        self._lots._require(self._group, self._queue, self._lot, self._waiting)
        return len(self._waiting) < before

    def missing(self) -> Iterator[SendBody]:
        where = f"the parking lot {self._lot}"
        count = _FIRST_COPY
        while self._waiting:
            parkings = self._waiting[:count]
            messages = _copies(self._log, parkings)
            # A copy keeps its message's UNIQ_KEY, because RocketMQ's tools find messages by that key.
            self._keys = pc.coalesce(
                property_columns(messages, [UNIQ_KEY])[UNIQ_KEY], self._log.sender.keys.take(len(parkings))
            )
            rows = _fit(to_park(messages, parkings), self._keys, parkings, where)
            # Encode all messages before sending one, so that none is sent if one is invalid.
            packing = self._port.packing(rows, where, 0)
            yield from list(encode(rows, self._keys, where, extra=property_columns(rows, PARKED_PROPERTIES), packing=packing))
            size = int(pc.sum(pc.binary_length(rows.column("body"))).as_py())
            count = max(1, min(_COPY_BYTES * count // max(size, 1), _MOST_COPIED))

    def record_sent(self, body: SendBody, offset: int) -> None:
        contents = self._contents
        parked, self._waiting = self._waiting[: body.rows], self._waiting[body.rows :]
        contents.places.update({parking.place: offset + number for number, parking in enumerate(parked)})
        self.end = offset + body.rows
        # If operators' commands were appended in between, the next call of `look` reads them.
        if offset == contents.end:
            contents.end, contents.last = self.end, self._keys[body.first + body.rows - 1].as_py()

    def adapt(self, body: SendBody, error: OrderedMQError) -> bool:  # noqa: ARG002
        return False


def _copies(log: RocketMQLog, parkings: Sequence[Parking]) -> pa.RecordBatch:
    """Return the messages at the places of ``parkings``, in the order of ``parkings``, with SOURCE_COLUMNS."""
    places: dict[MessageQueue, dict[int, int]] = {}
    for number, parking in enumerate(parkings):
        places.setdefault(parking.source, {})[parking.at] = number
    batches, order = [], []
    for source, numbers in places.items():
        for chosen, rows in pulls_at(log, source, sorted(numbers), _MOST_COPIED, _NO_LIMIT, SOURCE_COLUMNS):
            batches.append(rows)
            order += [numbers[at] for at in chosen]
    return concat_batches(batches).take(pa.array(np.argsort(order)))


def _fit(rows: pa.RecordBatch, keys: pa.Array, parkings: Sequence[Parking], where: str) -> pa.RecordBatch:
    """Shorten error texts so that RocketMQ accepts the size of each row's properties. Raises MessageError PROPERTIES_TOO_LARGE."""
    column = rows.column("properties")
    properties = column.to_pylist()
    changed = False
    texts = [(name, rows.column(of).to_pylist()) for of, name in _COLUMNS.items()] + [(UNIQ_KEY, keys.to_pylist())]
    for row, pairs in enumerate(properties):
        carried = [pair for pair in pairs if pair[0] in PARKED_PROPERTIES or not is_reserved(pair[0])]
        carried += [(name, values[row]) for name, values in texts]
        size = sum(len(name.encode()) + len(value.encode()) + _SEPARATORS for name, value in carried if value)
        if size <= MAX_SENT_BYTES:
            continue
        named = dict(pairs)
        room = len(named[PARKED_ERROR].encode()) - (size - MAX_SENT_BYTES)
        if room < 0:
            raise MessageError(
                MessageCondition.PROPERTIES_TOO_LARGE,
                f"message {parkings[row].at} of queue {parkings[row].source} cannot be put into {where}: its properties leave no room for "
                f"those of a parked message ({-room} bytes too many). Send smaller properties, or use OrderPerQueue",
            )
        properties[row] = list({**named, PARKED_ERROR: clip(named[PARKED_ERROR], room)}.items())
        changed = True
    if not changed:
        return rows
    index = rows.schema.get_field_index("properties")
    return rows.set_column(index, rows.schema.field(index), pa.array(properties, PROPERTIES_TYPE))


class LotTopics:
    """Finds, counts and deletes parking lots. Thread-safe."""

    def __init__(self, client: Client, log: RocketMQLog, offsets: GroupOffsets) -> None:
        self._client = client
        self._log = log
        self._offsets = offsets

    def find(self, *, group: str | None = None, topic: str | None = None) -> dict[str, tuple[str, str]]:
        """Return the names of parking lots' topics with their (group, topic), restricted to ``group`` and ``topic`` if given."""
        names = sorted(self._client.topics(Deadline.after(REQUEST_TIMEOUT)))
        lots = {name: of for name in names if (of := origin(name)) is not None}
        return {name: of for name, of in lots.items() if group in (None, of[0]) and topic in (None, of[1])}

    def queues_of(self, names: Iterable[str]) -> list[MessageQueue]:
        """Return the queues of the topics in ``names`` that exist."""
        queues: list[MessageQueue] = []
        for name in names:
            with contextlib.suppress(TopicError):
                queues += self._log.queues(name)
        return queues

    def ends(self, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        return {lot: bounds.max_offset for lot, bounds in self._log.bounds(lots).items()}

    def count(self, group: str, lots: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return how many messages are parked in each lot. Lots without parked messages are left out."""
        counts: dict[MessageQueue, int] = {}
        log, offsets = self._log.reading(PullSettings(group)), self._offsets.read(group, lots)
        for lot, bounds in self._log.bounds(lots).items():
            parked = Lot(max(bounds.min_offset, min(offsets.get(lot, 0), bounds.max_offset)))
            read_lot(log, parked, lot, bounds.max_offset)
            if parked.messages:
                counts[lot] = parked.messages
        return counts

    def require_none(
        self, group: str, lots: Sequence[MessageQueue], error: Callable[[str, int, Sequence[MessageQueue]], GroupError]
    ) -> None:
        used = self.count(group, lots)
        if used:
            raise error(group, sum(used.values()), [leader_of(group, lot) for lot in used])

    def delete(
        self,
        names: Mapping[str, tuple[str, str]],
        masters: Mapping[str, str],
        explain: Callable[[Sequence[str], str], str] | None = None,
    ) -> None:
        """Delete these topics of parking lots, with the groups' offsets in them. Raises RocketMQUnavailableError.

        If a group has read one of these topics as a normal topic, it may have parking lots of that topic. These lots are also deleted.

        ``explain`` makes an error's message from the topics that were not deleted and the reason.
        """
        remaining = sorted(names)
        while remaining:
            try:
                self._delete_one(remaining[0], names[remaining[0]][0], masters)
            except RocketMQError as error:
                if explain is None:
                    raise
                raise type(error)(error.sub, explain(remaining, error.message)) from error
            del remaining[0]

    def _delete_one(self, name: str, group: str, masters: Mapping[str, str]) -> None:
        self.delete(self.find(topic=name), masters)
        offsets = self._offsets.read(group, self.queues_of([name]))
        # Before 5.0, offsets outlive their topic. In a new lot of the same name they would hide parked messages.
        cleared = self._offsets.clear(group, [lot for lot, offset in offsets.items() if offset])
        try:
            delete_topic(self._client, self._log, name, masters.values())
        except RocketMQError as error:
            if error.denied:
                # The lot stays, so restore the group's offsets in it.
                with contextlib.suppress(TopicError):
                    self._offsets.write(group, {lot: offsets[lot] for lot in cleared})
            raise
