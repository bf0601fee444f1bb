"""Queries with active producers, and with executors in other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.faults.conftest import World
from tests.faults.drivers import Driver
from tests.waits import until


def test_available_now_ends_at_the_messages_of_its_start_while_producers_continue(world: World) -> None:
    """The run reads exactly up to its target, which is fixed before Spark asks for the first offset."""
    world.produce(50)
    world.points.arm("initial")
    query = world.start(available_now=True, source={"maxOffsetsPerTrigger": 40})
    world.points.wait("initial")
    stopped = threading.Event()

    def go_on() -> None:
        # Produce slowly, because all of these messages are read in the end.
        while not stopped.wait(0.2):
            world.produce(5)

    producer = threading.Thread(target=go_on)
    producer.start()
    try:
        until(lambda: world.count("in") > 200, "producers are at work")
        world.points.release("initial")
        assert query.awaitTermination(60)
    finally:
        stopped.set()
        producer.join()
    assert world.count() == 150
    assert world.group_at() == {0: 50, 1: 50, 2: 50}
    # The next run reads the rest.
    world.run()
    world.judge()


@pytest.mark.nightly
def test_executors_in_processes_of_their_own(worlds: Callable[..., World], drivers: Callable[..., Driver]) -> None:
    """A query from source to sink with two executors, each of them a JVM with its own workers."""
    world = worlds()
    driver = drivers("local-cluster[2,1,1024]")
    world.produce(40)
    driver.start(**world.spec())
    world.wait_for(120, timeout=120)
    world.points.arm("write", "fail", after=10)
    world.produce(40)
    world.wait_for(240, timeout=120)

    def both_at_work() -> bool:
        # The second executor may start only after the first batches.
        world.produce(1)
        return len({event["pid"] for event in world.points.history() if event["event"] == "read"}) >= 2

    until(both_at_work, "both executors have read", 120)
    until(lambda: world.count() == world.count("in"), "all messages are processed")
    assert driver.stop()["failure"] is None
    world.judge()
