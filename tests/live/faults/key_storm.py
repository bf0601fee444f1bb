"""A storm over listeners with order per key: workers and drivers die, keys fail at random or always, brokers restart.

`Storm` works with any world that has a broker. It starts queries in separate drivers with listeners that log their calls, and
calls the judge of `key_listener` at the end.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import psutil
import pyarrow as pa
import pytest

from orderedmq.broker import Broker
from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue
from orderedmq.parking import Command
from tests import evidence
from tests.live.faults.drivers import WORKER, Driver, send
from tests.live.faults.key_listener import CALLS, MOODY, POISON, at_work, judge, read_lot

LISTENER: Final = {
    "concurrency": 8,
    "consume_message_batch_max_size": 4,
    "in_batch_attempts": 2,
    "max_reconsume_times": 3,
    "suspend_current_queue_time_millis": 10,
}
#: Seconds between two checks of the group, because each check reads the parking lots.
_LOOK: Final = 0.25


class StormWorld(Protocol):
    """What a storm needs: a broker, the queues of a topic, and the arguments that start a query for them."""

    folder: Path
    broker: Broker
    queues: list[MessageQueue]
    group: str

    def spec(self, checkpoint: str, **more: Any) -> dict[str, Any]:
        """Return the arguments that start a query in a separate driver (see `tests.live.faults.queries.start`)."""


class Storm:
    """Kills, pauses and restarts of ``members`` queries that share a group. The listeners log their calls to ``folder``."""

    def __init__(self, world: StormWorld, folder: Path, monkeypatch: pytest.MonkeyPatch, *, keys: int, members: int) -> None:
        folder.mkdir()
        monkeypatch.setenv(CALLS, str(folder))
        self.world, self.folder, self.keys, self.members = world, folder, keys, members
        self.drivers: list[Driver] = []
        self.killed: Counter[str] = Counter()
        #: How many queries failed and were restarted, and the last error.
        self.failed = 0
        self.failure: str | None = None

    def run(
        self,
        *,
        messages: int,
        poison: int,
        kills: int,
        moody: int = 0,
        interrupts: Sequence[Callable[[], None]] = (),
        seconds: float = 900.0,
    ) -> Counter[str]:
        """Kill a worker or a whole driver ``kills`` times, let the queries finish, and judge. Return counts.

        The functions ``interrupts`` are called between kills, each while a listener runs. They may stop the broker for some time.
        """
        pending = list(interrupts)
        self.produce(messages, poison, moody)
        self.batch = max(800, messages // 40)
        draw = random.Random(kills)
        deadline = time.monotonic() + seconds
        looked = 0.0
        try:
            for member in range(self.members):
                self.begin(member)
            while True:
                if time.monotonic() - looked > _LOOK:
                    if self.done():
                        if self.killed.total() >= kills and not pending:
                            break
                        self.produce(1000, 0)
                    looked = time.monotonic()
                assert time.monotonic() < deadline, (
                    f"messages are left after the kills {self.killed}: {self.left()}; last failure: {self.failure}"
                )
                time.sleep(0.02)
                self.restart_failed()
                pid = at_work(self.folder)
                if pid is None or draw.random() < 0.9:
                    continue
                if pending and self.killed.total() >= kills - kills * len(pending) // (len(interrupts) + 1):
                    pending.pop()()
                elif self.killed.total() < kills:
                    self.kill(pid)
            for driver in self.drivers:
                driver.stop()
        finally:
            for driver in self.drivers:
                driver.close()
        seen = judge(self.world.broker, self.world.group, self.world.queues, self.folder)
        evidence.note(runs=self.killed.total(), acknowledged=seen["messages"])
        print(f"\nkilled {dict(self.killed)}, queries failed {self.failed}: {dict(seen)}")
        # Some kills hit a running micro-batch.
        assert seen["repeats"] > 0
        assert seen["dead letters"] > 0
        assert seen["failures"] > seen["dead letters"]
        return seen

    # -- messages ------------------------------------------------------------------------------------------------------------

    def produce(self, messages: int, poison: int, moody: int = 0) -> None:
        """Append messages with random keys, of which ``poison`` are poisoned and ``moody`` are moody. Each key is in one queue."""
        queues = self.world.queues
        kinds = [POISON] * poison + [MOODY] * moody
        names = [f"{kinds[number] if number < len(kinds) else 'key'}-{number}" for number in range(self.keys)]
        draw = random.Random(messages)
        chosen = [draw.randrange(self.keys) for _ in range(messages)]
        for number, queue in enumerate(queues):
            mine = [names[key] for key in chosen if key % len(queues) == number]
            bodies = pa.array([b"x" * 100] * len(mine), pa.binary())
            self.world.broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": mine})})

    def done(self) -> bool:
        """Whether every message is decided. This also makes all parked messages due, as an operator could."""
        world = self.world
        offsets = world.broker.groups.offsets(world.group, world.queues)
        ends = {queue: bounds.max_offset for queue, bounds in world.broker.log.bounds(world.queues).items()}
        return self.retry_all() == 0 and offsets == ends

    def retry_all(self) -> int:
        """Make all parked keys due. Return the number of parked messages."""
        world, left = self.world, 0
        for queue in world.queues:
            lot = read_lot(world.broker, world.group, queue)
            left += lot.messages
            if lot.messages and not lot.commanded:
                try:
                    world.broker.admin.command_parked(world.group, queue, [Command("retry", str(key)) for key in lot.keys])
                except TopicError:
                    assert not lot.messages
        return left

    def left(self) -> Sequence[object]:
        """The group's offsets, the queues' bounds and the numbers of parked messages, for an error message."""
        broker, group = self.world.broker, self.world.group
        lots = {str(queue): read_lot(broker, group, queue).messages for queue in self.world.queues}
        return broker.admin.group_offsets(group), broker.log.bounds(self.world.queues), lots

    # -- queries -------------------------------------------------------------------------------------------------------------

    def begin(self, member: int) -> None:
        """Start a member's query in a new driver."""
        driver = Driver(self.world.folder / f"driver-{member}-{time.monotonic_ns()}")
        self.drivers[member : member + 1] = [driver]
        self.query(member)

    def query(self, member: int) -> None:
        shared = {"assignment": "shared"} if self.members > 1 else {}
        source = {"parkingLot": "true", "maxOffsetsPerTrigger": self.batch, **shared}
        self.drivers[member].start(**self.world.spec(f"ck-{member}", sink="noop", source=source, listener=LISTENER))

    def restart_failed(self) -> None:
        """Restart failed queries, as their users do, because killing a worker fails its query."""
        for member, driver in enumerate(self.drivers):
            state = driver.state()
            if not state["active"]:
                self.failed += 1
                self.failure = state["failure"]
                self.query(member)

    def kill(self, pid: int) -> None:
        """Kill the worker ``pid`` or, every third time, its whole driver."""
        member = next(
            (number for number in range(self.members) if pid in {process.pid for process in self.drivers[number].processes()}),
            None,
        )
        if member is None:
            return
        if self.killed.total() % 3 < 2:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                send(psutil.Process(pid), WORKER, signal.SIGKILL)
                self.killed["workers"] += 1
        else:
            self.drivers[member].kill_all()
            self.drivers[member].close()
            self.killed["drivers"] += 1
            self.begin(member)
