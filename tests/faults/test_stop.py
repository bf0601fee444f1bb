"""query.stop(): an idle query unlocks its queues at once; in the middle of a batch it gives its tasks time to end."""

from __future__ import annotations

from tests.faults.conftest import GROUP, World
from tests.waits import until


def test_a_query_stopped_while_idle_leaves_its_queues_to_the_next_at_once(world: World) -> None:
    world.produce(30)
    first = world.start()
    world.wait_for_offset(30)
    first.stop()
    # Without the unlock, its locks would live for 40 s at least.
    until(lambda: not world.held(), "the queues are free", 30)
    world.produce(10)
    world.run("ck2", source={"lockTimeout": "0"})
    world.produce(10)
    world.run(source={"lockTimeout": "0"})
    world.judge()


def test_a_query_stopped_in_a_batch_restarts_at_once_and_its_late_task_counts_for_nothing(world: World) -> None:
    world.produce(30)
    first = world.start()
    world.wait_for(90)
    world.points.arm("write", after=20)
    world.produce(40)
    world.points.wait("write")
    first.stop()
    until(lambda: all(lock.remaining <= 20 for lock in world.held()), "the locks linger")
    world.run(source={"lockTimeout": "0"})
    assert world.count() == 210
    world.points.release("write")
    world.produce(10)
    world.run()
    until(lambda: world.tokens() == 0, "what the stopped run staged is swept")
    world.judge()


def test_another_query_waits_until_the_tasks_of_a_stopped_one_must_have_ended(world: World) -> None:
    world.lives(1000, linger=120)
    world.produce(30)
    first = world.start()
    world.wait_for(90)
    world.points.arm("write", after=20)
    world.produce(40)
    world.points.wait("write")
    (owner,) = {lock.owner for lock in world.held()}
    first.stop()
    until(lambda: all(0 < lock.remaining <= 120 for lock in world.held()), "the locks linger")
    text = world.fail(world.start("ck2", source={"lockTimeout": "0"}))
    assert "ORDEREDMQ_LOCK.HELD_BY_OTHER" in text
    assert "has stopped in the middle of a batch, its tasks may still be at work" in text
    second = world.start("ck2", available_now=True, source={"lockTimeout": "120s"})
    until(lambda: world.broker.groups.members(GROUP), "the second query is about to ask for the queues")
    assert world.count() == 90
    world.outlast(120, owner)
    assert second.awaitTermination(60)
    assert world.count() == 210
    world.points.release("write")
    # Restart the first query: the other one has processed its batch.
    world.produce(10)
    world.run()
    world.judge()
