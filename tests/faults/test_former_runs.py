"""Restarts of a query whose former run still holds its queues: it is paused, dies slowly, or the job was started twice.

One driver runs a query per case, each with its own store, until all queries are in the middle of a batch. Then the source runners
are stopped and the driver is killed. Now the batch is logged but not processed, and the locks have an owner that is alive.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import psutil
import pytest

from tests.faults.conftest import World
from tests.faults.drivers import RUNNER, Driver, gone, send
from tests.waits import until

# The first test waits for the former runs of all tests.
pytestmark = pytest.mark.timeout(400)

SHARED: Final = {"assignment": "shared"}
#: How many seconds a lock and a membership live in tests that wait for their end.
LIFE: Final = 4.0


@pytest.fixture(scope="module")
def driver(drivers: Callable[..., Driver]) -> Driver:
    """The Spark driver of all first runs. Tests that do not kill it come first. Eight cores suffice for all held tasks."""
    return drivers("local[8]")


@pytest.mark.holds("former run")
@pytest.mark.parametrize("source", [SHARED, pytest.param({}, marks=pytest.mark.nightly)], ids=["shared", "exclusive"])
def test_a_job_that_is_started_twice_on_one_checkpoint_is_refused_and_the_first_goes_on(
    source: dict[str, str], world: World, driver: Driver
) -> None:
    world.produce(30)
    driver.start("first", **world.spec(source=source))
    world.wait_for_offset(30)
    before = world.held()

    def second_is_refused() -> None:
        text = world.fail(world.start(source={**source, "lockTimeout": "1s"}))
        assert "another run of this same query" in text
        assert [lock.epoch for lock in world.held()] == [lock.epoch for lock in before]

    second_is_refused()
    world.points.arm("publish")
    world.produce(20)
    world.points.wait("publish")
    second_is_refused()
    world.points.release("publish")
    world.wait_for(150)
    world.produce(10)
    world.wait_for(180)
    assert driver.stop("first")["failure"] is None
    world.judge()


@dataclass
class Former:
    """A world whose query was killed in a batch of 60 messages, and the query's source runner, which is stopped."""

    world: World
    source: dict[str, str]
    runner: psutil.Process

    def restart(self, **source: str) -> Any:
        return self.world.start(source={**self.source, **source})

    def is_refused(self) -> None:
        text = self.world.fail(self.restart(lockTimeout="1s"))
        assert "another run of this same query" in text
        assert "the query was started twice on one checkpointLocation" in text
        assert self.world.count() == 90, "no message of the batch may be published"
        assert self.world.group_at() == {0: 30, 1: 30, 2: 30}

    def goes_on(self) -> None:
        """Assert that the restarted query repeats the batch and reads later messages."""
        query = self.restart()
        self.world.wait_for(171)
        self.world.wait_for_offset(57)
        query.stop()
        self.world.judge()


@pytest.fixture(scope="module")
def former(worlds: Callable[..., World], driver: Driver, nightly: bool) -> Iterator[dict[str, Former]]:
    cases = {
        "killed": SHARED,
        "resumed": SHARED,
        "patient": SHARED,
        "expired": SHARED,
    }
    if nightly:
        cases |= {"killed, exclusive": {}, "expired, exclusive": {}}
    made: dict[str, World] = {}
    for name, source in cases.items():
        world = made[name] = worlds()
        # Locks are short only in tests that wait for them to expire. In the other tests, locks must not expire before the test runs.
        world.lives(LIFE if "expired" in name else 1000)
        world.produce(30)
        driver.start(name, **world.spec(source=source))
        world.wait_for_offset(30)
    for world in made.values():
        world.points.arm("publish")
        world.produce(20)
        world.points.wait("publish")
        world.produce(7)
    runners = {process.pid: process for process in driver.of_kind(RUNNER)}
    driver.pause(RUNNER)
    driver.kill_jvm()
    found: dict[str, Former] = {}
    for name, world in made.items():
        (pid,) = {event["pid"] for event in world.points.history() if event["event"] == "entered"}
        found[name] = Former(world, dict(cases[name]), runners[pid])
    yield found
    for world in made.values():
        world.points.release_all()


def ended(case: Former, how: int) -> None:
    send(case.runner, RUNNER, how)
    until(lambda: gone(case.runner.pid), "the former run's source runner ends")


@pytest.mark.holds("former run")
@pytest.mark.parametrize("name", ["killed", pytest.param("killed, exclusive", marks=pytest.mark.nightly)])
def test_a_restart_waits_for_a_paused_former_run_and_loses_nothing_when_that_is_killed(
    name: str, former: dict[str, Former]
) -> None:
    case = former[name]
    case.is_refused()
    ended(case, signal.SIGKILL)
    case.goes_on()


def test_a_former_run_that_goes_on_finds_its_driver_gone_and_leaves_its_batch_to_the_restart(former: dict[str, Former]) -> None:
    case = former["resumed"]
    case.is_refused()
    ended(case, signal.SIGCONT)
    case.goes_on()


@pytest.mark.parametrize("name", ["expired", pytest.param("expired, exclusive", marks=pytest.mark.nightly)])
def test_a_former_run_that_is_paused_for_longer_than_its_locks_live_is_replaced(name: str, former: dict[str, Former]) -> None:
    case = former[name]
    until(lambda: all(lock.remaining == 0 for lock in case.world.held()), "the locks of the former run expire")
    assert all(lock.alive for lock in case.world.held())
    case.goes_on()
    # The former run continues after the restart and changes nothing.
    before = case.world.group_at()
    ended(case, signal.SIGCONT)
    assert case.world.group_at() == before
    case.world.produce(3)
    case.world.run(source=case.source)
    case.world.judge()


def test_a_restart_goes_on_by_itself_when_the_former_run_ends_within_its_patience(former: dict[str, Former]) -> None:
    case = former["patient"]
    query = case.restart(lockTimeout="120s")
    until(
        lambda: "another run of this same query" in case.world.log(),
        "the restarted query warns that it waits for the former run",
    )
    ended(case, signal.SIGKILL)
    case.world.wait_for(171)
    case.world.wait_for_offset(57)
    query.stop()
    case.world.judge()
