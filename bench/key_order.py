"""Order per key: parallel keys, equal and skewed, the costs of the engine and of a full parking lot, and a resize with a stuck queue."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
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
#: Cores of the bench's Spark. Each runs a task with one queue at a time.
CORES: Final = 2
SCHEMA: Final = (
    "topic string, broker_name string, queue_id int, queue_offset long, body binary, sharding_key string, "
    "store_timestamp timestamp, lock_token string, "
    "ticket struct<place: long, attempts: int, parkings: int, due: long, error: string>"
)
#: Seconds that a call waits: a cache, a service next door, a payment or a database.
WAITS: Final = (0.0001, 0.001, 0.01)
KEYS: Final = 10_000
#: Calls at the same time in a task, in threads and in an event loop.
THREADS: Final = 16
CALLS: Final = 1000
LOT: Final = 10_000
HOUR_MS: Final = 3_600_000


def _fill(broker: Broker, topic: str, keys: np.ndarray) -> None:
    """Create a topic with a message for each of these keys, which are numbers. Each queue has every fourth key."""
    broker.admin.create_topic(topic, QUEUES)
    for number, queue in enumerate(broker.log.queues(topic)):
        names = [f"key-{key:05d}" for key in keys[keys % QUEUES == number]]
        broker.log.append(
            {queue: pa.record_batch({"body": pa.array([b"x" * 100] * len(names), pa.binary()), "sharding_key": names})}
        )


def _waits(seconds: float, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    time.sleep(seconds)
    return ConsumeOrderlyStatus.SUCCESS


async def _awaits(seconds: float, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    await asyncio.sleep(seconds)
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


def _bare(seconds: float, calls: int) -> float:
    """Return the calls a second of a program that does nothing but create tasks that await, CALLS at the same time."""

    async def in_turn() -> None:
        for _ in range(calls // CALLS):
            await asyncio.create_task(asyncio.sleep(seconds))

    async def run() -> None:
        await asyncio.gather(*(in_turn() for _ in range(CALLS)))

    begin = time.perf_counter()
    asyncio.run(run())
    return calls / (time.perf_counter() - begin)


def _bare_in_two(seconds: float, calls: int) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(CORES) as processes:
        return {"rate": sum(processes.starmap(_bare, [(seconds, calls)] * CORES))}


def waiting(bench: Bench) -> list[Figure]:
    """Measure listeners that wait in each call, with keys that take turns and with keys of which a tenth of the messages have one."""
    path = bench.fresh("store")
    shares = 1 / np.arange(1, KEYS + 1)
    shares /= shares.sum()
    spreads: dict[str, tuple[float, Callable[[int], np.ndarray]]] = {
        f"{KEYS:,} equal keys": (1 / KEYS, lambda rows: np.arange(rows) % KEYS),
        f"{KEYS:,} keys, Zipf 1.0": (shares[0], lambda rows: np.random.default_rng(7).choice(KEYS, rows, p=shares)),
    }
    kinds: dict[str, tuple[Any, int, float]] = {"threads": (_waits, THREADS, 12_000), "async": (_awaits, CALLS, 30_000)}
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    allowed: dict[str, float] = {}
    with orderedmq.connect(path) as broker:
        for wait, (spread, (share, keys)), kind in itertools.product(WAITS, spreads.items(), kinds):
            listener, calls, most = kinds[kind]
            # Calls of the most frequent key follow each other.
            bound = min(calls * CORES, 1 / share) / wait
            rows = int(min(bound, most) * (0.5 if bench.quick else 4))
            name = f"{kind}, {calls:,} calls of {1e3 * wait:g} ms, {spread}"
            allowed[name] = bound
            _fill(broker, topic := f"t{len(runs)}", keys(rows))
            runs[name] = partial(_through, bench, path, topic, rows, partial(listener, wait), OrderPerKey(concurrency=calls))
        _fill(broker, "queue", np.arange(400))
    runs["queue"] = partial(_through, bench, path, "queue", 400, partial(_waits, WAITS[-1]), OrderPerQueue())
    runs["bare"] = partial(_bare_in_two, WAITS[-1], 4_000 if bench.quick else 60_000)
    rates = {name: found["rate"] for name, found in interleaved(bench.rounds, runs).items()}
    queue, bare = rates.pop("queue"), rates.pop("bare")
    threads, awaited = (rates[f"{kind}, {kinds[kind][1]:,} calls of 10 ms, {next(iter(spreads))}"] for kind in kinds)
    return [
        *(
            Figure("order per key", f"{name}, against what the waits allow", rate, "messages/s", allowed[name], rate / allowed[name])
            for name, rate in rates.items()
        ),
        Figure("order per key", "threads, 10 ms, equal keys, against order per queue", threads, "messages/s", queue, threads / queue, 12.0),
        Figure("order per key", "async, 10 ms, equal keys, against a bare asyncio program", awaited, "messages/s", bare, awaited / bare),
        Figure("order per key", "async, 10 ms, equal keys, per core", awaited / CORES, "messages/s", 40_000, awaited / CORES / 40_000, 1.0),
    ]  # fmt: skip


def engine(bench: Bench) -> list[Figure]:
    """Measure a listener that does nothing, with 64 keys in batches of 32, in order per key and in order per queue."""
    path = bench.fresh("store")
    rows = bench.rows // 4
    with orderedmq.connect(path) as broker:
        _fill(broker, "t", np.arange(rows) % 64)
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
            turns = itertools.count()

            def append() -> None:
                names = [f"new-{next(turns)}" for _ in range(10)]
                bodies = pa.array([b"x" * 100] * 10, pa.binary())
                broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": names})})

            rows = bench.source(SCHEMA, path, "t", parkingLot="true", parkingLotMaxMessages=2 * LOT)
            heard = rows.transform(consume_orderly, _accepts, OrderPerKey())
            with ticking(append, 0.2):
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


def resize(bench: Bench) -> list[Figure]:
    """Measure the queues of three families after a resize from 4 to 8 queues, while a parked key of the fourth holds up queue 5."""
    each = bench.rows // 64
    rows = pa.record_batch({"body": [b"x" * 100] * each, "sharding_key": [f"key-{place % 64}" for place in range(each)]})

    def run(stuck: bool) -> dict[str, float]:
        path = bench.fresh("store")
        with orderedmq.connect(path) as broker:
            broker.admin.create_topic("t", QUEUES)
            old = broker.log.queues("t")
            if stuck:
                park(broker, f"bench-{bench._number + 1}", old[1], 1)
            broker.log.append(dict.fromkeys(old, rows))
            broker.admin.resize_topic("t", 2 * QUEUES)
            broker.log.append(dict.fromkeys(broker.log.queues("t"), rows))
        read = 11 if stuck else 12
        speed = _through(bench, path, "t", read * each, _accepts, OrderPerKey(32))["rate"]
        return {"rate": speed * 9 / read / 1000}

    rates = interleaved(bench.rounds, {"stuck": partial(run, True), "free": partial(run, False)})
    mine, peer = (rates[name]["rate"] for name in ("stuck", "free"))
    what = "4 → 8 queues, one stuck: the queues of the other three, against none stuck"
    return [Figure("resize", what, mine, "k messages/s", peer, mine / peer, 0.9)]


def figures(bench: Bench) -> list[Figure]:
    return [*waiting(bench), *engine(bench), *lot(bench)]
