"""Messages that are lost before they are read: a named error with the range, or, if accepted, a warning with the count."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow as pa
import pytest

from tests import checker
from tests.contract import support
from tests.faults.conftest import World

ACCEPT = {"failOnDataLoss": "false"}


def trim(world: World, before: int) -> None:
    """Delete messages below ``before``, as retention does, and assert that some were deleted."""
    gone = world.broker.admin.trim("in", dict.fromkeys(world.queues, before))
    assert all(gone[queue] > 0 for queue in world.queues)
    assert all(at.min_offset == before for at in world.broker.log.bounds(world.queues).values())


def fill(world: World) -> None:
    """Produce chunks that retention can delete one by one: they end at 100, 140 and 150."""
    for rows in (100, 40, 10):
        world.produce(rows)


def lost(world: World, begin: int, end: int) -> list[dict[str, Any]]:
    return [{"event": "loss", "queue": str(queue), "begin": begin, "end": end} for queue in world.queues]


def test_messages_that_aged_out_between_two_runs(world: World) -> None:
    world.produce(100)
    world.run()
    world.produce(40)
    world.produce(10)
    history = [event for event in checker.sent(world.broker, "in") if event["offset"] >= 100]
    trim(world, 140)
    text = world.fail(world.start(available_now=True))
    assert "[ORDEREDMQ_DATA_LOSS.AGED_OUT] messages 100 to 139 (40) of queue in/embedded/" in text
    assert "were deleted by retention before they were read" in text
    assert "failOnDataLoss=false goes on behind them" in text
    assert world.group_at() == {0: 100, 1: 100, 2: 100}, "nothing was skipped in silence"
    world.run(source=ACCEPT)
    for queue in world.queues:
        assert f"messages 100 to 139 (40) of queue {queue} were deleted" in world.log()
    assert world.log().count("AGED_OUT") == 3, "each loss is told once"
    world.judge(*sent_before(world, 100), *history, *lost(world, 100, 140))


def sent_before(world: World, end: int) -> list[dict[str, Any]]:
    """The sends of messages below ``end``, which ``produce`` wrote and retention has deleted since."""
    return [
        {"event": "send", "queue": str(queue), "offset": place, "key": f"{queue.queue_id}-{place % 7}", "id": f"{queue}:{place}",
         "outcome": "ok"}
        for queue in world.queues for place in range(end)
    ]  # fmt: skip


@pytest.mark.parametrize("accept", [False, True], ids=["fails", "accepted"])
def test_messages_that_age_out_between_planning_and_reading(accept: bool, world: World) -> None:
    fill(world)
    world.points.arm("logged")
    query = world.start(source=ACCEPT if accept else {})
    world.points.wait("logged")
    trim(world, 100)
    world.points.release("logged")
    if not accept:
        text = world.fail(query)
        assert "[ORDEREDMQ_DATA_LOSS.AGED_OUT] messages 0 to 99 (100) of queue in/embedded/" in text
        assert world.count() == 0
        # The same batch again, with the loss accepted.
        query = world.start(source=ACCEPT)
    world.wait_for(150)
    query.stop()
    for queue in world.queues:
        assert f"100 messages of queue {queue} are lost, from 0 to 99" in world.log()
    world.judge(*sent_before(world, 150), *lost(world, 0, 100))


def recreate(world: World) -> None:
    world.broker.admin.delete_topic("in")
    world.broker.admin.create_topic("in", len(world.queues))
    for queue in world.queues:
        world.broker.log.append({queue: pa.record_batch({"body": [f"new {queue}:{place}".encode() for place in range(5)]})})


def bodies(world: World) -> list[str]:
    return [body for queue in world.broker.log.queues("out") for body in support.bodies(world.broker, queue)]


def expected(world: World, rows: int) -> list[str]:
    new = [f"new {queue}:{place}" for queue in world.queues for place in range(5)]
    return sorted([f"{queue}:{place}" for queue in world.queues for place in range(rows)] + new)


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "between two runs"])
def test_a_topic_that_was_deleted_and_created_again(running: bool, world: World) -> None:
    world.produce(30)
    if running:
        query = world.start()
        world.wait_for_offset(30)
        recreate(world)
    else:
        world.run()
        recreate(world)
        query = world.start()
    text = world.fail(query)
    # TOPIC_DELETED if the query looked in between.
    assert "[ORDEREDMQ_DATA_LOSS.TOPIC_RECREATED] topic 'in' was deleted and created again" in text or "TOPIC_DELETED" in text
    assert "failOnDataLoss=false" in text
    assert world.count() == 90
    world.run(source=ACCEPT)
    assert "TOPIC_RECREATED" in world.log()
    assert sorted(bodies(world)) == expected(world, 30)
    assert world.group_at() == {0: 5, 1: 5, 2: 5}
    world.produce(1)
    world.run()
    assert world.count() == 108


def test_a_topic_that_is_created_again_under_a_query_that_accepts_it(world: World) -> None:
    world.produce(30)
    world.broker.admin.create_topic("other", 1)
    query = world.start(topic="in,other", source=ACCEPT)
    world.wait_for_offset(30)
    # The query may see it deleted or recreated, depending on when it looks.
    world.points.arm("boundary")
    world.points.wait("boundary")
    recreate(world)
    world.points.release("boundary")
    world.wait_for(105)
    query.stop()
    assert sorted(bodies(world)) == expected(world, 30)


def test_a_topic_that_is_deleted_fails_the_query_by_name(world: World) -> None:
    world.produce(30)
    query = world.start()
    world.wait_for_offset(30)
    world.broker.admin.delete_topic("in")
    assert "ORDEREDMQ_DATA_LOSS.TOPIC_DELETED" in world.fail(query)


def test_a_store_that_was_replaced_by_an_older_copy_fails_by_name(world: World) -> None:
    world.produce(10)
    old = str(shutil.copytree(world.path, world.folder / "old"))
    world.produce(20)
    world.run()
    text = world.fail(world.start(path=old, available_now=True))
    assert "[ORDEREDMQ_DATA_LOSS.BEYOND_END] queue in/embedded/0 ends at 10, this query has read up to 30" in text
    assert "the store was replaced by an older copy; failOnDataLoss=false goes on at its end" in text
    world.run()
    world.judge()
