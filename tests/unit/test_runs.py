"""Tasks record the queues that they read, while queries continue and remove old records."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.embedded import garbage, runs
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.clock import FORGOTTEN
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.micro_batch import SourceRun
from tests.contract.support import FakeClock, bodies, locked, refused, rows

QUEUE = MessageQueue("t", EMBEDDED_BROKER, 0)
NOW = Instant("boot", FORGOTTEN)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def broker(path: Path, clock: FakeClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(path, clock=clock) as broker:
        broker.admin.create_topic("t", 1)
        broker.log.append({QUEUE: rows("abc")})
        yield broker


def staged(broker: EmbeddedBroker, batch: SinkBatch) -> Receipt:
    staging = broker.outbox.open(batch, 0)
    staging.add(QUEUE, rows("x"))
    return staging.receipt()


def note(store: Path, query: str, batch: int, run: str = "run", *, group: bool = True) -> None:
    token = LockToken("g", QUEUE, query, f"{query}@1", 1, 1) if group else None
    what = runs.Registration(QUEUE, OffsetRange(0, 1), token)
    runs.register(store, SourceRun(query, batch, run, f"name of {query}"), what, NOW)


def test_names_are_found_while_a_query_removes_what_it_noted_before(tmp_path: Path) -> None:
    """Each batch removes folders that a reader may have just listed."""
    (tmp_path / runs.FOLDER).mkdir()
    note(tmp_path, "other", 0)
    stopped = threading.Event()

    def go_on() -> None:
        batch = 0
        while not stopped.is_set():
            note(tmp_path, "busy", batch)
            batch += 1

    query = threading.Thread(target=go_on)
    query.start()
    try:
        for _ in range(1000):
            assert runs.query_names(tmp_path)["other@1"] == "name of other"
    finally:
        stopped.set()
        query.join()


def test_a_task_registers_while_a_sweep_removes_its_folder(tmp_path: Path) -> None:
    stopped = threading.Event()

    def sweep() -> None:
        while not stopped.is_set():
            runs.sweep(tmp_path, Instant("next boot", 5.0), lambda _: False)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(500):
            note(tmp_path, "query", 7)
    finally:
        stopped.set()
        sweeper.join()


def test_a_task_does_not_register_in_a_store_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        note(tmp_path / "gone", "query", 7)


# -- removal ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "now", "alive", "kept"),
    [
        pytest.param(True, Instant("boot", 2 * FORGOTTEN + 1), False, False, id="ended"),
        pytest.param(True, Instant("next boot", 5.0), False, False, id="rebooted"),
        pytest.param(False, Instant("boot", 2 * FORGOTTEN + 1), False, False, id="no group"),
        pytest.param(True, Instant("boot", 2 * FORGOTTEN + 1), True, True, id="long batch"),
        pytest.param(False, Instant("boot", FORGOTTEN + 1), False, True, id="wall clock set"),
    ],
)
def test_removes_the_registrations_of_an_ended_run(tmp_path: Path, group: bool, now: Instant, alive: bool, kept: bool) -> None:
    note(tmp_path, "query", 7, group=group)
    [file] = (tmp_path / runs.FOLDER).glob("*/*/*/*")
    os.utime(file, (1, 1))
    runs.sweep(tmp_path, now, lambda _: alive)
    assert (list((tmp_path / runs.FOLDER).iterdir()) != []) is kept


def test_an_incomplete_file_is_removed_when_it_is_a_week_old(tmp_path: Path) -> None:
    note(tmp_path, "query", 7)
    [file] = (tmp_path / runs.FOLDER).glob("*/*/*/*")
    file.write_text("{")
    runs.sweep(tmp_path, NOW, lambda _: False)
    assert file.exists()
    os.utime(file, (1, 1))
    runs.sweep(tmp_path, NOW, lambda _: False)
    assert list((tmp_path / runs.FOLDER).iterdir()) == []


def test_a_query_that_repeats_a_batch_after_a_week_is_fenced_while_others_publish(path: Path) -> None:
    clock = FakeClock()
    with EmbeddedBroker(path, clock=clock) as broker:
        broker.admin.create_topic("t", 1)
        broker.log.append({QUEUE: rows("abc")})
        first, again = (SinkBatch("q", 7, SourceRun("q", 7, run)) for run in ("first", "again"))
        for batch in (first, again):
            with EmbeddedBroker(path, clock=clock) as query:
                [token] = locked(query, "g", query.groups.join("q"), [QUEUE])
                query.outbox.register(batch.run, QUEUE, OffsetRange(0, 3), token)  # type: ignore[arg-type]
            if batch is first:
                clock.pass_(FORGOTTEN + 1)
        os.utime(path / "segments" / garbage.LOOKED, (1, 1))
        broker.outbox.publish(SinkBatch("other", 0), [])
        locked(broker, "g", broker.groups.join("other"), [QUEUE])
        with refused("LOCK.LOST"):
            broker.outbox.publish(again, [])
        assert [run.name for run in (path / "runs" / "q" / "7").iterdir()] == ["again"], "the first run has ended"


@pytest.mark.holds("no leftovers")
def test_a_query_in_a_restart_loop_keeps_the_registrations_of_two_runs(
    path: Path, broker: EmbeddedBroker, clock: FakeClock
) -> None:
    [token] = locked(broker, "g", broker.groups.join("q"), [QUEUE])
    batches = [SinkBatch("q", 7, SourceRun("q", 7, f"run-{number}")) for number in range(30)]
    for batch in batches:
        for begin in range(10):
            broker.outbox.register(batch.run, QUEUE, OffsetRange(begin, begin + 1), token)  # type: ignore[arg-type]
    assert len([file for file in (path / "runs").rglob("*") if file.is_file()]) == 2 * 10 + 1
    # A run whose registrations are gone would not be fenced, so it can do nothing any more.
    receipt = staged(broker, batches[0])
    with refused("SINK.TOKEN_GONE", "batch 7", "two other runs"):
        broker.outbox.publish(batches[0], [receipt])
    with refused("SINK.TOKEN_GONE", "batch 7"):
        broker.outbox.register(batches[0].run, QUEUE, OffsetRange(0, 1), token)  # type: ignore[arg-type]
    assert bodies(broker, QUEUE) == list("abc")
    clock.pass_(61)
    locked(broker, "g", broker.groups.join("other"), [QUEUE])
    for batch in batches[-2:]:
        with refused("LOCK.LOST"):
            broker.outbox.publish(batch, [])


def test_a_run_whose_source_has_died_leaves_no_registration_after_ten_minutes(
    path: Path, broker: EmbeddedBroker, clock: FakeClock
) -> None:
    """A query that starts with another checkpoint each time has another id each time."""
    batches = [SinkBatch(f"q-{number}", 0, SourceRun(f"q-{number}", 0, "run")) for number in range(2)]
    for batch in batches:
        with EmbeddedBroker(path, clock=clock) as query:
            [token] = locked(query, "g", query.groups.join("q"), [QUEUE])
            query.outbox.register(batch.run, QUEUE, OffsetRange(0, 3), token)  # type: ignore[arg-type]
        clock.pass_(400)
    os.utime(path / "segments" / garbage.LOOKED, (1, 1))
    broker.outbox.publish(SinkBatch("other", 0), [])
    assert [file.parent.parent.parent.name for file in (path / "runs").glob("*/0/run/*")] == ["q-1"]
    with refused("SINK.TOKEN_GONE", "batch 0"):
        broker.outbox.publish(batches[0], [])
    assert not broker.outbox.publish(batches[1], []).replayed


@pytest.mark.holds("no leftovers")
def test_a_file_that_the_store_did_not_write_stays_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / runs.FOLDER
    for name in ("exp1/events.out", "exp1/7/weights", "exp1/7/more/weights", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    others = sorted(folder.rglob("*"))
    note(tmp_path, "exp1", 7)
    assert runs.query_names(tmp_path) == {"exp1@1": "name of exp1"}
    runs.sweep(tmp_path, Instant("next boot", 5.0), lambda _: False)
    assert sorted(folder.rglob("*")) == others
