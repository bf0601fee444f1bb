"""``orderedmq peek --follow``: shows messages as they arrive."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from orderedmq.broker import Log
from orderedmq.cli.shell import LONGEST, WHOLE, Shell
from orderedmq.conditions import DataLossCondition
from orderedmq.errors import DataLossError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.tools.readable import one_line, shortened

#: Seconds between two polls of a broker without `Log.change`, and of a broker with it.
_LOOK: Final = 0.5
_GLANCE: Final = 0.1

Pull = Callable[[MessageQueue, int, int], pa.RecordBatch]


def arrivals(
    log: Log,
    queues: Callable[[], Sequence[MessageQueue]],
    positions: dict[MessageQueue, int],
    pull: Pull,
    note: Callable[[str], None],
) -> Iterator[list[pa.RecordBatch]]:
    """Yield messages from ``positions`` on, in batches, as they arrive. This never ends. Messages of a queue are in order.

    A new queue is read from its first message. Raises TopicError MISSING if the topic is deleted, and DataLossError TOPIC_RECREATED
    if a queue ends before its position.
    """
    while True:
        changed = log.change()
        there = queues()
        batches = []
        for queue, at in log.bounds(list(there)).items():
            begin = positions.setdefault(queue, at.min_offset)
            if begin > at.max_offset:
                raise DataLossError(
                    DataLossCondition.TOPIC_RECREATED,
                    f"queue {queue} ends at {at.max_offset}, but it had reached {begin}: topic {queue.topic!r} was "
                    "deleted and created again, or its broker lost messages. Run the command again",
                )
            if begin < at.min_offset:
                note(
                    f"messages {begin} to {at.min_offset - 1} of queue {queue} were deleted by retention before they were shown"
                )
                begin = at.min_offset
            if begin < at.max_offset:
                batch = pull(queue, begin, at.max_offset)
                begin += batch.num_rows
                # The batch is empty if the broker has lost messages since it returned the bounds.
                batches += [batch] if batch.num_rows else []
            positions[queue] = begin
        if batches:
            yield batches
            continue
        time.sleep(_LOOK if changed is None else _GLANCE)
        while changed is not None and log.change() == changed:
            time.sleep(_GLANCE)


class Lines:
    """Prints messages, one per line. A table is impossible, because its column widths depend on messages that have not arrived yet.

    ``full``: do not cut long values.
    """

    def __init__(self, shell: Shell, full: bool) -> None:
        self._shell = shell
        self._full = full
        self._queue_width = 0

    def show(self, rows: Sequence[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> None:
        """Print messages as JSON lines, or as lines of queue, offset, time, key, tag and body. Flushes the output."""
        for row in rows:
            if self._shell.json:
                self._shell.emit(row)
                continue
            queue_name = str(row["queue_id"]) if row["broker"] == EMBEDDED_BROKER else f"{row['broker']}/{row['queue_id']}"
            self._queue_width = max(self._queue_width, len(queue_name))
            when = f"{row['store_timestamp'][:10]} {row['store_timestamp'][11:19]}"
            shown = (
                f"{queue_name:>{self._queue_width}} {row['queue_offset']:>8}",
                when,
                row["sharding_key"],
                row["tags"],
                text(row),
            )
            parts = [part or "-" for part in shown]
            self._shell.say("  ".join(one_line(part if self._full else shortened(part, LONGEST, WHOLE)) for part in parts))
        sys.stdout.flush()
