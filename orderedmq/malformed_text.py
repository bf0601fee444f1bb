"""Counts messages with text that is not UTF-8, per queue, and warns about them. text.py makes such text readable."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from orderedmq.model import MessageQueue
from orderedmq.text import valid_rows

log = logging.getLogger("orderedmq")


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
        given = sorted(offsets)
        if not given:
            return
        with self._lock:
            seen = self._seen.setdefault(queue, _Seen())
            new = [offset for offset in given if offset > seen.last]
            if not new:
                return
            seen.messages += len(new)
            seen.last = new[-1]
            if seen.messages < seen.warn_at:
                return
            seen.warn_at = 2 * seen.messages
            messages, last = seen.messages, seen.last
        log.warning(
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
