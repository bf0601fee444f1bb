"""A loss of power at any moment: the store has the acknowledged messages once and in order, has no others, and is usable.

A workload is recorded. Then the product opens the states in which a loss of power could have left its files (`crash`).
``--nightly`` tries 10,000 states; otherwise 300 are tried. A failure names the seed of its state.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orderedmq.embedded.check import check
from orderedmq.embedded.store import store_lock
from tests import evidence
from tests.memory import folder_in_memory
from tests.power import failed_sync
from tests.power.crash import states
from tests.power.judge import allowed, allowed_copy, findings, messages
from tests.power.recorder import Event, Mark, Sync, Write, record
from tests.power.workload import BUGS, COPY, STORE

FEW, MANY = 300, 10_000
#: So many syncs, and so many writes of each kind, fail in turn: without ``--nightly``, and with it.
SYNCS, ALL_SYNCS = 3, 1_000
WRITES, MANY_WRITES = 3, 150
#: The number of states that are tried for each recording with a failed sync.
AFTER_FAILURE = 30
#: The number of states within which a planted bug must be found.
ENOUGH = 600


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def sound(folder: Path) -> tuple[Path, list[Event]]:
    """A run of the workload without faults."""
    return recorded(folder, "sound")


def recorded(
    folder: Path, name: str, *bug: str, failing: str | None = None, program: str = "tests.power.workload"
) -> tuple[Path, list[Event]]:
    """Run a program. Return the folder that it filled, and the recorded events."""
    if shutil.which("strace") is None:
        why = "no strace on this machine: make tools installs it from Debian's archive, or install it yourself"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    base = folder / name
    base.mkdir()
    command: list[str | Path] = [sys.executable, "-m", program, base, *bug]
    return base, record(command, base, failing=failing)


def tried(folder: Path, base: Path, events: Sequence[Event], seeds: Sequence[int]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield each seed with the number of messages that had been acknowledged in its state, and the errors in it."""
    marks = [event.text for event in events if isinstance(event, Mark)]
    place = folder / "state"
    for seed, random, disk, under_way in states(events, base, seeds):
        shutil.rmtree(place, ignore_errors=True)
        disk.after_loss(place, random, under_way)
        rights = allowed(disk.marks, marks)
        found = findings(place / STORE, rights)
        yield seed, messages(rights[0]), [*found, *findings(place / COPY, allowed_copy(disk.marks, marks))]


def wrong_states(folder: Path, base: Path, events: Sequence[Event], seeds: Sequence[int]) -> dict[int, list[str]]:
    """Return the seeds of wrong states with the errors in them."""
    trials = list(tried(folder, base, events, seeds))
    wrong = {seed: found for seed, _, found in trials if found}
    evidence.note(base.name, runs=len(trials), acknowledged=sum(count for _, count, _ in trials), wrong=len(wrong))
    return wrong


@pytest.mark.fault("loss of power", "embedded")
@pytest.mark.holds("loss of power")
@pytest.mark.timeout(3600)
def test_after_a_loss_of_power_there_is_what_was_acknowledged_and_nothing_else(folder: Path, sound, nightly: bool):
    base, events = sound
    wrong = wrong_states(folder, base, events, range(MANY if nightly else FEW))
    assert not wrong, f"{len(wrong)} states are wrong, for example {list(wrong.items())[:3]}"


def in_turn(events: Sequence[Sync | Write], call: str, most: int, more: int = 0) -> list[str]:
    """Return strace options that make each call in ``events`` fail, with ``more`` calls after it.

    If there are more than ``most``: the first two, which make the store, and some others. With ``more``, writes of the lock file are left
    out: nobody looks for the cause when they fail, so the next call would be one of another step.
    """
    numbers = [number for number, event in enumerate(events, 1) if not more or event.path.name != store_lock.NAME]
    first, second, *rest = numbers
    chosen = [first, second, *(rest if len(numbers) <= most else sorted(Random(9).sample(rest, most - 2)))]
    return [f"{call}:when={number}..{number + more}" for number in chosen]


def outcomes(events: Sequence[Event]) -> list[dict[str, Any]]:
    """What the workload reported at the end of each step."""
    marks = [json.loads(event.text) for event in events if isinstance(event, Mark)]
    return [mark for mark in marks if "end" in mark]


