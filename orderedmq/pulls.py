"""What the pulls of all brokers share: a limit of bytes, warnings about malformed texts, and reading a queue or a parking lot to an end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.errors import beyond_end
from orderedmq.model import MessageQueue
from orderedmq.parking.lot import LOT_COLUMNS, Lot
from orderedmq.text import valid_rows

_logger = logging.getLogger("orderedmq")

#: Offsets that are less than this apart are read by one pull, because a RocketMQ broker returns 32 messages at a time anyway.
_NEAR: Final = 32
#: Limits of one pull of a lot: messages, and bytes of their bodies. A broker may have to send the bodies although they are not needed.
LOT_PULL: Final = 8192
LOT_PULL_BYTES: Final = 16 * 1024 * 1024


def bounded(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Return the first rows, at least one, whose bodies fit into ``max_bytes``; all rows if there is no column body."""
    index = batch.schema.get_field_index("body")
    if index < 0 or batch.num_rows < 2:
        return batch
    sizes = pc.binary_length(batch.column(index))
    if int(pc.sum(sizes).as_py() or 0) <= max_bytes:
        return batch
    sums = pc.cumulative_sum(sizes.cast(pa.int64()))
    return batch.slice(0, max(1, int(pc.sum(pc.less_equal(sums, max_bytes)).as_py() or 0)))


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


def read_lot(log: Log, lot: Lot, queue: MessageQueue, end: int) -> None:
    """Add the messages of ``queue`` from the end of ``lot`` up to ``end`` to ``lot``. A lower ``end`` changes nothing.

    After an error, the lot has the messages that were read before the error, and a later call continues after them. Raises the errors of
    `pulls`.
    """
    for rows in pulls(log, queue, lot.end, end, LOT_PULL, LOT_PULL_BYTES, LOT_COLUMNS):
        lot.add(rows)


@dataclass
class _Seen:
    messages: int = 0
    last: int = -1
    #: The number of messages at which the next warning is logged.
    warn_at: int = 1


class MalformedText:
    """Counts messages with malformed text. Warns about the first one in a queue and each time their number doubles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[MessageQueue, _Seen] = {}

    def note(self, queue: MessageQueue, offsets: Iterable[int]) -> None:
        """Count malformed messages by their offsets. Ignores offsets up to the highest one counted so far."""
        sorted_offsets = sorted(offsets)
        if not sorted_offsets:
            return
        with self._lock:
            seen = self._seen.setdefault(queue, _Seen())
            new = [offset for offset in sorted_offsets if offset > seen.last]
            if not new:
                return
            seen.messages += len(new)
            seen.last = new[-1]
            if seen.messages < seen.warn_at:
                return
            seen.warn_at = 2 * seen.messages
            messages, last = seen.messages, seen.last
        _logger.warning(
            "%d messages of queue %s, the last one at offset %d, have a tag, key or property that is not UTF-8. Each malformed byte "
            "sequence is shown as U+FFFD, as Java shows it. Correct the producer",
            messages,
            queue,
            last,
        )

    def valid(self, batch: pa.RecordBatch, queue: MessageQueue, first: int) -> pa.RecordBatch:
        """Return the rows with valid text, and count those that had malformed text. ``first``: offset of the first row."""
        batch, rows = valid_rows(batch)
        self.note(queue, (first + rows).tolist())
        return batch
