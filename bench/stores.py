"""Measures the embedded store and the reader's driver side without Spark."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from bench import data
from bench.figures import ROOT, Figure
from bench.measure import Bench, interleaved, median, status
from ordered_source.columns import full_schema
from ordered_source.partition_reader import QueuePartition, read
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker, SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.schema import DEFAULT_COLUMNS
from orderedmq.tools.producer import Producer

QUEUES = 1000
QUEUES_OF_WRITERS = 4


def _one_row_each(broker: Broker, queues: list[MessageQueue], number: int) -> None:
    """Publish one message in every queue, in one transaction."""
    made = data.messages(1)
    batch = SinkBatch("bench", number)
    staging = broker.outbox.open(batch, 0)
    for queue in queues:
        staging.add(queue, made)
    broker.outbox.publish(batch, [staging.receipt()])


def many_queues(bench: Bench) -> list[Figure]:
    """Measure what the source does on the driver in each micro-batch when each of 1,000 queues has new messages."""
    path = bench.fresh("queues")
    times = []
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("t", QUEUES)
        queues = broker.log.queues("t")
        reader = StreamReader({"path": str(path), "topic": "t", "consumerGroup": "g"}, full_schema())
        try:
            start = reader.initialOffset()
            for number in range(6 if bench.quick else 16):
                _one_row_each(broker, queues, number)
                begin = time.perf_counter()
                end = reader.latestOffset(start, ReadAllAvailable())
                reader.partitions(start, end)
                times.append((time.perf_counter() - begin) * 1000)
                start = end
        finally:
            reader.stop()
    # Leave out the first batch, in which the queues are locked.
    took = median(times[1:])
    return [Figure("1,000 queues", "latestOffset + partitions", took, "ms", 50.0, took / 50.0, 1.0, low=True)]


def size(bench: Bench) -> list[Figure]:
    """Compare opening a large store with opening a small one, and the disk space of the large one with its payloads."""
    large, small = (500_000, 10_000) if bench.quick else (10_000_000, 10_000)
    stores = {}
    for rows in (large, small):
        stores[rows] = bench.fresh(f"store-{rows}")
        with orderedmq.connect(stores[rows]) as broker:
            data.fill(broker, "t", 1, rows)

    def opened(rows: int) -> dict[str, float]:
        begin = time.perf_counter()
        with orderedmq.connect(stores[rows]) as broker:
            assert len(broker.log.queues("t")) == 1
            return {"open": (time.perf_counter() - begin) * 1000}

    found = interleaved(bench.rounds, {"large": partial(opened, large), "small": partial(opened, small)})
    mine, other = found["large"]["open"], found["small"]["open"]
    disk = sum(file.stat().st_blocks * 512 for file in stores[large].rglob("*") if file.is_file())
    with orderedmq.connect(stores[large]) as broker:
        payloads = sum(queue.stored_bytes for queue in broker.admin.describe_topic("t"))
    case = "size of the store"
    space = f"disk space of {large:,} messages, against their payloads"
    return [
        Figure(case, space, disk / 1e6, "MB", payloads / 1e6, disk / payloads, 1.05, low=True),
        Figure(case, f"open, {large:,} messages against {small:,}", mine, "ms", other, mine / other, low=True),
    ]


def writers(bench: Bench) -> list[Figure]:
    """Compare `Producer.send` with a sync of the disk, and measure the renewals of a lock while eight processes write."""
    path = bench.fresh("writers")
    sends = 50 if bench.quick else 300
    total = 800_000 if bench.quick else 5_760_000
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("t", QUEUES_OF_WRITERS, compression="none")
        producer, one = Producer(broker.log, "t"), data.messages(1)
        client = broker.groups.join("owner")
        tokens = [
            token for token in broker.groups.lock("g", client, broker.log.queues("t")).values() if isinstance(token, LockToken)
        ]

        def send() -> dict[str, float]:
            return {"wait": median([_timed(lambda: producer.send(one)) for _ in range(sends)])}

        def sync() -> dict[str, float]:
            page = os.urandom(4096)
            with open(path.parent / "page", "wb", buffering=0) as file:

                def write_and_sync() -> None:
                    file.write(page)
                    os.fdatasync(file.fileno())

                return {"wait": median([_timed(write_and_sync) for _ in range(sends)])}

        def write(processes: int) -> dict[str, float]:
            context = multiprocessing.get_context("spawn")
            start, ends = context.Barrier(processes + 1), context.Queue()
            tasks = [
                context.Process(target=_stage, args=(path, number, total // processes, start, ends))
                for number in range(processes)
            ]
            for task in tasks:
                task.start()
            start.wait()
            waits = []
            while ends.qsize() < processes:
                waits.append(_timed(lambda: broker.groups.renew(tokens)))
                time.sleep(0.02)
            for task in tasks:
                task.join()
            return {"renewal": max(waits) * 1000}

        quick = interleaved(bench.rounds, {"send": send, "sync": sync})
        longest = interleaved(bench.rounds, {"eight": partial(write, 8)}, warm=False)["eight"]["renewal"]
    mine, other = (quick[name]["wait"] * 1000 for name in ("send", "sync"))
    return [
        Figure("writers", "a message by Producer, against a sync of 4 KiB", mine, "ms", other, mine / other, 1.5, low=True),
        Figure("writers", "longest wait of a lock's renewal beside eight", longest, "ms", 50.0, longest / 50.0, 1.0, low=True),
    ]


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _stage(path: Path, number: int, rows: int, start: Barrier, ends: Any) -> None:
    """Write rows as a task does, publish nothing, and report that the receipt is ready. Runs in a separate process."""
    made = data.messages(65536, number)
    with orderedmq.connect(path) as broker:
        queues = broker.log.queues("t")
        staging = broker.outbox.open(SinkBatch(None), number)
        start.wait()
        for step in range(0, rows, made.num_rows):
            staging.add(queues[step // made.num_rows % len(queues)], made.slice(0, min(made.num_rows, rows - step)))
        receipt = staging.receipt()
        ends.put(None)
        broker.outbox.discard([receipt])


def memory(bench: Bench) -> list[Figure]:
    """Measure the peak of the resident memory of a process that reads one queue as an executor's worker does."""
    large, small = (500_000, 50_000) if bench.quick else (5_000_000, 500_000)
    peaks = {}
    for rows in (small, large):
        path = bench.fresh(f"memory-{rows}")
        with orderedmq.connect(path) as broker:
            data.fill(broker, "t", 1, rows)
        program = f"from bench import stores; stores.read_all({str(path)!r}, {rows})"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        peaks[rows] = int(done.stdout) / 1024
    mine, other = peaks[large], peaks[small]
    what = f"peak RSS, {large:,} messages against {small:,}"
    return [Figure("memory", what, mine, "MB", other, mine / other, 1.1, low=True)]


def read_all(path: str, rows: int) -> None:
    """Read a queue as a task does, write its rows to /dev/null as a worker writes them to its socket, and print the peak of RSS in
    KiB. Runs in a separate process.
    """
    with orderedmq.connect(path) as broker:
        (queue,) = broker.log.queues("t")
        incarnation = broker.log.topic("t").incarnation
        partition = QueuePartition(broker.identity, queue, 0, rows, None, incarnation, streaming=False)
    schema = to_arrow_schema(full_schema(), timezone="UTC")
    with pa.OSFile("/dev/null", "wb") as sink:
        writer = None
        for batch in read(partition, SourceOptions(path=path), DEFAULT_COLUMNS, schema):
            writer = writer or pa.ipc.new_stream(sink, batch.schema)
            writer.write_batch(batch)
    print(status("VmHWM"))
