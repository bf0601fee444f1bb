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
from bench.rocketmq_rig import rig
from orderedmq.broker import Broker, Receipt, SinkBatch
from orderedmq.model import MessageQueue

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
        seconds = [
            _batch(pool, processes, made.broker, made.address, number, queues) for number in range(2 if bench.quick else 4)
        ]
    most = MOST * count / 1000
    case = f"RocketMQ: {count * ROWS:,} rows from {count:,} tasks to {count:,} queues"
    return [
        Figure(case, what, value, "s", most, value / most, 1.0, low=True)
        for what, value in (("first batch of a sink", seconds[0]), ("later batches", median(seconds[1:])))
    ]


def _batch(
    pool: ProcessPoolExecutor, processes: int, broker: Broker, address: str, number: int, queues: Sequence[MessageQueue]
) -> float:
    """Write a batch, and return the seconds until it is committed."""
    batch = SinkBatch("many", number, None, None, uuid.uuid4().hex, queues[0].topic)
    began = time.perf_counter()
    tasks = [pool.submit(_write, address, batch, range(first, len(queues), processes), queues) for first in range(processes)]
    broker.outbox.publish(batch, [receipt for task in tasks for receipt in task.result()])
    return time.perf_counter() - began


def _write(address: str, batch: SinkBatch, partitions: range, queues: Sequence[MessageQueue]) -> list[Receipt]:
    """Run the tasks of some partitions in this process."""
    receipts = []
    with orderedmq.connect(namesrv_addr=address) as broker:
        for partition in partitions:
            draw = random.Random(f"{batch.batch_id}/{partition}")
            staging = broker.outbox.open(batch, partition)
            targets = staging.targets(queues[0].topic, queues)
            for queue in draw.sample(targets, ROWS):
                staging.add(queue, pa.record_batch({"body": [draw.randbytes(100)], "sharding_key": [f"key-{draw.random()}"]}))
            receipts.append(staging.receipt())
    return receipts
