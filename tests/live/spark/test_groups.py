"""Two queries of one group in one session: the second is refused while the first runs, and admitted after it has stopped."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException

from tests.live.spark.conftest import Rig, numbers
from tests.waits import until


def start(rig: Rig, name: str, **options: Any) -> Any:
    df = rig.stream(**{"topic": "in", "consumerGroup": "g", "lockTimeout": "1s", **options})
    return rig.start(df, name, topic="out", topicQueueNums=2, onKeyConflict="ignore", queryName=name)


@pytest.mark.holds("exclusive")
def test_a_second_query_of_the_group_is_refused_until_the_first_has_stopped(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    rig.topic("more", 2)
    first = start(rig, "one")
    until(lambda: rig.offsets("g") == {0: 10, 1: 10} if rig.broker.admin.groups() else False)
    locks = [lock for lock in rig.broker.admin.locks() if lock.held]
    owner = locks[0]
    # The lock has Spark's name of the query, which Spark passes only to tasks.
    assert owner.name == "one"
    with pytest.raises(PySparkException) as caught:
        start(rig, "two", topic="more,in").awaitTermination()
    assert "ORDEREDMQ_LOCK.HELD_BY_OTHER" in str(caught.value)
    assert owner.client_id in str(caught.value)
    # All queues or none: the refused query keeps no lock of the queues that were free.
    held = [(lock.queue, lock.epoch) for lock in rig.broker.admin.locks() if lock.held]
    assert held == [(lock.queue, lock.epoch) for lock in locks]
    rig.fill("in", 10, first=20)
    until(lambda: numbers(rig.bodies("out")) == list(range(30)))
    assert first.isActive
    until(lambda: not first.status["isTriggerActive"])
    first.stop()
    # The source unlocks its queues, unless Spark ends its process within a call. In both cases, the lock's life does not matter.
    until(lambda: not any(lock.held and lock.alive for lock in rig.broker.admin.locks()), "no queue is locked")
    second = start(rig, "two", lockTimeout="0", queryName="given")
    rig.fill("in", 4, first=30)
    until(lambda: numbers(rig.bodies("out")) == list(range(34)))
    # The source's option queryName overrides Spark's name, which is "two".
    assert {lock.name for lock in rig.broker.admin.locks() if lock.held} == {"given"}
    second.stop()
