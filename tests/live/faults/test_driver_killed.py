"""kill -9 of a Spark driver at named points of a micro-batch. The restarted query's output is its input, once and in order.

One driver runs a query per case, each with its own store, until each query is held at its point. Then one kill ends them all. A
task or commit that is held at a point survives its driver and does not notice the driver's end. It continues after the restarted
query has ended, and must have no effect. A source runner continues immediately and finds its driver gone, unless it is paused: then
it still holds its queues while its query is restarted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, Final

import psutil
import pytest

from tests import checker
from tests.live.faults.conftest import World
from tests.live.faults.drivers import RUNNER, Driver, gone, send
from tests.waits import until

# The first test waits for the killed runs of all tests.
pytestmark = pytest.mark.timeout(400)

#: The points, and the number of rows after which a process is held there.
POINTS = {
    "logged": 0,
    "write": 20,
    "staged": 0,
    "publish": 0,
    "published": 0,
}
LATE = "publish, while the next run is at work"
#: Cases whose source runner is paused.
PAUSED = ("waited for", "expired")
SHARED: Final = {"source": {"assignment": "shared"}}
#: How many seconds a lock and a membership of a paused source runner live. No test waits for their end.
LIFE: Final = 1000.0


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

    def runner(self) -> psutil.Process:
        """The source runner of the killed run."""
        return psutil.Process(next(event["pid"] for event in self.world.points.history() if event["event"] == "entered"))

    def end_runner(self, how: int) -> None:
        """Send a signal to the paused source runner, and wait until it has ended."""
        runner = self.runner()
        send(runner, RUNNER, how)
        until(lambda: gone(runner.pid), "the former run's source runner ends")

    def restart(self, **source: str) -> Any:
        return self.world.start(source={**self.more["source"], **source})

    def is_exact(self, query: Any) -> None:
        """Assert that the restarted query repeats the batch and reads later messages."""
        self.world.wait_for(261)
        self.world.wait_for_offset(87)
        query.stop()
        self.world.judge()


@pytest.fixture(scope="module")
def killed(worlds: Callable[..., World], drivers: Callable[..., Driver], nightly: bool) -> Iterator[dict[str, Killed]]:
    # A held task keeps its core: those of the cases "write" and "staged".
    driver = drivers("local[4]")
    cases = {name: Killed(worlds(), name.partition(",")[0]) for name in (*POINTS, LATE)}
    foreign = worlds()
    cases["appended"] = Killed(foreign, "appended", sink=f"parquet:{foreign.folder / 'table'}")
    paused = {name: Killed(worlds(), "publish", **SHARED) for name in PAUSED}
    if nightly:
        paused |= {f"{name}, exclusive": Killed(worlds(), "publish", source={}) for name in PAUSED}
    for case in paused.values():
        case.world.lives(LIFE)
    cases |= paused
    for case in cases.values():
        case.start(driver)
    for case in cases.values():
        case.catch()
    for case in paused.values():
        send(case.runner(), RUNNER, signal.SIGSTOP)
    driver.kill_jvm()
    cases["logged"].let_go()
    yield cases
    for case in cases.values():
        case.world.points.release_all()


@pytest.mark.fault("killed process", "embedded")
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
    if point != "logged":
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


@pytest.mark.fault("killed process", "embedded")
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


@pytest.mark.fault("paused process", "embedded")
@pytest.mark.holds("former run")
@pytest.mark.parametrize("name", ["waited for", pytest.param("waited for, exclusive", marks=pytest.mark.nightly)])
def test_a_restart_waits_for_a_paused_former_run_and_goes_on_by_itself_when_that_ends(
    name: str, killed: dict[str, Killed]
) -> None:
    case = killed[name]
    text = case.world.fail(case.restart(lockTimeout="1s"))
    assert "another run of this same query" in text
    assert "the query was started twice on one checkpointLocation" in text
    assert case.world.count() == 90, "no message of the batch may be published"
    assert case.world.group_at() == {0: 30, 1: 30, 2: 30}
    warnings = case.world.log().count("another run of this same query")
    query = case.restart(lockTimeout="120s")
    # An exclusive query waits for locks, without a warning.
    if case.more == SHARED:
        until(
            lambda: case.world.log().count("another run of this same query") > warnings,
            "the restarted query warns that it waits for the former run",
        )
    case.end_runner(signal.SIGKILL)
    case.is_exact(query)


@pytest.mark.fault("paused process", "embedded")
@pytest.mark.parametrize("name", ["expired", pytest.param("expired, exclusive", marks=pytest.mark.nightly)])
def test_a_former_run_that_is_paused_for_longer_than_its_locks_live_is_replaced(name: str, killed: dict[str, Killed]) -> None:
    case = killed[name]
    (owner,) = {lock.owner for lock in case.world.held()}
    case.world.outlast(LIFE, owner)
    assert all(lock.alive and lock.remaining == 0 for lock in case.world.held())
    case.is_exact(case.restart())
    # The former run continues after the restart and changes nothing.
    before = case.world.group_at()
    case.end_runner(signal.SIGCONT)
    assert case.world.group_at() == before
    case.world.produce(3)
    case.world.run(**case.more)
    case.world.judge()
