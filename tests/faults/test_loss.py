"""Messages deleted before they are read: the error and the warnings in a real Spark. tests/loop/test_loss.py has other cases."""

from __future__ import annotations

from typing import Any

import pytest

from tests import checker
from tests.faults.conftest import World

ACCEPT = {"failOnDataLoss": "false"}


def trim(world: World, before: int) -> None:
    """Delete messages below ``before``, as retention does, and assert that some were deleted."""
    gone = world.broker.admin.trim("in", dict.fromkeys(world.queues, before))
    assert all(gone[queue] > 0 for queue in world.queues)
    assert all(at.min_offset == before for at in world.broker.log.bounds(world.queues).values())


def lost(world: World, begin: int, end: int) -> list[dict[str, Any]]:
    return [{"event": "loss", "queue": str(queue), "begin": begin, "end": end} for queue in world.queues]


@pytest.mark.holds("named loss")
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
    assert "set failOnDataLoss=false to skip them" in text
    assert world.group_at() == {0: 100, 1: 100, 2: 100}, "no message may be skipped without a warning"
    world.run(source=ACCEPT)
    for queue in world.queues:
        assert f"messages 100 to 139 (40) of queue {queue} were deleted" in world.log()
    assert world.log().count("AGED_OUT") == 3, "each loss is logged once"
    world.judge(*sent_before(world, 100), *history, *lost(world, 100, 140))


def sent_before(world: World, end: int) -> list[dict[str, Any]]:
    """Send events for the messages below ``end``, which `produce` sent and retention has deleted since."""
    return [
        {"event": "send", "queue": str(queue), "offset": place, "key": f"{queue.queue_id}-{place % 7}", "id": f"{queue}:{place}",
         "outcome": "ok"}
        for queue in world.queues for place in range(end)
    ]  # fmt: skip
