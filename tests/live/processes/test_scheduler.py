"""Queries must survive when Spark starts a task twice, and when executors end and come back, are lost or are decommissioned.

The cluster is Spark's own, on this machine. Its two workers have different host names, because Spark starts the second attempt of
a slow task only on another host.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests import event_log
from tests.live.faults.conftest import StoreWorld
from tests.live.faults.drivers import ROOT, Driver, Refused, gone
from tests.live.faults.key_listener import CALLS, at_work
from tests.standalone import Standalone
from tests.waits import until

pytestmark = [pytest.mark.nightly, pytest.mark.spark, pytest.mark.timeout(900)]

QUEUES: Final = 4
#: The number of messages in each queue, for listeners. A task for a queue takes two seconds.
MESSAGES: Final = 100
LISTENER: Final = {"suspend_current_queue_time_millis": 10}


class Rig(StoreWorld):
    """A store, a cluster, and the logged calls of listeners."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, QUEUES)
        self.calls = folder / "calls"
        self.calls.mkdir()
        self.cluster = Standalone(folder / "cluster", ("127.0.0.1", "127.0.0.2"), {"spark.decommission.enabled": "true"})

    @contextmanager
    def driver(self, settings: Mapping[str, str] | None = None) -> Iterator[Driver]:
        """A driver whose first task waits for both executors, unless ``settings`` say otherwise."""
        given = {
            "spark.driver.host": "127.0.0.1",
            "spark.cores.max": "2",
            "spark.executor.memory": "512m",
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            f"spark.executorEnv.{CALLS}": str(self.calls),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
            **(settings or {}),
        }
        driver = Driver(self.folder / "driver", self.cluster.url, given)
        try:
            yield driver
        finally:
            self.points.release_all()
            driver.close()

    def listen(self, driver: Driver, **more: Any) -> None:
        driver.start(**self.spec(sink="noop", listener=LISTENER, source={"includeLockToken": "true"}, **more))

    def through(self, driver: Driver, done: Callable[[], Any], what: str) -> None:
        def there() -> Any:
            state = driver.state()
            assert state["active"], state["failure"]
            return done()

        until(there, what, 180.0)

    def has(self, rows: int) -> bool:
        """Whether the sink has this number of messages for each queue."""
        return self.count() >= QUEUES * rows

    def told(self, event: str) -> int:
        """The number of times that the processes of queries reported an event."""
        return sum(entry["event"] == event for entry in self.points.history())

    def accepted(self) -> dict[str, list[tuple[int, int]]]:
        """For each queue, the offset and process of each message that a listener accepted, in order of time."""
        calls_by_queue: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for call in event_log.read(self.calls):
            if call["ok"]:
                calls_by_queue[call["queue"]] += [(offset, call["pid"]) for offset in call["offsets"]]
        return calls_by_queue

    def of_executors(self) -> dict[psutil.Process, set[int]]:
        """The ids of the processes below each executor."""
        return {
            executor: {process.pid for process in executor.children(recursive=True)} for executor in self.cluster.executors()
        }

    def executor_of(self, pid: int) -> psutil.Process:
        return next(executor for executor, below in self.of_executors().items() if pid in below)

    def close(self) -> None:
        self.cluster.close()
        super().close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def repeated(calls: Sequence[tuple[int, int]]) -> int:
    """Return how many messages were accepted again. Assert that none was overtaken and that a repeat begins at the first message."""
    at, again = 0, list[int]()
    for offset, _ in calls:
        assert offset <= at, f"offset {offset} was accepted before {at}"
        if offset < at:
            again.append(offset)
        at = max(at, offset + 1)
    assert at == MESSAGES
    assert again == list(range(len(again)))
    return len(again)


def held_in_turn(rig: Rig, driver: Driver) -> Iterator[tuple[str, int, int]]:
    """Start a query, and hold a task in three micro-batches: while it reads, while it writes, and after it has staged rows.

    Yields the point, the number of messages in each queue so far, and the id of the task's process.
    """
    messages = 30
    rig.produce(messages)
    driver.start(**rig.spec())
    rig.wait_for(QUEUES * messages, timeout=180)
    for point, after in {"read": 20, "write": 20, "staged": 0}.items():
        rig.points.arm(point, after=after)
        rig.produce(40)
        messages += 40
        yield point, messages, rig.points.wait(point)


@pytest.mark.holds("executors come and go")
def test_with_speculation_each_row_is_in_the_sink_once_and_a_listener_is_refused(rig: Rig) -> None:
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.5",
        # Even on a busy machine, only a held task takes so long.
        "spark.speculation.minTaskRuntime": "5s",
    }
    with rig.driver(speculation) as driver:
        for _, messages, first in held_in_turn(rig, driver):
            rig.through(driver, partial(rig.has, messages), f"{messages} messages of each queue")
            until(partial(gone, first), "Spark ends the first attempt", 30.0)
        rig.wait_for_offset(30 + 3 * 40)
        rig.judge()
        until(lambda: rig.tokens() == 0, "the staged rows of the first attempts are deleted")
        reads = Counter((event["batch"], event["queue"]) for event in rig.points.history() if event["event"] == "read")
        assert sorted(reads.values())[-4:] == [1, 2, 2, 2]
        with pytest.raises(Refused, match=r"UNSUPPORTED\] consume_orderly .*with spark.speculation=false"):
            rig.listen(driver, query="l", checkpoint="ck-l", group="l")


