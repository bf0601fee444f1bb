"""Reads a task's range of a parking lot: the parked messages as they were sent, each with its ticket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from ordered_source.columns import LOCK_TOKEN, TICKET, TICKET_TYPE
from ordered_source.read_context import LotPlan
from orderedmq import lots
from orderedmq.broker import Log
from orderedmq.core.lock import LockToken
from orderedmq.core.parked_rows import RESTORE_COLUMNS, Lot, restore
from orderedmq.model import MessageQueue
from orderedmq.pulls import pulls


@dataclass(frozen=True)
class LotSpan:
    """The range [``begin``, ``end``) of a parking lot that a task reads before its range of the queue.

    It is empty unless the lot was planned; ``begin`` then is the group's offset in it. ``token`` is the lot's own
    (`core.parking.companion`), ``room`` the number of messages above which no key is parked any more.
    """

    queue: MessageQueue
    begin: int
    end: int
    token: LockToken
    room: int

    def plan(self, q_begin: int) -> LotPlan:
        """Return what a row's lock_token says of this range, for a range of the queue that begins at ``q_begin``."""
        return LotPlan(q_begin, self.begin, self.end, self.room)


def read(
    log: Log, span: LotSpan, queue: MessageQueue, columns: tuple[str, ...], text: str, max_messages: int, max_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of the range as they were sent to ``queue``, with ``columns``. ``text`` is the queue's lock_token.

    It reads the range twice: an order that lies at its end concerns messages at its beginning. Raises as `pulls`, also if the
    user accepts losses: without its parked messages a key's order is not known.
    """
    lot = Lot(span.begin)
    lots.read(log, lot, span.queue, span.end)
    for rows in pulls(log, span.queue, span.begin, span.end, max_messages, max_bytes, RESTORE_COLUMNS):
        messages, tickets = restore(rows, queue, lot)
        if not messages.num_rows:
            continue
        own = {LOCK_TOKEN: pa.repeat(text, messages.num_rows)}
        if TICKET in columns:
            each = [(place, one.attempts, one.puts, one.due, one.error) for place, one in tickets]
            own[TICKET] = pa.array(each, TICKET_TYPE)
        arrays = [own[name] if name in own else messages.column(name) for name in columns]
        yield pa.RecordBatch.from_arrays(arrays, names=list(columns))
