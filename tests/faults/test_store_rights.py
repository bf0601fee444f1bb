"""Queries and producers that lose their rights to the store while they use it, and get them back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from tests.faults.conftest import World
from tests.faults.drivers import ROOT, Driver
from tests.waits import until

#: A user to whom a test gives the store. Without the capabilities below, root has no rights to another user's files.
NOBODY: Final = 65534
ONLY_AN_OWNER: Final = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
#: A program that connects again for every few messages and logs which messages the store has acknowledged.
PRODUCER: Final = """
import sys, time
import pyarrow as pa
from orderedmq import connect
from orderedmq.errors import OrderedMQError
path, acknowledged = sys.argv[1], open(sys.argv[2], "a", buffering=1)
number = 0
while True:
    try:
        with connect(path) as broker:
            queues = broker.log.queues("in")
            for queue in queues:
                bodies = [f"sent {number} {row}".encode() for row in range(20)]
                at = broker.log.append({queue: pa.record_batch({"body": bodies, "sharding_key": [f"s{queue.queue_id}"] * 20})})[queue]
                number += 1
                print(f"ok {queue.queue_id} {at.begin} {at.end}", file=acknowledged)
    except OrderedMQError as error:
        print(f"refused {error}", file=acknowledged)
    time.sleep(0.05)
"""


def for_all(path: Path, change: Callable[[Path], None]) -> None:
    """Change a folder and everything below it. Programs that use the store may remove files meanwhile."""
    change(path)
    for above, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                change(Path(above, name))


def give(path: Path, user: int) -> None:
    for_all(path, lambda one: os.chown(one, user, user))


def read_only(path: Path) -> None:
    for_all(path, lambda one: one.chmod(0o500 if one.is_dir() else 0o400))


def writable(path: Path) -> None:
    path.chmod(0o700)
    if os.getuid() == 0:
        give(path, 0)
    for_all(path, lambda one: one.chmod(0o700 if one.is_dir() else 0o600))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, cast(Any, None), 3)
    yield made
    writable(Path(made.path))
    made.close()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_store_that_loses_its_rights_six_times_fails_queries_by_name_and_loses_nothing(world: World) -> None:
    store, acknowledged = Path(world.path), world.folder / "acknowledged"
    run_by = ONLY_AN_OWNER if os.getuid() == 0 else ()

    def said(kind: str) -> list[str]:
        return [line for line in acknowledged.read_text().splitlines() if line.startswith(kind)]

    def drained() -> bool:
        ends = {queue.queue_id: at.max_offset for queue, at in world.broker.log.bounds(world.queues).items()}
        return world.group_at() == ends

    driver = Driver(world.folder / "driver", run_by=run_by)
    producer = subprocess.Popen([*run_by, sys.executable, "-c", PRODUCER, world.path, str(acknowledged)], cwd=ROOT)
    failures = []
    try:
        driver.start(**world.spec())
        for number in range(6):
            before, refused = world.count(), len(said("refused"))
            until(lambda: world.count() >= before + 200 or not driver.state()["active"], "the query resumes", 300)  # noqa: B023
            if number % 2 and run_by:
                give(store, NOBODY)
            else:
                read_only(store)
            failures.append(driver.failure(timeout=120))
            until(lambda: len(said("refused")) > refused, "the producer is refused")  # noqa: B023
            writable(store)
            driver.start(**world.spec())
        producer.kill()
        producer.wait()
        until(drained, "all messages are read", 120)
        assert driver.stop()["failure"] is None
    finally:
        producer.kill()
        producer.wait()
        driver.close()
    for text in [*failures, *said("refused")]:
        assert "[ORDEREDMQ_STORE.PERMISSION] this process has no permission to use the store at" in text
        # An attempt may fail while the rights are being given back, and then no file lacks them any more.
        assert any(remedy in text for remedy in ("chmod -R u+rwX", "chown -R", "Try again if rights were just changed")), text
    sent = sum(int(line.split()[3]) - int(line.split()[2]) for line in said("ok"))
    print(f"\n{len(failures)} times without rights, {sent} messages acknowledged, {world.count()} written")
    assert world.count() >= sent > 0
    world.judge()
