"""Listeners of each kind whose workers and driver are killed in a long micro-batch get only the messages above their progress again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orderedmq.broker import PROGRESS_INTERVAL
from tests.live.faults.conftest import World
from tests.live.faults.drivers import Driver
from tests.live.faults.progress_storm import Storm, shown

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    return worlds(queues=1)


@pytest.mark.holds("orderly listener", "order per key", "concurrent listener", "async listener")
def test_a_listener_gets_nothing_below_its_progress_after_a_kill_of_its_workers_and_of_its_driver(
    world: World, drivers: Callable[..., Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm = Storm(world, tmp_path / "calls", monkeypatch, calls_per_second=100, interval=0.5)
    storm.produce(500)
    driver = drivers("local[4,4]")
    storm.start(driver)
    storm.wait_for_progress(100)
    storm.kill(lambda: storm.kill_workers(driver))
    storm.wait_for_progress(200)
    storm.kill(driver.kill_all)
    storm.start(drivers("local[4,4]"))
    storm.wait_for_end()
    print(f"\n{shown(storm.judge())}")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seconds", "moment"), [(60, 0.4), (300, 0.7), (600, 0.75)])
def test_a_kill_in_a_long_micro_batch_repeats_seconds_of_calls(
    world: World,
    drivers: Callable[..., Driver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    moment: float,
) -> None:
    """``seconds``: how long the micro-batch would run. ``moment``: the part of it after which the driver is killed."""
    storm = Storm(world, tmp_path / "calls", monkeypatch, calls_per_second=100, interval=PROGRESS_INTERVAL)
    storm.produce(100 * seconds)
    driver = drivers("local[4]")
    storm.start(driver)
    storm.wait_for_seconds(moment * seconds)
    storm.kill(driver.kill_all)
    storm.start(drivers("local[4]"))
    storm.wait_for_news()
    counts = storm.judge()
    print(f"\na micro-batch of {seconds} s, killed after {moment * seconds:.0f} s: {shown(counts)}")
    # A busy machine may record a few seconds late.
    assert all(again <= 100 * (PROGRESS_INTERVAL + 5) for again, _ in counts[0].values())
