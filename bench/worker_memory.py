"""Measures the peak memory of an executor's Python workers.

The rule for spark.executor.memoryOverhead in docs/guides/deploying.md is based on it. Each query has a new session, so that its
workers are new. The system reports the peak (VmHWM), which does not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import psutil
from pyspark.sql import DataFrame

import orderedmq
from bench.figures import Figure
from bench.measure import Bench, Skipped, status
from bench.rocketmq_rig import QUEUES, fill, rig, sized_messages
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerKey, consume_orderly
from orderedmq.broker import Broker

#: Bytes of bodies, and how many such messages a queue has: more than a task holds in memory.
_SMALL: Final = 100
_LARGE: Final = 10_000
_EACH: Final = {_SMALL: 300_000, _LARGE: 20_000}
#: The same for a listener, which needs more time per message.
_HEARD: Final = {_SMALL: 30_000, _LARGE: 8_000}
#: Cores of the bench's executor, and so the number of parallel tasks.
_CORES: Final = 2
#: The end of the command of an executor's workers. The first such process starts the others. The driver's workers have another module.
_WORKER: Final = ["pyspark.daemon", "pyspark.worker"]
#: Seconds that a call of the async listener awaits.
_AWAITED: Final = 0.01


def figures(bench: Bench) -> list[Figure]:
    found = list(_of_store(bench))
    # Without RocketMQ's jars, return only the figures of the store.
    with contextlib.suppress(Skipped):
        found.append(_of_cluster(bench))
    return found


def _of_store(bench: Bench) -> Iterator[Figure]:
    path = str(bench.fresh("memory"))
    with orderedmq.connect(path) as broker:
        for size in _EACH:
            _make_topics(bench, broker, size)

    def read(topic: str, size: int, **options: Any) -> DataFrame:
        group = bench.fresh("group").name
        reader = bench.spark.readStream.format("orderedmq").options(path=path, topic=f"{topic}-{size}", consumerGroup=group)
        return reader.options(**options).load()

    def copy(size: int, **options: Any) -> None:
        target = {"path": path, "topic": bench.fresh("out").name, "topicQueueNums": QUEUES, "compression": "none", **options}
        # Only warn about keys in more than one task, because all queues have the same keys.
        target["onKeyConflict"] = "warn"
        _finish(bench, read("all", size), "orderedmq", **target)

    def listen(listener: Any, concurrency: int, size: int) -> None:
        heard = read("heard", size, parkingLot=True)
        _finish(bench, heard.transform(consume_orderly, listener, OrderPerKey(concurrency=concurrency)), "noop")

    yield _figure(bench, "source → noop", lambda size: _finish(bench, read("all", size), "noop"))
    yield _figure(bench, "source → sink", copy)
    yield _figure(bench, "source → listener, concurrency=16", partial(listen, _accepts, 16))
    yield _figure(bench, "source → async listener, concurrency=1000", partial(listen, _awaits, 1000))
    yield _sorted(bench, partial(copy, _LARGE, orderBy="queue_offset"))


def _of_cluster(bench: Bench) -> Figure:
    made = rig(bench)
    for size in _EACH:
        _make_topics(bench, made.broker, size)

    def read(size: int) -> None:
        group = bench.fresh("group").name
        reader = bench.spark.readStream.format("orderedmq").options(namesrvAddr=made.address, topic=f"all-{size}")
        _finish(bench, reader.options(consumerGroup=group).load(), "noop")

    return _figure(bench, "RocketMQ: source → noop", read)


def _make_topics(bench: Bench, broker: Broker, size: int) -> None:
    for topic, counts in (("all", _EACH), ("heard", _HEARD)):
        name = f"{topic}-{size}"
        # RocketMQ's brokers do not compress, and compressed bodies with common parts would need less memory.
        if broker.capabilities.atomic_publish:
            broker.admin.create_topic(name, QUEUES, compression="none")
        else:
            broker.admin.create_topic(name, QUEUES)
        fill(broker, name, counts[size] // (10 if bench.quick else 1), partial(sized_messages, size))


def _finish(bench: Bench, rows: DataFrame, sink: str, **options: Any) -> None:
    bench.start(rows, sink, available_now=True, **options).awaitTermination()


def _figure(bench: Bench, what: str, run: Callable[[int], None]) -> Figure:
    """Return the memory of one task's workers together, with large bodies against small ones."""
    (workers, large), (_, small) = (_peaks(bench, partial(run, size)) for size in (_LARGE, _SMALL))
    text = f"{what}: {workers:.0f} workers a task, bodies of {_LARGE:,} against {_SMALL} bytes"
    return Figure("worker memory", text, large, "MB", small, large / small)


def _sorted(bench: Bench, run: Callable[[], None]) -> Figure:
    """Return the memory of one task's workers, against the rows that the task sorts."""
    rows = _EACH[_LARGE] // (10 if bench.quick else 1) * _LARGE / 1e6
    workers, peak = _peaks(bench, run)
    text = f"source → sink with orderBy: {workers:.0f} workers a task, against the rows that a task sorts"
    return Figure("worker memory", text, peak, "MB", rows, peak / rows)


def _peaks(bench: Bench, run: Callable[[], None]) -> tuple[float, float]:
    """Run a query in a new session. Return how many workers a core had, and the sum of their peaks in MB."""
    bench.renew()
    run()
    peaks = [status("VmHWM", worker.pid) * 1024 / 1e6 for worker in _workers()]
    print(f"  {len(peaks)} workers: {', '.join(f'{peak:.0f}' for peak in sorted(peaks))} MB", flush=True)
    return len(peaks) / _CORES, sum(peaks) / _CORES


def _workers() -> list[psutil.Process]:
    below = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        # Spark's planning processes may end during the loop.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[-2:] == _WORKER:
                below.append(process)
    pids = {process.pid for process in below}
    return [process for process in below if process.ppid() in pids]


def _accepts(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    return ConsumeOrderlyStatus.SUCCESS


async def _awaits(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    await asyncio.sleep(_AWAITED)
    return ConsumeOrderlyStatus.SUCCESS
