"""Listeners with order per key, and without order, in real queries: keys that wait alone, threads, workers, lost locks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
from tests.live.spark.conftest import Rig
from tests.waits import until

SUCCESS = ConsumeOrderlyStatus.SUCCESS


def heard(rig: Rig) -> list[str]:
    """The lines that listeners wrote, in order."""
    log = rig.folder / "heard"
    return log.read_text().splitlines() if log.exists() else []


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
    results = outcomes(rig, consumed.schema)
    assert sorted(row.begin_offset for row in results if row.status == "SUCCESS") == list(range(30))
    parked = {row.begin_offset: row for row in results if row.status == "PARKED"}
    assert sorted(parked) == [0, 5, 10, 15, 20, 25]
    assert {offset for offset, row in parked.items() if row.due_timestamp is not None} == {0}
    assert {row.sharding_key for row in parked.values()} == {"k0-0"}


@pytest.mark.holds("concurrent listener")
def test_messages_that_failed_without_order_come_back_alone(rig: Rig) -> None:
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
    results = outcomes(rig, consumed.schema)
    assert sorted(row.begin_offset for row in results if row.status == "SUCCESS") == list(range(10))
    assert {row.begin_offset for row in results if row.status == "PARKED"} >= {2, 3, 6, 7}
    assert {"0:0 1:0 2:0 3:0", "4:0 5:0 6:0 7:0", "8:0 9:0"} <= set(heard(rig))


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
