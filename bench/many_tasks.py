"""Measures a batch whose tasks each have a few rows for many queues over RocketMQ, as from a source with as many queues, without Spark.

Each process runs tasks one after another, as a Python worker of Spark does. The time must grow with the rows.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import pyarrow as pa

import orderedmq
from bench.figures import Figure
from bench.measure import Bench, median
from bench.rocketmq_rig import Rig, rig
from orderedmq.broker import Receipt, SinkBatch
from orderedmq.model import MessageQueue
from orderedmq.rows.message_rows import normalise

#: Rows of each task, each for another queue.
ROWS: Final = 10
#: Seconds that a batch of 10,000 rows may take.
MOST: Final = 10.0


def figures(bench: Bench) -> list[Figure]:
    made = rig(bench)
    count = 100 if bench.quick else 1000
    topic = bench.fresh("many").name
    made.broker.admin.create_topic(topic, count)
    while len(queues := made.broker.log.targets(topic)) < count:
        time.sleep(0.1)
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        # The processes start before the first batch.
        list(
            pool.map(
                _write, [made.address] * processes, [SinkBatch(None)] * processes, [range(0)] * processes, [queues] * processes
            )
        )
        batches = [_batch(pool, processes, made, number, queues) for number in range(2 if bench.quick else 4)]
    most = MOST * count / 1000
    case = f"RocketMQ: {count * ROWS:,} rows from {count:,} tasks to {count:,} queues"
    seconds, cpu = zip(*batches)
    measured = {
        "first batch of a sink": seconds[0],
        "later batches": median(list(seconds[1:])),
        "later batches, CPU of tasks and brokers per core": median(list(cpu[1:])) / processes,
    }
    return [Figure(case, what, value, "s", most, value / most, 1.0, low=True) for what, value in measured.items()]


def _batch(
    pool: ProcessPoolExecutor, processes: int, made: Rig, number: int, queues: Sequence[MessageQueue]
) -> tuple[float, float]:
    """Write a batch. Return the seconds until it is committed, and the CPU seconds of the tasks, the commit and the brokers."""
    batch = SinkBatch("many", number, None, None, uuid.uuid4().hex, queues[0].topic)
    began, own, brokers = time.perf_counter(), time.process_time(), made.brokers_cpu()
    tasks = [
        pool.submit(_write, made.address, batch, range(first, len(queues), processes), queues) for first in range(processes)
    ]
    ended = [task.result() for task in tasks]
    made.broker.outbox.publish(batch, [receipt for receipts, _ in ended for receipt in receipts])
    cpu = time.process_time() - own + made.brokers_cpu() - brokers + sum(used for _, used in ended)
    return time.perf_counter() - began, cpu


def _write(address: str, batch: SinkBatch, partitions: range, queues: Sequence[MessageQueue]) -> tuple[list[Receipt], float]:
    """Run the tasks of some partitions in this process. Return their receipts and CPU seconds."""
    receipts = []
    began = time.process_time()
    with orderedmq.connect(namesrv_addr=address) as broker:
        for partition in partitions:
            draw = random.Random(f"{batch.batch_id}/{partition}")
            staging = broker.outbox.open(batch, partition)
            targets = staging.targets(queues[0].topic, queues)
            columns = {
                "body": [draw.randbytes(100) for _ in range(ROWS)],
                "sharding_key": [f"key-{draw.random()}" for _ in range(ROWS)],
            }
            # Check the rows together, as the sink's writer does.
            rows = normalise(pa.record_batch(columns), "the batch")
            for number, queue in enumerate(draw.sample(targets, ROWS)):
                staging.add(queue, rows.slice(number, 1))
            receipts.append(staging.receipt())
    return receipts, time.process_time() - began
