"""Listeners with order per key, and without order, in real queries: keys that wait alone, threads, workers, lost locks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from ordered_source import (
    ConcurrentSettings,
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderPerKey,
    consume_concurrently,
    consume_orderly,
)
from tests.spark.conftest import Rig
from tests.waits import until

SUCCESS = ConsumeOrderlyStatus.SUCCESS


def heard(rig: Rig) -> list[str]:
    """The lines that listeners wrote, in order."""
    found = rig.folder / "heard"
    return found.read_text().splitlines() if found.exists() else []


def start(rig: Rig, outcomes: Any, name: str = "ck", *, available_now: bool = False) -> Any:
    writer = outcomes.writeStream.format("parquet").option("path", str(rig.folder / "outcomes"))
    writer = writer.option("checkpointLocation", str(rig.folder / name))
    return (writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="100 milliseconds")).start()


def outcomes(rig: Rig, schema: Any) -> list[Any]:
    folder = rig.folder / "outcomes"
    if not list(folder.glob("_spark_metadata/*")):
        return []
    return rig.spark.read.schema(schema).parquet(str(folder)).collect()


def rows(rig: Rig, **options: Any) -> Any:
    return rig.stream(**{"topic": "in", "consumerGroup": "g", "parkingLot": "true", **options})


def committed(rig: Rig) -> int:
    """The group's offset in the only queue."""
    queues = rig.broker.log.queues("in")
    return rig.broker.groups.offsets("g", queues).get(queues[0], 0)


@pytest.mark.holds("parked key returns")
def test_a_poisoned_key_waits_alone_comes_back_by_itself_and_is_never_overtaken(rig: Rig) -> None:
    """Ten keys share one queue. The listener fails for k0-0 until the key is healed, while messages of all keys are added."""
    rig.topic("in", 1, rows=20)
    path, healed = str(rig.folder / "heard"), rig.folder / "healed"

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus | None:
        for message in messages:
            with open(path, "a") as file:
                file.write(f"{message.sharding_key} {message.queue_offset} {message.reconsume_times}\n")
        return None if messages[0].sharding_key == "k0-0" and not healed.exists() else SUCCESS

    consumed = consume_orderly(
        rows(rig), listener, OrderPerKey(concurrency=4, in_batch_attempts=2, suspend_current_queue_time_millis=10)
    )
    query = start(rig, consumed)
    until(lambda: committed(rig) == 20, "the first messages are decided or parked", 90)
    rig.fill("in", 10, first=20)
    until(lambda: committed(rig) == 30, "the other messages are decided or parked", 90)
    before = heard(rig)
    assert {line.split()[0] for line in before} == {f"k0-{number}" for number in range(5)}
    assert {line for line in before if line.startswith("k0-0 ")} == {"k0-0 0 0", "k0-0 0 1"}
    healed.touch()
    until(lambda: "k0-0 25 0" in heard(rig), "the key has come back by itself", 90)
    after = heard(rig)[len(before) :]
    assert after == ["k0-0 0 2", "k0-0 5 0", "k0-0 10 0", "k0-0 15 0", "k0-0 20 0", "k0-0 25 0"]
    until(
        lambda: sum(row.status == "SUCCESS" for row in outcomes(rig, consumed.schema)) == 30, "all messages have outcomes", 90
    )
    query.stop()
    told = outcomes(rig, consumed.schema)
    assert sorted(row.begin_offset for row in told if row.status == "SUCCESS") == list(range(30))
    parked = {row.begin_offset: row for row in told if row.status == "PARKED"}
    assert sorted(parked) == [0, 5, 10, 15, 20, 25]
    assert {offset for offset, row in parked.items() if row.due_timestamp is not None} == {0}
    assert {row.sharding_key for row in parked.values()} == {"k0-0"}


@pytest.mark.holds("concurrent listener")
def test_what_fails_without_order_comes_back_alone(rig: Rig) -> None:
    rig.topic("in", 1, rows=10)
    path = str(rig.folder / "heard")

    def listener(messages: Sequence[Any], context: ConsumeConcurrentlyContext) -> ConsumeConcurrentlyStatus:
        with open(path, "a") as file:
            file.write(" ".join(f"{message.queue_offset}:{message.reconsume_times}" for message in messages) + "\n")
        context.ack_index = 1
        context.delay_level_when_next_consume = 1
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS

    consumed = consume_concurrently(rows(rig), listener, ConcurrentSettings(consume_message_batch_max_size=4, concurrency=2))
    query = start(rig, consumed)
    until(lambda: sum(row.status == "SUCCESS" for row in outcomes(rig, consumed.schema)) == 10, "all messages are decided", 90)
    query.stop()
    told = outcomes(rig, consumed.schema)
    assert sorted(row.begin_offset for row in told if row.status == "SUCCESS") == list(range(10))
    assert {row.begin_offset for row in told if row.status == "PARKED"} >= {2, 3, 6, 7}
    assert {"0:0 1:0 2:0 3:0", "4:0 5:0 6:0 7:0", "8:0 9:0"} <= set(heard(rig))


