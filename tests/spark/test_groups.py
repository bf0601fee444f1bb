"""Two queries of one group in one session: the second is refused while the first runs, and admitted after it has stopped."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.errors import PySparkException

from tests.spark.conftest import Rig, numbers
from tests.waits import until


def start(rig: Rig, name: str, **options: Any) -> Any:
    df = rig.stream(topic="in", **{"consumerGroup": "g", "lockTimeout": "1s", **options})
    return rig.start(df, name, topic="out", topicQueueNums=2, onKeyConflict="ignore", queryName=name)


def test_a_second_query_of_the_group_is_refused_and_the_first_goes_on(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    first = start(rig, "one")
    until(lambda: rig.offsets("g") == {0: 10, 1: 10} if rig.broker.admin.groups() else False)
    second = start(rig, "two")
    with pytest.raises(PySparkException) as caught:
        second.awaitTermination()
    text = str(caught.value)
    owner = rig.broker.admin.locks()[0]
    # The lock has Spark's name of the query, which Spark passes only to tasks.
    assert owner.name == "one"
    assert "[ORDEREDMQ_LOCK.HELD_BY_OTHER]" in text
    assert f"query {owner.owner} ({owner.client_id}), which is alive" in text
    assert re.search(r"ends in [1-6]?\d s unless it is renewed", text)
    assert "foreachBatch" in text
    assert "broadcasting" in text
    rig.fill("in", 10, first=20)
    until(lambda: numbers(rig.bodies("out")) == list(range(30)))
    assert first.isActive
    first.stop()


def test_a_stopped_idle_query_gives_its_queues_back_at_once(rig: Rig) -> None:
    rig.topic("in", 2, rows=20)
    first = start(rig, "one", queryName="given")
    until(lambda: rig.offsets("g") == {0: 10, 1: 10} if rig.broker.admin.groups() else False)
    # The source's option queryName overrides Spark's name, which is "one".
    assert {lock.name for lock in rig.broker.admin.locks()} == {"given"}
    until(lambda: first.lastProgress is not None and not first.status["isTriggerActive"])
    first.stop()
    # Without an unlock, the locks would live for at least 40 s.
    until(lambda: not any(lock.held for lock in rig.broker.admin.locks()), "no queue is locked", 30.0)
    second = start(rig, "two")
    rig.fill("in", 4, first=20)
    until(lambda: numbers(rig.bodies("out")) == list(range(24)))
    second.stop()


def test_one_query_may_be_restarted_from_its_checkpoint_at_once(rig: Rig) -> None:
    rig.topic("in", 2, rows=2000)
    for _ in range(2):
        query = start(rig, "one", maxOffsetsPerTrigger="100", lockTimeout="60s")
        until(lambda: query.lastProgress is not None or query.exception() is not None)  # noqa: B023 (called at once)
        assert query.exception() is None
        query.stop()
    query = rig.run(rig.stream(topic="in", consumerGroup="g"), "one", topic="out", onKeyConflict="ignore")
    assert numbers(rig.bodies("out")) == list(range(2000))
    for bodies in rig.bodies("out").values():
        per_source: dict[str, list[int]] = {}
        for body in bodies:
            queue, _, number = body.partition(":")
            per_source.setdefault(f"{queue}-{int(number) % 5}", []).append(int(number))
        for found in per_source.values():
            assert found == sorted(found)
