"""``dead_letter`` under kill -9: workers and drivers are killed while dead letters and the remaining rows are written."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, cast

import psutil
import pytest

from orderedmq.pulls import pulls
from tests.faults.conftest import GROUP, World
from tests.faults.drivers import WORKER, Driver, send
from tests.faults.key_listener import dead_letters

#: The minimum number of kills of workers or drivers. Kills continue until one has hit a worker that runs a task, because killing
#: an idle worker does not fail the query.
KILLS: Final = 10
#: The condition of messages that become dead letters: one message of three.
BAD: Final = "queue_offset % 3 = 1"


def judge(world: World) -> Counter[str]:
    """Assert that each message is once in ``out`` or once a dead letter, in the order of its queue. Return counts."""
    passed: dict[str, list[int]] = defaultdict(list)
    for queue in world.broker.log.queues("out"):
        end = world.broker.log.bounds([queue])[queue].max_offset
        here: dict[str, list[int]] = defaultdict(list)
        for rows in pulls(world.broker.log, queue, 0, end, 8192, 1 << 24, ("keys",)):
            for origin in rows.column("keys").to_pylist():
                where, _, offset = origin.rpartition(":")
                here[where].append(int(offset))
        for where, offsets in here.items():
            assert offsets == sorted(offsets), f"messages of {where} are not in order in {queue}"
            passed[where] += offsets
    letters: dict[str, list[int]] = defaultdict(list)
    for where, _, offset, _ in dead_letters(world.broker, GROUP):
        letters[where].append(offset)
    seen: Counter[str] = Counter()
    for queue in world.queues:
        end, name = world.broker.log.bounds([queue])[queue].max_offset, str(queue)
        assert letters[name] == [offset for offset in range(end) if offset % 3 == 1]
        assert sorted(passed[name]) == [offset for offset in range(end) if offset % 3 != 1]
        seen += Counter({"messages": end, "passed": len(passed[name]), "letters": len(letters[name])})
    return seen


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_kills_leave_each_message_in_the_output_or_as_one_letter(tmp_path: Path) -> None:
    world = World(tmp_path, cast(Any, None), 3)
    draw, seen = random.Random(7), Counter[str]()
    spec = world.spec(source={"includeLockToken": "true", "maxOffsetsPerTrigger": 300}, letters=BAD)
    driver = Driver(tmp_path / "driver")
    try:
        driver.start(**spec)
        for kill in itertools.count():
            world.produce(500)
            before = world.count()
            seen["failed queries"] += driver.go_on(lambda: world.count() > before, "rows pass", **spec)  # noqa: B023
            if kill >= KILLS and seen["failed queries"]:
                break
            # Wait a random time, so that the kills hit different places of a micro-batch.
            time.sleep(draw.random() / 2)
            if kill % 5 == 4:
                driver.kill_all()
                driver.close()
                seen["killed drivers"] += 1
                driver = Driver(tmp_path / f"driver-{kill}")
                driver.start(**spec)
            else:
                for worker in driver.workers():
                    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                        send(worker, WORKER, signal.SIGKILL)
                        seen["killed workers"] += 1
        ends = {queue.queue_id: at.max_offset for queue, at in world.broker.log.bounds(world.queues).items()}
        driver.go_on(lambda: world.group_at() == ends, "all messages are read", **spec)
        assert driver.stop()["failure"] is None
        print(f"\n{dict(seen + judge(world))}")
    finally:
        driver.close()
        world.close()