@pytest.mark.fault("failed sync", "embedded")
@pytest.mark.holds("loss of power")
@pytest.mark.timeout(7200)
def test_after_a_failed_sync_nothing_is_acknowledged_that_is_not_on_the_disk(folder: Path, sound, nightly: bool):
    """Each sync in turn reports an error once, and the data that it should have written are lost. Then the step is tried again."""
    _, events = sound
    for call in ("fdatasync", "fsync"):
        kind = [event for event in events if isinstance(event, Sync) and event.data_only is (call == "fdatasync")]
        for failing in in_turn(kind, f"{call}:error=EIO", ALL_SYNCS if nightly else SYNCS):
            base, failed = recorded(folder, failing, failing=failing)
            assert sum(isinstance(event, Sync) and event.failed for event in failed) == 1, failing
            for one in outcomes(failed):
                assert one["error"] is None or (one["error"] == "ORDEREDMQ_STORE.IO" and not one["again"]), (failing, one)
            wrong = wrong_states(folder, base, failed, range(AFTER_FAILURE))
            assert not wrong, f"{failing}: {len(wrong)} states are wrong, for example {list(wrong.items())[:3]}"
            shutil.rmtree(base)


def after_a_kill(folder: Path, *bug: str) -> dict[int, list[str]]:
    """Return the errors of the wrong states after a commit's sync has failed, its process was killed and another one has continued."""
    base, events = recorded(
        folder, "-".join(("killed", *bug)), *bug, failing=failed_sync.FAILING, program="tests.power.failed_sync"
    )
    assert sum(isinstance(event, Sync) and event.failed for event in events) == 1
    marks = [event.text for event in events if isinstance(event, Mark)]
    place, wrong, acknowledged = folder / "state", {}, 0
    for seed, random, disk, under_way in states(events, base, range(ENOUGH)):
        shutil.rmtree(place, ignore_errors=True)
        disk.after_loss(place, random, under_way)
        must, *_ = rights = allowed(disk.marks, marks)
        acknowledged += messages(must)
        if found := findings(place / STORE, rights):
            wrong[seed] = found
    evidence.note(base.name, runs=ENOUGH, acknowledged=acknowledged, wrong=len(wrong))
    return wrong


@pytest.mark.fault("failed sync", "embedded")
@pytest.mark.holds("loss of power")
def test_nothing_is_acknowledged_after_a_commit_that_a_killed_process_could_not_sync(folder: Path) -> None:
    """The next process finds the commit in the system's cache, but it is not on the disk. What follows it must not be lost with it."""
    wrong = after_a_kill(folder)
    assert not wrong, f"{len(wrong)} states are wrong, for example {list(wrong.items())[:3]}"


@pytest.mark.parametrize("bug", failed_sync.BUGS)
def test_a_planted_bug_after_a_failed_sync_is_found(folder: Path, bug: str) -> None:
    assert after_a_kill(folder, bug)


@pytest.mark.fault("full disk", "embedded")
@pytest.mark.holds("kill -9")
@pytest.mark.timeout(7200)
def test_a_disk_that_is_full_at_one_write_says_so_changes_nothing_and_works_once_there_is_room(
    folder: Path, sound, nightly: bool
):
    """Each write in turn finds no room, on the disk or in a quota. Then the step is tried again.

    SQLite does not tell a full quota from other errors, so the store writes once more to learn the cause.
    """
    _, events = sound
    for call, error, more in (("pwrite64", "ENOSPC", 0), ("pwrite64", "EDQUOT", 1), ("pwritev2", "ENOSPC", 0)):
        kind = [event for event in events if isinstance(event, Write) and event.call == call]
        for failing in in_turn(kind, f"{call}:error={error}", MANY_WRITES if nightly else WRITES, more):
            base, full = recorded(folder, failing, failing=failing)
            before: Any = None
            for one in outcomes(full):
                if one["error"] is not None:
                    assert (one["error"], one["again"], one["state"]) == ("ORDEREDMQ_STORE.FULL", False, before), (failing, one)
                before = one["state"]
            assert check(base / STORE) == check(base / COPY) == [], failing
            evidence.note(failing, acknowledged=messages(before))
            shutil.rmtree(base)


def test_a_small_micro_batch_and_a_send_are_one_commit_each(folder: Path) -> None:
    """A commit waits once for the disk, for the index's log. Other steps do not wait."""
    _, events = recorded(folder, "small-batches", program="tests.power.small_batches")
    waits: list[list[str]] = []
    for event in events:
        if isinstance(event, Mark):
            waits.append([event.text])
        elif not waits:
            # The topics are created before the first mark.
            continue
        elif isinstance(event, Sync):
            waits[-1].append(f"sync of {event.path.name}")
    # Skip the first micro-batches, which join the group and lock their queues.
    assert waits[4:-1] == [[json.dumps(what), "sync of index.db-wal"] for _ in range(4) for what in ("send", "micro-batch")]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(folder: Path, bug: str):
    base, events = recorded(folder, bug.replace(" ", "-"), bug)
    assert any(found for *_, found in tried(folder, base, events, range(ENOUGH)))
