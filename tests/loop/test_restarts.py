"""A query that ends between any two of Spark's steps resumes where it stopped, without loss or repeats."""

from __future__ import annotations

import os
import signal

import pyarrow as pa
import pytest

from tests import checker
from tests.contract.support import locked
from tests.live.spark.conftest import numbers
from tests.loop.conftest import EACH_LOOP, LoopRig, LoopWorld
from tests.micro_batches import Point

POINTS: list[Point] = ["planned", "logged", "written", "published", "committed", "idle"]


@EACH_LOOP
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
@pytest.mark.parametrize("batch", ["first", "later"])
@pytest.mark.parametrize("point", POINTS)
def test_a_query_that_ends_between_two_steps_goes_on_without_loss_or_repeat(
    point: Point, batch: str, killed: bool, world: LoopWorld
) -> None:
    world.produce(10)
    query = world.start(source={"maxOffsetsPerTrigger": 15})
    if batch == "later":
        query.advance("committed")
    query.advance(point)
    if killed:
        query.kill()
    else:
        query.stop()
    if (point, batch, killed) == ("planned", "first", False):
        # The offset that names the owner is not in the checkpoint yet. To the next run, the locks therefore seem to belong to another
        # query, which stopped after planning a batch.
        world.outlast(20, world.held()[0].owner)
    world.produce(10)
    # A batch that was logged keeps its end; a batch that was not logged is planned again and includes more messages.
    world.run(source={"maxOffsetsPerTrigger": 25})
    assert world.count() == 60
    world.judge()


@EACH_LOOP
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_query_without_a_group_repeats_nothing(point: Point, world: LoopWorld) -> None:
    """It has no locks to lose. Its checkpoint and the batches recorded by the sink are enough."""
    source = {"messageModel": "broadcasting", "startingOffsets": "earliest"}
    world.produce(20)
    query = world.start(group=None, source=source)
    query.advance(point)
    query.kill()
    world.produce(10)
    world.run(group=None, source=source)
    history = [*checker.sent(world.broker, "in"), *checker.delivered(world.broker, "out")]
    assert checker.judge(history) == []
    assert world.count() == 90
    assert world.held() == []
    assert world.broker.admin.groups() == []


@EACH_LOOP
def test_another_query_is_refused_until_the_tasks_of_a_stopped_one_must_have_ended(world: LoopWorld) -> None:
    world.produce(10)
    query = world.start()
    query.advance("logged")
    query.stop()
    text = world.fail(world.start("ck2", source={"lockTimeout": "0"}))
    assert "ORDEREDMQ_LOCK.HELD_BY_OTHER" in text
    assert "stopped in the middle of a batch, so its tasks may still be running" in text
    world.outlast(20, world.held()[0].owner)
    world.run("ck2", source={"lockTimeout": "0"})
    assert world.count() == 30
    # Restart the first query. The second query has processed the first one's batch.
    world.produce(10)
    world.run()
    world.judge()


def test_a_signal_that_arrives_while_the_query_stops_leaves_no_queue_locked(
    world: LoopWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's process may notice the end of its connection before Spark's signals."""
    world.produce(10)
    query = world.start()
    query.advance("idle")
    groups = query.reader._run.session._groups
    offsets = groups.offsets

    def signalled(*args: object) -> object:
        # The loop restores the handler of this process after each step.
        signal.signal(signal.SIGTERM, query.reader._terminate)
        os.kill(os.getpid(), signal.SIGTERM)
        return offsets(*args)

    monkeypatch.setattr(groups, "offsets", signalled)
    query.kill()
    assert world.held() == []


def test_signals_end_the_wait_for_a_lock(world: LoopWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark sends two signals. The second one must not interrupt what ends the wait."""
    world.produce(10)
    world.start().advance("idle")
    query = world.start("ck2", source={"lockTimeout": "100s"})
    ended: list[str] = []

    def sleep(seconds: float) -> None:
        del seconds
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append("wait")

    monkeypatch.setattr("ordered_source.group_session.time.sleep", sleep)
    with pytest.raises(SystemExit):
        query.advance("idle")
    assert ended == ["wait"]
    query.kill()


@EACH_LOOP
@pytest.mark.parametrize("assignment", ["exclusive", "shared"])
def test_each_scan_of_a_repeated_batch_leaves_out_what_another_owner_took(assignment: str, rig: LoopRig) -> None:
    """Spark asks for the partitions of a batch once per scan of the stream, so twice if a DataFrame is joined with itself."""
    rig.topic("in", 2, rows=10)
    source = {"topic": "in", "consumerGroup": "g", "assignment": assignment}
    query = rig.start(source, None)
    query.advance("logged")
    query.kill()
    [token] = locked(rig.broker, "g", rig.broker.groups.join("other"), rig.broker.log.queues("in")[1:])
    rig.broker.groups.commit({token: 5})
    if assignment == "exclusive":
        rig.broker.groups.unlock([token])
    again = rig.start(source, None)
    again.advance("committed")
    scan = again.reader.partitions(again.reader.initialOffset(), rig.checkpoints["ck"].end(0))
    assert {str(part.queue): (part.begin, part.end) for part in scan} == again.batches[0].ranges == {"in/embedded/0": (0, 5)}


@pytest.mark.holds("other sinks")
@EACH_LOOP
@pytest.mark.parametrize("reset", ["another query's startingOffsets", "a seek"])
@pytest.mark.parametrize("point", ["published", "committed"])
def test_a_reset_of_one_topic_repeats_no_message_of_another(point: Point, reset: str, rig: LoopRig) -> None:
    rig.topic("in", 2, rows=10)
    rig.topic("other", 2, rows=10)
    batches: dict[int, list[bytes]] = {}

    def write(rows: pa.Table, batch: int) -> None:
        # Like a sink that compares the number of the batch, ignore a batch that was written before.
        batches.setdefault(batch, rows.column("body").to_pylist())

    source = {"topic": "in", "consumerGroup": "g"}
    query = rig.start(source, write)
    query.advance(point)
    query.stop()
    if reset == "a seek":
        rig.broker.admin.seek("g", dict.fromkeys(rig.broker.log.queues("other"), 5))
    else:
        other = {"topic": "other", "consumerGroup": "g", "startingOffsets": "earliest"}
        rig.start(other, None, "ck2", available_now=True).process_all_available()
    rig.fill("in", 4, first=10)
    rig.run(source, write)
    bodies = [body.decode() for rows in batches.values() for body in rows]
    assert numbers({0: bodies}) == list(range(14))
