"""Where a query goes on when its checkpoint or its group's offsets are new, old or deleted, or when nothing is decided yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orderedmq.embedded.store import Store
from tests import checker
from tests.faults.conftest import GROUP, World
from tests.faults.drivers import RUNNER, WORKER, kill_below

START = {"startingOffsets": "latest"}


def at(world: World, offset: int) -> dict[int, int]:
    return {queue.queue_id: offset for queue in world.queues}


def forget_group(world: World) -> None:
    """Delete the group's offsets and locks from the store, as if the group had never existed."""
    store = Store.open(Path(world.path))
    try:
        with store.write() as txn:
            for database in ("groups", "locks"):
                for key in [key for key, _ in txn.scan(database, GROUP.encode() + b"\0")]:
                    txn.delete(database, key)
    finally:
        store.close()


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


@pytest.mark.parametrize("point", ["logged", "write", "publish", "published"])
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


def test_an_old_copy_of_the_checkpoint_repeats_what_the_sink_knows_and_goes_on(world: World) -> None:
    limit = {"maxOffsetsPerTrigger": 30}
    world.produce(20)
    world.run(source=limit)
    shutil.copytree(world.folder / "ck", world.folder / "old")
    world.produce(30)
    world.run(source=limit)
    assert world.count() == 150
    world.produce(10)
    world.run("old", source=limit)
    assert "the checkpoint is behind group g: queue in/embedded/0 is read again from 20, the group was at 50" in world.log()
    assert [event["replayed"] for event in world.points.history() if event["event"] == "publish"].count(True) == 3
    world.judge()


def test_an_old_copy_of_the_checkpoint_that_batches_otherwise_fails_by_name_and_loses_nothing(world: World) -> None:
    world.produce(20)
    world.run()
    shutil.copytree(world.folder / "ck", world.folder / "old")
    world.produce(10)
    world.run()
    world.produce(10)
    text = world.fail(world.start("old", available_now=True))
    assert "[ORDEREDMQ_SINK.REPLAY_DIFFERS] batch 1 of this query was published already, with other content" in text
    assert "from 20 to 30 then, from 20 to 40 now" in text
    for remedy in ("restore the newest checkpoint", "start with a new one", "onReplayDiffers=skip"):
        assert remedy in text
    # The newest checkpoint still works, the group has not moved, and no message was lost.
    world.run()
    world.judge()


def test_a_new_checkpoint_goes_on_at_the_groups_offset(world: World) -> None:
    world.produce(20)
    world.run()
    shutil.rmtree(world.folder / "ck")
    world.produce(20)
    world.run()
    world.judge()


@pytest.mark.parametrize("source", [{}, START], ids=["committed", "latest"])
def test_a_group_that_is_gone_does_not_matter_to_a_checkpoint(source: dict[str, str], world: World) -> None:
    world.produce(20)
    world.run()
    world.produce(20)
    forget_group(world)
    assert world.group_at() == {}
    world.run(source=source)
    world.judge()
    assert world.group_at() == at(world, 40)


def test_checkpoint_and_group_that_are_both_gone_begin_as_a_new_group_does(world: World) -> None:
    world.produce(20)
    world.run()
    shutil.rmtree(world.folder / "ck")
    forget_group(world)
    world.produce(20)
    world.run(source={"consumeFromWhere": "last"})
    world.produce(10)
    world.run()
    assert world.group_at() == at(world, 50)
    # Messages that arrived before the new group began are not its own.
    lost = [{"event": "loss", "queue": str(queue), "begin": 20, "end": 40} for queue in world.queues]
    world.judge(*lost)
