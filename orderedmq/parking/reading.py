"""Reading a parking lot from the broker: which keys are parked, and when they are due.

The driver that plans a lot, the task that consumes it and the command that lists it all read it here. What a lot says is
`lot.Lot`.
"""

from __future__ import annotations

from typing import Final

from orderedmq.broker import Log
from orderedmq.model import MessageQueue
from orderedmq.parking.lot import LOT_COLUMNS, Lot
from orderedmq.pulls import pulls

#: Messages in one pull of a lot, and bytes of their bodies, which a broker may have to send along.
LOT_PULL: Final = 8192
LOT_PULL_BYTES: Final = 16 * 1024 * 1024


def end_of(log: Log, queue: MessageQueue) -> int:
    """Return the end offset of the parking lot ``queue``; 0 if it does not exist: nothing was ever parked there."""
    bounds = log.bounds([queue]).get(queue)
    return 0 if bounds is None else bounds.max_offset


def read(log: Log, lot: Lot, queue: MessageQueue, end: int) -> None:
    """Extend ``lot`` by the messages of ``queue`` from its end up to ``end``. It never goes back: a lower ``end`` changes nothing.

    If it fails, the lot has the messages that were read before, and may be read on. Raises as `pulls`.
    """
    for rows in pulls(log, queue, lot.end, end, LOT_PULL, LOT_PULL_BYTES, LOT_COLUMNS):
        lot.add(rows)
