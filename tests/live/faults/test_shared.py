"""Queries that share a group: a queue with messages in flight keeps its owner, killed and paused members lose their queues, and
no message is lost or repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.live.faults.conftest import GROUP, World
from tests.live.faults.drivers import JVM, RUNNER, WORKER, Driver
from tests.waits import until

#: How many seconds a queue lock and a membership live. No test waits for their end.
LIFE: Final = 1000.0
SHARED: Final = {"assignment": "shared"}
EVERYTHING: Final = ("tests.live.faults.job", JVM, RUNNER, WORKER)


def share(world: World, checkpoint: str, **more: Any) -> Any:
    return world.start(checkpoint, source=SHARED, **more)


def owners(world: World) -> dict[str, list[int]]:
    """The queues of each owner that is not known to be dead, without expired locks."""
    queues_by_owner: dict[str, list[int]] = {}
    for lock in world.held():
        if lock.alive and lock.remaining > 0:
            queues_by_owner.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return queues_by_owner


def shares(world: World) -> list[int]:
    return sorted(len(queues) for queues in owners(world).values())


def divided(world: World, *wanted: int, timeout: float = 120.0) -> None:
    until(lambda: shares(world) == sorted(wanted), f"the members own {wanted} queues, not {shares(world)}", timeout)


@pytest.mark.holds("no sharing of messages in flight")
def test_a_queue_with_messages_in_flight_is_not_given_to_another_member(world: World) -> None:
    # A common bug of shared groups: one member has messages 1 to 5 in flight while another gets the queue and messages 6 to 10.
    share(world, "ck1")
    world.produce(5)
    world.wait_for(15)
    (first,) = owners(world)
    world.points.arm("read")
    world.produce(5)
    world.points.wait("read")
    second = share(world, "ck2")
    # Wait until the second query has asked for its queues once, without success.
    until(
        lambda: len([event for event in world.points.history() if event["event"] == "entered"]) == 2,
        "the second query has entered",
    )
    assert len(world.broker.groups.members(GROUP)) == 2
    world.produce(5)
    begin = time.monotonic()
    while time.monotonic() - begin < 1:
        assert list(owners(world)) == [first]
        assert world.count() == 15
        time.sleep(0.1)
    world.points.release("read")
    divided(world, 1, 2)
    world.produce(5)
    world.wait_for(60)
    assert second.isActive
    world.judge()


class Producers:
    """A thread that writes to the world's topic until it is stopped, so slowly that queries are idle between some batches."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.5):
            self._world.produce(3)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.fixture
def four(worlds: Callable[..., World]) -> World:
    return worlds(4)


@pytest.mark.fault("paused process", "embedded")
@pytest.mark.holds("shared source to sink", "shared take-over", "one owner")
@pytest.mark.timeout(400)
def test_two_then_three_then_one_query_with_one_killed_and_one_paused_lose_and_repeat_nothing(
    four: World, drivers: Callable[..., Driver], lasting: Driver
) -> None:
    paused, killed = lasting, drivers()
    four.lives(LIFE)
    producers = Producers(four)
    try:
        paused.start("paused", **four.spec("paused", source=SHARED))
        divided(four, 4)
        (owner,) = owners(four)
        killed.start("killed", **four.spec("killed", source=SHARED))
        divided(four, 2, 2)
        last = share(four, "last")
        divided(four, 1, 1, 2)
        # A death is noticed immediately, long before the lock expires.
        killed.kill_all()
        divided(four, 2, 2)
        # Pause the query in a batch, but not in a write transaction, where a stopped process would block all other writers.
        publish = f"publish of {paused.state('paused')['id']}"
        four.points.arm(publish)
        four.points.wait(publish)
        paused.pause(*EVERYTHING)
        try:
            four.outlast(LIFE, owner)
            divided(four, 4)
            at = four.count()
            until(lambda: four.count() > at + 30, "the last query continues alone")
        finally:
            four.points.release(publish)
            paused.resume()
        # With its old locks the query changes nothing and fails. Then it is restarted.
        assert "ORDEREDMQ_LOCK.LOST" in paused.failure("paused")
        paused.start("again", **four.spec("paused", source=SHARED))
        divided(four, 2, 2)
        # The last query has processed the first one's logged batch.
        assert "its part of the logged batch is not repeated" in four.log()
    finally:
        producers.stop()
    until(lambda: four.count() == four.count("in"), "all messages are processed", 90.0)
    assert last.isActive
    four.judge(drained=False)
    paused.stop("again")
