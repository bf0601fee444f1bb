"""Changes while a query runs: active producers, added queues, executors in other processes or on another machine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests import checker
from tests.faults.conftest import World
from tests.faults.drivers import WORKER, Driver, kill_below
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


def test_an_executor_that_sees_another_store_says_that_a_store_serves_one_machine(world: World) -> None:
    world.produce(10)
    elsewhere = world.points.folder / "elsewhere"
    elsewhere.touch()
    text = world.fail(world.start())
    assert (
        f"[ORDEREDMQ_STORE.OTHER_MACHINE] the query was planned with a store at {world.path}, but there is another store"
        in text
    )
    assert "the embedded broker serves only one machine. Use namesrvAddr" in text
    elsewhere.unlink()
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


def test_without_a_group_a_batch_that_the_sink_has_is_not_repeated(world: World) -> None:
    """A query without a group has no locks to lose. Its checkpoint and the batches recorded by the sink are enough."""
    world.produce(20)
    source = {"messageModel": "broadcasting", "startingOffsets": "earliest"}
    world.points.arm("published")
    query = world.start(group=None, source=source)
    kill_below(world.points.wait("published"), WORKER)
    world.fail(query)
    assert world.count() == 60
    world.produce(10)
    world.run(group=None, source=source)
    history = [*checker.sent(world.broker, "in"), *checker.delivered(world.broker, "out")]
    assert checker.judge(history) == []
    assert world.held() == []
    assert world.broker.admin.groups() == []
