"""Tasks record the queues that they read, while queries continue and remove old records."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from orderedmq.broker import SinkBatch
from orderedmq.embedded import garbage, runs
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.clock import FORGOTTEN
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.micro_batch import SourceRun
from tests.contract.support import FakeClock, locked, refused, rows

QUEUE = MessageQueue("t", EMBEDDED_BROKER, 0)
NOW = Instant("boot", FORGOTTEN)


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
def test_what_a_run_noted_is_removed_when_the_run_has_ended(
    tmp_path: Path, group: bool, now: Instant, alive: bool, kept: bool
) -> None:
    note(tmp_path, "query", 7, group=group)
    [file] = (tmp_path / runs.FOLDER).glob("*/*/*")
    os.utime(file, (1, 1))
    runs.sweep(tmp_path, now, lambda _: alive)
    assert (list((tmp_path / runs.FOLDER).iterdir()) != []) is kept


def test_an_incomplete_file_is_removed_when_it_is_a_week_old(tmp_path: Path) -> None:
    note(tmp_path, "query", 7)
    [file] = (tmp_path / runs.FOLDER).glob("*/*/*")
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
        assert len(list((path / "runs" / "q" / "7").iterdir())) == 1, "the first run has ended"


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
