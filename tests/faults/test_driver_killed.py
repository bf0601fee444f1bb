"""kill -9 of a Spark driver at named points of a micro-batch. The restarted query's output is its input, once and in order.

One driver runs a query per point, each with its own store, until each query is held at its point. Then one kill ends them all. A
task or commit that is held at a point survives its driver and does not notice the driver's end. It continues after the restarted
query has ended, and must have no effect. A source runner continues immediately and finds its driver gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import checker
from tests.faults.conftest import World
from tests.faults.drivers import Driver, gone
from tests.waits import until

# The first test waits for the killed runs of all tests.
pytestmark = pytest.mark.timeout(400)

#: The points, and the number of rows after which a process is held there.
POINTS = {
    "planned": 0,
    "logged": 0,
    "read": 20,
    "write": 20,
    "staged": 0,
    "publish": 0,
    "published": 0,
}
IN_RUNNER = ("planned", "logged")
LATE = "publish, while the next run is at work"


class Killed:
    """A world whose driver was killed, and the process that is still held at its point."""

    def __init__(self, world: World, point: str, **more: Any) -> None:
        self.world = world
        self.point = point
        self.more = more
        self.pid = 0

    def start(self, driver: Driver) -> None:
        self.world.produce(30)
        driver.start(str(self.world.folder), **self.world.spec(**self.more))
        # Wait for each query before starting the next: Spark gives a Python process 10 s to start.
        self.world.wait_for_offset(30)

    def catch(self) -> None:
        """Hold the second batch at the point, and produce messages for a third one."""
        self.world.points.arm(self.point, after=POINTS.get(self.point, 0))
        self.world.produce(50)
        self.pid = self.world.points.wait(self.point)
        self.world.produce(7)

    def let_go(self) -> None:
        """Let the held process of the killed run continue, and wait until it has ended."""
        self.world.points.release(self.point)
        until(lambda: gone(self.pid), f"process {self.pid} of the killed run ends")

    def last_words(self) -> dict[str, Any]:
        return [event for event in self.world.points.history() if event.get("pid") == self.pid][-1]


@pytest.fixture(scope="module")
def killed(worlds: Callable[..., World], drivers: Callable[..., Driver]) -> Iterator[dict[str, Killed]]:
    # Use eight cores, because a held task keeps its core.
    driver = drivers("local[8]")
    cases = {name: Killed(worlds(), name.partition(",")[0]) for name in (*POINTS, LATE)}
    foreign = worlds()
    cases["appended"] = Killed(foreign, "appended", sink=f"parquet:{foreign.folder / 'table'}")
    for case in cases.values():
        case.start(driver)
    for case in cases.values():
        case.catch()
    driver.kill_jvm()
    for name in IN_RUNNER:
        cases[name].let_go()
    yield cases
    for case in cases.values():
        case.world.points.release_all()


@pytest.mark.holds("source to sink once")
@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_in_a_batch_is_replaced_without_loss_or_repeat(point: str, killed: dict[str, Killed]) -> None:
    case = killed[point]
    world = case.world
    # With a slow producer the batch may have the rows of only some queues, but always all rows of a queue.
    seen = (140, 190, 240) if point == "published" else (90,)
    assert world.count() in seen, "the batch was published too early, or not at all"
    world.run()
    assert world.count() == 261
    if point not in IN_RUNNER:
        case.let_go()
    if point == "publish":
        words = case.last_words()
        assert (words["event"], words["accepted"], words["replayed"]) == ("publish", True, True), (
            "the repeated commit must be accepted as already done"
        )
    assert world.count() == 261
    world.judge()
    if point in ("write", "staged"):
        # The next batch sweeps all rows that the killed run staged, including rows that it staged after the restart.
        world.produce(1)
        world.run()
        world.judge()
    assert world.tokens() == 0


@pytest.mark.holds("source to sink once")
def test_a_late_commit_of_the_killed_run_is_refused_while_the_next_run_is_at_work(killed: dict[str, Killed]) -> None:
    case = killed[LATE]
    world = case.world
    world.points.arm("write", after=50)
    query = world.start(available_now=True)
    world.points.wait("write")
    assert world.count() == 90
    case.let_go()
    words = case.last_words()
    assert (words["event"], words["accepted"]) == ("publish", False)
    assert "ORDEREDMQ_LOCK.LOST" in words["error"]
    assert world.count() == 90
    world.points.release("write")
    assert query.awaitTermination(60)
    world.judge()


@pytest.mark.holds("other sinks")
def test_another_sink_gets_the_last_batch_again_as_a_whole_and_nothing_else(killed: dict[str, Killed]) -> None:
    case = killed["appended"]
    world = case.world
    assert world.group_at() == {0: 30, 1: 30, 2: 30}, "the group must not be beyond the offsets that Spark has committed"
    world.run(**case.more)
    table = [row.asDict() for row in world.spark.read.parquet(str(world.folder / "table")).collect()]
    deliveries = []
    for at, batch in sorted({(row["at"], row["batch"]) for row in table}):
        rows = [row["keys"].rpartition(":") for row in table if row["at"] == at]
        places = sorted((queue, int(offset)) for queue, _, offset in rows)
        own = {f"{row['keys']}": (row["sharding_key"], row["body"].decode()) for row in table if row["at"] == at}
        out = [[queue, offset, *own[f"{queue}:{offset}"]] for queue, offset in places]
        deliveries.append({"event": "deliver", "lane": "table", "batch": batch, "rows": out})
    assert [delivery["batch"] for delivery in deliveries] == [0, 1, 1, 2]
    history = [*checker.sent(world.broker, "in"), *deliveries, *checker.offsets(world.broker, "g")]
    assert checker.judge(history, repeats=True) == []
    assert {anomaly.kind for anomaly in checker.judge(history)} == {"duplicate"}
    assert world.group_at() == {0: 87, 1: 87, 2: 87}
