"""The progress of listeners over a real broker that is killed, with their driver and without it, in a long micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq.rocketmq.local.servers import Cluster
from tests.live.faults.drivers import Driver
from tests.live.faults.progress_storm import Storm, shown
from tests.live.rocketmq.test_key_storm import World

pytestmark = pytest.mark.spark


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    world = World(cluster, tmp_path, queues=1)
    yield world
    world.broker.close()


@pytest.mark.holds("orderly listener", "order per key", "concurrent listener", "async listener")
@pytest.mark.nightly
def test_a_listener_gets_nothing_below_its_progress_after_a_kill_of_its_broker_and_of_its_driver(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_both() -> None:
        driver.kill_all()
        world.restart_broker()

    storm = Storm(world, tmp_path / "calls", monkeypatch, calls_per_second=50, interval=1.0)
    storm.produce(2000)
    driver = Driver(tmp_path / "first", "local[4,4]")
    try:
        storm.start(driver)
        storm.wait_for_progress(100)
        world.restart_broker()
        # A broker writes its numbers to disk for the first time 10 s after its start, and then every 5 s.
        storm.wait_for_progress(1200)
        storm.kill(kill_both, forgets=True)
        after = Driver(tmp_path / "second", "local[4,4]")
        try:
            storm.start(after)
            storm.wait_for_end()
        finally:
            after.close()
    finally:
        driver.close()
    [counts] = storm.judge()
    print(f"\n{shown([counts])}")
    assert all(again < ended for again, ended in counts.values())
