"""Finds out from a broker how far a group may read each queue of topics that were resized. `routing.generations` has the rule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from orderedmq.broker import Broker
from orderedmq.errors import DataLossError, GroupError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.offsets import OffsetMap
from orderedmq.parking import Lot, parked_queue
from orderedmq.pulls import read_lot_from
from orderedmq.routing.generations import Wait, waits


class Barrier:
    """The barrier of one group, or of a query without a group."""

    def __init__(self, broker: Broker, group: str | None) -> None:
        self._broker = broker
        self._group = group
        self._lots: dict[MessageQueue, Lot] = {}

    def waits(self, topics: Iterable[str], positions: OffsetMap) -> dict[MessageQueue, Wait]:
        """Return the queues of these topics that the group may not read to their ends, and what each of them waits for.

        ``positions``: up to where the caller has processed its own queues and their parking lots. The group's offsets count for the others.
        Read the ends of queues before this call (`Log.resizes`).
        """
        log = self._broker.log
        resizes = log.resizes(topics)
        if not resizes:
            return {}
        # The offset of a queue is read before its lot, because its owner parks a message before it moves the offset.
        left = self._left(sorted({queue for resize in resizes for queue in resize.former}), positions)
        return waits(resizes, {queue: span.begin for queue, span in left.items()}, self._parked(left, positions))

    def _left(self, queues: list[MessageQueue], positions: OffsetMap) -> dict[MessageQueue, OffsetRange]:
        """Return the range that the group has not processed in each queue that exists."""
        others = [queue for queue in queues if queue not in positions]
        offsets = self._broker.groups.offsets(self._group, others) if self._group is not None and others else {}
        return {
            queue: OffsetRange(max(at.min_offset, positions.get(queue, offsets.get(queue, 0))), at.max_offset)
            for queue, at in self._broker.log.bounds(queues).items()
        }

    def _parked(self, queues: Iterable[MessageQueue], positions: OffsetMap) -> dict[MessageQueue, tuple[int, str]]:
        """Return for each queue in whose lot a key is left the lowest offset of such a message, and its key."""
        if self._group is None:
            return {}
        leaders: dict[MessageQueue, MessageQueue] = {}
        for queue in queues:
            # An error means that the name of the lot would be too long, so no such lot exists.
            with contextlib.suppress(GroupError):
                leaders[parked_queue(self._group, queue)] = queue
        left = {lot: span for lot, span in self._left(list(leaders), positions).items() if span.messages > 0}
        self._lots = {lot: read for lot, read in self._lots.items() if lot in left}
        out: dict[MessageQueue, tuple[int, str]] = {}
        for lot, span in left.items():
            try:
                read = read_lot_from(self._broker.log, self._lots, lot, *span)
            except DataLossError:
                # Its owner has processed it in the meantime. The offset that it commits is a change for which the caller looks again.
                out[leaders[lot]] = 0, ""
                continue
            # A message without a key has no order, and neither has one that a listener without order has parked.
            parked = [(keyed.offsets[0], key) for key, keyed in read.keys.items() if isinstance(key, str)]
            if parked:
                out[leaders[lot]] = min(parked)
        return out
