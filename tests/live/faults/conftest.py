"""Each test gets a world: a store with topics ``in`` and ``out``, points, an observer of locks and offsets, and a final judgement."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import orderedmq
from orderedmq.broker import Broker, LockInfo
from orderedmq.embedded.check import check
from orderedmq.errors import GroupError
from orderedmq.model import MessageQueue
from tests import checker, evidence
from tests.live.faults import queries
from tests.live.faults.drivers import Driver
from tests.live.faults.faulty import FaultySource
from tests.live.faults.points import Points
from tests.live.faults.store_access import age, staged
from tests.waits import STEP, until

GROUP = "g"
#: Rows per RecordBatch of the source. Points count rows in these steps.
PULL = 10


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.spark)


class Observer:
    """Records changes of locks and group offsets. It runs in the test's process, so kills of other processes do not stop it."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = []
        #: The owner and the tenure of each queue of a group at the last look.
        self._tenures: dict[tuple[str, MessageQueue], tuple[str, int]] = {}
        self._path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        with orderedmq.connect(self._path) as broker:
            change = -1
            while not self._stopped.is_set():
                now = broker.log.change()
                if now is None or now == change:
                    self._stopped.wait(STEP)
                    continue
                change = now
                at = time.monotonic_ns()
                for lock in broker.admin.locks():
                    if self._reset(lock):
                        self._note({"event": "reset", "at": at, "group": lock.group})
                    if lock.held:
                        where = {"group": lock.group, "queue": str(lock.queue), "epoch": lock.epoch, "owner": lock.owner}
                        self._note({"event": "grant", "at": at, **where})
                for group in broker.admin.groups():
                    # The group may have been deleted since it was listed.
                    with contextlib.suppress(GroupError):
                        for event in checker.offsets(broker, group):
                            self._note({"at": at, **event})

    def _reset(self, lock: LockInfo) -> bool:
        """Whether the queue was reset since the last look: a new tenure began without a new owner."""
        owner, tenure = self._tenures.get((lock.group, lock.queue), (lock.owner, lock.tenure))
        self._tenures[lock.group, lock.queue] = lock.owner, lock.tenure
        return tenure != lock.tenure and lock.owner in ("", owner)

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)


class StoreWorld:
    """A store, with the actions and checks of a test."""

    group = GROUP

    def __init__(self, folder: Path, queues: int) -> None:
        self.folder = folder
        self.path = str(folder / "store")
        self.points = Points(folder / "points")
        self.points.folder.mkdir()
        self.broker: Broker = orderedmq.connect(self.path)
        for topic in ("in", "out"):
            self.broker.admin.create_topic(topic, queues)
        self.queues: list[MessageQueue] = self.broker.log.queues("in")
        self.observer = Observer(folder / "store")
        #: Objects with a method ``stop`` that the test has started.
        self._queries: list[Any] = []

    # -- actions ------------------------------------------------------------------------------------------------------------

    def produce(self, rows: int, topic: str = "in") -> None:
        """Append ``rows`` messages to each queue. The body is the queue and the offset, and no two queues share a key."""
        queues = self.broker.log.queues(topic)
        ends = {queue: at.max_offset for queue, at in self.broker.log.bounds(queues).items()}
        for queue in queues:
            places = range(ends[queue], ends[queue] + rows)
            bodies = [f"{queue}:{place}".encode() for place in places]
            keys = [f"{queue.queue_id}-{place % 7}" for place in places]
            self.broker.log.append({queue: pa.record_batch({"body": pa.array(bodies, pa.binary()), "sharding_key": keys})})

    def spec(self, checkpoint: str = "ck", **more: Any) -> dict[str, Any]:
        """The arguments that start a query of this world, in this process or in a separate driver."""
        source = {"pullBatchSize": PULL, "lockTimeout": "5s", **more.pop("source", {})}
        return {"path": self.path, "checkpoint": str(self.folder / checkpoint), "group": GROUP, "source": source, **more}

    def lives(self, life: float) -> None:
        """Make sources that connect from now on take locks that live ``life`` seconds and are not renewed.

        There are no renewals because a renewal is a write, and a process that is stopped during a write blocks all other writers.
        """
        self.points._write("lives", "json", {"life": life})

    def outlast(self, seconds: float, owner: str) -> None:
        """Age the locks and the membership of ``owner`` by ``seconds``."""
        age(self.path, owner, seconds)

    # -- observations -------------------------------------------------------------------------------------------------------

    def count(self, topic: str = "out") -> int:
        return sum(at.max_offset - at.min_offset for at in self.broker.log.bounds(self.broker.log.queues(topic)).values())

    def group_at(self, group: str = GROUP) -> dict[int, int]:
        return {queue.queue_id: at for queue, at in self.broker.groups.offsets(group, self.queues).items()}

    def wait_for(self, rows: int, topic: str = "out", timeout: float = 60.0) -> None:
        until(lambda: self.count(topic) >= rows, f"{rows} messages in {topic}", timeout)

    def wait_for_offset(self, offset: int, group: str = GROUP) -> None:
        """Wait until the group is at ``offset`` in every queue."""
        done = {queue.queue_id: offset for queue in self.queues}
        until(lambda: self.group_at(group) == done, f"group {group} at {offset}")

    def held(self, group: str = GROUP) -> list[Any]:
        return [lock for lock in self.broker.admin.locks(group) if lock.held]

    def tokens(self) -> int:
        """The number of attempts whose rows are staged and not published."""
        return staged(self.path)

    def log(self) -> str:
        """The warnings that the source and the sink logged."""
        file = self.points.folder / "log.txt"
        return file.read_text() if file.exists() else ""

    def judge(self, *more: dict[str, Any], drained: bool = True, group: str = GROUP) -> None:
        """Assert that ``out`` has all sent messages exactly once and in order, and that no offset or epoch decreased.

        With ``drained``, also assert that the group is at the end of every queue. `close` checks the store.
        """
        history = sorted([*self.observer.events, *self.points.history()], key=lambda event: event["at"])
        end = {"at": time.monotonic_ns()}
        dump = [*checker.sent(self.broker, "in"), *checker.delivered(self.broker, "out"), *checker.offsets(self.broker, group)]
        whole = [*more, *history, *({**event, **end} for event in dump)]
        anomalies = checker.judge(whole, drained=drained)
        evidence.note_history(self, whole, anomalies)
        assert anomalies == []
        if drained:
            ends = {queue.queue_id: at.max_offset for queue, at in self.broker.log.bounds(self.queues).items()}
            assert self.group_at(group) == ends

    def close(self) -> None:
        self.points.release_all()
        for query in self._queries:
            query.stop()
        self.observer.close()
        self.broker.close()
        assert check(Path(self.path)) == []


