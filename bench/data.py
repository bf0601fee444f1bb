"""The rows of the measurements: bodies of 100 random bytes, and the demo's flights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from orderedmq.broker import Broker
from orderedmq.demo import flights

BODY_BYTES: Final = 100
#: Number of distinct sharding keys in one part. A key has 8 bytes.
KEYS: Final = 10_000


def messages(rows: int, part: int = 0) -> pa.RecordBatch:
    """Return random bodies, which no codec makes smaller, with keys that no other part has."""
    random = np.random.default_rng(part)
    ends = np.arange(0, BODY_BYTES * (rows + 1), BODY_BYTES, dtype=np.int32)
    body = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(random.bytes(BODY_BYTES * rows))])
    keys = pa.array([f"{part % 100:02d}-{number:05d}" for number in range(KEYS)])
    return pa.record_batch({"sharding_key": keys.take(pa.array(random.integers(0, KEYS, rows))), "body": body})


def demo_messages(rows: int) -> pa.RecordBatch:
    """Return the demo's events, repeated until there are ``rows``."""
    found = flights.events(rows).select(["sharding_key", "body"])
    whole = pa.Table.from_batches([found] * -(-rows // found.num_rows)).slice(0, rows)
    return whole.combine_chunks().to_batches()[0]


def write_files(folder: Path, rows: pa.RecordBatch, files: int) -> None:
    """Write ``rows`` as Parquet files that have no key in common, so that no key is in two tasks."""
    folder.mkdir(parents=True)
    step = -(-rows.num_rows // files)
    for number in range(files):
        part = rows.slice(number * step, step)
        keys = pc.binary_join_element_wise(part.column("sharding_key"), f"-{number}", "")
        part = pa.record_batch({"sharding_key": keys, "body": part.column("body")})
        pq.write_table(pa.Table.from_batches([part]), folder / f"{number}.parquet", compression="none", use_dictionary=False)


def fill(broker: Broker, topic: str, queues: int, rows: int, step: int = 65536) -> None:
    """Create a topic with ``rows`` messages, equally many in each queue, in uncompressed chunks of full size."""
    broker.admin.create_topic(topic, queues, compression="none")
    for queue in broker.log.queues(topic):
        made = messages(step, queue.queue_id)
        left = rows // queues
        while left > 0:
            broker.log.append({queue: made.slice(0, min(left, step))})
            left -= step
