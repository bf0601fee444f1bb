"""Long-running processes do not need more and more memory for finished micro-batches, parked messages and dead letters."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import orderedmq
from ordered_source import stream_reader
from orderedmq.embedded.store import schema
from tests.stopped_readers import stopped
from tests.unit.test_parking_plan import Run, produce, ticket


def blocks() -> int:
    """The number of memory blocks that live Python objects use in this process.

    The caches of decoded locks and groups are bounded, but the renewal of a lock during the test would add to them, so they are
    cleared.
    """
    schema.lock_of.cache_clear()
    gc.collect()
    return sys.getallocatedblocks()


def growth(work: Callable[[], object], rounds: int) -> int:
    """The number of memory blocks by which this process grows in the second half of ``rounds`` calls.

    These calls are divided into three thirds, and the result is three times the smallest growth of a third. A leak in each call affects all
    thirds. The first use of something, in this or another thread, affects only one third.
    """
    for _ in range(rounds // 2):
        work()
    grown = []
    for _ in range(3):
        before = blocks()
        for _ in range(rounds // 6):
            work()
        grown.append(blocks() - before)
    return 3 * min(grown)


def test_the_driver_keeps_nothing_of_micro_batches_that_are_done(tmp_path: Path) -> None:
    """If each micro-batch left only one block, a query would run out of memory after months. The test calls the real reader as Spark does."""
    with orderedmq.connect(tmp_path / "store") as broker:
        broker.admin.create_topic("in", 1)
        run = Run(broker)
        parked = 0

        def boundary() -> None:
            nonlocal parked
            produce(broker, "a", "b")
            assert run.batch() is not None
            run.park(ticket(parked, 0), ticket(parked + 1, 0))
            parked += 2
            # Both messages are due immediately, and neither is parked again.
            assert run.batch() is not None
            assert run.batch() is None
            run.reader.reportLatestOffset()
            # Spark deletes old entries of its logs.
            log = run.checkpoint.log
            log[:-1] = [""] * (len(log) - 1)

        with stopped(run.reader):
            # Less than one block for each of the 180 measured boundaries (three per call). PyArrow may also keep a few on first use.
            assert growth(boundary, 120) < 180


def test_the_driver_forgets_parked_messages_when_they_leave_the_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's memory depends on the present size of the lot, not on the number of messages that were ever parked."""
    count, hour = 400, 3600
    passed = 0
    clock = {"time": lambda: time.time() + passed, "monotonic": lambda: time.monotonic() + passed}
    monkeypatch.setattr(stream_reader, "time", SimpleNamespace(**clock))
    sizes: list[int] = []
    with orderedmq.connect(tmp_path / "store") as broker:
        broker.admin.create_topic("in", 1)
        run = Run(broker)
        with stopped(run.reader):
            for begin in range(0, 3 * count, count):
                produce(broker, *(f"key-{number}" for number in range(begin, begin + count)))
                assert run.batch() is not None
                run.park(*(ticket(number, 1000 * (passed + hour)) for number in range(begin, begin + count)))
                assert run.batch() is None
                sizes.append(blocks())
                passed += 2 * hour
                assert run.batch() == ((begin + count, begin + count), (begin, begin + count))
                assert run.batch() is None
                sizes.append(blocks())
    _, _, full, empty, full_again, empty_again = sizes
    assert full - empty > count
    assert abs(full_again - full) < count / 4
    assert abs(empty_again - empty) < count / 4