class World(StoreWorld):
    """A store, and Spark queries that read and write it."""

    def __init__(self, folder: Path, spark: SparkSession, queues: int) -> None:
        super().__init__(folder, queues)
        self.spark = spark

    def start(self, checkpoint: str = "ck", **more: Any) -> StreamingQuery:
        """Start a query in the Spark session of this process."""
        query = queries.start(self.spark, **self.spec(checkpoint, **more))
        self._queries.append(query)
        return query

    def run(self, checkpoint: str = "ck", **more: Any) -> None:
        """Run a query in this process until it has processed all current messages and ended."""
        query = self.start(checkpoint, available_now=True, **more)
        assert query.awaitTermination(60), "the query did not end"

    def fail(self, query: StreamingQuery, timeout: float = 60.0) -> str:
        """Wait until a query fails, and return the text of its error."""
        until(lambda: not query.isActive, "the query ends", timeout)
        failure = query.exception()
        assert failure is not None, "the query ended without a failure"
        return str(failure)


@pytest.fixture(scope="session")
def session(spark: SparkSession) -> SparkSession:
    """The Spark session of this process, with the data source of these tests registered."""
    spark.dataSource.register(FaultySource)
    return spark


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, session: SparkSession) -> Iterator[Callable[..., World]]:
    """A function that creates worlds. They are closed after the module's last test."""
    created: list[World] = []

    def make(queues: int = 3) -> World:
        created.append(World(tmp_path_factory.mktemp("world"), session, queues))
        return created[-1]

    yield make
    for world in created:
        world.close()


@pytest.fixture
def world(tmp_path: Path, session: SparkSession) -> Iterator[World]:
    world = World(tmp_path, session, 3)
    yield world
    world.close()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Driver]]:
    """A function that starts separate Spark drivers for tests that kill or stop them."""
    started: list[Driver] = []

    def make(master: str = "local[2]") -> Driver:
        started.append(Driver(tmp_path_factory.mktemp("driver"), master))
        return started[-1]

    yield make
    for driver in started:
        driver.close()


@pytest.fixture(scope="package")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A separate Spark driver that tests of all modules share, with up to four attempts per task.

    No test may kill it, and each test must stop its queries in it.
    """
    driver = Driver(tmp_path_factory.mktemp("driver"), "local[4,4]")
    yield driver
    driver.close()
