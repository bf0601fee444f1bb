"""kill -9 of workers, and failing tasks: after a retry or a restart, nothing is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.faults.conftest import World
from tests.faults.drivers import WORKER, Driver, kill_below
from tests.waits import until


def test_a_worker_killed_without_retries_fails_the_query_and_its_restart_is_exact(world: World) -> None:
    world.produce(30)
    query = world.start()
    world.wait_for(90)
    world.points.arm("write", after=20)
    world.produce(40)
    kill_below(world.points.wait("write"), WORKER)
    assert "Python worker exited unexpectedly" in world.fail(query)
    assert world.count() == 90
    world.run()
    world.judge()
    assert world.tokens() == 0


class Retrying(NamedTuple):
    driver: Driver
    world: World


@pytest.fixture(scope="module")
def retrying(worlds: Callable[..., World], lasting: Driver) -> Iterator[Retrying]:
    """A query that runs through all tests below, with up to four attempts per task."""
    world = worlds()
    lasting.start("retrying", **world.spec())
    yield Retrying(lasting, world)
    assert lasting.stop("retrying")["failure"] is None


@pytest.mark.holds("same key, same queue")
@pytest.mark.parametrize("point", ["read", "write", "staged"])
def test_a_worker_killed_with_retries_is_made_good_in_the_same_batch(point: str, retrying: Retrying) -> None:
    driver, world = retrying
    before = world.count()
    world.points.arm(point, after=0 if point == "staged" else 20)
    world.produce(40)
    kill_below(world.points.wait(point), WORKER)
    world.wait_for(before + 120)
    world.judge()
    until(lambda: world.tokens() == 0, "the staged rows of the killed attempt are deleted")
    assert driver.state("retrying")["active"]


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.nightly), 20, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("point", ["read", "write"])
def test_a_task_that_fails_on_its_first_attempt_counts_once(point: str, after: int, retrying: Retrying) -> None:
    _, world = retrying
    before = world.count()
    world.points.arm(point, "fail", after=after)
    world.produce(40)
    world.points.wait(point)
    world.wait_for(before + 120)
    world.judge()
    until(lambda: world.tokens() == 0, "the staged rows of the failed attempt are deleted")
