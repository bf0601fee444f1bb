"""Where a query begins when it is killed, or messages arrive, before that is decided. tests/loop/test_checkpoints.py has the rest."""

from __future__ import annotations

import pytest

from tests import checker
from tests.faults.conftest import World
from tests.faults.drivers import RUNNER, WORKER, kill_below

START = {"startingOffsets": "latest"}


def at(world: World, offset: int) -> dict[int, int]:
    return {queue.queue_id: offset for queue in world.queues}


def assert_exact_from(world: World, first: int) -> None:
    """Assert that ``out`` has all messages from ``first`` on, once and in order, and none before."""
    before = [{"event": "loss", "queue": str(queue), "begin": 0, "end": first} for queue in world.queues]
    assert min(row[1] for event in checker.delivered(world.broker, "out") for row in event["rows"]) == first
    world.judge(*before)


def test_asking_where_to_begin_decides_nothing(world: World) -> None:
    # Spark asks twice; messages arrive in between, and after the answer.
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
    assert world.group_at() == at(world, 30), "the group was reset to where the query begins"
    world.produce(10)
    world.points.release("planned")
    world.wait_for(30)
    query.stop()
    assert [event["event"] for event in world.points.history()].count("initial") >= 2
    world.produce(10)
    world.run(source=START)
    assert_exact_from(world, 30)


@pytest.mark.parametrize(
    "point",
    [
        "logged",
        pytest.param("write", marks=pytest.mark.nightly),
        "publish",
        pytest.param("published", marks=pytest.mark.nightly),
    ],
)
def test_a_crash_in_the_first_batch_loses_nothing_behind_where_it_began(point: str, world: World) -> None:
    world.produce(10)
    world.points.arm("boundary")
    query = world.start(source=START)
    world.points.wait("boundary")
    # There is nothing to read: the first batch only records where the query begins.
    world.points.arm(point)
    world.points.release("boundary")
    pid = world.points.wait(point)
    world.produce(10)
    kill_below(pid, RUNNER if point == "logged" else WORKER)
    world.fail(query)
    world.produce(10)
    world.run(source=START)
    assert_exact_from(world, 10)
