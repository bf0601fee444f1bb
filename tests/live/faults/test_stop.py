"""Stops between two micro-batches. tests/loop/test_stop_requests.py has the other cases."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from ordered_source import stop_at_boundary
from tests.live.faults.conftest import GROUP, World
from tests.live.faults.drivers import JVM, Driver, gone, send
from tests.waits import until


@pytest.mark.holds("stop at a boundary")
def test_a_query_that_stops_at_a_boundary_finishes_its_batch_and_its_queues_are_free_at_once(world: World) -> None:
    world.produce(10)
    first = world.start()
    world.wait_for(30)
    world.points.arm("write", after=5)
    world.produce(10)
    world.points.wait("write")
    # These messages are for another batch, which is not planned because the query stops before it.
    world.produce(10)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(stop_at_boundary(first)))
    stopping.start()
    time.sleep(0.5)
    assert first.isActive, "the query must run until its batch is done"
    world.points.release("write")
    stopping.join(90)
    assert stopped == [True]
    assert not first.isActive
    assert not world.held()
    assert world.broker.groups.members(GROUP) == []
    assert world.count() == 60
    world.run("ck2", source={"lockTimeout": "0"})
    world.produce(10)
    world.run(source={"lockTimeout": "0"})
    world.judge()


@pytest.mark.holds("stop at a boundary")
@pytest.mark.nightly
@pytest.mark.parametrize("whom", ["python", "python that waits for its query", "java"])
def test_an_application_stops_its_queries_at_a_boundary_after_sigterm(whom: str, world: World, tmp_path: Path) -> None:
    driver = Driver(tmp_path / "driver")
    try:
        driver.stop_on_sigterm()
        world.produce(10)
        driver.start(**world.spec())
        world.wait_for(30)
        world.points.arm("write", after=5)
        world.produce(10)
        world.points.wait("write")
        if "waits" in whom:
            driver.wait_for_its_query()
        kind = JVM if whom == "java" else "tests.live.faults.job"
        [process] = driver.of_kind(kind)
        send(process, kind, signal.SIGTERM)
        time.sleep(1.0)
        assert process.is_running(), "the program must run until its batch is done"
        world.points.release("write")
        until(lambda: gone(process.pid), "the program has ended")
        assert not world.held()
        assert "was stopped between two micro-batches" in world.log() + driver.errors.read_text()
        if whom != "java":
            until(lambda: driver.code is not None, "the Python driver has ended")
            assert (driver.code, "Traceback" in driver.errors.read_text()) == (143, False), driver.errors.read_text()
    finally:
        driver.close()
    world.run(source={"lockTimeout": "0"})
    world.judge()
