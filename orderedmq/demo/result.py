"""Compares the output of the demo's job with an uninterrupted pass over the same events, and collects figures to show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.broker import Log
from orderedmq.demo import IN, OUT
from orderedmq.demo.turnaround import LATE, follow, read
from orderedmq.model import MessageQueue
from orderedmq.pulls import pulls

_AT_ONCE: Final = 65536
_BYTES: Final = 64 * 1024 * 1024
_TOLD: Final = pa.schema(
    [
        ("type", pa.string()),
        ("tailnum", pa.string()),
        ("actual", pa.string()),
        ("delay", pa.int64()),
        ("leg", pa.int64()),
        ("carried", pa.int64()),
        ("chain", pa.int64()),
        ("chain_minutes", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Result:
    """The result of `verify`. ``different``: number of messages that differ from an uninterrupted pass.

    The fields from ``late`` on are figures to show.
    """

    messages: int
    different: int
    late: int
    late_brought_along: int
    most_legs: dict[str, Any]
    longest_chain: dict[str, Any]


def verify(log: Log) -> Result:
    """Compare the job's output with an uninterrupted pass. Raises TopicError MISSING if nothing was written."""
    messages = different = late = brought = 0
    tops: list[list[tuple[float, dict[str, Any]]]] = []
    for queue, out in zip(log.queues(IN), log.queues(OUT), strict=True):
        progress: bytes | None = None
        bounds = log.bounds([queue, out])
        # The job keeps the order within each queue, so messages at the same offset must be equal.
        different += abs(bounds[queue].max_offset - bounds[out].max_offset)
        end = min(bounds[queue].max_offset, bounds[out].max_offset)
        for begin in range(0, end, _AT_ONCE):
            count = min(_AT_ONCE, end - begin)
            progress, expected = follow(progress, _bodies(log, queue, begin, count))
            actual = _bodies(log, out, begin, count)
            different += count - int(pc.sum(pc.equal(expected["body"], actual)).as_py())
            messages += count
            rows = read(actual, _TOLD)
            departures = pc.equal(rows["type"], "departure")
            late += _count(pc.and_(departures, pc.greater_equal(rows["delay"], int(LATE))))
            brought += _count(pc.greater_equal(rows["carried"], int(LATE)))
            tops.append(_tops(rows))
    legs, chain = (max(numbers, key=lambda top: top[0])[1] for numbers in zip(*tops, strict=True)) if tops else ({}, {})
    return Result(messages, different, late, brought, legs, chain)


def _bodies(log: Log, queue: MessageQueue, begin: int, count: int) -> pa.Array:
    return pa.concat_arrays([batch["body"] for batch in pulls(log, queue, begin, begin + count, count, _BYTES, ("body",))])


def _count(mask: pa.Array) -> int:
    return int(pc.sum(mask).as_py() or 0)


def _tops(rows: pa.RecordBatch) -> list[tuple[float, dict[str, Any]]]:
    """Return the row with the most legs, and the row with the longest chain. Of equally long chains, the one with more minutes wins."""
    out = []
    for values in (_numbers(rows["leg"]), _numbers(rows["chain"]) * 1e6 + _numbers(rows["chain_minutes"])):
        index = int(np.argmax(values))
        out.append((float(values[index]), rows.slice(index, 1).to_pylist()[0]))
    return out


def _numbers(column: pa.Array) -> Any:
    return column.to_numpy(zero_copy_only=False).astype(np.float64)
