"""Queries that share a group's queues in real Spark: division and hand-over. tests/loop/test_shared.py has agreement and restarts."""

from __future__ import annotations

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
    found: dict[str, list[int]] = {}
    for lock in rig.broker.admin.locks("g"):
        if lock.held:
            found.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return found


def shares(rig: StoreRig) -> list[int]:
    return sorted(len(queues) for queues in owners(rig).values())


def fill(rig: Rig, first: int, last: int) -> None:
    rig.fill("in", last - first, first=first)
    until(lambda: numbers(rig.bodies("out")) == list(range(last)))


@pytest.fixture
def shared(rig: Rig) -> Rig:
    rig.topic("in", QUEUES)
    rig.topic("out", QUEUES)
    return rig


def in_order(rig: StoreRig) -> None:
    """Assert that for each source queue and key, the messages in the target are in the order of the source."""
    for bodies in rig.bodies("out").values():
        last: dict[str, int] = {}
        for body in bodies:
            queue, _, number = body.partition(":")
            key = f"{queue}-{int(number) % 5}"
            assert last.get(key, -1) < int(number)
            last[key] = int(number)


@pytest.mark.holds("hand-over")
def test_queries_divide_the_queues_and_hand_them_over_without_loss_or_repeat(shared: Rig) -> None:
    first = start(shared, "one")
    fill(shared, 0, 80)
    assert shares(shared) == [8]
    second = start(shared, "two")
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 80, 240)
    third = start(shared, "three")
    until(lambda: shares(shared) == [2, 3, 3])
    fill(shared, 240, 400)
    second.stop()
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 400, 480)
    first.stop()
    until(lambda: shares(shared) == [8])
    fill(shared, 480, 560)
    assert third.exception() is None
    third.stop()
    in_order(shared)
    assert shared.offsets("g") == dict.fromkeys(range(QUEUES), 70)


def test_an_available_now_run_gets_its_share_from_a_running_query_and_takes_no_more(shared: Rig) -> None:
    first = start(shared, "one")
    fill(shared, 0, 80)
    df = shared.stream(topic="in", consumerGroup="g", assignment="shared", lockTimeout="60s")
    shared.fill("in", 80, first=80)
    shared.run(df, "two", topic="out", onKeyConflict="ignore")
    until(lambda: shares(shared) == [8])
    fill(shared, 160, 240)
    first.stop()
    in_order(shared)
