"""Damage of a store's file: whichever bit has changed, readers and writers get the right answer or a named error.

Each attempt changes one byte of a copy, reads everything, writes, and reads again. It runs in a process with a time limit, and a
process that hangs or dies is a finding. ``--nightly`` changes a bit in every piece of 8 bytes that
affects an answer, and in every byte of SQLite's headers; otherwise a sample is taken.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check, examine
from orderedmq.embedded.store import transaction, wal
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import TABLES, Table
from orderedmq.embedded.store.segment_file import HEADER_BYTES
from orderedmq.embedded.store.store_file import FILE
from orderedmq.embedded.store.store_lock import StoreLock
from orderedmq.errors import StoreError
from orderedmq.model import OffsetRange
from orderedmq.ownership.micro_batch import SourceRun
from tests import evidence
from tests.contract.support import refused, rows
from tests.memory import folder_in_memory
from tests.unit.small_store import QUEUES, READS, FixedClock, make, read_all, write_all

PROCESSES = mp.get_context("forkserver")
# Preload pandas because pyarrow imports it when it creates its first array.
PROCESSES.set_forkserver_preload(["pandas", "orderedmq.embedded.broker", "tests.live.processes.test_store_damage"])

#: Errors that a reader may get. With a damaged format or first page, a file can look like another version's, or like no store.
NAMED = ("ORDEREDMQ_STORE.CORRUPT", "ORDEREDMQ_STORE.NOT_A_STORE", "ORDEREDMQ_STORE.OTHER_FORMAT")
#: Seconds without a result after which an attempt counts as hanging. An attempt takes some hundredths of a second.
PATIENCE = 60.0
SAMPLE = 200
#: The sizes of SQLite's headers: of the file, of its log, and of each frame of the log.
HEADER_SIZE, LOG_HEADER_SIZE, FRAME_HEADER_SIZE, PAGE = 100, 32, 24, 4096

#: A position in the file, and the new bytes there.
Change = tuple[int, bytes]


@dataclass
class World:
    """An undamaged store, the content of its files, and the data read from it before and after a write.

    ``content`` is the content of the index, of its log and of the segments. ``sizes``: the sizes of these files, by name. ``last``: the
    number of the last transaction, which the log has.
    """

    path: Path
    sizes: dict[str, int]
    content: bytes
    receipts: tuple[Receipt, ...]
    last: int
    answers: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    def flipped(self, at: int, bit: int) -> Change:
        return at, bytes([self.content[at] ^ 1 << bit])

    @property
    def headers(self) -> list[int]:
        """The positions of the bytes of SQLite's headers."""
        log = self.sizes[FILE]
        frames = range(log + LOG_HEADER_SIZE, log + self.sizes[wal.NAME], FRAME_HEADER_SIZE + PAGE)
        headers = [(0, HEADER_SIZE), (log, LOG_HEADER_SIZE), *((frame, FRAME_HEADER_SIZE) for frame in frames)]
        return [at for begin, size in headers for at in range(begin, begin + size)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def world(folder: Path) -> Iterator[World]:
    path = folder / "store"
    broker, _, receipts = make(path)
    with broker:
        # The last transactions are in the log, and all others in the file.
        with contextlib.closing(sqlite3.connect(path / FILE)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for offset in range(3):
            broker.admin.seek("h", {QUEUES[0]: offset})
        contents = {name: (path / name).read_bytes() for name in (FILE, wal.NAME, *segment_files(path))}
        sizes = {name: len(content) for name, content in contents.items()}
        world = World(path, sizes, b"".join(contents.values()), receipts, broker.log.change())
        place = copy(world, path.parent / "sound", world.content)
        with EmbeddedBroker(place, clock=FixedClock()) as fresh:
            world.answers = read_all(fresh)
        assert check(place) == []
        with EmbeddedBroker(place, clock=FixedClock()) as fresh:
            world.written = write_all(fresh, receipts)
        yield world


def segment_files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in (path / "segments").glob("*.segment"))


def copy(world: World, place: Path, content: bytes) -> Path:
    """Create a store whose files have this content. The same members are alive as in the undamaged store."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "segments").mkdir(parents=True)
    (place / "owners").symlink_to(world.path / "owners")
    begin = 0
    for name, size in world.sizes.items():
        (place / name).write_bytes(content[begin : begin + size])
        begin += size
    with contextlib.closing(StoreLock(place)) as lock:
        lock.acknowledge((place / FILE).stat().st_ino, world.last)
    return place


def judge(world: World, place: Path) -> list[str]:
    """The outcome of each read and of the writes: "right", the condition of an error, or a description of a wrong outcome."""
    out = []
    with EmbeddedBroker(place, clock=FixedClock()) as broker:
        for name, read in READS.items():
            out.append(outcome(name, lambda read=read: read(broker), world.answers[name]))
            if name == "identity" and out[0] != "right":
                return out
        out.append(outcome("writes", lambda: write_all(broker, world.receipts), world.written))
    # Damaged entries that no read has touched may remain, and then other entries do not agree with them. A payload whose key was changed
    # belongs to no entry.
    left = ("fails", "belongs to no entry", "cannot be read")
    if out[-1] == "right" and (findings := check(place)) and not any(why in finding for finding in findings for why in left):
        out.append(f"after writes: {findings}")
    return out


def outcome(name: str, read: Any, expected: Any) -> str:
    try:
        answer = read()
    except StoreError as error:
        return error.condition if error.condition in NAMED and "\n" not in str(error) else f"{name}: {error}"
    except Exception as error:
        return f"{name}: foreign {error!r}"
    return "right" if answer == expected else f"{name}: wrong answer {answer} instead of {expected}"


def attempt_all(pipe: Connection, world: World, place: Path, changes: list[Change]) -> None:
    for at, new in changes:
        content = bytearray(world.content)
        content[at : at + len(new)] = new
        copy(world, place, bytes(content))
        try:
            pipe.send(judge(world, place))
        except Exception as error:
            pipe.send([f"foreign {error!r}"])


class Attempts:
    """Tries changes in a child process. A child that hangs or dies is replaced, and the change that it was trying is a finding."""

    def __init__(self, world: World, place: Path, changes: list[Change]) -> None:
        self._world = world
        self._place = place
        self._left = changes
        self.outcomes: Counter[str] = Counter()
        #: The changes after which some answers were not right.
        self.noticed: list[Change] = []
        self.findings: list[str] = []
        self._start()

    def _start(self) -> None:
        ours, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=attempt_all, args=(theirs, self._world, self._place, self._left), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours
        self._since = time.monotonic()

    def step(self) -> bool:
        """Take a result of the child, if any. Return whether changes are left."""
        if not self._left:
            self._process.join()
            return False
        if self._pipe.poll(0.2):
            try:
                self._note(self._pipe.recv())
                return True
            except EOFError:
                self._process.join()
                self._note([f"the process died ({self._process.exitcode})"])
        elif time.monotonic() - self._since < PATIENCE:
            return True
        else:
            self._process.kill()
            self._process.join()
            self._note(["hangs"])
        if self._left:
            self._start()
        return True

    def _note(self, outcomes: list[str]) -> None:
        (at, new), self._left = self._left[0], self._left[1:]
        self._since = time.monotonic()
        if set(outcomes) == {"right"}:
            self.outcomes["right"] += 1
        else:
            self.outcomes["named"] += 1
            self.noticed.append((at, new))
        wrong = [outcome[:600] for outcome in outcomes if outcome != "right" and outcome not in NAMED]
        if wrong:
            self.findings.append(f"byte {at} (page {at // 4096}, {at % 4096}) as {new[:16]!r}: {wrong}")


def attempt(world: World, folder: Path, changes: list[Change]) -> tuple[Counter[str], list[Change]]:
    """Try all changes, in two processes. Assert that each gives the right answer or a named error.

    Return the number of changes after which all answers were right, that of the others, and the others.
    """
    attempts = [Attempts(world, folder / f"copy-{number}", changes[number::2]) for number in range(2)]
    running = attempts
    while running:
        running = [one for one in running if one.step()]
    findings = [finding for one in attempts for finding in one.findings]
    evidence.note((len(changes), changes[0]), runs=len(changes), wrong=len(findings))
    assert not findings, f"{len(findings)} of {len(changes)}:\n" + "\n".join(findings[:40])
    return attempts[0].outcomes + attempts[1].outcomes, [change for one in attempts for change in one.noticed]


#: Bytes of a piece of the files. A change of every single byte would take many hours.
PIECE = 8


def pieces_in_use(world: World, folder: Path) -> list[int]:
    """The positions of the pieces that affect an answer.

    If all bytes of a range can be inverted and every answer stays right, nothing reads the range: unused space, for example, and pages of
    earlier transactions. Ranges with other outcomes are divided further.
    """
    places = list(range(0, len(world.content), 4096))
    for size, part in ((4096, 512), (512, 64), (64, PIECE)):
        inverted = [(at, bytes(byte ^ 0xFF for byte in world.content[at : at + size])) for at in places]
        _, noticed = attempt(world, folder, inverted)
        places = [at for begin, _ in noticed for at in range(begin, begin + size, part)]
    return places


@pytest.mark.fault("changed bits", "embedded")
@pytest.mark.holds("changed bits", "changed body")
@pytest.mark.timeout(7200)
def test_a_changed_bit_gives_the_right_answer_or_a_named_error(world: World, folder: Path, nightly: bool):
    random = Random(7)
    if nightly:
        last = len(world.content) - 1
        places = [*(min(at + random.randrange(PIECE), last) for at in pieces_in_use(world, folder)), *world.headers]
    else:
        # Change a sample of the bytes that are not zero, and all fields that SQLite reads first.
        written = [at for at, byte in enumerate(world.content) if byte]
        places = [*random.sample(written, SAMPLE), *world.headers]
    changes = [world.flipped(at, random.randrange(8)) for at in places]
    random.shuffle(changes)
    seen, _ = attempt(world, folder, changes)
    assert seen["right"] > 10, "some bytes must be unused"
    assert seen["named"] > len(places) // 20, seen


@pytest.mark.fault("changed bits", "embedded")
def test_a_sector_or_page_that_is_lost_or_anothers_gives_the_right_answer_or_a_named_error(world: World, folder: Path):
    random = Random(8)
    changes: list[Change] = []
    for page in range(0, len(world.content), 4096):
        other = random.randrange(0, len(world.content), 4096)
        changes.append((page, world.content[other : other + 4096]))
        changes.append((page + random.randrange(0, 4096, 512), random.choice((bytes(512), random.randbytes(512)))))
    seen, _ = attempt(world, folder, changes)
    assert min(seen["right"], seen["named"]) > len(changes) // 10, seen


# -- segments -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_segments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, dict[str, Any], dict[Path, bytes]]]:
    """A store with all payloads in segments, the data read from it, and the content of the segments."""
    monkeypatch.setattr(transaction, "INLINE_BYTES", 0)
    path = folder / "segments"
    shutil.rmtree(path, ignore_errors=True)
    broker, _, _ = make(path, small=True)
    with broker, EmbeddedBroker(path, clock=FixedClock()) as reader:
        contents = {file: file.read_bytes() for file in sorted((path / "segments").glob("*.segment"))}
        assert len(contents) > 6
        yield path, read_all(reader), contents
        for file, content in contents.items():
            file.write_bytes(content)
        assert check(path) == []


def look(path: Path, answers: dict[str, Any]) -> Counter[str]:
    """Read everything in this process, because segments are not mapped, so their damage cannot kill it."""
    with EmbeddedBroker(path, clock=FixedClock()) as broker:
        seen = Counter(outcome(name, lambda read=read: read(broker), answers[name]) for name, read in READS.items())
    assert set(seen) <= {"right", "ORDEREDMQ_STORE.CORRUPT"}, seen
    return seen


@pytest.mark.fault("changed bits", "embedded")
@pytest.mark.timeout(3600)
def test_every_byte_of_the_segments_changed_gives_the_right_answer_or_a_named_error(in_segments, nightly: bool):
    """Change the byte at one position in all segments at a time. The check must name each changed file that is in use."""
    path, answers, contents = in_segments
    needed = set(contents) - {path / "segments" / name for name in examine(path).unused}
    places = range(max(map(len, contents.values())))
    random = Random(11)
    chosen = places if nightly else sorted(random.sample(places, SAMPLE))
    for at in chosen:
        changed = {file for file, content in contents.items() if at < len(content)}
        for file in changed:
            content = contents[file]
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :])
        outcomes = look(path, answers)
        assert outcomes["right"] == len(READS) or at >= HEADER_BYTES, "changed headers must not affect readers"
        assert len(check(path)) == len(changed & needed), (at, check(path))
        for file in changed:
            file.write_bytes(contents[file])
    evidence.note(runs=len(chosen))


@pytest.mark.fault("missing or cut files", "embedded")
@pytest.mark.timeout(3600)
def test_segments_that_are_cut_off_anywhere_give_the_right_answer_or_a_named_error(in_segments, nightly: bool):
    path, answers, contents = in_segments
    lengths = range(max(map(len, contents.values())))
    chosen = lengths if nightly else sorted(Random(12).sample(lengths, SAMPLE // 4))
    for length in chosen:
        for file, content in contents.items():
            file.write_bytes(content[:length])
        look(path, answers)
        cut = {file for file, content in contents.items() if length < len(content)} & set(contents)
        assert bool(check(path)) is any(file.name not in examine(path).unused for file in cut)
    evidence.note(runs=len(chosen))


def test_segments_of_another_store_or_of_each_other_give_a_named_error(in_segments, folder: Path):
    path, answers, contents = in_segments
    other = folder / "other"
    shutil.rmtree(other, ignore_errors=True)
    broker, _, _ = make(other, small=True)
    broker.close()
    foreign = [file.read_bytes() for file in sorted((other / "segments").glob("*.segment"))]
    for replacements in (foreign, [*list(contents.values())[1:], next(iter(contents.values()))]):
        for file, content in zip(contents, replacements):
            file.write_bytes(content)
        assert look(path, answers)["ORDEREDMQ_STORE.CORRUPT"] > 3
        assert any("has a header that fails its checksum" in finding for finding in check(path))
        for file, content in contents.items():
            file.write_bytes(content)


@pytest.mark.fault("missing or cut files", "embedded")
def test_missing_segments_are_named_and_the_others_can_be_read(in_segments):
    path, answers, contents = in_segments
    for file, content in contents.items():
        file.unlink()
        outcomes = look(path, answers)
        assert outcomes["right"] >= len(READS) - 2, file
        assert any(file.stem in finding for finding in check(path)) is (outcomes["right"] < len(READS))
        file.write_bytes(content)
    shutil.move(path / "segments", path / "elsewhere")
    assert look(path, answers)["ORDEREDMQ_STORE.CORRUPT"] > 3
    assert "folder segments is missing" in check(path)
    shutil.move(path / "elsewhere", path / "segments")
    evidence.note(runs=len(contents) + 1)


# -- kinds of damage ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(world: World, folder: Path) -> Path:
    return copy(world, folder / "place", world.content)


@contextlib.contextmanager
def opened(place: Path) -> Iterator[Store]:
    store = Store.open(place)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.fault("missing or cut files", "embedded")
@pytest.mark.parametrize("lost", ["the whole log", "the last transaction"])
def test_acknowledged_transactions_that_the_log_lacks_are_missed(world: World, place: Path, lost: str):
    """SQLite takes a log that ends early for one that was torn by a loss of power."""
    log = place / wal.NAME
    if lost == "the whole log":
        log.unlink()
    else:
        os.truncate(log, log.stat().st_size - 1)
    for _ in range(2):
        with EmbeddedBroker(place, clock=FixedClock()) as broker, refused("STORE.CORRUPT", f"orderedmq check {place}"):
            broker.log.topics()
    assert any("are missing" in finding for finding in check(place))
    evidence.note()


@pytest.mark.parametrize("table", [table for table in TABLES.values() if table.sealed], ids=lambda table: table.name)
def test_a_row_that_a_changed_key_has_moved_is_missed(place: Path, table: Table[Any]):
    """The end of the key is changed, so that the row stays between its neighbours, but is not found under its key."""
    with opened(place) as store, store.read() as txn:
        *_, row = txn.scan(table)
    key = row[: table.keys]
    last = key[-1] + 1 if isinstance(key[-1], int) else key[-1] + "~"
    columns = list(row._asdict())
    with contextlib.closing(sqlite3.connect(place / FILE, isolation_level=None)) as connection:
        where = " AND ".join(f"{column} = ?" for column in columns[: table.keys])
        assert (
            connection.execute(f"UPDATE {table.name} SET {columns[table.keys - 1]} = ? WHERE {where}", (last, *key)).rowcount
            == 1
        )
    with contextlib.suppress(StoreError), opened(place) as store:
        for look in (lambda txn: txn.get(table, *key), lambda txn: list(txn.scan(table, *key[:-1]))):
            with refused("STORE.CORRUPT", "fails its checksum"), store.read() as txn:
                look(txn)


@pytest.mark.parametrize("name", [f"{FILE}-shm", "index.lock"])
def test_damage_of_files_that_are_made_again_does_no_harm(world: World, place: Path, name: str):
    """No process has the store open, so SQLite makes its shared memory again, and a lock without a valid record says nothing."""
    for _ in range(3):
        (place / name).write_bytes(os.urandom(32 * 1024))
        with EmbeddedBroker(place, clock=FixedClock()) as broker:
            assert read_all(broker) == world.answers


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 20_000])
def test_a_file_that_was_cut_off_is_refused(place: Path, size: int):
    os.truncate(place / FILE, size)
    (place / wal.NAME).unlink()
    with EmbeddedBroker(place, clock=FixedClock()) as broker, pytest.raises(StoreError) as caught:
        broker.log.topics()
    assert caught.value.condition in NAMED


def test_a_batch_with_a_damaged_registration_is_not_published(place: Path):
    run = SourceRun("query", 3, "run")
    with EmbeddedBroker(place, clock=FixedClock()) as broker:
        broker.outbox.register(run, QUEUES[0], OffsetRange(3, 5), None)
        [note] = (place / "runs" / "query" / "3").glob("*/*")
        content = note.read_bytes()
        for at in range(len(content)):
            note.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            with refused("STORE.CORRUPT", note, "Restart the query"):
                broker.outbox.publish(SinkBatch("new", 3, run), [])
        note.write_bytes(content)
        assert not broker.outbox.publish(SinkBatch("new", 3, run), []).replayed


# -- undamaged stores ----------------------------------------------------------------------------------------------------------------


def test_a_store_that_others_write_to_is_opened_and_checked_without_a_finding(tmp_path: Path):
    path = tmp_path / "store"
    with EmbeddedBroker(path) as broker:
        broker.admin.create_topic("orders", 2)
        queues = broker.log.queues("orders")
    enough = PROCESSES.Event()
    writing = [PROCESSES.Event() for _ in queues]
    writers = [
        PROCESSES.Process(target=write_until, args=(enough, path, queue.queue_id, begun), daemon=True)
        for queue, begun in zip(queues, writing)
    ]
    for writer in writers:
        writer.start()
    assert all(begun.wait(60) for begun in writing)
    for turn in range(60):
        with EmbeddedBroker(path) as broker:
            assert len(broker.log.topics()) == 1
        if turn % 6 == 0:
            assert check(path) == []
    enough.set()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert check(path) == []


def write_until(enough: Event, path: Path, number: int, begun: Event) -> None:
    with EmbeddedBroker(path) as broker:
        queue = broker.log.queues("orders")[number]
        written = 0
        while not enough.is_set():
            broker.log.append({queue: rows([str(written) * 100])})
            written += 1
            if written % 20 == 0:
                broker.admin.trim("orders", {queue: written // 2})
            begun.set()
