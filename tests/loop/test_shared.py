"""Queries that share a group's queues, step by step: which are refused, and where each one resumes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.errors import GroupError, OptionError
from orderedmq.model import MessageQueue
from tests.contract.support import locked
from tests.live.spark.conftest import numbers
from tests.loop.conftest import EACH_LOOP, LoopRig, LoopWorld
from tests.micro_batches import MicroBatchLoop
from tests.waits import until

QUEUES = 8
OUT = {"topic": "out", "onKeyConflict": "ignore"}


def start(rig: LoopRig, name: str, **options: Any) -> MicroBatchLoop:
    source = {"topic": "in", "consumerGroup": "g", "assignment": "shared", "lockTimeout": "1s", **options}
    return rig.start(source, OUT, name).process_all_available()


def owners(rig: LoopRig) -> dict[str, list[int]]:
    """The queue ids of each owner."""
    queues_by_owner: dict[str, list[int]] = {}
    for lock in rig.broker.admin.locks("g"):
        if lock.held:
            queues_by_owner.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return queues_by_owner


def shares(rig: LoopRig) -> list[int]:
    return sorted(len(queues) for queues in owners(rig).values())


def in_order(rig: LoopRig) -> None:
    """Assert that for each source queue and key, the messages in each target queue are in the order of the source."""
    for bodies in rig.bodies("out").values():
        last: dict[str, int] = {}
        for body in bodies:
            queue, _, number = body.partition(":")
            key = f"{queue}-{int(number) % 5}"
            assert last.get(key, -1) < int(number)
            last[key] = int(number)


def divide(rig: LoopRig, expected: list[int], *queries: MicroBatchLoop) -> None:
    """Trigger the queries in turn until each owns the expected number of queues."""
    until(lambda: all(query.process_all_available() for query in queries) and shares(rig) == expected)


def fill(rig: LoopRig, first: int, last: int, *queries: MicroBatchLoop, since: int = 0) -> None:
    """Add messages and trigger the queries in turn until all messages are copied."""
    rig.fill("in", last - first, first=first)
    everything = list(range(since, last))
    until(lambda: all(query.process_all_available() for query in queries) and numbers(rig.bodies("out")) == everything)


@pytest.fixture
def shared(rig: LoopRig) -> LoopRig:
    rig.topic("in", QUEUES)
    rig.topic("out", QUEUES)
    return rig


@EACH_LOOP
def test_a_restarted_member_goes_on_where_the_others_brought_its_queues(shared: LoopRig) -> None:
    first, second = start(shared, "one"), start(shared, "two")
    divide(shared, [4, 4], first, second)
    fill(shared, 0, 80, first, second)
    first.stop()
    divide(shared, [8], second)
    fill(shared, 80, 160, second)
    first = start(shared, "one")
    divide(shared, [4, 4], second, first)
    fill(shared, 160, 240, first, second)
    in_order(shared)


@pytest.mark.holds("agreement")
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"allocateMessageQueueStrategy": "AVG_BY_CIRCLE"}, "strategy 'AVG_BY_CIRCLE', not 'AVG'"),
        ({"tags": "b || a"}, "filter 'a || b', not '*'"),
        ({"topic": "in,more"}, "topics 'in,more', not 'in'"),
        ({"assignment": "exclusive"}, "assignment 'exclusive', not 'shared'"),
        ({"parkingLot": "true"}, "parkingLot=true, not false"),
    ],
)
def test_a_member_that_disagrees_is_refused_and_the_others_continue(
    shared: LoopRig, other: dict[str, str], difference: str
) -> None:
    shared.topic("more", 1)
    first = start(shared, "one")
    fill(shared, 0, 80, first)
    with pytest.raises(GroupError) as caught:
        start(shared, "two", **other)
    assert "[ORDEREDMQ_GROUP.DISAGREES]" in str(caught.value)
    assert difference in str(caught.value)
    assert next(iter(owners(shared))) in str(caught.value)
    fill(shared, 80, 160, first)
    assert shares(shared) == [8]


@pytest.mark.holds("former run")
def test_a_second_run_of_a_shared_query_is_refused_while_the_first_is_a_member(shared: LoopRig) -> None:
    first = start(shared, "one")
    fill(shared, 0, 80, first)
    with pytest.raises(GroupError) as caught:
        start(shared, "one")
    assert caught.value.condition == "ORDEREDMQ_GROUP.IN_USE"
    fill(shared, 80, 160, first)


@pytest.mark.holds("former run")
def test_a_queue_that_a_repeated_batch_leaves_out_ends_its_tenure(shared: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a broker that keeps no lineage would let the next run resume after messages that were never processed."""
    ended: list[MessageQueue] = []
    monkeypatch.setattr(EmbeddedGroups, "end_tenures", lambda groups, group, tenures: ended.extend(tenures))
    shared.fill("in", 80)
    query = shared.start({"topic": "in", "consumerGroup": "g", "assignment": "shared"}, OUT, "one")
    query.advance("logged")
    query.kill()
    left_out = shared.broker.log.queues("in")[:1]
    locked(shared.broker, "g", shared.broker.groups.join("other"), left_out)
    query = start(shared, "one")
    assert len(query.batches[0].ranges) == QUEUES - 1
    assert ended == left_out


@EACH_LOOP
def test_explicit_starting_offsets_hold_only_where_the_shared_group_never_committed(shared: LoopRig) -> None:
    shared.fill("in", 80)
    first = start(shared, "one", startingOffsets="latest")
    assert shares(shared) == [8]
    fill(shared, 80, 160, first, since=80)
    second = start(shared, "two", startingOffsets="earliest")
    divide(shared, [4, 4], first, second)
    fill(shared, 160, 240, first, second, since=80)


def test_starting_offsets_as_json_name_every_queue_of_a_shared_group(shared: LoopRig) -> None:
    shared.fill("in", 80)
    every = json.dumps({"in": {"embedded": {str(queue): 3 for queue in range(QUEUES)}}})
    query = start(shared, "one", startingOffsets=every)
    assert query.batches[0].ranges == {f"in/embedded/{queue}": (3, 10) for queue in range(QUEUES)}
    with pytest.raises(OptionError, match="in/embedded/8"):
        start(shared, "two", startingOffsets=every.replace('"7"', '"7": 3, "8"'), consumerGroup="other")


def test_an_available_now_run_ends_with_a_warning_if_others_hold_all_its_queues(world: LoopWorld) -> None:
    shared = {"assignment": "shared"}
    other = world.broker.groups.join("other")
    tokens = locked(world.broker, world.group, other, world.queues)
    world.produce(5)
    world.run(source={**shared, "lockTimeout": "1s"})
    assert world.count() == 0
    assert "all 3 queues that this query should have in group g are held by others (query other (other@" in world.log()
    world.broker.groups.unlock(tokens)
    world.broker.groups.leave(other)
    world.run(source=shared)
    world.judge()


def test_an_available_now_run_takes_no_queue_after_its_first_boundary(world: LoopWorld) -> None:
    other = world.broker.groups.join("other")
    tokens = locked(world.broker, world.group, other, world.queues[:1])
    world.produce(5)
    query = world.start(available_now=True, source={"assignment": "shared", "lockTimeout": "1s"})
    query.advance("committed")
    world.broker.groups.unlock(tokens)
    world.broker.groups.leave(other)
    query.process_all_available()
    assert {queue for batch in query.batches for queue in batch.ranges} == set(map(str, world.queues[1:]))
