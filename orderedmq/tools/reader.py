"""Reads messages without Spark, chosen by queue, offset, time, key and tag, in the order of arrival or of the queues.

Rules: reading changes no offset and needs no group. The ends of the queues are read once, at first. In the order of arrival, the next pull
is from the queue whose last read message is oldest, so that all messages up to a time are complete. Messages of one queue stay in order: a
message counts as stored no earlier than the messages before it, even where a RocketMQ broker's clock went back.
"""

from __future__ import annotations

import heapq
import importlib.util
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.connections import reach
from orderedmq.endpoint import Endpoint
from orderedmq.errors import missing_package, no_such_offset
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.parse import parse
from orderedmq.options.source import parse_tags
from orderedmq.options.values import choice, conflict, find_queue, integer, invalid, parse_timestamp
from orderedmq.pulls import pulls
from orderedmq.rows.filters import ALL, Filter
from orderedmq.schema import DEFAULT_COLUMNS, concat_batches, select_schema
from orderedmq.text import Int64s

if TYPE_CHECKING:
    import pandas as pd

Order = Literal["arrival", "queue"]
ORDERS: Final[tuple[Order, ...]] = ("arrival", "queue")
Row = dict[str, Any]
Ranges = Mapping[MessageQueue, OffsetRange]

PULL_ROWS: Final = 65536
PULL_BYTES: Final = 16 * 1024 * 1024
#: Bytes of bodies that are held together in the order of arrival, and at least of each queue.
_HELD_BYTES: Final = 256 * 1024 * 1024
_HELD_OF_A_QUEUE: Final = 1024 * 1024
#: The time of a queue's last read message before the first one is read.
_UNREAD: Final = -(2**63)


@dataclass(frozen=True)
class Selection:
    """Which messages of the ranges, and which of their columns.

    ``key``, ``tags``: only messages with this sharding key, or with one of the tags. ``first``, ``last``: at most so many messages from this
    end of the order.
    """

    columns: tuple[str, ...] = DEFAULT_COLUMNS
    key: str | None = None
    tags: Filter | None = None
    order: Order = "arrival"
    first: int | None = None
    last: int | None = None

    @property
    def pulled(self) -> tuple[str, ...]:
        """The columns to pull: also those by which messages are chosen and ordered."""
        chosen_by = {"sharding_key": self.key, "tags": self.tags, "store_timestamp": self.order == "arrival"}
        return (*self.columns, *(name for name, used in chosen_by.items() if used and name not in self.columns))

    @property
    def whole(self) -> bool:
        """Whether every message is chosen, as far as `first` and `last` allow."""
        return self.key is None and self.tags is None

    def matching(self, rows: pa.RecordBatch) -> pa.Array:
        mask = pa.repeat(True, rows.num_rows)
        if self.key is not None:
            mask = pc.fill_null(pc.equal(rows["sharding_key"], self.key), False)
        return mask if self.tags is None else pc.and_(mask, self.tags.matching(rows["tags"]))


class Arrival(NamedTuple):
    """A message's position in the order of arrival. ``stored`` is in µs since 1970."""

    stored: int
    queue: MessageQueue
    offset: int


class Part(NamedTuple):
    """Chosen messages that precede all messages that are not read yet, in the order of arrival.

    ``stored``: the time of each message in this order. ``next``: no later than the next message, None at the end.
    """

    rows: pa.RecordBatch
    stored: Int64s
    next: Arrival | None


def ranges(
    log: Log, topic: str, queue: str = "", offset: int | None = None, since: int | None = None, until: int | None = None
) -> dict[MessageQueue, OffsetRange]:
    """Return the messages that each queue of a topic has now, or only those from ``offset`` on, or stored in [``since``, ``until``).

    ``queue``: the only queue, as `find_queue` knows it. Raises TopicError MISSING, NO_SUCH_QUEUE or AMBIGUOUS, OptionError INVALID or
    CONFLICT, OffsetError BEYOND_END.
    """
    queues = log.queues(topic)
    if offset is not None and not queue:
        raise conflict(
            "option offset (--offset) needs queue (--queue), because each queue has offsets of its own. Name the queue"
        )
    spans = {}
    for each, at in log.bounds([find_queue(queue, queues)] if queue else queues).items():
        if offset is not None and offset > at.max_offset:
            raise no_such_offset(each, at.max_offset, f"offset {offset}. Give offset (--offset) {at.max_offset} or less")
        # Messages that arrived since the ends were read are beyond them.
        begin = min(at.max_offset, max(at.min_offset, offset or 0, 0 if since is None else log.offset_at(each, since)))
        end = at.max_offset if until is None else min(at.max_offset, log.offset_at(each, until))
        spans[each] = OffsetRange(begin, max(begin, end))
    return spans


