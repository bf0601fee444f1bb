"""Order per key under kill -9: workers and drivers die, keys fail at random or always, members of a group come and go."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Final

import psutil
import pyarrow as pa
import pytest

from orderedmq.broker import Broker
from orderedmq.core.parking import Order
from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue
from tests.faults.conftest import GROUP, World
from tests.faults.drivers import WORKER, Driver, send
from tests.faults.key_listener import CALLS, POISON, at_work, judge, read_lot

LISTENER: Final = {
    "order": "key",
    "concurrency": 8,
    "consume_message_batch_max_size": 4,
    "in_batch_attempts": 2,
    "max_reconsume_times": 3,
    "suspend_current_queue_time_millis": 10,
}


def produce(broker: Broker, queues: list[MessageQueue], messages: int, keys: int, poison: int) -> None:
    """``messages`` messages of ``keys`` keys, ``poison`` of them poisoned; a key has one queue."""
    names = [f"{POISON if number < poison else 'key'}-{number}" for number in range(keys)]
    draw = random.Random(messages)
    chosen = [draw.randrange(keys) for _ in range(messages)]
    for number, queue in enumerate(queues):
        mine = [names[key] for key in chosen if key % len(queues) == number]
        bodies = pa.array([b"x" * 100] * len(mine), pa.binary())
        broker.log.append(queue, pa.record_batch({"body": bodies, "sharding_key": mine}))


def retry_all(world: World) -> int:
    """Make all parked keys due, as an operator may. Return how many messages are parked."""
    left = 0
    for queue in world.queues:
        lot = read_lot(world.broker, GROUP, queue)
        left += lot.messages
        if lot.messages and not lot.ordered:
            try:
                world.broker.admin.order_parked(GROUP, queue, [Order("retry", str(key)) for key in lot.keys])
            except TopicError:
                assert not lot.messages
    return left


def storm(world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, *, messages: int, keys: int, poison: int, kills: int,
          members: int) -> None:  # fmt: skip
    """Run ``members`` queries, and kill a worker or a whole driver ``kills`` times; then let them finish, and judge."""
    folder.mkdir()
    monkeypatch.setenv(CALLS, str(folder))
    produce(world.broker, world.queues, messages, keys, poison)
    draw = random.Random(kills)
    shared = {"assignment": "shared"} if members > 1 else {}
    source = {"parkingLot": "true", "maxOffsetsPerTrigger": max(800, messages // 40), **shared}
    drivers: list[Driver] = []
    killed = {"workers": 0, "drivers": 0}

    def start(member: int) -> None:
        driver = Driver(world.folder / f"driver-{member}-{time.monotonic_ns()}")
        drivers[member : member + 1] = [driver]
        run(member)

    def run(member: int) -> None:
        drivers[member].start(**world.spec(f"ck-{member}", sink="noop", source=source, listener=LISTENER))

    def done() -> bool:
        at = world.broker.groups.offsets(GROUP, world.queues)
        ends = {queue: one.max_offset for queue, one in world.broker.log.bounds(world.queues).items()}
        return retry_all(world) == 0 and at == ends

    try:
        for member in range(members):
            start(member)
        deadline = time.monotonic() + 900
        while True:
            if done():
                if sum(killed.values()) >= kills:
                    break
                produce(world.broker, world.queues, 1000, keys, 0)
            assert time.monotonic() < deadline, f"after {killed} nothing is done: {world.broker.admin.group_offsets(GROUP)}"
            time.sleep(0.02)
            for member, driver in enumerate(drivers):
                if not driver.state()["active"]:
                    # A worker that is killed fails its query, which the user restarts.
                    run(member)
            pid = at_work(folder)
            if pid is None or sum(killed.values()) >= kills or draw.random() < 0.9:
                continue
            mine = next((one for one in range(members) if pid in {process.pid for process in drivers[one].processes()}), None)
            if mine is None:
                continue
            if sum(killed.values()) % 3 < 2:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    send(psutil.Process(pid), WORKER, signal.SIGKILL)
                    killed["workers"] += 1
            else:
                drivers[mine].kill_all()
                drivers[mine].close()
                killed["drivers"] += 1
                start(mine)
        for driver in drivers:
            driver.stop()
    finally:
        for driver in drivers:
            driver.close()
    seen = judge(world.broker, GROUP, world.queues, folder)
    print(f"\nkilled {killed}: {dict(seen)}")
    # Kills came in the middle of micro-batches.
    assert seen["repeats"] > 0
    assert seen["dead letters"] > 0
    assert seen["failures"] > seen["dead letters"]


@pytest.mark.timeout(300)
def test_killed_workers_and_drivers_lose_and_reorder_nothing_of_any_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm(world, tmp_path / "calls", monkeypatch, messages=3000, keys=60, poison=2, kills=3, members=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_and_two_members_lose_and_reorder_nothing_of_two_thousand_keys(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm(world, tmp_path / "calls", monkeypatch, messages=200_000, keys=2000, poison=5, kills=20, members=2)
