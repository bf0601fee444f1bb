"""Warnings of messages with texts that are not UTF-8, by queue: they are shown as Java shows them (text.py), and counted here."""

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
    #: So many messages are warned of next.
    warn_at: int = 1


class MalformedText:
    """Counts such messages as they are read, and warns at the first one of a queue and whenever they have doubled. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[MessageQueue, _Seen] = {}

    def note(self, queue: MessageQueue, offsets: Iterable[int]) -> None:
        """Messages at these offsets were read. One that is read again is not counted again, nor are those before it."""
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
            "%d messages of queue %s, the last one at offset %d, have a tag, key or property that is not UTF-8: it is shown with U+FFFD in "
            "the place of each malformed byte sequence, as Java shows it; correct their producer",
            messages,
            queue,
            last,
        )

    def valid(self, batch: pa.RecordBatch, queue: MessageQueue, first: int) -> pa.RecordBatch:
        """Messages from offset ``first`` on, one behind the other, with valid text; those that had none are noted."""
        batch, rows = valid_rows(batch)
        self.note(queue, (first + rows).tolist())
        return batch
