"""Order per key: the gain of parallel keys, and the costs of the engine, of one poisoned key and of a full parking lot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

import orderedmq
from bench.figures import Figure
from bench.latency import ticking
from bench.measure import Bench, interleaved
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerKey, OrderPerQueue, consume_orderly
from orderedmq.broker import Broker
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.parking import Parking, Ticket

QUEUES: Final = 4
#: Cores of the bench's Spark.
CORES: Final = 2
SCHEMA: Final = (
    "topic string, broker_name string, queue_id int, queue_offset long, body binary, sharding_key string, "
    "store_timestamp timestamp, lock_token string, "
    "ticket struct<place: long, attempts: int, parkings: int, due: long, error: string>"
)
#: Seconds that a call waits, as for a payment or a database.
WAIT: Final = 0.01
POISON: Final = "poison"
LOT: Final = 10_000
HOUR_MS: Final = 3_600_000


def _fill(broker: Broker, topic: str, rows: int, keys: int) -> None:
    """Create a topic with ``rows`` messages of ``keys`` keys. Each queue has an equal share of the keys, which take turns."""
    broker.admin.create_topic(topic, QUEUES)
    for number, queue in enumerate(broker.log.queues(topic)):
        names = [f"key-{number}-{key % (keys // QUEUES):05d}" for key in range(rows // QUEUES)]
        broker.log.append(
            {queue: pa.record_batch({"body": pa.array([b"x" * 100] * len(names), pa.binary()), "sharding_key": names})}
        )


def _waits(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    time.sleep(WAIT)
    return ConsumeOrderlyStatus.SUCCESS


async def _awaits(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    await asyncio.sleep(WAIT)
    return ConsumeOrderlyStatus.SUCCESS


def _accepts(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    return ConsumeOrderlyStatus.SUCCESS


def _through(
    bench: Bench, path: Path, topic: str, rows: int, listener: Any, order: OrderPerQueue | OrderPerKey
) -> dict[str, float]:
    """Return messages a second through a listener, inside the micro-batch."""
    option = {"parkingLot": "true"} if isinstance(order, OrderPerKey) else {}
    heard = bench.source(SCHEMA, path, topic, **option).transform(consume_orderly, listener, order)
    return {"rate": 1e6 * bench.drain(heard, "noop", rows)["micro-batch"]}


def waiting(bench: Bench) -> list[Figure]:
    """Measure a listener that waits 10 ms, in threads and async, with 1,000 keys in 4 queues."""
    path = bench.fresh("store")
    few, many, most = (400, 6_400, 20_000) if bench.quick else (1_200, 19_200, 120_000)
    with orderedmq.connect(path) as broker:
        _fill(broker, "few", few, 1000)
        _fill(broker, "many", many, 1000)
        _fill(broker, "most", most, 1000)
    found = interleaved(
        bench.rounds,
        {
            "queue": partial(_through, bench, path, "few", few, _waits, OrderPerQueue()),
            "key": partial(_through, bench, path, "many", many, _waits, OrderPerKey(concurrency=16)),
            "async": partial(_through, bench, path, "most", most, _awaits, OrderPerKey(concurrency=1000)),
        },
    )
    queue, key, awaited = (found[name]["rate"] for name in ("queue", "key", "async"))
    what = "a listener that waits 10 ms, concurrency 16, against order per queue"
    also = "an async listener that awaits 10 ms, concurrency 1,000, against 16 threads"
    return [
        Figure("order per key", what, key, "messages/s", queue, key / queue, 12.0),
        Figure("order per key", also, awaited, "messages/s", key, awaited / key, 5.0),
    ]


def engine(bench: Bench) -> list[Figure]:
    """Measure a listener that does nothing, with 64 keys in batches of 32, in order per key and in order per queue."""
    path = bench.fresh("store")
    rows = bench.rows // 4
    with orderedmq.connect(path) as broker:
        _fill(broker, "t", rows, 64)
    orders: dict[str, OrderPerQueue | OrderPerKey] = {"queue": OrderPerQueue(32), "key": OrderPerKey(32)}
    found = interleaved(
        bench.rounds, {name: partial(_through, bench, path, "t", rows, _accepts, order) for name, order in orders.items()}
    )
    mine, peer = (found[name]["rate"] / 1000 for name in ("key", "queue"))
    what, each = "a listener that does nothing, batches of 32", peer / CORES
    return [
        Figure("orderly listener", f"{what}, per core, against 100 k", each, "k messages/s", 100.0, each / 100, 1.0),
        Figure("order per key", f"{what}, against order per queue", mine, "k messages/s", peer, mine / peer, 0.7),
    ]


class _Clocked:
    """A listener that fails for the poisoned key, and records how long other messages waited, in seconds from append to call."""

    folder: str

    def __init__(self) -> None:
        self.file = Path(self.folder, f"{os.getpid()}-{threading.get_ident()}").open("a")  # noqa: SIM115

    def __call__(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        now = time.time()
        if messages[0].sharding_key == POISON:
            raise ValueError("it cannot be parsed")
        self.file.write("".join(f"{now - one.store_timestamp.timestamp()}\n" for one in messages))
        self.file.flush()
        return ConsumeOrderlyStatus.SUCCESS


@contextlib.contextmanager
def _traffic(path: Path, every: float, keys: Callable[[int], list[str]]) -> Iterator[None]:
    """Append a chunk to the only queue of topic t every ``every`` seconds."""
    turns = itertools.count()
    with orderedmq.connect(path) as broker:
        (queue,) = broker.log.queues("t")

        def append() -> None:
            names = keys(next(turns))
            bodies = pa.array([b"x" * 100] * len(names), pa.binary())
            broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": names})})

        with ticking(append, every):
            yield


def poisoned(bench: Bench) -> list[Figure]:
    """With one poisoned key of 1,000, measure how long other keys wait, and how long a micro-batch takes once the key is parked."""

    def run(first: str) -> dict[str, float]:
        path, waits = bench.fresh("store"), bench.fresh("waits")
        waits.mkdir()

        class Clocked(_Clocked):
            folder = str(waits)

        with orderedmq.connect(path) as broker:
            broker.admin.create_topic("t", 1)

        def keys(turn: int) -> list[str]:
            # In 100 turns of 10 messages, each key has one message. The first key is poisoned.
            return [first if (turn * 10 + one) % 1000 == 0 else f"key-{(turn * 10 + one) % 1000}" for one in range(10)]

        order = OrderPerKey(concurrency=8, in_batch_attempts=2, suspend_current_queue_time_millis=10)
        heard = bench.source(SCHEMA, path, "t", parkingLot="true").transform(consume_orderly, Clocked, order)
        with _traffic(path, 0.1, keys):
            took = bench.paced(heard, "noop", 20 if bench.quick else 120)["trigger"]
        seen = [float(line) for file in waits.iterdir() for line in file.read_text().split()]
        # Leave out the first messages, which wait for Spark's workers to start.
        return {"p99": float(np.percentile(seen[len(seen) // 4 :], 99)), "batch": took}

    found = interleaved(bench.rounds, {"poison": partial(run, POISON), "none": partial(run, "key-0")}, warm=False)
    with_it, without = found["poison"], found["none"]
    return [
        Figure("one poisoned key", "p99 of the others, from append to the call", 1e3 * with_it["p99"], "ms", 1e3 * without["p99"],
               with_it["p99"] / without["p99"], 1.2, low=True),
        Figure("one poisoned key", "a micro-batch, against one without it", with_it["batch"], "ms", without["batch"],
               with_it["batch"] / without["batch"], 1.1, low=True),
    ]  # fmt: skip


def lot(bench: Bench) -> list[Figure]:
    """Measure what 10,000 parked messages cost a micro-batch that touches none of them."""

    def run(parked: int) -> dict[str, float]:
        path = bench.fresh("store")
        with orderedmq.connect(path) as broker:
            broker.admin.create_topic("t", 1)
            (queue,) = broker.log.queues("t")
            group = f"bench-{bench._number + 1}"
            if parked:
                park(broker, group, queue, parked)
        heard = bench.source(SCHEMA, path, "t", parkingLot="true", parkingLotMaxMessages=2 * LOT).transform(
            consume_orderly, _accepts, OrderPerKey()
        )
        with _traffic(path, 0.2, lambda turn: [f"new-{turn}-{one}" for one in range(10)]):
            return {"batch": bench.paced(heard, "noop", 10 if bench.quick else 40)["trigger"]}

    found = interleaved(bench.rounds, {"parked": partial(run, LOT), "none": partial(run, 0)}, warm=False)
    more = found["parked"]["batch"] - found["none"]["batch"]
    what = f"a micro-batch beside {LOT:,} parked messages, more than without, against 5 ms"
    return [Figure("parking lot", what, more, "ms", 5.0, more / 5.0, 1.0, low=True)]


def park(broker: Broker, group: str, queue: MessageQueue, count: int) -> None:
    """Park ``count`` messages of 5 keys, due in an hour, and move the group's offset to the end of the queue."""
    names = [f"parked-{one % 5}" for one in range(count)]
    broker.log.append({queue: pa.record_batch({"body": pa.array([b"x" * 100] * count, pa.binary()), "sharding_key": names})})
    client = broker.groups.join("bench")
    token = broker.groups.lock(group, client, [queue])[queue]
    assert isinstance(token, LockToken)
    due = int(time.time() * 1000) + HOUR_MS
    for begin in range(0, count, 256):
        parkings = [Parking(queue, at, Ticket(at, 1, 1, due, "no")) for at in range(begin, min(begin + 256, count))]
        broker.groups.park(token, parkings)
    broker.groups.commit({token: count})
    broker.groups.unlock([token])
    broker.groups.leave(client)


def figures(bench: Bench) -> list[Figure]:
    return [*waiting(bench), *engine(bench), *poisoned(bench), *lot(bench)]
