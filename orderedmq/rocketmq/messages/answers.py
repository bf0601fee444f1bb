"""The answers to the pulls of a queue: limits, what earlier answers have shown, and how rows are decoded, trimmed and validated. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from orderedmq.errors import aged_out, unreadable
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.decode import decode
from orderedmq.rocketmq.codec.gather import total_bytes
from orderedmq.rocketmq.codec.row_decoder import Unreadable
from orderedmq.rocketmq.wire.codes import MASTER_ID
from orderedmq.rocketmq.wire.namespaces import Namespaces

#: Approximate bytes of a stored message without its body.
_OVERHEAD: Final = 300
#: See `Log.tail_loss`.
TAIL_LOSS: Final = (
    "its broker died before its last messages were on its disk, a replica without them took over, or the topic was deleted and created "
    "again"
)


@dataclass
class QueueFacts:
    """Facts about a queue that earlier pulls have shown."""

    #: Messages that the broker returns per pull, and when that was measured.
    step: int = 32
    learned: float = float("-inf")
    end: int = 0
    #: The replica that the broker suggested to read from (PullMessageResponseHeader.suggestWhichBrokerId).
    replica: int = MASTER_ID
    #: Until when only the master is used, because a replica failed.
    only_master: float = float("-inf")
    #: Approximate bytes of a body, and when that was measured.
    body_bytes: float | None = None
    measured: float = float("-inf")
    #: Bytes of the last answer.
    answer: int = 0


class PullLimits(NamedTuple):
    """The limits of one pull. Bytes are approximate.

    ``max_messages``, ``max_bytes``: the messages to return, and the bytes of their bodies. ``hold_messages``, ``hold_bytes``: the
    messages and total bytes to hold in memory.
    """

    max_messages: int
    max_bytes: int
    hold_messages: int
    hold_bytes: int


class Answers(NamedTuple):
    """Answers in the order of their messages, and the offset after the last message."""

    parts: list[memoryview]
    end: int


def decode_rows(
    queue: MessageQueue,
    parts: Sequence[memoryview],
    columns: tuple[str, ...],
    begin: int,
    end: int,
    max_bytes: int,
    *,
    malformed: Callable[[MessageQueue, Sequence[int]], None],
    names: Namespaces,
    tags: frozenset[str] = frozenset(),
    verify_crc: bool = False,
) -> tuple[pa.RecordBatch, int]:
    """Decode pull responses as `decode.decode` does. The result always has the column queue_offset.

    Raises DataLossError UNREADABLE, ProtocolError.
    """
    decoded = columns if "queue_offset" in columns else (*columns, "queue_offset")
    try:
        return decode(
            parts,
            decoded,
            names.spelled_queue(queue),
            begin=begin,
            end=end,
            max_bytes=max_bytes,
            tags=tags,
            verify_crc=verify_crc,
            malformed=partial(malformed, queue),
        )
    except Unreadable as error:
        raise unreadable(queue, error.offset, str(error)) from error


def drop_repeats(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows sorted by offset, each once. An answer that reaches into the next range repeats messages of that range."""
    offsets = batch.column("queue_offset").to_numpy()
    if (offsets[1:] > offsets[:-1]).all():
        return batch
    return batch.take(pa.array(np.unique(offsets, return_index=True)[1]))


def before_gap(batch: pa.RecordBatch, offset: int) -> int:
    """Return how many of the first rows have consecutive offsets from ``offset`` on. The rows are in order."""
    offsets = batch.column("queue_offset").to_numpy()
    right = offsets == np.arange(offset, offset + len(offsets))
    return len(offsets) if right.all() else int(np.argmin(right))


def cut_at_gap(batch: pa.RecordBatch, queue: MessageQueue, offset: int, end: int) -> pa.RecordBatch:
    """Return the rows before the first missing offset. Raises DataLossError AGED_OUT if ``offset`` itself is missing."""
    count = before_gap(batch, offset)
    if not count and end > offset:
        raise aged_out(queue, offset, batch.column("queue_offset")[0].as_py() if batch.num_rows else end)
    return batch.slice(0, count)


def average_body(batch: pa.RecordBatch, received: int, before: float | None) -> float:
    """Return the approximate bytes of a body: the mean of this batch's average and ``before``, the average so far."""
    if "body" in batch.schema.names:
        now: float = total_bytes(batch.column("body")) / batch.num_rows
    else:
        now = max(1.0, received / batch.num_rows - _OVERHEAD)
    return now if before is None else (now + before) / 2