def batches(log: Log, spans: Ranges, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Yield the chosen messages in their order, with the chosen columns. Raises the errors of `pulls`."""
    first, last = selection.first, selection.last
    if last is not None and selection.whole:
        spans = {queue: OffsetRange(max(begin, end - last), end) for queue, (begin, end) in spans.items()}
    step = first + 1 if first is not None and selection.whole else PULL_ROWS
    parts: Iterator[pa.RecordBatch]
    if selection.order == "arrival":
        parts = (part.rows for part in by_arrival(log, spans, selection, step))
    else:
        parts = _by_queue(log, spans, selection, min(step, PULL_ROWS))
    parts = (part.select(selection.columns) for part in parts if part.num_rows)
    for part in parts if last is None else _end(parts, last):
        yield part if first is None else part.slice(0, min(first, part.num_rows))
        if first is not None and (first := first - part.num_rows) <= 0:
            return


def _end(parts: Iterator[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """Yield the last ``most`` rows."""
    kept, rows = deque[pa.RecordBatch](), 0
    for part in parts:
        kept.append(part)
        rows += part.num_rows
        while rows - kept[0].num_rows >= most:
            rows -= kept.popleft().num_rows
    if kept:
        kept[0] = kept[0].slice(max(0, rows - most))
    yield from kept


def _by_queue(log: Log, spans: Ranges, selection: Selection, step: int) -> Iterator[pa.RecordBatch]:
    for queue, (begin, end) in spans.items():
        for part in pulls(log, queue, begin, end, step, PULL_BYTES, selection.pulled):
            yield part if selection.whole else part.filter(selection.matching(part))


def by_arrival(log: Log, spans: Ranges, selection: Selection, step: int = PULL_ROWS) -> Iterator[Part]:
    """Yield messages with the columns `Selection.pulled` in the order of arrival, a part after each pull. Each queue is read once at first.

    ``step``: rows of a queue's first pull; later ones are larger. Raises the errors of `pulls`.
    """
    most_bytes = min(PULL_BYTES, max(_HELD_OF_A_QUEUE, _HELD_BYTES // max(1, len(spans))))
    # For each queue that is not read to its end: a lower bound of its next message's position, and how many rows to pull next.
    reading = [
        (Arrival(_UNREAD, queue, begin), min(step, PULL_ROWS)) for queue, (begin, end) in sorted(spans.items()) if begin < end
    ]
    held: dict[MessageQueue, list[tuple[Int64s, pa.RecordBatch]]] = {place.queue: [] for place, _ in reading}
    while reading:
        (latest, queue, begin), rows = heapq.heappop(reading)
        end = spans[queue].end
        batch = next(pulls(log, queue, begin, end, rows, most_bytes, selection.pulled))
        stored = np.maximum.accumulate(np.maximum(batch["store_timestamp"].cast(pa.int64()).to_numpy(), latest))
        if begin + batch.num_rows < end:
            place = Arrival(int(stored[-1]), queue, begin + batch.num_rows)
            heapq.heappush(reading, (place, min(rows * 4, PULL_ROWS)))
        if not selection.whole:
            chosen = selection.matching(batch)
            batch, stored = batch.filter(chosen), stored[chosen.to_numpy(zero_copy_only=False)]
        held[queue].append((stored, batch))
        horizon = reading[0][0] if reading else None
        if horizon is None or horizon.stored != _UNREAD:
            yield Part(*_released(held, horizon), horizon)


def _released(
    held: dict[MessageQueue, list[tuple[Int64s, pa.RecordBatch]]], horizon: Arrival | None
) -> tuple[pa.RecordBatch, Int64s]:
    """Remove the messages before ``horizon`` from ``held``, and return them in order, with their times."""
    released: list[tuple[Int64s, pa.RecordBatch]] = []
    for queue, parts in held.items():
        kept = []
        for stored, rows in parts:
            count = len(stored)
            if horizon is not None:
                # Of several messages stored at the same time, those of a smaller queue come first.
                count = int(np.searchsorted(stored, horizon.stored, "right" if queue <= horizon.queue else "left"))
            if count or not released:
                released.append((stored[:count], rows.slice(0, count)))
            if count < len(stored):
                kept.append((stored[count:], rows.slice(count)))
        parts[:] = kept
    stored = np.concatenate([times for times, _ in released])
    order = np.argsort(stored, kind="stable")
    return concat_batches([rows for _, rows in released]).take(pa.array(order)), stored[order]


def rows(batch: pa.RecordBatch) -> list[Row]:
    """Return messages as dicts, with the properties of each as a dict."""
    messages: list[Row] = batch.to_pylist()
    if "properties" in batch.schema.names:
        for message in messages:
            message["properties"] = dict(message["properties"] or ())
    return messages


class Messages:
    """The messages that `read` has chosen. Iterate over it for one dict per message, with the columns' names.

    Polars, DuckDB and pyarrow take it as a table. Each use reads the same messages again, over a connection of its own. Raises
    DataLossError AGED_OUT if messages were deleted since.
    """

    def __init__(self, endpoint: Endpoint, identity: str, spans: Ranges, selection: Selection) -> None:
        """Call `read` instead."""
        self._endpoint = endpoint
        self._identity = identity
        self._spans = spans
        self._selection = selection

    @property
    def schema(self) -> pa.Schema:
        """The names and types of the columns."""
        return select_schema(self._selection.columns)

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches():
            yield from rows(batch)

    def batches(self) -> pa.RecordBatchReader:
        """Return the messages as record batches, which are read as you iterate over them."""
        return pa.RecordBatchReader.from_batches(self.schema, self._batches())

    def to_arrow(self) -> pa.Table:
        """Return all messages as one table."""
        return self.batches().read_all()

    def to_pandas(self) -> pd.DataFrame:
        """Return all messages as a DataFrame of pandas. Raises OptionError MISSING without pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise missing_package("to_pandas", "pandas", "spark", "pip install pandas")
        return self.to_arrow().to_pandas()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the messages as a stream of Arrow's PyCapsule interface."""
        return self.batches().__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with reach(self._endpoint, identity=self._identity) as broker:
            yield from batches(broker.log, self._spans, self._selection)


def read(
    topic: str,
    *,
    path: str | Path | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    order: Order = "arrival",
    key: str | int | None = None,
    tags: str = ALL,
    since: datetime | str | None = None,
    until: datetime | str | None = None,
    queue: MessageQueue | int | str | None = None,
    offset: int | None = None,
    first: int | None = None,
    last: int | None = None,
    **options: str,
) -> Messages:
    """Return the messages that a topic has now, without Spark, without a group, and without moving an offset.

    ``path``: the directory of an embedded broker. ``options``: for a RocketMQ cluster, namesrvAddr and the other options of a connection, as
    in Spark. ``columns``: those of Spark's source, by default all but properties. ``order``: "arrival", by the time at which messages were
    stored, or "queue", one queue after the other.

    Only messages with the sharding ``key``; with one of the ``tags`` ("paid || shipped"); stored from ``since`` on and before ``until`` (ISO
    8601, or aware times); of ``queue`` (3, or "broker-a/3") and in it from ``offset`` on; and of these at most the ``first`` or the ``last``
    in the order.

    Raises TopicError MISSING, SchemaError UNKNOWN_COLUMN, OptionError MISSING, CONFLICT, UNKNOWN or INVALID, OffsetError BEYOND_END, and the
    errors of a connection.
    """
    if not columns:
        raise invalid("columns", "it names no column. Name at least one, for example body")
    connection = parse(BrokerOptions, options if path is None else {"path": str(path), **options})
    selection = Selection(
        tuple(select_schema((columns,) if isinstance(columns, str) else tuple(columns)).names),
        None if key is None else str(key),
        parse_tags(tags, "tags"),
        choice(ORDERS)(order, "order"),
        None if first is None else integer(1)(str(first), "first"),
        None if last is None else integer(1)(str(last), "last"),
    )
    if first is not None and last is not None:
        raise conflict("options first and last exclude each other. Drop one")
    with reach(connection.endpoint) as broker:
        spans = ranges(
            broker.log,
            topic,
            "" if queue is None else str(queue),
            None if offset is None else integer(0)(str(offset), "offset"),
            _micros(since, "since"),
            _micros(until, "until"),
        )
        return Messages(connection.endpoint, broker.identity, spans, selection)


def _micros(time: datetime | str | None, option: str) -> int | None:
    if time is None:
        return None
    return parse_timestamp(time if isinstance(time, str) else time.isoformat(), option)
