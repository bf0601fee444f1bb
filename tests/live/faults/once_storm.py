"""A storm over tables that get each message once: two queries share a group and append to the same tables, while their drivers are killed,
paused until the other query has their queues, and continued.

`OnceStorm` works with any world that has a broker, like `key_storm.Storm`.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from orderedmq.model import MessageQueue
from tests import evidence
from tests.live.faults.drivers import JVM, RUNNER, WORKER, Driver
from tests.live.faults.key_storm import StormWorld
from tests.live.faults.once_loop import LoopDriver
from tests.live.faults.once_tables import Tables
from tests.waits import until

EVERYTHING: Final = ("tests.live.faults.job", JVM, RUNNER, WORKER)
#: Messages that are appended at once, for two micro-batches.
_MESSAGES: Final = 120


class OnceStorm:
    """``expire``: makes the locks of paused queries older than their life. ``driver``: a process with a query, with or without Spark."""

    def __init__(
        self,
        world: StormWorld,
        database: str | None,
        expire: Callable[[], None],
        driver: type[Driver] | type[LoopDriver] = Driver,
    ) -> None:
        self._world, self._database, self._expire, self._kind = world, database, expire, driver
        self._tables = Tables(world.folder / "tables", database)
        self._tables.create()
        self._drivers: list[Driver | LoopDriver] = []
        #: A driver without a query, which takes the place of the next one that is killed. It starts while the storm goes on.
        self._spare: Future[Driver | LoopDriver]
        self._pool = ThreadPoolExecutor(1, "spare")
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Kill 50 drivers, and ten more whose queues the other query gets, and pause 20. With Spark, a quarter of that. Then judge.

        A driver of Spark takes a minute of a small machine that has other work, so all 80 take an hour.
        """
        part = 4 if self._kind is Driver else 1
        steps = [self._kill] * (50 // part) + [self._take_over] * (10 // part) + [self._pause] * (20 // part)
        draw = random.Random(len(steps))
        draw.shuffle(steps)
        self._spare = self._pool.submit(self._driver)
        try:
            self._drivers = [self._driver(), self._driver()]
            for member in (0, 1):
                self._start(member)
            until(lambda: len(self._owners()) == 2, "both queries own queues", 300)
            for step in steps:
                self._restart_failed((0, 1))
                self._produce()
                # Any moment of a micro-batch.
                time.sleep(draw.random() * 2)
                step(draw.randrange(2))
            until(lambda: self._processed(self._ends(), 0, 1), "all messages are processed", 300)
            for driver in self._drivers:
                driver.stop()
        finally:
            for driver in (*self._drivers, self._spare.result()):
                driver.close()
            self._pool.shutdown()
        self.judge()

    def judge(self) -> None:
        """Assert that each table has each message once, those of a queue in their order."""
        ends = {queue.queue_id: end for queue, end in self._ends().items()}
        appended = self._tables.appended()
        sent = {(name, queue_id): range(end) for name in appended for queue_id, end in ends.items()}
        rows = {(name, queue_id): offsets for name, queues in appended.items() for queue_id, offsets in queues.items()}
        evidence.note_lists(sent, rows, runs=self.counts.total() - self.counts["failed"])
        for name, queues in appended.items():
            for queue_id, end in ends.items():
                assert queues.get(queue_id, []) == list(range(end)), f"{name}, queue {queue_id}, {self.counts}"
        print(f"\n{dict(self.counts)}, {sum(ends.values())} messages")

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def _kill(self, member: int) -> None:
        self._drivers[member].kill_all()
        self._replace(member)
        self._start(member)
        self.counts["kills"] += 1

    def _take_over(self, member: int) -> None:
        self._drivers[member].kill_all()
        self._replace(member)
        self._produce()
        target = self._ends()
        until(lambda: self._processed(target, 1 - member), "the other query processes all queues", 300)
        self._start(member)
        self.counts["take-overs"] += 1

    def _pause(self, member: int) -> None:
        driver = self._drivers[member]
        driver.pause(*EVERYTHING)
        try:
            self._expire()
            # A process that is stopped inside a write transaction blocks the other query, which then gets the queues later.
            target, deadline = self._ends(), time.monotonic() + 60
            while not (overtaken := self._processed(target, 1 - member)) and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            driver.resume()
        self.counts["pauses" if overtaken else "pauses in a transaction"] += 1

    # -- queries -------------------------------------------------------------------------------------------------------------

    def _driver(self) -> Driver | LoopDriver:
        return self._kind(self._world.folder / f"driver-{time.monotonic_ns()}")

    def _replace(self, member: int) -> None:
        self._drivers[member].close()
        self._drivers[member] = self._spare.result()
        self._spare = self._pool.submit(self._driver)

    def _start(self, member: int) -> None:
        source = {"assignment": "shared", "maxOffsetsPerTrigger": _MESSAGES // 2}
        target = {} if self._database is None else {"database": self._database}
        sink = f"once:{self._world.folder / 'tables'}"
        self._drivers[member].start(**self._world.spec(f"ck-{member}", sink=sink, source=source, target=target))

    def _restart_failed(self, members: Iterable[int]) -> None:
        """Restart failed queries, as their users do: a query that was paused for too long has lost its locks."""
        for member in members:
            state = self._drivers[member].state()
            if not state["active"]:
                # A query may fail because it lost its locks or because the machine is busy, but no table may refuse its rows.
                assert not re.search(r"ORDEREDMQ_(SCHEMA|OPTION|SINK)", state["failure"] or ""), state
                self.counts["failed"] += 1
                self._start(member)

    # -- messages ------------------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        for queue in self._world.queues:
            bodies = pa.array([b"x"] * (_MESSAGES // len(self._world.queues)), pa.binary())
            keys = [f"{queue.queue_id}-{number % 7}" for number in range(len(bodies))]
            self._world.broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": keys})})

    def _ends(self) -> dict[MessageQueue, int]:
        return {queue: at.max_offset for queue, at in self._world.broker.log.bounds(self._world.queues).items()}

    def _processed(self, ends: dict[MessageQueue, int], *members: int) -> bool:
        """Whether the group has processed all queues up to ``ends``. The members that have failed are restarted."""
        self._restart_failed(members)
        offsets = self._world.broker.groups.offsets(self._world.group, self._world.queues)
        return all(offsets.get(queue, 0) >= end for queue, end in ends.items())

    def _owners(self) -> set[str]:
        return {lock.owner for lock in self._world.broker.admin.locks(self._world.group) if lock.held and lock.remaining > 0}
