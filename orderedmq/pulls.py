"""Reads a range of a queue, or a parking lot to its end, from any broker."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Final

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.errors import beyond_end
from orderedmq.model import MessageQueue
from orderedmq.parking import LOT_COLUMNS, Lot

#: Offsets that are less than this apart are read by one pull, because a RocketMQ broker returns 32 messages at a time anyway.
_NEAR: Final = 32
#: Limits of one pull of a lot: messages, and bytes of their bodies. A broker may have to send the bodies although they are not needed.
LOT_PULL: Final = 8192
LOT_PULL_BYTES: Final = 16 * 1024 * 1024


def pulls(
    log: Log, queue: MessageQueue, begin: int, end: int, max_messages: int, max_bytes: int, columns: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield the messages from ``begin`` to ``end``, in order and without a gap, at most ``max_messages`` in a batch.

    Never waits for messages. Raises the errors of `Log.pull`, and DataLossError BEYOND_END if a pull returns no messages. In that
    case the queue ends before ``end`` now, although it reached ``end`` when the caller read that offset.
    """
    while begin < end:
        batch = log.pull(queue, begin, min(max_messages, end - begin), max_bytes, columns, None, end)
        if not batch.num_rows:
            why = f"it had messages up to {end} a moment ago"
            raise beyond_end(queue, begin, why, log.tail_loss)
        begin += batch.num_rows
        yield batch


def pulls_at(
    log: Log, queue: MessageQueue, offsets: Sequence[int], max_messages: int, max_bytes: int, columns: tuple[str, ...]
) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    """Yield batches of the messages at ``offsets``, which are ascending, each batch with its offsets. Otherwise like `pulls`."""
    wanted = set(offsets)
    for begin, end in _runs(offsets):
        for rows in pulls(log, queue, begin, end, max_messages, max_bytes, columns):
            chosen = [at for at in range(begin, begin + rows.num_rows) if at in wanted]
            yield chosen, rows.take(pa.array([at - begin for at in chosen], pa.int64()))
            begin += rows.num_rows


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges [begin, end) that contain all of ``offsets``, which are ascending, and few other offsets."""
    if not offsets:
        return
    begin = end = offsets[0]
    for at in offsets:
        if at - end >= _NEAR:
            yield begin, end
            begin = at
        end = at + 1
    yield begin, end


def end_of_lot(log: Log, queue: MessageQueue) -> int:
    """Return the end offset of the parking lot ``queue``, or 0 if no message was ever parked in it, so that it does not exist."""
    bounds = log.bounds([queue]).get(queue)
    return 0 if bounds is None else bounds.max_offset


def read_lot_from(log: Log, lots: MutableMapping[MessageQueue, Lot], queue: MessageQueue, begin: int, end: int) -> Lot:
    """Return the messages of the lot ``queue`` from ``begin`` to ``end``. ``lots`` has what was read before. Raises the errors of `pulls`."""
    lot = lots.get(queue)
    if lot is None or lot.begin != begin:
        lot = lots[queue] = Lot(begin)
    read_lot(log, lot, queue, end)
    return lot


def read_lot(log: Log, lot: Lot, queue: MessageQueue, end: int) -> None:
    """Add the messages of ``queue`` from the end of ``lot`` up to ``end`` to ``lot``. A lower ``end`` changes nothing.

    After an error, the lot has the messages that were read before the error, and a later call continues after them. Raises the errors of
    `pulls`.
    """
    for rows in pulls(log, queue, lot.end, end, LOT_PULL, LOT_PULL_BYTES, LOT_COLUMNS):
        lot.add(rows)
