"""Decides how much of the backlog one micro-batch takes, from Spark's read limit, the options, and state kept between triggers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final

from ordered_source.older_spark import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows
from orderedmq.broker import Log
from orderedmq.errors import DataLossError
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import admit, hold_back

_NO_LIMIT: Final = 2**63 - 1
_BODY: Final = ("body",)


class Admission:
    """Divides a trigger's limit among the queues. Remembers which queue gets the remainder next, and when the last batch was planned."""

    def __init__(self, options: SourceOptions, now: float) -> None:
        self._options = options
        self._turn = 0
        self._last_batch = now
        #: With availableNow the query must end, so it never waits for more messages.
        self.available_now = False

    def default_limit(self) -> ReadLimit:
        """Return the limit for Spark to pass to `latestOffset`.

        Spark cannot combine limits. With any limit except ReadAllAvailable, `count_messages` therefore applies all options.
        """
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.min_offsets_per_trigger is not None or options.max_bytes_per_trigger is not None:
            return ReadMaxRows(_NO_LIMIT)
        return ReadAllAvailable()

    def count_messages(
        self, log: Log, backlog: Mapping[MessageQueue, OffsetRange], limit: ReadLimit, now: float
    ) -> dict[MessageQueue, int] | None:
        """Return how many messages to take from each queue, or None to skip this trigger and wait for more messages."""
        waiting = {queue: span.messages for queue, span in backlog.items() if span.messages}
        if isinstance(limit, ReadAllAvailable):
            return self._record_taken(waiting, now)
        least = self._options.min_offsets_per_trigger
        if isinstance(limit, ReadMinRows):
            least = max(least or 0, limit.min_rows)
        if not self.available_now and hold_back(
            sum(waiting.values()), least, now - self._last_batch, self._options.max_trigger_delay
        ):
            return None
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT
        out = admit(waiting, min(most, self._options.max_offsets_per_trigger or _NO_LIMIT), self._turn)
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes_per_trigger
        if size is not None and out:
            out = self._cut_to_size(log, backlog, out, size)
        return self._record_taken(out, now)

    def _record_taken(self, counts: dict[MessageQueue, int], now: float) -> dict[MessageQueue, int]:
        if counts:
            self._last_batch = now
            self._turn += 1
        return counts

    def _cut_to_size(
        self, log: Log, backlog: Mapping[MessageQueue, OffsetRange], counts: Mapping[MessageQueue, int], size: int
    ) -> dict[MessageQueue, int]:
        """Reduce the counts in proportion, so that the bodies have at most ``size`` bytes in total.

        The first queue of ``counts`` always gets its first message. If that message is larger than ``size``, it is taken alone, because it
        would block its queue forever otherwise. Lost messages count as empty, because the tasks that read them report or skip the loss.
        """
        first = next(iter(counts))
        begin = backlog[first].begin
        room = size
        with contextlib.suppress(DataLossError):
            head = log.pull(first, begin, 1, _NO_LIMIT, _BODY).column("body")
            room -= len(head[0].as_py()) if len(head) else 0
        out = {first: 1}
        if room <= 0:
            return out
        total = sum(counts.values())
        for queue in counts:
            # The size of the first queue's first message is already subtracted.
            offset = backlog[queue].begin + (1 if queue == first else 0)
            end = backlog[queue].begin + counts[queue]
            try:
                reached = log.advance(queue, offset, end, room * counts[queue] // total)
            except DataLossError as error:
                reached = min(error.resume_at or offset, end)
            if reached > backlog[queue].begin:
                out[queue] = reached - backlog[queue].begin
        return out
