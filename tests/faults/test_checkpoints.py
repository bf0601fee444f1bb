"""Kills and new messages before a query has decided where to begin. tests/loop/test_checkpoints.py has the other cases."""

from __future__ import annotations

import pytest

from tests import checker
from tests.faults.conftest import World
from tests.faults.drivers import RUNNER, WORKER, kill_below

START = {"startingOffsets": "latest"}


def at(world: World, offset: int) -> dict[int, int]:
    return {queue.queue_id: offset for queue in world.queues}


def assert_exact_from(world: World, first: int) -> None:
    """Assert that ``out`` has all messages from ``first`` on, once and in order, and no earlier ones."""
    before = [{"event": "loss", "queue": str(queue), "begin": 0, "end": first} for queue in world.queues]
    assert min(row[1] for event in checker.delivered(world.broker, "out") for row in event["rows"]) == first
    world.judge(*before)


def test_asking_where_to_begin_decides_nothing(world: World) -> None:
    # Spark calls initialOffset twice. Messages arrive between the calls, and after the second one.
    world.produce(10)
    world.points.arm("initial")
    query = world.start(source=START)
    world.points.wait("initial")
    world.produce(10)
    world.points.arm("boundary")
    world.points.release("initial")
    world.points.wait("boundary")
    world.produce(10)
    world.points.arm("planned")
    world.points.release("boundary")
    world.points.wait("planned")
    assert world.group_at() == at(world, 30), "the group must be at the offset where the query begins"
    world.produce(10)
    world.points.release("planned")
    world.wait_for(30)
    query.stop()
    assert [event["event"] for event in world.points.history()].count("initial") >= 2
    world.produce(10)
    world.run(source=START)
    assert_exact_from(world, 30)


@pytest.mark.parametrize(
    "point", ["logged", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("write", "publish", "published"))]
)
def test_a_crash_in_the_first_batch_loses_no_message_after_the_offset_where_it_began(point: str, world: World) -> None:
    world.produce(10)
    world.points.arm("boundary")
    query = world.start(source=START)
    world.points.wait("boundary")
    # No message is left to read, so the first batch only records where the query begins.
    world.points.arm(point)
    world.points.release("boundary")
    pid = world.points.wait(point)
    world.produce(10)
    kill_below(pid, RUNNER if point == "logged" else WORKER)
    world.fail(query)
    world.produce(10)
    world.run(source=START)
    assert_exact_from(world, 10)
