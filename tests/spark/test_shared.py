"""Queries that share a group's queues: division, hand-over and agreement."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException

from tests.spark.conftest import Rig, numbers
from tests.waits import until

QUEUES = 8


def start(rig: Rig, name: str, **options: Any) -> Any:
    df = rig.stream(topic="in", **{"consumerGroup": "g", "assignment": "shared", "lockTimeout": "60s", **options})
    return rig.start(df, name, topic="out", onKeyConflict="ignore")


def owners(rig: Rig) -> dict[str, list[int]]:
    """The ids of each owner's queues."""
    found: dict[str, list[int]] = {}
    for lock in rig.broker.admin.locks("g"):
        if lock.held:
            found.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return found


def shares(rig: Rig) -> list[int]:
    return sorted(len(queues) for queues in owners(rig).values())


def fill(rig: Rig, first: int, last: int) -> None:
    rig.fill("in", last - first, first=first)
    until(lambda: numbers(rig.bodies("out")) == list(range(last)))


@pytest.fixture
def shared(rig: Rig) -> Rig:
    rig.topic("in", QUEUES)
    rig.topic("out", QUEUES)
    return rig


def in_order(rig: Rig) -> None:
    """Assert that a key's messages of each source queue are in the target in the source's order."""
    for bodies in rig.bodies("out").values():
        last: dict[str, int] = {}
        for body in bodies:
            queue, _, number = body.partition(":")
            key = f"{queue}-{int(number) % 5}"
            assert last.get(key, -1) < int(number)
            last[key] = int(number)


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


def test_a_restarted_member_goes_on_where_the_others_brought_its_queues(shared: Rig) -> None:
    first, second = start(shared, "one"), start(shared, "two")
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 0, 80)
    first.stop()
    until(lambda: shares(shared) == [8])
    fill(shared, 80, 160)
    first = start(shared, "one")
    until(lambda: shares(shared) == [4, 4])
    fill(shared, 160, 240)
    first.stop()
    second.stop()
    in_order(shared)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        # tests/unit/test_membership.py tests each difference by itself.
        pytest.param(
            {"allocateMessageQueueStrategy": "AVG_BY_CIRCLE"}, "strategy 'AVG_BY_CIRCLE', not 'AVG'", marks=pytest.mark.nightly
        ),
        ({"tags": "b || a"}, "filter 'a || b', not '*'"),
        pytest.param({"topic": "in,more"}, "topics 'in,more', not 'in'", marks=pytest.mark.nightly),
        ({"assignment": "exclusive"}, "assignment 'exclusive', not 'shared'"),
    ],
)
def test_a_member_that_disagrees_is_refused_by_name_and_the_others_go_on(
    shared: Rig, other: dict[str, str], difference: str
) -> None:
    shared.topic("more", 1)
    first = start(shared, "one")
    fill(shared, 0, 80)
    options: dict[str, Any] = {"topic": "in", "consumerGroup": "g", "assignment": "shared", "lockTimeout": "1s", **other}
    second = shared.start(shared.stream(**options), "two", topic="out", onKeyConflict="ignore")
    with pytest.raises(PySparkException) as caught:
        second.awaitTermination()
    assert "[ORDEREDMQ_GROUP.DISAGREES]" in str(caught.value)
    assert difference in str(caught.value)
    assert next(iter(owners(shared))) in str(caught.value)
    fill(shared, 80, 160)
    assert shares(shared) == [8]
    first.stop()


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


def test_explicit_starting_offsets_hold_only_where_the_shared_group_never_committed(shared: Rig) -> None:
    shared.fill("in", 80)
    first = start(shared, "one", startingOffsets="latest")
    until(lambda: shares(shared) == [8])
    shared.fill("in", 80, first=80)
    until(lambda: numbers(shared.bodies("out")) == list(range(80, 160)))
    second = start(shared, "two", startingOffsets="earliest")
    until(lambda: shares(shared) == [4, 4])
    shared.fill("in", 80, first=160)
    until(lambda: numbers(shared.bodies("out")) == list(range(80, 240)))
    first.stop()
    second.stop()
