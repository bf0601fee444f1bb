"""Browses messages: of one queue from an offset on, or of many queues in the order of arrival, either of one key or of all keys.

Rules: browsing changes no offset and needs no group. A search over queues advances evenly in time, because each pull reads the
queue whose last read message is oldest. So its results are complete up to the time to which all queues were read, and a later
search can resume there. Messages of one queue stay in order: a message counts as stored no earlier than the messages
before it, even where a RocketMQ broker's clock went back. (A search that resumes near such a place uses a binary search by time,
which may miss messages.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log, QueueBounds
from orderedmq.conditions import OffsetCondition
from orderedmq.errors import OffsetError, no_such_offset
from orderedmq.model import MessageQueue
from orderedmq.pulls import pulls

#: The columns of a message's row.
COLUMNS: Final = (
    "topic", "broker_name", "queue_id", "queue_offset", "sharding_key", "tags", "keys", "body", "store_timestamp", "message_id",
    "properties",
)  # fmt: skip
_SEARCHED: Final = ("queue_offset", "sharding_key", "store_timestamp")
_PULL_ROWS: Final = 65536
_PULL_BYTES: Final = 16 * 1024 * 1024

Row = dict[str, Any]


class Arrival(NamedTuple):
    """A message's position in the order of arrival. ``stored`` is in µs since 1970."""

    stored: int
    queue: MessageQueue
    offset: int


@dataclass(frozen=True)
class Found:
    """The results of a search, in order. ``next``: where to resume, None if the search reached the end. ``searched``: messages read."""

    rows: list[Row]
    next: Arrival | None
    searched: int


def rows_of(log: Log, queue: MessageQueue, begin: int, end: int) -> list[Row]:
    """Return the messages from ``begin`` to ``end`` with `COLUMNS`, times in µs since 1970. Raises the errors of `pulls`."""
    return [row for batch in pulls(log, queue, begin, end, _PULL_ROWS, _PULL_BYTES, COLUMNS) for row in _readable(batch)]


def message_at(log: Log, queue: MessageQueue, offset: int) -> Row:
    """Return one message. Raises OffsetError BEYOND_END or INVALID if the queue does not have it."""
    at = log.bounds([queue])[queue]
    if offset >= at.max_offset:
        raise no_such_offset(queue, at.max_offset, f"message {offset}")
    if offset < at.min_offset:
        raise OffsetError(OffsetCondition.INVALID, f"queue {queue} begins at {at.min_offset}: message {offset} was deleted")
    return rows_of(log, queue, offset, offset + 1)[0]


def last_of(log: Log, bounds: dict[MessageQueue, QueueBounds], most: int) -> list[Row]:
    """Return the last ``most`` messages of all these queues together, in the order of their arrival."""
    rows = (
        row
        for queue, at in bounds.items()
        for row in rows_of(log, queue, max(at.min_offset, at.max_offset - most), at.max_offset)
    )
    return by_arrival(rows)[-most:]


def by_arrival(rows: Iterable[Row]) -> list[Row]:
    """Return messages of several queues in the order of their arrival. Those of one queue are given in order, and stay in order."""
    latest: dict[MessageQueue, int] = {}
    rows_by_arrival: list[tuple[Arrival, Row]] = []
    for row in rows:
        queue = MessageQueue(row["topic"], row["broker_name"], row["queue_id"])
        latest[queue] = max(latest.get(queue, 0), row["store_timestamp"])
        rows_by_arrival.append((Arrival(latest[queue], queue, row["queue_offset"]), row))
    return [row for _, row in sorted(rows_by_arrival, key=itemgetter(0))]


def search(
    log: Log, queues: Sequence[MessageQueue], key: str | None, since: int | Arrival | None, most: int, go_on: Callable[[], bool]
) -> Found:
    """Return up to ``most`` messages of these queues in the order of their arrival. ``key`` None: messages of all sharding keys.

    ``since``: a time in µs since 1970, or the `Found.next` of an earlier search. ``go_on`` is called between two pulls: when it
    returns False, the search ends with the results that are complete so far.
    """
    bounds = log.bounds(list(queues))
    # Without a key every row is a result, so a small pull is enough.
    step = most + 1 if key is None else _PULL_ROWS
    unread = [(queue, _begin(log, queue, at, since)) for queue, at in bounds.items()]
    #: For each queue that is not read to its end: a lower bound of its next message's position, and how many rows to pull next.
    reading: list[tuple[Arrival, int]] = []
    # ``certain``: results that precede all unread messages, in order. ``other``: the remaining results.
    certain, other = list[Arrival](), list[Arrival]()
    searched = 0
    # Read each queue at least once, so that a resumed search makes progress even if it has very little time.
    while unread or (reading and len(certain) <= most and go_on()):
        if unread:
            (queue, begin), rows, latest = unread.pop(), step, 0
        else:
            (latest, queue, begin), rows = heapq.heappop(reading)
        end = bounds[queue].max_offset
        if begin >= end:
            continue
        batch = log.pull(queue, begin, min(rows, end - begin), _PULL_BYTES, _SEARCHED)
        # The pull is empty if the broker has lost the end of the queue since it reported the bounds.
        if batch.num_rows:
            searched += batch.num_rows
            stored = pc.cumulative_max(batch.column(2).cast(pa.int64()), start=latest)
            for place in _matching(batch, stored, queue, key):
                heapq.heappush(other, place)
            begin += batch.num_rows
            if begin < end:
                heapq.heappush(reading, (Arrival(stored[-1].as_py(), queue, begin), min(rows * 4, _PULL_ROWS)))
        while not unread and other and not (reading and reading[0][0] <= other[0]):
            certain.append(heapq.heappop(other))
    following = certain[most] if len(certain) > most else reading[0][0] if reading else None
    rows_found = [rows_of(log, place.queue, place.offset, place.offset + 1)[0] for place in certain[:most]]
    return Found(rows_found, following, searched)


def _begin(log: Log, queue: MessageQueue, at: QueueBounds, since: int | Arrival | None) -> int:
    """Return the offset of the first message of a queue that is not before ``since``."""
    if since is None:
        return at.min_offset
    if not isinstance(since, Arrival):
        return log.offset_at(queue, since)
    if queue == since.queue:
        return max(since.offset, at.min_offset)
    # Of several messages stored at the same time, those of a smaller queue come first.
    return log.offset_at(queue, since.stored + (queue < since.queue))


def _matching(batch: pa.RecordBatch, stored: pa.Array, queue: MessageQueue, key: str | None) -> list[Arrival]:
    offsets = batch.column(0)
    if key is not None:
        same = pc.fill_null(pc.equal(batch.column(1), key), False)
        offsets, stored = offsets.filter(same), stored.filter(same)
    return [Arrival(at, queue, offset) for at, offset in zip(stored.to_pylist(), offsets.to_pylist(), strict=True)]


def _readable(batch: pa.RecordBatch) -> list[Row]:
    index = COLUMNS.index("store_timestamp")
    rows = batch.set_column(index, "store_timestamp", batch.column(index).cast(pa.int64())).to_pylist()
    return [
        {
            **row,
            "queue": MessageQueue(row["topic"], row["broker_name"], row["queue_id"]),
            "properties": dict(row["properties"] or ()),
        }
        for row in rows
    ]
