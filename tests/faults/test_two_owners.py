"""Two queries of one group: the second is refused while the first is alive, and replaces it if it is dead or was paused too long."""

from __future__ import annotations

import pytest

from tests.faults.conftest import GROUP, World
from tests.faults.drivers import JVM, RUNNER, WORKER, Driver
from tests.waits import until

#: How many seconds a lock lives. A test that pauses an owner waits that long.
LIFE = 3.0
EVERYTHING = ("tests.faults.job", JVM, WORKER, RUNNER)


@pytest.fixture
def other(lasting: Driver) -> Driver:
    """A separate Spark driver for the first query. The tests that do not kill it come first."""
    return lasting


def assert_refused(text: str, owner: str) -> None:
    assert "[ORDEREDMQ_LOCK.HELD_BY_OTHER] 3 of 3 queues of group 'g' belong to query " + owner in text
    assert "which is alive" in text
    assert "Its lock of in/embedded/0 ends in " in text
    for remedy in ("Stop that query", "a separate consumerGroup", "messageModel=broadcasting", "foreachBatch", "load once"):
        assert remedy in text


@pytest.mark.holds("exclusive")
def test_a_second_query_in_another_process_is_refused_and_the_first_goes_on(world: World, other: Driver) -> None:
    world.produce(30)
    other.start("refusing", **world.spec())
    world.wait_for(90)
    before = world.held()
    text = world.fail(world.start("ck2", source={"lockTimeout": "1s"}))
    assert_refused(text, before[0].owner)
    assert [lock.epoch for lock in world.held()] == [lock.epoch for lock in before]
    world.produce(20)
    world.wait_for(150)
    assert other.stop("refusing")["failure"] is None
    world.judge()


def test_a_second_query_in_the_same_session_is_refused_and_the_first_goes_on(world: World) -> None:
    world.produce(30)
    world.broker.admin.create_topic("more", 2)
    query = world.start()
    world.wait_for(90)
    (owner,) = {lock.owner for lock in world.held()}
    assert_refused(world.fail(world.start("ck2", source={"lockTimeout": "0"})), owner)
    # All queues or none: the refused query keeps no lock of the queues that were free.
    text = world.fail(world.start("ck3", topic="more,in", source={"lockTimeout": "0"}))
    assert f"3 of 5 queues of group 'g' belong to query {owner}" in text
    assert {lock.queue.topic for lock in world.held()} == {"in"}
    world.produce(20)
    world.wait_for(150)
    assert query.isActive
    query.stop()
    world.judge()


@pytest.mark.holds("one owner")
def test_an_owner_paused_in_a_batch_beyond_its_locks_life_publishes_nothing_more(world: World, other: Driver) -> None:
    world.lives(LIFE)
    world.produce(30)
    other.start("paused", **world.spec())
    world.wait_for(90)
    world.points.arm("publish")
    world.produce(40)
    world.points.wait("publish")
    other.pause(*EVERYTHING)
    try:
        until(lambda: all(lock.remaining == 0 for lock in world.held()), "the locks of the paused query expire")
        assert all(lock.alive for lock in world.held())
        second = world.start("ck2")
        world.wait_for(210)
        world.produce(10)
        world.wait_for(240)
    finally:
        other.resume()
        world.points.release("publish")
    assert "ORDEREDMQ_LOCK.LOST" in other.failure("paused")
    (refused,) = [event for event in world.points.history() if event["event"] == "publish" and not event["accepted"]]
    assert "Restart the query. It resumes without a gap" in refused["error"]
    assert world.count() == 240
    world.judge()
    # Restart the first query. The second query has processed the first one's logged batch.
    second.stop()
    world.produce(10)
    world.run()
    assert "its part of the logged batch is not repeated" in world.log()
    world.judge()


def test_an_owner_paused_between_batches_commits_no_offset_any_more(world: World, other: Driver) -> None:
    world.lives(LIFE)
    world.produce(30)
    # With a foreign sink only the source moves the group's offset, after the batch.
    world.points.arm("planned")
    other.start("paused", **world.spec(sink="noop"))
    world.points.wait("planned")
    world.points.arm("boundary")
    world.points.release("planned")
    world.points.wait("boundary")
    assert world.group_at() == {0: 0, 1: 0, 2: 0}
    other.pause(RUNNER)
    try:
        until(lambda: all(lock.remaining == 0 for lock in world.held()), "the locks of the paused query expire")
        second = world.start("ck2")
        world.wait_for_offset(30)
        world.produce(10)
        world.wait_for_offset(40)
    finally:
        other.resume()
        world.points.release("boundary")
    assert "ORDEREDMQ_LOCK.LOST" in other.failure("paused")
    second.stop()
    world.judge()


@pytest.mark.holds("killed owner")
def test_an_owner_that_was_killed_is_replaced_at_once_and_not_when_its_lock_ends(world: World, other: Driver) -> None:
    world.lives(1000)
    world.produce(30)
    other.start("dead", **world.spec())
    world.wait_for(90)
    other.kill_all()
    dead = {lock.queue: lock for lock in world.broker.admin.locks(GROUP)}
    assert all(lock.held and not lock.alive and lock.remaining > 500 for lock in dead.values()), dead
    world.produce(10)
    # A lockTimeout of 0 allows one try: the locks are granted immediately or not at all.
    query = world.start("ck2", source={"lockTimeout": "0"})
    world.wait_for(120)
    query.stop()
    now = {lock.queue: lock for lock in world.broker.admin.locks(GROUP)}
    assert all(now[queue].epoch > lock.epoch and now[queue].owner != lock.owner for queue, lock in dead.items())
    world.judge()
