"""Measures the embedded store and the reader's driver side without Spark."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from bench import data
from bench.figures import ROOT, Figure
from bench.measure import Bench, interleaved, median, status
from bench.one_task import CHUNK, read_away, whole_queue
from ordered_source.columns import full_schema
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
    path = bench.fresh("queues")
    rounds = 5 if bench.quick else 15
    times: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        times.setdefault(what, []).append((time.perf_counter() - begin) * 1000)
        return result

    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("t", QUEUES)
        queues = broker.log.queues("t")
        reader = StreamReader({"path": str(path), "topic": "t", "consumerGroup": "g"}, full_schema(False))
        try:
            # Each queue has a row before the query begins.
            _one_row_each(broker, queues, 0)
            start = reader.initialOffset()
            for number in range(rounds + 1):
                kind = "steady" if number else "first"
                end = timed(f"{kind}: latestOffset", reader.latestOffset, start, ReadAllAvailable())
                timed(f"{kind}: partitions", reader.partitions, start, end)
                start = end
                _one_row_each(broker, queues, number + 1)
            start = reader.latestOffset(start, ReadAllAvailable())
            for number in range(rounds):
                # A change of another group: the store has changed, but the queues have not.
                broker.admin.seek("other", {queues[0]: number})
                timed("nothing new, another change", reader.latestOffset, start, ReadAllAvailable())
                timed("nothing new, no change", reader.latestOffset, start, ReadAllAvailable())
        finally:
            reader.stop()
    out = []
    for what, values in times.items():
        out.append(Figure("1,000 queues", what, median(values), "ms"))
    sums = [sum(pair) for pair in zip(times["steady: latestOffset"], times["steady: partitions"])]
    out.append(
        Figure("1,000 queues", "latestOffset + partitions", median(sums), "ms", 50.0, median(sums) / 50.0, 1.0, low=True)
    )
    return out


def size(bench: Bench) -> list[Figure]:
    """Compare opening, seeking and reading a few rows in a large store and a small one."""
    large, small = (500_000, 10_000) if bench.quick else (10_000_000, 10_000)
    stores = {}
    for rows in (large, small):
        stores[rows] = bench.fresh(f"store-{rows}")
        with orderedmq.connect(stores[rows]) as broker:
            data.fill(broker, "t", 1, rows)

    def run(rows: int) -> dict[str, float]:
        begin = time.perf_counter()
        with orderedmq.connect(stores[rows]) as broker:
            (queue,) = broker.log.queues("t")
            opened = time.perf_counter()
            stamps = broker.admin.describe_topic("t")[0]
            assert stamps.first_timestamp is not None
            assert stamps.last_timestamp is not None
            seek, by_time = [], []
            for turn in range(50):
                # Read other columns each time, because the store caches the chunk that was read last, with its columns.
                columns = ("body", "queue_offset") if turn % 2 else ("body",)
                offset = random.randrange(rows)
                before = time.perf_counter()
                broker.log.pull(queue, offset, 10, 1 << 20, columns)
                seek.append(time.perf_counter() - before)
                moment = random.randint(stamps.first_timestamp, stamps.last_timestamp)
                before = time.perf_counter()
                broker.log.offset_at(queue, moment)
                by_time.append(time.perf_counter() - before)
        return {
            "open": (opened - begin) * 1000,
            "read 10 rows at a random offset": median(seek) * 1000,
            "offset at a time": median(by_time) * 1000,
        }

    found = interleaved(bench.rounds, {"large": lambda: run(large), "small": lambda: run(small)})
    case, label = "size of the store", f"{large:,} messages against {small:,}"
    disk = sum(file.stat().st_blocks * 512 for file in stores[large].rglob("*") if file.is_file())
    with orderedmq.connect(stores[large]) as broker:
        payloads = sum(queue.stored_bytes for queue in broker.admin.describe_topic("t"))
    plain = data.messages(65536).select(["body", "sharding_key"])
    texts = large * sum(pc.sum(pc.binary_length(column)).as_py() for column in plain.columns) / plain.num_rows
    what = f"disk space of {large:,} messages, against"
    space = [
        Figure(case, f"{what} their payloads", disk / 1e6, "MB", payloads / 1e6, disk / payloads, 1.05, low=True),
        Figure(case, f"{what} the texts of bodies and keys", disk / 1e6, "MB", texts / 1e6, disk / texts, low=True),
    ]
    return [
        *space,
        *(
            Figure("size of the store", f"{what}, {label}", mine, "ms", found["small"][what], mine / found["small"][what])
            for what, mine in found["large"].items()
        ),
    ]


def writers(bench: Bench) -> list[Figure]:
    """Compare `Producer.send` with a sync of the disk, and eight writing processes with two, while a lock is renewed."""
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
            begin, waits = time.perf_counter(), []
            while ends.qsize() < processes:
                waits.append(_timed(lambda: broker.groups.renew(tokens)))
                time.sleep(0.02)
            took = max(ends.get() for _ in tasks) - begin
            for task in tasks:
                task.join()
            return {"speed": total / took / 1e6, "renewal": max(waits) * 1000}

        quick = interleaved(bench.rounds, {"send": send, "sync": sync})
        found = interleaved(bench.rounds, {"eight": lambda: write(8), "two": lambda: write(2)}, warm=False)
    mine, other = (quick[name]["wait"] * 1000 for name in ("send", "sync"))
    eight, two = found["eight"], found["two"]
    return [
        Figure("writers", "a message by Producer, against a sync of 4 KiB", mine, "ms", other, mine / other, 1.5, low=True),
        Figure(
            "writers", "eight processes that stage rows, against two", eight["speed"], "M rows/s", two["speed"],
            eight["speed"] / two["speed"], 0.95,
        ),
        Figure(
            "writers", "longest wait of a lock's renewal beside eight", eight["renewal"], "ms", 50.0, eight["renewal"] / 50.0, 1.0, low=True,
        ),
    ]  # fmt: skip


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _stage(path: Path, number: int, rows: int, start: Barrier, ends: Any) -> None:
    """Write rows as a task does, publish nothing, and report when the receipt is ready. Runs in a separate process."""
    made = data.messages(65536, number)
    with orderedmq.connect(path) as broker:
        queues = broker.log.queues("t")
        staging = broker.outbox.open(SinkBatch(None), number)
        start.wait()
        for step in range(0, rows, made.num_rows):
            staging.add(queues[step // made.num_rows % len(queues)], made.slice(0, min(made.num_rows, rows - step)))
        receipt = staging.receipt()
        # All processes of the machine share this clock.
        ends.put(time.perf_counter())
        broker.outbox.discard([receipt])


def small_batches(bench: Bench) -> list[Figure]:
    batches = 1000 if bench.quick else 10_000
    path = bench.fresh("small")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("small", 1, compression="none")
        (small,) = broker.log.queues("small")
        begin = time.perf_counter()
        data.append_small(broker, small, batches, 2)
        each = (time.perf_counter() - begin) / batches * 1000
        data.fill(broker, "large", 1, 2 * batches)
        (large,) = broker.log.queues("large")
        chunks = broker.admin.describe_topic("small")[0].chunks

        def run(queue: MessageQueue) -> dict[str, float]:
            speeds = []
            for _ in range(20):
                begin, position = time.perf_counter(), 0
                while position < 2 * batches:
                    position += broker.log.pull(queue, position, CHUNK, 1 << 24, DEFAULT_COLUMNS).num_rows
                speeds.append(position / (time.perf_counter() - begin) / 1e6)
            return {"speed": median(speeds)}

        found = interleaved(bench.rounds, {"small": lambda: run(small), "large": lambda: run(large)})
    mine, other = found["small"]["speed"], found["large"]["speed"]
    label = f"{batches:,} two-row batches"
    return [
        Figure("small batches", f"read what {label} wrote, against large chunks", mine, "M rows/s", other, mine / other, 0.5),
        Figure("small batches", f"chunks left by {label}", chunks, "chunks"),
        Figure("small batches", "stage and publish one batch", each, "ms"),
    ]


def memory(bench: Bench) -> list[Figure]:
    """Measure the peak RSS of a process that reads one queue as an executor's worker does."""
    large, small = (500_000, 50_000) if bench.quick else (5_000_000, 500_000)
    peaks: dict[int, dict[str, float]] = {}
    for rows in (small, large):
        path = bench.fresh(f"memory-{rows}")
        with orderedmq.connect(path) as broker:
            data.fill(broker, "t", 1, rows)
        done = subprocess.run(
            [sys.executable, "-c", f"from bench import stores; stores.read_all({str(path)!r}, {rows})"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        before, peak, mapped = (int(word) / 1024 for word in done.stdout.split())
        peaks[rows] = {"peak RSS": peak, "peak RSS above an idle worker's": peak - before, "of it the store's pages": mapped}
    return [
        Figure(
            "memory", f"{what}, {large:,} messages against {small:,}", mine, "MB", peaks[small][what],
            mine / peaks[small][what] if peaks[small][what] else None, 1.1 if what == "peak RSS" else None, low=True,
        )
        for what, mine in peaks[large].items()
    ]  # fmt: skip


def read_all(path: str, rows: int) -> None:
    """Read a queue, and print in KiB the RSS before, its peak, and the file pages at the end. Runs in a separate process."""
    with orderedmq.connect(path) as broker:
        partition = whole_queue(broker, "t", rows)
    before = status("VmRSS")
    read_away(partition, SourceOptions(path=path))
    print(before, status("VmHWM"), status("RssFile"))
