"""An owner whose source runner is killed. tests/loop/test_group_changes.py and test_driver_killed.py have a former run that is alive."""

from __future__ import annotations

import pytest

from tests.live.faults.conftest import GROUP, World
from tests.live.faults.drivers import RUNNER, kill_below


@pytest.mark.fault("killed process", "embedded")
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
