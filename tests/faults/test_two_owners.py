"""Two queries of one group, or two runs of one query: the second is refused while the first is alive, and replaces it when that one
is killed, or paused for too long.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import GROUP, World
from tests.faults.drivers import RUNNER, Driver, kill_below
from tests.waits import until

#: How many seconds a lock lives. A test that pauses an owner waits that long.
LIFE = 3.0


@pytest.mark.holds("former run")
@pytest.mark.parametrize(
    "source", [{"assignment": "shared"}, pytest.param({}, marks=pytest.mark.nightly)], ids=["shared", "exclusive"]
)
def test_a_job_that_is_started_twice_on_one_checkpoint_is_refused_and_the_first_goes_on(
    source: dict[str, str], world: World, lasting: Driver
) -> None:
    world.produce(30)
    lasting.start("first", **world.spec(source=source))
    world.wait_for_offset(30)
    before = world.held()
    world.points.arm("publish")
    world.produce(20)
    world.points.wait("publish")
    assert "another run of this same query" in world.fail(world.start(source={**source, "lockTimeout": "1s"}))
    assert [lock.epoch for lock in world.held()] == [lock.epoch for lock in before]
    world.points.release("publish")
    world.wait_for(150)
    world.produce(10)
    world.wait_for(180)
    assert lasting.stop("first")["failure"] is None
    world.judge()


def test_an_owner_paused_between_batches_commits_no_offset_any_more(world: World, lasting: Driver) -> None:
    world.lives(LIFE)
    world.produce(30)
    # With a foreign sink only the source moves the group's offset, after the batch.
    world.points.arm("planned")
    lasting.start("paused", **world.spec(sink="noop"))
    world.points.wait("planned")
    world.points.arm("boundary")
    world.points.release("planned")
    world.points.wait("boundary")
    assert world.group_at() == {0: 0, 1: 0, 2: 0}
    lasting.pause(RUNNER)
    try:
        until(lambda: all(lock.remaining == 0 for lock in world.held()), "the locks of the paused query expire")
        second = world.start("ck2")
        world.wait_for_offset(30)
        world.produce(10)
        world.wait_for_offset(40)
    finally:
        lasting.resume()
        world.points.release("boundary")
    assert "ORDEREDMQ_LOCK.LOST" in lasting.failure("paused")
    second.stop()
    world.judge()


@pytest.mark.holds("killed owner")
def test_a_killed_source_runner_fails_its_query_and_another_query_gets_the_queues_at_once(world: World) -> None:
    world.lives(1000)
    world.produce(30)
    first = world.start()
    world.wait_for(90)
    world.points.arm("logged")
    world.produce(40)
    kill_below(world.points.wait("logged"), RUNNER)
    # Spark only sees the end of the runner's pipe, as an exception without a message.
    assert "STREAM_FAILED" in world.fail(first)
    dead = {lock.queue: lock for lock in world.broker.admin.locks(GROUP)}
    assert all(lock.held and not lock.alive and lock.remaining > 500 for lock in dead.values()), dead
    # A lockTimeout of 0 allows one try: the locks are granted immediately or not at all.
    second = world.start("ck2", source={"lockTimeout": "0"})
    world.wait_for(210)
    now = {lock.queue: lock for lock in world.held()}
    assert all(now[queue].epoch > lock.epoch and now[queue].owner != lock.owner for queue, lock in dead.items())
    second.stop()
    # Restart the first query. The second query has processed the first one's logged batch.
    world.produce(10)
    world.run()
    assert "its part of the logged batch is not repeated" in world.log()
    world.judge()
