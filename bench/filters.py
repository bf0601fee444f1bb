"""Counts how many chunks of a large store a batch query reads if its filters are pushed down."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any
from unittest import mock

from pyspark.sql import datasource as ds
from pyspark.sql.datasource import Filter

import orderedmq
from bench import data
from bench.figures import Figure
from bench.measure import Bench
from bench.one_task import CHUNK
from ordered_source.batch_reader import BatchReader
from ordered_source.columns import full_schema
from ordered_source.pushed_filters import FilteredReader
from orderedmq.embedded import chunk_codec
from orderedmq.model import MessageQueue

QUEUES = 4


def figures(bench: Bench) -> list[Figure]:
    rows = 400_000 if bench.quick else 10_000_000
    path = bench.fresh("filters")
    with orderedmq.connect(path) as broker:
        data.fill(broker, "t", QUEUES, rows, CHUNK)
        chunks = sum(queue.chunks for queue in broker.admin.describe_topic("t"))
        first, *_ = broker.log.queues("t")

        def moments(begin: int) -> tuple[datetime, datetime]:
            """Return when the first queue's messages at ``begin`` and five appends later were stored. All messages of an append
            have the same time.
            """
            since, until = (
                broker.log.pull(first, offset, 1, 1, ("store_timestamp",)).column(0)[0].as_py()
                for offset in (begin, begin + 5 * CHUNK)
            )
            return since, until

        each = rows // QUEUES
        # Each variant reads a different part, because a connection caches the chunk that was read last.
        parts = [moments(each * tenth // 10) for tenth in (3, 5, 7)]
    times: list[list[Filter]] = [
        [ds.GreaterThanOrEqual(("store_timestamp",), since), ds.LessThan(("store_timestamp",), until)] for since, until in parts
    ]
    offsets: list[Filter] = [
        ds.GreaterThanOrEqual(("queue_offset",), each // 10), ds.LessThan(("queue_offset",), each // 10 + each // 100)
    ]  # fmt: skip
    since, until = parts[2]
    ways: dict[str, Callable[[], BatchReader]] = {
        "a hundredth of each queue, by queue_offset": lambda: _filtered(path, offsets),
        "five appends, by store_timestamp": lambda: _filtered(path, times[0]),
        "five appends, by store_timestamp and queue_id": lambda: _filtered(path, [*times[1], ds.EqualTo(("queue_id",), 0)]),
        "five appends, by startingTimestamp and endingTimestamp": lambda: _reader(
            path, BatchReader, startingTimestamp=since.isoformat(), endingTimestamp=until.isoformat()
        ),
    }
    out = []
    for what, make in ways.items():
        read = _chunks_read(make())
        out.append(Figure("filters", f"chunks read for {what}", read, "chunks", chunks, read / chunks, 0.02, low=True))
    return out


def _reader(path: Any, kind: type[BatchReader], **options: str) -> Any:
    return kind({"path": str(path), "topic": "t", **options}, full_schema(False))


def _filtered(path: Any, filters: list[Filter]) -> BatchReader:
    reader: FilteredReader = _reader(path, FilteredReader)
    reader.pushFilters(filters)
    return reader


def _chunks_read(reader: BatchReader) -> int:
    """Plan a read and read all its partitions. Return how many different chunks were read, for the search or for the rows."""
    seen: set[tuple[MessageQueue, int]] = set()
    verify = chunk_codec.verify

    def noted(payload: Any, chunk: Any, queue: MessageQueue, first: int) -> None:
        seen.add((queue, first))
        verify(payload, chunk, queue, first)

    rows = 0
    with mock.patch.object(chunk_codec, "verify", noted):
        for partition in reader.partitions():
            rows += sum(batch.num_rows for batch in reader.read(partition))
    assert rows, "the case needs rows that fit"
    return len(seen)
