"""Reads a parking lot from the broker, to find out which keys are parked and when they are due.

The driver that plans a lot, the task that consumes it and the command that lists it use these functions. `lot.Lot` has the contents of a
lot.
"""

from __future__ import annotations

from typing import Final

from orderedmq.broker import Log
from orderedmq.model import MessageQueue
from orderedmq.parking.lot import LOT_COLUMNS, Lot
from orderedmq.pulls import pulls

#: Limits of one pull of a lot: messages, and bytes of their bodies. A broker may have to send the bodies although they are not needed.
LOT_PULL: Final = 8192
LOT_PULL_BYTES: Final = 16 * 1024 * 1024


def end_of(log: Log, queue: MessageQueue) -> int:
    """Return the end offset of the parking lot ``queue``, or 0 if no message was ever parked in it, so that it does not exist."""
    bounds = log.bounds([queue]).get(queue)
    return 0 if bounds is None else bounds.max_offset


def read(log: Log, lot: Lot, queue: MessageQueue, end: int) -> None:
    """Add the messages of ``queue`` from the end of ``lot`` up to ``end`` to ``lot``. A lower ``end`` changes nothing.

    After an error, the lot has the messages that were read before the error, and a later call continues after them. Raises the errors of
    `pulls`.
    """
    for rows in pulls(log, queue, lot.end, end, LOT_PULL, LOT_PULL_BYTES, LOT_COLUMNS):
        lot.add(rows)
