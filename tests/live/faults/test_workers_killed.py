"""kill -9 of workers: after a retry, nothing is lost or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.live.faults.conftest import World
from tests.live.faults.drivers import WORKER, Driver, kill_below
from tests.waits import until


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


@pytest.mark.fault("killed process", "embedded")
@pytest.mark.holds("same key, same queue")
@pytest.mark.parametrize("point", ["read", "write", "staged"])
def test_the_task_of_a_killed_worker_is_retried_in_the_same_batch(point: str, retrying: Retrying) -> None:
    driver, world = retrying
    before = world.count()
    world.points.arm(point, after=0 if point == "staged" else 20)
    world.produce(40)
    kill_below(world.points.wait(point), WORKER)
    world.wait_for(before + 120)
    world.judge()
    until(lambda: world.tokens() == 0, "the staged rows of the killed attempt are deleted")
    assert driver.state("retrying")["active"]
