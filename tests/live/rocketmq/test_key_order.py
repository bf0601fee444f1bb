"""Listeners with order per key in real Spark over a real cluster: a key with a poison message in a Java producer's events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerKey, consume_orderly
from orderedmq import pulls
from orderedmq.parking import Command, Lot, parked_queue
from tests.live.rocketmq.peers import Peers
from tests.live.rocketmq.test_source import Rig, rig
from tests.waits import until

pytestmark = pytest.mark.spark

__all__ = ["rig"]


@pytest.mark.holds("order per key")
def test_a_poisoned_key_of_a_java_producer_waits_alone_over_a_restart_and_comes_back_in_order(
    spark: SparkSession, rig: Rig, peers: Peers
) -> None:
    """Three keys share one queue. Messages of k0 fail until the file ``healed`` exists; the query is restarted in between."""
    producer = peers.producer(rig.cluster.address)
    rig.topic(1)
    [queue] = until(lambda: rig.broker.log.queues(rig.source), "the topic is known")
    healed, heard = rig.folder / "healed", rig.folder / "heard"

    def fill(first: int, count: int) -> None:
        for number in range(first, first + count):
            producer.send(rig.source, b"%d" % number, f"k{number % 3}")

    path = str(heard)

    def listener(messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus | None:
        with open(path, "a") as file:
            for message in messages:
                file.write(f"{message.sharding_key} {int(message.body)} {message.reconsume_times}\n")
        return None if messages[0].sharding_key == "k0" and not Path(healed).exists() else ConsumeOrderlyStatus.SUCCESS

    def lines() -> list[str]:
        return heard.read_text().splitlines() if heard.exists() else []

    def start() -> Any:
        rows = spark.readStream.format("orderedmq").options(**rig.options(parkingLot="true")).load()
        outcomes = consume_orderly(
            rows, listener, OrderPerKey(concurrency=4, in_batch_attempts=1, suspend_current_queue_time_millis=10)
        )
        writer = outcomes.writeStream.format("noop").option("checkpointLocation", str(rig.folder / "ck"))
        return writer.trigger(processingTime="200 milliseconds").start()

    fill(0, 9)
    query = start()
    until(lambda: rig.broker.groups.offsets(rig.group, [queue]) == {queue: 9}, "the first messages are processed or parked", 90)
    query.stop()
    fill(9, 3)
    query = start()
    until(
        lambda: rig.broker.groups.offsets(rig.group, [queue]) == {queue: 12}, "the other messages are processed or parked", 90
    )
    before = lines()
    accepted = [line for line in before if not line.startswith("k0")]
    assert sorted(accepted) == sorted(f"k{number % 3} {number} 0" for number in range(12) if number % 3)
    assert {line.split()[1] for line in before if line.startswith("k0")} == {"0"}
    healed.touch()
    rig.broker.admin.command_parked(rig.group, queue, [Command("retry", "k0")])
    until(lambda: "k0 9 0" in lines(), "the key has come back", 90)
    after = [line.split()[1] for line in lines()[len(before) :]]
    assert after == ["0", "3", "6", "9"]

    def nothing_parked() -> bool:
        parked = parked_queue(rig.group, queue)
        lot = Lot(rig.broker.groups.offsets(rig.group, [parked]).get(parked, 0))
        pulls.read_lot(rig.broker.log, lot, parked, pulls.end_of_lot(rig.broker.log, parked))
        return lot.messages == 0

    until(nothing_parked, "no message is parked any more", 90)
    query.stop()
    producer.stop()
