"""The messages that a listener gets: rows of Arrow batches, with fields named like the columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from orderedmq.core.process_queue import Slice
from orderedmq.model import OffsetRange
from orderedmq.text import valid


class Columns:
    """The columns of one batch as Python values, each converted when a listener first asks for it."""

    __slots__ = ("_batch", "_values")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._values: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        names: list[str] = self._batch.schema.names
        return names

    def get(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            if name not in self.names:
                raise AttributeError(f"a message has no field {name!r}; the DataFrame has {', '.join(self.names)}")
            values = self._values[name] = valid(self._batch.column(name))[0].to_pylist()
        return values

    def keys(self) -> Sequence[str | None]:
        """The column sharding_key, or no keys without it."""
        return self.get("sharding_key") if "sharding_key" in self.names else [None] * self._batch.num_rows


class Message:
    """One message. Its fields are the columns of the DataFrame: ``message.body``, ``message.sharding_key``, …

    ``reconsume_times`` counts its retries, as in RocketMQ's orderly consumer: 0 at the first attempt. A field that the
    DataFrame does not have raises AttributeError.
    """

    __slots__ = ("_columns", "_index", "_retries")

    def __init__(self, columns: Columns, index: int, retries: int) -> None:
        self._columns = columns
        self._index = index
        self._retries = retries

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._columns.get(name)[self._index]
        if self._retries and name == "reconsume_times":
            return (value or 0) + self._retries
        return value

    def __repr__(self) -> str:
        return f"Message({', '.join(f'{name}={getattr(self, name)!r}' for name in self._columns.names)})"


class Window:
    """The messages of one queue that may still go to the listener, found by offset."""

    def __init__(self) -> None:
        #: Per part: its first offset, its end offset (exclusive), the batch's columns, the index of its first message in them.
        self._parts: deque[tuple[int, int, Columns, int]] = deque()

    def add(self, batch: pa.RecordBatch) -> list[Slice]:
        """Add rows of one queue, ordered by offset. Return them as slices of consecutive offsets."""
        offsets = batch.column("queue_offset").to_pylist()
        columns, slices = Columns(batch), []
        retries = batch.select(["reconsume_times"]) if "reconsume_times" in batch.schema.names else None
        begin = 0
        for span in runs(offsets):
            self._parts.append((span.begin, span.end, columns, begin))
            slices.append(Slice(span.begin, span.end, 0, None if retries is None else retries.slice(begin, span.messages)))
            begin += span.messages
        return slices

    def messages(self, spans: Sequence[Slice], retries: int = 0) -> list[Message]:
        """Return the messages of these slices, in order; ``retries`` is added to their ``reconsume_times``."""
        found: list[Message] = []
        for span in spans:
            for first, end, columns, index in self._parts:
                low, high = max(first, span.begin), min(end, span.end)
                if low < high:
                    found += [Message(columns, index + offset - first, retries) for offset in range(low, high)]
                elif first >= span.end:
                    break
        return found

    def forget(self, offset: int) -> None:
        """Drop batches that end at or below ``offset``: their messages are settled."""
        while self._parts and self._parts[0][1] <= offset:
            self._parts.popleft()


def runs(offsets: Sequence[int]) -> list[OffsetRange]:
    """Split offsets into ranges without gaps. A filter may leave gaps; the engine refuses offsets that do not ascend."""
    if offsets and offsets[-1] - offsets[0] == len(offsets) - 1 and all(b - a == 1 for a, b in pairwise(offsets)):
        return [OffsetRange(offsets[0], offsets[-1] + 1)]
    found: list[OffsetRange] = []
    for offset in offsets:
        if found and found[-1].end == offset:
            found[-1] = OffsetRange(found[-1].begin, offset + 1)
        else:
            found.append(OffsetRange(offset, offset + 1))
    return found
