"""Queries that share a group: a queue with messages in flight keeps its owner, killed and paused members lose their queues, and
no message is lost or repeated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.faults.conftest import GROUP, World
from tests.faults.drivers import JVM, RUNNER, WORKER, Driver, kill_below
from tests.waits import until

#: How many seconds a queue lock and a membership live. No test waits for their end.
LIFE: Final = 1000.0
SHARED: Final = {"assignment": "shared"}
EVERYTHING: Final = ("tests.faults.job", JVM, RUNNER, WORKER)


def share(world: World, checkpoint: str, **more: Any) -> Any:
    return world.start(checkpoint, source=SHARED, **more)


def owners(world: World) -> dict[str, list[int]]:
    """The queues of each owner that is not known to be dead, without expired locks."""
    found: dict[str, list[int]] = {}
    for lock in world.held():
        if lock.alive and lock.remaining > 0:
            found.setdefault(lock.owner, []).append(lock.queue.queue_id)
    return found


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


@pytest.mark.holds("hand-over")
def test_a_hand_over_repeats_nothing_also_with_a_foreign_sink(world: World) -> None:
    # Use one table per query, because two Spark jobs that append to the same folder delete each other's unfinished files.
    tables = [str(world.folder / name) for name in ("one", "two")]
    first = share(world, "ck1", sink=f"parquet:{tables[0]}")
    world.produce(20)
    world.wait_for_offset(20)
    share(world, "ck2", sink=f"parquet:{tables[1]}")
    divided(world, 1, 2)
    world.produce(20)
    world.wait_for_offset(40)
    until(lambda: not first.status["isTriggerActive"], "the first query is idle")
    first.stop()
    divided(world, 3)
    world.produce(20)
    world.wait_for_offset(60)
    rows = world.spark.read.parquet(*tables).select("body").collect()
    bodies = sorted(bytes(row.body).decode() for row in rows)
    assert bodies == sorted(f"{queue}:{place}" for queue in world.queues for place in range(60))


def test_an_available_now_run_whose_queues_are_all_held_by_others_says_so_and_ends(world: World) -> None:
    other = world.broker.groups.join("other")
    held = world.broker.groups.lock(GROUP, other, world.queues)
    world.produce(5)
    world.run(source={**SHARED, "lockTimeout": "1s"})
    assert world.count() == 0
    assert "all 3 queues that this query should have in group g are held by others (query other (other@" in world.log()
    world.broker.groups.unlock([token for token in held.values() if not hasattr(token, "alive")])
    world.broker.groups.leave(other)
    world.run(source=SHARED)
    world.judge()


@pytest.fixture(scope="module")
def other(drivers: Callable[..., Driver]) -> Driver:
    """A separate Spark driver. The tests that do not kill it come first."""
    return drivers("local[4]")


@pytest.mark.holds("shared take-over")
def test_the_queues_of_a_killed_runner_are_taken_over_within_two_triggers(world: World, other: Driver) -> None:
    world.lives(LIFE)
    other.start("dead", **world.spec("dead", source=SHARED))
    world.produce(5)
    world.wait_for(15)
    share(world, "ck")
    divided(world, 1, 2)
    (pid,) = [process.pid for process in other.of_kind(RUNNER)]
    kill_below(pid, RUNNER)
    # The lock would outlive this wait, which allows two triggers of 100 ms and the time that a busy machine needs for them.
    divided(world, 3)
    world.produce(5)
    world.wait_for(30)
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


@pytest.mark.holds("shared source to sink")
@pytest.mark.timeout(400)
def test_two_then_three_then_one_query_with_one_killed_and_one_paused_lose_and_repeat_nothing(
    four: World, other: Driver, lasting: Driver
) -> None:
    paused, killed = lasting, other
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
    finally:
        producers.stop()
    until(lambda: four.count() == four.count("in"), "all messages are processed", 90.0)
    assert last.isActive
    four.judge(drained=False)
    paused.stop("again")