class Counted:
    """A listener class that records each object created from it."""

    folder: str

    def __init__(self) -> None:
        Path(self.folder, f"made-{os.getpid()}-{threading.get_ident()}-{id(self)}").touch()

    def __call__(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        with open(f"{self.folder}/heard", "a") as file:
            file.write(f"{os.getpid()}-{threading.get_ident()} {id(self)}\n")
        return SUCCESS


def test_each_thread_of_a_worker_makes_one_object_of_a_class_and_keeps_it(rig: Rig) -> None:
    rig.topic("in", 1)

    class Own(Counted):
        folder = str(rig.folder)

    query = start(rig, consume_orderly(rows(rig), Own, OrderPerKey(concurrency=3)))
    for batch in range(4):
        rig.fill("in", 10, first=10 * batch)
        until(lambda: committed(rig) == 10 * (batch + 1), "the micro-batch is done", 90)  # noqa: B023
    query.stop()
    lines = [line.split() for line in heard(rig)]
    assert len(lines) == 40
    # Each thread used one object and created no other.
    made = sorted(path.name for path in rig.folder.glob("made-*"))
    assert made == sorted({f"made-{thread}-{one}" for thread, one in lines})
    assert len({thread for thread, _ in lines}) == len(made)
    workers = {thread.partition("-")[0] for thread, _ in lines}
    assert len(made) <= 3 * len(workers)


class Awaited(Counted):
    """An async listener whose calls wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = 0
        self.most = 0

    async def __call__(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:  # type: ignore[override]
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        while self.most < 50:
            await asyncio.sleep(0.001)
        self.under_way -= 1
        with open(f"{self.folder}/heard", "a") as file:
            file.write(f"{messages[0].sharding_key} {messages[0].queue_offset}\n")
        return SUCCESS


def test_an_async_listener_awaits_many_keys_at_once_with_one_object_for_each_worker(rig: Rig) -> None:
    rig.topic("in", 1)
    queue = rig.broker.log.queues("in")[0]
    keys = pa.array([f"k{number % 100}" for number in range(300)])
    rig.broker.log.append({queue: pa.record_batch({"body": keys.cast(pa.binary()), "sharding_key": keys})})

    class Own(Awaited):
        folder = str(rig.folder)

    query = start(rig, consume_orderly(rows(rig), Own, OrderPerKey(concurrency=1000)), available_now=True)
    query.awaitTermination(90)
    assert query.exception() is None
    offsets: dict[str, list[int]] = {}
    for line in heard(rig):
        key, offset = line.split()
        offsets.setdefault(key, []).append(int(offset))
    assert offsets == {f"k{number}": [number, number + 100, number + 200] for number in range(100)}
    assert len(list(rig.folder.glob("made-*"))) == 1


def test_a_query_that_is_stopped_while_listeners_are_at_work_starts_no_more(rig: Rig) -> None:
    rig.topic("in", 1, rows=10)
    path, go = str(rig.folder / "heard"), rig.folder / "go"

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        with open(path, "a", buffering=1) as file:
            file.write(f"{os.getpid()} begins\n")
            until(go.exists, "the listener may return", 120.0)
        return SUCCESS

    query = start(rig, consume_orderly(rows(rig), listener, OrderPerKey(concurrency=3)))
    until(lambda: len(heard(rig)) == 3, "three calls are running", 90)
    (worker,) = {int(line.split()[0]) for line in heard(rig)}
    query.stop()
    until(lambda: not alive(worker), "Spark has ended the worker although its threads are busy", 90)
    go.touch()
    assert len(heard(rig)) == 3
    assert query.exception() is None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_lock_that_is_lost_ends_the_query_when_the_calls_under_way_have_returned(rig: Rig) -> None:
    rig.topic("in", 1, rows=10)
    path, go = str(rig.folder / "heard"), rig.folder / "go"

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus | None:
        with open(path, "a", buffering=1) as file:
            file.write("begins\n")
            until(go.exists, "the listener may return", 120.0)
            file.write("returns\n")
        return None

    # A message that fails is parked immediately, under the lock.
    query = start(rig, consume_orderly(rows(rig), listener, OrderPerKey(concurrency=2, in_batch_attempts=1)))
    until(lambda: len(heard(rig)) == 2, "two calls are running", 90)
    rig.broker.admin.release("g", rig.broker.log.queues("in"), force=True)
    go.touch()
    with pytest.raises(PySparkException, match=r"ORDEREDMQ_LOCK.LOST"):
        query.awaitTermination(90)
    said = heard(rig)
    assert said.count("begins") == said.count("returns")
    assert not lots_exist(rig)


def lots_exist(rig: Rig) -> bool:
    return "%PARKED%g%in" in {topic.name for topic in rig.broker.log.topics()}


def test_an_order_that_does_not_fit_is_refused_by_name(rig: Rig) -> None:
    rig.topic("in", 1, rows=2)

    def never(messages: Sequence[Any], context: Any) -> Any:
        raise AssertionError("no call is allowed")

    with_lot = rows(rig)
    without = rig.stream(topic="in", consumerGroup="g", includeLockToken="true")
    with pytest.raises(Exception, match=r"INVALID.*order is 'key'"):
        consume_orderly(with_lot, never, order="key")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"INVALID.*in_batch_attempts"):
        consume_orderly(with_lot, never, OrderPerKey(in_batch_attempts=0))
    with pytest.raises(Exception, match=r"INVALID.*max_reconsume_times"):
        consume_concurrently(with_lot, never, ConcurrentSettings(max_reconsume_times=-2))
    with pytest.raises(Exception, match=r"MISSING_COLUMN.*sharding_key"):
        consume_orderly(with_lot.drop("sharding_key"), never, OrderPerKey())
    with pytest.raises(Exception, match=r"MISSING_COLUMN.*needs the columns ticket.*parkingLot=true"):
        consume_orderly(without, never, OrderPerKey())
