"""Queries that share a group's queues in real Spark: division and hand-over. tests/loop/test_shared.py has agreement and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.spark.conftest import Rig, StoreRig, numbers
from tests.waits import until

QUEUES = 8


def start(rig: Rig, name: str, **options: Any) -> Any:
    df = rig.stream(topic="in", **{"consumerGroup": "g", "assignment": "shared", "lockTimeout": "60s", **options})
    return rig.start(df, name, topic="out", onKeyConflict="ignore")


def owners(rig: StoreRig) -> dict[str, list[int]]:
    """The queue ids of each owner."""
    queues_by_owner: dict[str, list[int]] = {}
    for lock in rig.broker.admin.locks("g"):
        if lock.held:
            queues_by_owner.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return queues_by_owner


def shares(rig: StoreRig) -> list[int]:
    return sorted(len(queues) for queues in owners(rig).values())


def fill(rig: Rig, first: int, last: int, foreign: Sequence[str] = ()) -> None:
    """Add messages, and wait until each message is once in the topic ``out`` or in ``foreign``."""
    rig.fill("in", last - first, first=first)
    until(lambda: numbers({**rig.bodies("out"), -1: list(foreign)}) == list(range(last)))


@pytest.fixture
def shared(rig: Rig) -> Rig:
    rig.topic("in", QUEUES)
    rig.topic("out", QUEUES)
    return rig


def in_order(rig: StoreRig, foreign: Sequence[str] = ()) -> None:
    """Assert that for each source queue and key, the messages in each target queue and in ``foreign`` are in the order of the source."""
    for bodies in (*rig.bodies("out").values(), foreign):
        last: dict[str, int] = {}
        for body in bodies:
            queue, _, number = body.partition(":")
            key = f"{queue}-{int(number) % 5}"
            assert last.get(key, -1) < int(number)
            last[key] = int(number)


@pytest.mark.holds("hand-over")
def test_queries_divide_the_queues_and_hand_them_over_without_loss_or_repeat_also_with_a_foreign_sink(shared: Rig) -> None:
    """The second query collects its rows in a list, and only its source moves the group's offsets."""
    foreign: list[str] = []
    first = start(shared, "one")
    fill(shared, 0, 80)
    assert shares(shared) == [8]
    rows = shared.stream(topic="in", consumerGroup="g", assignment="shared", lockTimeout="60s")
    writer = rows.writeStream.foreachBatch(lambda df, batch: foreign.extend(bytes(row.body).decode() for row in df.collect()))
    second = writer.trigger(processingTime="100 milliseconds").option("checkpointLocation", str(shared.folder / "two")).start()
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 80, 240, foreign)
    third = start(shared, "three")
    until(lambda: shares(shared) == [2, 3, 3])
    fill(shared, 240, 400, foreign)
    until(
        lambda: shared.offsets("g") == dict.fromkeys(range(QUEUES), 50),
        "the second query's source has committed its last batch",
    )
    until(lambda: not second.status["isTriggerActive"], "the second query is idle")
    second.stop()
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 400, 480, foreign)
    first.stop()
    until(lambda: shares(shared) == [8])
    fill(shared, 480, 560, foreign)
    assert third.exception() is None
    third.stop()
    in_order(shared, foreign)
    assert foreign
    assert shared.offsets("g") == dict.fromkeys(range(QUEUES), 70)
