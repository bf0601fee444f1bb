"""Where a query resumes when its checkpoint or its group's offsets are new, old or deleted, or when queues were added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import LOCKS, OFFSETS
from tests.contract.support import bodies
from tests.live.faults.conftest import GROUP
from tests.live.faults.faulty import FaultyReader
from tests.live.faults.points import ToldToFail
from tests.live.spark.conftest import numbers
from tests.loop.conftest import LoopRig, LoopWorld
from tests.micro_batches import Checkpoint, Point

START = {"startingOffsets": "latest"}


def at(world: LoopWorld, offset: int) -> dict[int, int]:
    return {queue.queue_id: offset for queue in world.queues}


def forget_group(world: LoopWorld) -> None:
    """Delete the group's offsets and locks from the store, as if the group had never existed."""
    store = Store.open(Path(world.path))
    try:
        with store.write() as txn:
            for row in list(txn.scan(OFFSETS, GROUP)):
                txn.delete(OFFSETS, *row[:3])
            for lock in list(txn.scan(LOCKS, GROUP)):
                txn.delete(LOCKS, *lock[:3])
    finally:
        store.close()


def test_an_old_copy_of_the_checkpoint_repeats_published_batches_and_continues(world: LoopWorld) -> None:
    limit = {"maxOffsetsPerTrigger": 30}
    world.produce(20)
    world.run(source=limit)
    world.checkpoints["old"] = world.checkpoints["ck"].copy()
    world.produce(30)
    world.run(source=limit)
    assert world.count() == 150
    world.produce(10)
    world.run("old", source=limit)
    warning = "the checkpoint is behind group g: queue in/embedded/0 is read again from 20, although the group's offset was 50"
    assert warning in world.log()
    assert [event["replayed"] for event in world.points.history() if event["event"] == "publish"].count(True) == 3
    world.judge()


def test_an_old_copy_of_the_checkpoint_with_other_batches_is_refused_and_loses_no_message(world: LoopWorld) -> None:
    world.produce(20)
    world.run()
    world.checkpoints["old"] = world.checkpoints["ck"].copy()
    world.produce(10)
    world.run()
    world.produce(10)
    assert "ORDEREDMQ_SINK.REPLAY_DIFFERS" in world.fail(world.start("old", available_now=True))
    # The newest checkpoint still works, the group has not moved, and no message was lost.
    world.run()
    world.judge()


def test_a_new_checkpoint_goes_on_at_the_groups_offset(world: LoopWorld) -> None:
    world.produce(20)
    world.run()
    del world.checkpoints["ck"]
    world.produce(20)
    world.run()
    world.judge()


@pytest.mark.parametrize(
    ("way", "at"), [("new checkpoint", "published"), ("stopped", "logged"), ("stopped, without a group", "published")]
)
def test_a_backup_is_restored_with_a_new_checkpoint_or_with_one_that_was_copied_while_the_query_was_stopped(
    way: str, at: Point, rig: LoopRig
) -> None:
    reads_as = {"messageModel": "broadcasting"} if way.endswith("without a group") else {"consumerGroup": "g"}
    source, sink = {"topic": "in", "maxOffsetsPerTrigger": 14, **reads_as}, {"topic": "out", "topicQueueNums": 2}
    rig.topic("in", 2)
    query = rig.start(source, sink).process_all_available()
    rig.fill("in", 20)
    query.process_all_available()
    rig.fill("in", 20, first=20)
    query.advance(at)
    if way != "new checkpoint":
        query.stop()
    rig.fill("in", 10, first=40)
    copy = {"path": str(rig.folder / "copy")}
    orderedmq.snapshot(rig.path, copy["path"])
    rig.checkpoints["restored"] = Checkpoint() if way == "new checkpoint" else rig.checkpoints["ck"].copy()
    query.stop()
    # The query continues in the original store, which is then lost.
    rig.start(source, sink, available_now=True).process_all_available()
    rig.start({**source, **copy}, {**sink, **copy}, "restored", available_now=True).process_all_available()
    with orderedmq.connect(copy["path"]) as broker:
        written = {queue.queue_id: bodies(broker, queue) for queue in broker.log.queues("out")}
    assert numbers(written) == list(range(50))


def test_asking_for_the_initial_offset_decides_nothing(world: LoopWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark asks twice for the offset of batch 0. Messages arrive after each answer."""
    initial_offset = FaultyReader.initialOffset

    def followed_by_messages(reader: FaultyReader) -> dict[str, Any]:
        offset = initial_offset(reader)
        world.produce(10)
        return offset

    monkeypatch.setattr(FaultyReader, "initialOffset", followed_by_messages)
    world.produce(10)
    query = world.start(source=START)
    query.advance("planned")
    assert world.group_at() == at(world, 20), "the query begins where the messages ended when the first batch was planned"
    query.process_all_available().stop()
    world.judge(*[{"event": "loss", "queue": str(queue), "begin": 0, "end": 20} for queue in world.queues])
    assert world.count() == 30


@pytest.mark.parametrize("point", ["logged", "written", "published", "committed"])
def test_a_crash_in_the_first_batch_loses_no_message_after_the_offset_where_it_began(point: Point, world: LoopWorld) -> None:
    world.produce(10)
    query = world.start(source=START)
    # No message is left to read, so the first batch only records where the query begins.
    query.advance(point)
    query.kill()
    world.produce(10)
    world.run(source=START)
    world.judge(*[{"event": "loss", "queue": str(queue), "begin": 0, "end": 10} for queue in world.queues])
    assert world.count() == 30


@pytest.mark.parametrize("source", [{}, START], ids=["committed", "latest"])
def test_a_group_that_is_gone_does_not_matter_to_a_checkpoint(source: dict[str, str], world: LoopWorld) -> None:
    world.produce(20)
    world.run()
    world.produce(20)
    forget_group(world)
    assert world.group_at() == {}
    world.run(source=source)
    world.judge()
    assert world.group_at() == at(world, 40)


def test_checkpoint_and_group_that_are_both_gone_begin_as_a_new_group_does(world: LoopWorld) -> None:
    world.produce(20)
    world.run()
    del world.checkpoints["ck"]
    forget_group(world)
    world.produce(20)
    world.run(source={"consumeFromWhere": "last"})
    world.produce(10)
    world.run()
    assert world.group_at() == at(world, 50)
    # The new group does not read messages that arrived before it began.
    lost = [{"event": "loss", "queue": str(queue), "begin": 20, "end": 40} for queue in world.queues]
    world.judge(*lost)


def test_queues_that_are_added_are_read_from_their_beginning_also_across_a_crash(world: LoopWorld) -> None:
    world.produce(10)
    query = world.start(source={"startingOffsets": "latest"}).process_all_available()
    assert world.group_at() == {0: 10, 1: 10, 2: 10}, "the query has begun"
    world.points.arm("write", "fail")
    world.broker.admin.resize_topic("in", 5)
    world.queues = world.broker.log.queues("in")
    # The first batch with the new queues fails.
    world.produce(10)
    with pytest.raises(ToldToFail, match="at write"):
        query.process_all_available()
    world.produce(10)
    world.run()
    before = [{"event": "loss", "queue": str(queue), "begin": 0, "end": 10} for queue in world.queues[:3]]
    assert world.count() == 3 * 20 + 2 * 20
    world.judge(*before)
