"""Segment files and several processes: killed tasks, copies of a store in use, many segments, few descriptors."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.broker import SinkBatch
from orderedmq.embedded import garbage, index, snapshot
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check, examine
from orderedmq.embedded.clock import SystemClock
from orderedmq.embedded.store import filesystem, transaction
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.segment_file import HEADER_BYTES
from orderedmq.errors import StoreError
from orderedmq.model import MessageQueue
from tests.children import Child, preload
from tests.contract.support import bodies, queues_of, refused, rows
from tests.memory import folder_in_memory
from tests.waits import until

preload("tests.live.processes.test_segment_processes")
QUEUE = MessageQueue("orders", "embedded", 0)
LARGE = 100_000
#: A number of bytes that is so large that a task begins to write them before it creates its receipt.
MUCH = 2_000_000


@pytest.fixture
def broker(path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(path) as broker:
        broker.admin.create_topic("orders", 2, compression="none")
        yield broker


def collected(path: Path) -> int:
    store = Store.open(path)
    try:
        return garbage.collect_now(store, SystemClock())
    finally:
        store.close()


# -- killed tasks -------------------------------------------------------------------------------------------------------------------


def wait_for_file(path: Path, token: str) -> None:
    """Wait until the writer thread of a task has begun to write."""
    file = path / "segments" / f"{token}.open"
    until(lambda: file.exists() and file.stat().st_size > HEADER_BYTES, "the task's thread writes")


def die_as_tasks(parent: EmbeddedBroker, pipe: Any, count: int) -> None:
    """Fork tasks and kill each of them, either while it writes or after it has created its receipt."""
    # No task searches for garbage, however long this takes.
    garbage.INTERVAL = float("inf")  # type: ignore[misc]
    for number in range(count):
        child = os.fork()
        if child == 0:
            with EmbeddedBroker(parent.path) as broker:
                staging = broker.outbox.open(SinkBatch("s", 0), number)
                staging.add(QUEUE, rows([b"x" * (LARGE if number % 2 else MUCH)]))
                if number % 2:
                    staging.receipt()
                else:
                    wait_for_file(parent.path, staging.token)
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.holds("no leftovers")
@pytest.mark.timeout(900)
def test_killed_tasks_leave_no_file(path: Path, broker: EmbeddedBroker, nightly: bool) -> None:
    """The long tier kills a thousand tasks."""
    count = 1000 if nightly else 100
    (path / "segments" / garbage.LOOKED).touch()
    Child(path, die_as_tasks, count).end()
    assert len(examine(path).unused) == count
    assert collected(path) == count // 2, "the segments of tasks with a receipt may still be published"
    staging = broker.outbox.open(SinkBatch("s", 0), 0)
    staging.add(QUEUE, rows(["a"]))
    broker.outbox.publish(SinkBatch("s", 0), [staging.receipt()])
    collected(path)
    assert examine(path).unused == check(path) == []
    assert bodies(broker, QUEUE) == ["a"]


def test_a_task_that_is_stopped_keeps_its_segment(path: Path, broker: EmbeddedBroker) -> None:
    child = Child(path, stop_in_the_middle)
    assert child.pipe.recv() == "written"
    child.send(signal.SIGSTOP)
    assert collected(path) == 0
    assert len(examine(path).unused) == 1
    child.send(signal.SIGCONT)
    child.pipe.send("go on")
    [receipt] = child.end()
    assert broker.outbox.publish(SinkBatch("s", 0), [receipt]).ranges
    assert bodies(broker, QUEUE) == ["x" * MUCH]


def stop_in_the_middle(broker: EmbeddedBroker, pipe: Any) -> None:
    staging = broker.outbox.open(SinkBatch("s", 0), 0)
    staging.add(QUEUE, rows([b"x" * MUCH]))
    wait_for_file(broker.path, staging.token)
    pipe.send("written")
    pipe.recv()
    pipe.send(staging.receipt())


# -- copies -------------------------------------------------------------------------------------------------------------------------


def write_until_told(broker: EmbeddedBroker, pipe: Any) -> None:
    """Append small and large bodies in turn to both queues, and report acknowledged appends. Retention deletes old messages."""
    queues, number = queues_of(broker), 0
    while not pipe.poll(0):
        body = str(number).ljust(LARGE if number % 2 else 10)
        broker.log.append({queue: rows([body]) for queue in queues})
        number += 1
        pipe.send(number)
    pipe.recv()


@pytest.mark.holds("snapshot")
@pytest.mark.parametrize("linked", [True, False])
def test_a_copy_of_a_store_in_use_has_what_was_acknowledged_before(
    path: Path, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """In each copy both queues end at the same message, although segments come and go during the copying."""
    if not linked:
        monkeypatch.setattr(os, "link", elsewhere)
    broker.admin.alter_topic("orders", retention_bytes=10 * LARGE)
    writer = Child(path, write_until_told)
    acknowledged = writer.pipe.recv()
    for number in range(20):
        while writer.pipe.poll(0):
            acknowledged = writer.pipe.recv()
        copy = tmp_path / f"copy-{number}"
        result = orderedmq.snapshot(path, copy)
        assert result.links == (result.segments if linked else 0)
        assert check(copy) == []
        assert examine(copy).unused == examine(copy).foreign == []
        with EmbeddedBroker(copy) as copied:
            first, second = (copied.log.bounds(queues_of(copied))[queue] for queue in queues_of(copied))
            assert first.max_offset == second.max_offset >= acknowledged
            for queue, bounds in zip(queues_of(copied), (first, second), strict=True):
                read = [int(body) for body in bodies(copied, queue, bounds.min_offset)]
                assert read == list(range(bounds.min_offset, bounds.max_offset))
            copied.log.append({QUEUE: rows(["new", "n" * LARGE])})
        assert check(copy) == []
    until(lambda: broker.log.bounds([QUEUE])[QUEUE].min_offset > 0, "retention deletes")
    writer.pipe.send("stop")
    writer.end()
    assert check(path) == []


def elsewhere(*_: object) -> None:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.holds("snapshot")
def test_a_copy_is_a_store_of_its_own_with_groups_and_progress(path: Path, broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.log.append({QUEUE: rows(["a" * LARGE, "b"])})
    broker.admin.seek("g", {QUEUE: 1})
    staging = broker.outbox.open(SinkBatch("s", 3), 0)
    staging.add(QUEUE, rows(["c"]))
    receipt = staging.receipt()
    broker.outbox.publish(SinkBatch("s", 3), [receipt])
    copy = tmp_path / "below" / "copy"
    orderedmq.snapshot(path, copy)
    broker.admin.delete_topic("orders")
    with EmbeddedBroker(copy) as copied:
        assert copied.identity != broker.identity
        assert bodies(copied, QUEUE) == ["a" * LARGE, "b", "c"]
        assert copied.groups.offsets("g", [QUEUE]) == {QUEUE: 1}
        assert copied.outbox.publish(SinkBatch("s", 3), [receipt]).replayed
    assert copy.stat().st_mode & 0o777 == (copy / "segments").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in copy.rglob("*") if file.is_file()} == {0o600}


@pytest.mark.holds("snapshot")
def test_a_refused_snapshot_leaves_no_store(path: Path, broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.log.append({QUEUE: rows(["a" * LARGE])})
    with refused("STORE.MISSING"):
        orderedmq.snapshot(tmp_path / "none", tmp_path / "copy")
    with refused("STORE.NOT_EMPTY", "inside"):
        orderedmq.snapshot(path, path / "copy")
    taken = tmp_path / "taken"
    orderedmq.snapshot(path, taken)
    with refused("STORE.NOT_EMPTY", taken):
        orderedmq.snapshot(path, taken)
    [segment] = (path / "segments").glob("*.segment")
    segment.rename(tmp_path / "away")
    with refused("STORE.CORRUPT", segment.name):
        orderedmq.snapshot(path, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    (tmp_path / "away").rename(segment)
    orderedmq.snapshot(path, tmp_path / "copy")


@pytest.mark.holds("snapshot")
def test_of_two_snapshots_into_one_folder_one_is_refused_and_the_other_is_whole(
    path: Path, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.log.append({QUEUE: rows(["a" * LARGE])})
    copy, both = tmp_path / "copy", threading.Barrier(2)
    results: list[str] = []
    make = filesystem.make_folder

    def make_together(folder: Path) -> None:
        make(folder)
        if folder == copy:
            both.wait(30)

    def take() -> None:
        try:
            results.append(f"{orderedmq.snapshot(path, copy).segments} segment")
        except StoreError as error:
            results.append(error.sub)

    monkeypatch.setattr(snapshot, "make_folder", make_together)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["1 segment", "NOT_EMPTY"]
    assert check(copy) == []
    with EmbeddedBroker(copy) as copied:
        assert bodies(copied, QUEUE) == ["a" * LARGE]


@pytest.mark.parametrize(("step", "of"), [("make_folder", "segments"), ("_link", ""), ("sync_folder", "copy")])
def test_a_copy_without_room_is_refused_and_leaves_no_file(
    path: Path, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, of: str
) -> None:
    done = getattr(snapshot, step)

    def refuse(*paths: Path) -> None:
        if paths[-1].name == of or not of:
            raise OSError(28, "No space left on device")
        done(*paths)

    broker.log.append({QUEUE: rows(["a" * LARGE])})
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, step, refuse)
        with refused("STORE.FULL", tmp_path / "copy"):
            orderedmq.snapshot(path, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    orderedmq.snapshot(path, tmp_path / "copy")


def test_a_copy_whose_entries_have_no_room_is_refused_with_its_path(path: Path, broker: EmbeddedBroker, tmp_path: Path) -> None:
    broker.log.append({QUEUE: rows(["a"])})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, before[1]))
    try:
        with refused("STORE.FULL", tmp_path / "copy", "File too large"):
            orderedmq.snapshot(path, tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "copy").iterdir()) == []


# -- many segments, few descriptors -------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


@pytest.mark.nightly
def test_a_store_with_ten_thousand_segments(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each append has a separate segment, and none are merged. A few descriptors are enough to read, copy, check and trim the store."""
    monkeypatch.setattr(transaction, "INLINE_BYTES", 0)
    monkeypatch.setattr(index, "MERGE_BELOW", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Allow more descriptors than other tests of this process have left open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 64, hard))
    try:
        with EmbeddedBroker(memory / "store") as broker:
            broker.admin.create_topic("orders", 2, compression="none")
            for number in range(10_000):
                broker.log.append({QUEUE: rows([number])})
            assert bodies(broker, QUEUE) == [str(number) for number in range(10_000)]
            result = orderedmq.snapshot(memory / "store", memory / "copy")
            assert result.segments == 10_000
            assert check(memory / "store") == check(memory / "copy") == []
            assert broker.admin.trim("orders", {QUEUE: 9_999}) == {QUEUE: 9_999}
            assert len(list((memory / "store" / "segments").glob("*.segment"))) == 1
            assert check(memory / "store") == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def few_descriptors(broker: EmbeddedBroker, pipe: Any) -> None:
    """Use up all free file descriptors, then write."""
    broker.log.append({QUEUE: rows(["before" * LARGE])})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    said = []
    for work in (lambda: broker.log.append({QUEUE: rows(["x" * LARGE])}), lambda: bodies(broker, QUEUE)):
        try:
            work()
        except orderedmq.OrderedMQError as error:
            said.append((error.condition, "ulimit -n" in str(error)))
    for descriptor in held:
        os.close(descriptor)
    broker.log.append({QUEUE: rows(["after"])})
    pipe.send((said, len(bodies(broker, QUEUE))))


def test_a_process_without_a_free_descriptor_gets_a_named_error_until_one_is_free(path: Path, broker: EmbeddedBroker) -> None:
    [(said, count)] = Child(path, few_descriptors).end()
    assert said == [("ORDEREDMQ_STORE.IO", True)] * 2
    assert count == 2
    assert check(path) == []