@pytest.mark.holds("executors come and go")
def test_executors_that_come_back_after_an_idle_time_go_on_under_the_same_locks(rig: Rig) -> None:
    dynamic = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
        "spark.executor.cores": "1",
        "spark.scheduler.minRegisteredResourcesRatio": "0",
    }
    with rig.driver(dynamic) as driver:
        driver.start(**rig.spec())
        seen = set[int]()
        for number in range(1, 4):
            rig.produce(30)
            rig.through(driver, partial(rig.has, 30 * number), f"{30 * number} messages of each queue")
            pids = {one.pid for one in rig.cluster.executors()}
            assert not pids & seen
            seen |= pids
            rig.through(driver, lambda: not rig.cluster.executors(), "no executor is left")
        rig.wait_for_offset(3 * 30)
        rig.judge()
        grants = {(event["queue"], event["epoch"]) for event in rig.observer.events if event["event"] == "grant"}
        assert len(grants) == QUEUES


@pytest.mark.holds("executors come and go")
def test_a_killed_executors_tasks_run_again_and_each_row_is_in_the_sink_once(rig: Rig) -> None:
    with rig.driver() as driver:
        for point, messages, held in held_in_turn(rig, driver):
            rig.executor_of(held).kill()
            rig.points.release(point)
            rig.through(driver, partial(rig.has, messages), f"{messages} messages of each queue")
        rig.wait_for_offset(30 + 3 * 40)
        rig.judge()
        until(lambda: rig.tokens() == 0, "the staged rows of the killed attempts are deleted")


@pytest.mark.holds("lost executor")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_listener_sees_the_messages_of_a_killed_executors_tasks_again(shuffle: bool, rig: Rig) -> None:
    """With a shuffle after the listener, the listener also gets the messages of tasks that the executor had finished."""

    def in_second_task() -> tuple[psutil.Process, str, str] | None:
        """Return an executor that has finished one queue and is in the middle of a second one, and return the two queues."""
        accepted = rig.accepted()
        for executor, below in rig.of_executors().items():
            here = {queue: sum(pid in below for _, pid in calls) for queue, calls in accepted.items()}
            done = [queue for queue, calls in here.items() if calls == MESSAGES]
            half = [queue for queue, calls in here.items() if 10 < calls < MESSAGES // 2]
            if done and half:
                return executor, done[0], half[0]
        return None

    with rig.driver() as driver:
        rig.produce(MESSAGES)
        rig.listen(driver, shuffle=shuffle)
        executor, done, half = until(in_second_task, "an executor is in its second task", 180.0)
        executor.kill()
        rig.wait_for_offset(MESSAGES)
        assert driver.stop()["failure"] is None
    again = {queue: repeated(calls) for queue, calls in rig.accepted().items()}
    assert again.pop(half) > 10
    assert again.pop(done) == (MESSAGES if shuffle else 0)
    assert set(again.values()) == {0}


@pytest.mark.holds("executors come and go", "lost executor")
def test_a_decommissioned_executor_finishes_its_task(rig: Rig) -> None:
    with rig.driver({"spark.decommission.enabled": "true"}) as driver:
        rig.points.arm("write", after=20)
        rig.produce(MESSAGES)
        driver.start(**rig.spec())
        executor = rig.executor_of(rig.points.wait("write", timeout=180.0))
        # Send the signal that Kubernetes sends.
        executor.send_signal(signal.SIGPWR)
        rig.through(driver, lambda: rig.told("staged") == QUEUES - 1, "the other executor runs the other tasks")
        rig.points.release("write")
        rig.through(driver, lambda: gone(executor.pid), "the executor ends by itself")
        rig.wait_for_offset(MESSAGES)
        assert rig.told("read") == rig.told("staged") == QUEUES
        assert driver.stop()["failure"] is None
        rig.judge()

        rig.listen(driver, group="l", checkpoint="ck-l")
        executor = rig.executor_of(until(lambda: at_work(rig.calls), "a listener is running", 180.0))
        worker = next(one for one in rig.cluster.workers if executor in psutil.Process(one.pid).children(recursive=True))
        worker.send_signal(signal.SIGPWR)
        rig.through(driver, lambda: gone(executor.pid), "the executor ends by itself")
        assert not any(rig.group_at("l").values()), "the micro-batch must still be running"
        rig.wait_for_offset(MESSAGES, group="l")
        assert driver.stop()["failure"] is None
    assert {queue: repeated(calls) for queue, calls in rig.accepted().items()} == {str(queue): 0 for queue in rig.queues}
