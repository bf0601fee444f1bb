"""Damage of a store's file: whichever bit has changed, readers and writers get the right answer or a named error.

Each attempt changes one byte of a copy, reads everything, writes, and reads again. It runs in a process with a time limit, and a
process that hangs or dies is a finding. ``--nightly`` changes every field that affects an answer; otherwise a sample is taken.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import shutil
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check, examine
from orderedmq.embedded.store import layout, pages, transaction
from orderedmq.embedded.store.environment import Store
from orderedmq.embedded.store.segment_file import HEADER_BYTES
from orderedmq.embedded.store.verify import reading
from orderedmq.errors import StoreError
from orderedmq.model import OffsetRange
from orderedmq.ownership.micro_batch import SourceRun
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
#: The number of used bytes in a meta page.
META_SIZE = 152

#: A position in the file, and the new bytes there.
Change = tuple[int, bytes]


@dataclass
class World:
    """An undamaged store, the content of its files, and the data read from it before and after a write.

    ``content`` is the content of LMDB's file, followed by the segments' content. ``sizes``: the sizes of these files, by name.
    """

    path: Path
    sizes: dict[str, int]
    content: bytes
    receipts: tuple[Receipt, ...]
    answers: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)

    def flipped(self, at: int, bit: int) -> Change:
        return at, bytes([self.content[at] ^ 1 << bit])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


@pytest.fixture(scope="module")
def world(folder: Path) -> Iterator[World]:
    path = folder / "store"
    broker, _, receipts = make(path)
    with broker:
        contents = {name: (path / name).read_bytes() for name in ("data.mdb", *segment_files(path))}
        sizes = {name: len(content) for name, content in contents.items()}
        world = World(path, sizes, b"".join(contents.values()), receipts)
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
    left = ("fails", "belongs to no entry")
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


def attempt(world: World, folder: Path, changes: list[Change]) -> Attempts:
    """Try all changes. Assert that each gives the right answer or a named error."""
    running = Attempts(world, folder / "copy", changes)
    while running.step():
        pass
    assert not running.findings, f"{len(running.findings)} of {len(changes)}:\n" + "\n".join(running.findings[:40])
    return running


def fields_in_use(world: World, folder: Path) -> list[int]:
    """The positions of the 16-bit fields that affect an answer. LMDB has no smaller fields, and this project's data have checksums.

    If all bytes of a range can be inverted and every answer stays right, nothing reads the range. Nine tenths of the file are such
    ranges: unused space and pages of earlier transactions. Ranges with other outcomes are divided further.
    """
    places = list(range(0, len(world.content), 4096))
    for size, part in ((4096, 512), (512, 64), (64, 8), (8, 2)):
        inverted = [(at, bytes(byte ^ 0xFF for byte in world.content[at : at + size])) for at in places]
        noticed = attempt(world, folder, inverted).noticed
        places = [at for begin, _ in noticed for at in range(begin, begin + size, part)]
    return places


@pytest.mark.holds("changed bits", "changed body")
@pytest.mark.timeout(3600)
def test_a_changed_bit_gives_the_right_answer_or_a_named_error(world: World, folder: Path, nightly: bool):
    random = Random(7)
    if nightly:
        places = [at + random.randrange(2) for at in fields_in_use(world, folder)]
    else:
        # Change a sample of the bytes that are not zero, and all fields that LMDB reads first.
        written = [at for at, byte in enumerate(world.content) if byte]
        places = [*random.sample(written, SAMPLE), *range(META_SIZE), *range(4096, 4096 + META_SIZE)]
    changes = [world.flipped(at, random.randrange(8)) for at in places]
    random.shuffle(changes)
    seen = attempt(world, folder, changes).outcomes
    assert seen["right"] > 10, "some bytes must be unused"
    assert seen["named"] > len(places) // 20, seen


def test_a_sector_or_page_that_is_lost_or_anothers_gives_the_right_answer_or_a_named_error(world: World, folder: Path):
    random = Random(8)
    changes: list[Change] = []
    for page in range(0, len(world.content), 4096):
        other = random.randrange(0, len(world.content), 4096)
        changes.append((page, world.content[other : other + 4096]))
        changes.append((page + random.randrange(0, 4096, 512), random.choice((bytes(512), random.randbytes(512)))))
    seen = attempt(world, folder, changes).outcomes
    assert min(seen["right"], seen["named"]) > len(changes) // 10, seen


def test_no_reader_waits_for_rows_that_a_damaged_entry_promises(world: World, folder: Path):
    """Change each bit of the row count in index entries. With a smaller count, a search by time once did not end."""
    opened = Store.open(world.path)
    with opened.read() as txn:
        entries = [key + value for key, value in txn.scan("index")]
        states = [key + value for key, value in txn.scan("queues")]
    opened.close()
    chunk, state = len(layout.Chunk(layout.INLINE, *[0] * 10).pack()), len(layout.QueueState(*[0] * 4).pack())
    rows_at = [world.content.index(entry) + len(entry) - chunk + 24 for entry in entries]
    end_at = [world.content.rindex(entry) + len(entry) - state + 8 for entry in states]
    changes = [world.flipped(at + byte, bit) for at in rows_at for byte in range(2) for bit in range(8)]
    seen = attempt(world, folder, [*changes, *(world.flipped(at + byte, 2) for at in end_at for byte in range(8))]).outcomes
    assert seen["named"] > len(changes) // 3, seen


def test_a_database_with_other_flags_is_damaged(world: World, folder: Path):
    """With the flag of duplicate keys (4), LMDB would add values instead of replacing them."""
    # In the list of databases, a name precedes its record: four bytes of padding, then the flags. Former pages have such lists too.
    records = [found.end() for name in layout.DATABASES for found in re.finditer(name.encode() + bytes(6), world.content)]
    seen = attempt(world, folder, [(at - 2, b"\x04") for at in records]).outcomes
    assert seen["named"] == len(layout.DATABASES), seen


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


@pytest.mark.timeout(3600)
def test_every_byte_of_the_segments_changed_gives_the_right_answer_or_a_named_error(in_segments, nightly: bool):
    """Change the byte at one position in all segments at a time. The check must name each changed file that is in use."""
    path, answers, contents = in_segments
    needed = set(contents) - {path / "segments" / name for name in examine(path).unused}
    places = range(max(map(len, contents.values())))
    random = Random(11)
    for at in places if nightly else sorted(random.sample(places, SAMPLE)):
        changed = {file for file, content in contents.items() if at < len(content)}
        for file in changed:
            content = contents[file]
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :])
        outcomes = look(path, answers)
        assert outcomes["right"] == len(READS) or at >= HEADER_BYTES, "changed headers must not affect readers"
        assert len(check(path)) == len(changed & needed), (at, check(path))
        for file in changed:
            file.write_bytes(contents[file])


@pytest.mark.timeout(3600)
def test_segments_that_are_cut_off_anywhere_give_the_right_answer_or_a_named_error(in_segments, nightly: bool):
    path, answers, contents = in_segments
    lengths = range(max(map(len, contents.values())))
    for length in lengths if nightly else sorted(Random(12).sample(lengths, SAMPLE // 4)):
        for file, content in contents.items():
            file.write_bytes(content[:length])
        look(path, answers)
        cut = {file for file, content in contents.items() if length < len(content)} & set(contents)
        assert bool(check(path)) is any(file.name not in examine(path).unused for file in cut)


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


# -- kinds of damage ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(world: World, folder: Path) -> Path:
    return copy(world, folder / "place", world.content)


def change(place: Path, at: int, *values: bytes) -> None:
    with open(place / "data.mdb", "r+b") as file:
        file.seek(at)
        file.write(b"".join(values))


def number_at(place: Path, at: int, size: int = 8) -> int:
    return int.from_bytes((place / "data.mdb").read_bytes()[at : at + size], "little")


def newest(place: Path) -> int:
    """The number (0 or 1) of the current meta page."""
    return int(number_at(place, 4096 + META_TRANSACTION) > number_at(place, META_TRANSACTION))


def corrupt(place: Path, *words: str) -> None:
    """Assert that opening is refused in one line that says what to do, and that a check also finds the damage."""
    for _ in range(2):
        with EmbeddedBroker(place, clock=FixedClock()) as broker, refused("STORE.CORRUPT", *words, f"orderedmq check {place}"):
            broker.log.topics()
    assert check(place)


META_TRANSACTION = 144
META_MAIN_ROOT = 128


def test_an_older_snapshot_is_not_taken_for_the_newest(place: Path):
    """Both snapshots are complete. Only the transaction's number says which one is newer."""
    new = newest(place)
    older = number_at(place, (1 - new) * 4096 + META_TRANSACTION)
    change(place, (1 - new) * 4096 + META_TRANSACTION, (older + 2).to_bytes(8, "little"))
    corrupt(place, "transaction")


def test_a_newer_snapshot_is_not_taken_for_an_older_one(place: Path):
    """The number of the newer snapshot is lowered by two. Without the check, the last write would be lost silently."""
    new = newest(place)
    change(place, new * 4096 + META_TRANSACTION, (number_at(place, new * 4096 + META_TRANSACTION) - 2).to_bytes(8, "little"))
    corrupt(place, "has the entries of another transaction")


def key_at(content: bytes, page: int, key: bytes) -> int:
    """The position of a key, found by the page's list of nodes, because free space of a page may contain former keys."""
    begin = page * 4096
    (end,) = struct.unpack_from("<H", content, begin + 12)
    nodes = struct.unpack_from(f"<{(end - 16) // 2}H", content, begin + 16)
    [found] = [begin + node + 8 for node in nodes if content.startswith(key, begin + node + 8)]
    return found


def test_a_page_that_leads_back_to_itself_ends_a_walk(place: Path):
    """The root page of the list of databases becomes the root of one of its databases."""
    content = (place / "data.mdb").read_bytes()
    root = number_at(place, newest(place) * 4096 + META_MAIN_ROOT)
    at = key_at(content, root, b"groups")
    change(place, at + 6 + 40, root.to_bytes(8, "little"))
    corrupt(place, "groups")


def test_a_tree_on_free_pages_is_damage(place: Path):
    """A root points to the page that was this database's root before. Its entries are complete, with correct checksums, but old."""
    with EmbeddedBroker(place, clock=FixedClock()) as broker:
        queue = QUEUES[0]
        content = (place / "data.mdb").read_bytes()
        root = number_at(place, newest(place) * 4096 + META_MAIN_ROOT)
        at = key_at(content, root, b"groups")
        before = content[at + 6 + 40 : at + 6 + 48]
        broker.admin.seek("h", {queue: 2})
    content = (place / "data.mdb").read_bytes()
    root = number_at(place, newest(place) * 4096 + META_MAIN_ROOT)
    at = key_at(content, root, b"groups")
    assert content[at + 6 + 40 : at + 6 + 48] != before
    change(place, at + 6 + 40, before)
    corrupt(place, "used")


def test_pages_beyond_the_value_are_not_freed(place: Path):
    """The first page of a payload says how many pages LMDB must free. The change adds three pages that belong to other data."""
    content = (place / "data.mdb").read_bytes()
    at = content.index(b"q" * 3000) // 4096 * 4096
    assert number_at(place, at) == at // 4096
    change(place, at + 12, (number_at(place, at + 12, 4) + 3).to_bytes(4, "little"))
    with EmbeddedBroker(place, clock=FixedClock()) as broker, refused("STORE.CORRUPT", f"page {at // 4096}"):
        broker.admin.delete_topic("plain")
    assert [finding for finding in check(place) if f"page {at // 4096}" in finding]


@pytest.mark.parametrize("database", ["topics", "queues", "groups", "locks", "dead", "parked", "batches", "segments", "space"])
def test_an_entry_that_a_changed_key_has_moved_is_missed(place: Path, database: str):
    """The key's last byte is changed, so that the entry stays between its neighbours, but is not found under its key."""
    opened = Store.open(place)
    with opened.read() as txn:
        key = [key for key, _ in txn.scan(database)][-1]
    opened.close()
    content = (place / "data.mdb").read_bytes()
    for at in [at for at in range(len(content)) if content.startswith(key, at)]:
        change(place, at + len(key) - 1, bytes([key[-1] ^ 4]))
    opened = Store.open(place)
    try:
        for look in (lambda txn: txn.get(database, key), lambda txn: list(txn.scan(database, key[:-1]))):
            with refused("STORE.CORRUPT", "fails its checksum"), opened.read() as txn:
                look(txn)
    finally:
        opened.close()


def test_damage_of_the_lock_file_is_repaired_when_the_store_is_opened(world: World, place: Path):
    """No process has the store open, so LMDB creates its lock file again."""
    with EmbeddedBroker(place, clock=FixedClock()) as broker:
        broker.log.topics()
    for _ in range(3):
        (place / "lock.mdb").write_bytes(os.urandom((place / "lock.mdb").stat().st_size))
        with EmbeddedBroker(place, clock=FixedClock()) as broker:
            assert read_all(broker) == world.answers


@pytest.mark.parametrize("size", [4096, 8192, 20_000, 80_000])
def test_a_file_that_was_cut_off_is_refused(place: Path, size: int):
    os.truncate(place / "data.mdb", size)
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


def test_pages_of_any_history_are_sound(tmp_path: Path):
    """Trees grow, shrink, split and become empty, with values of all sizes. Some writes are aborted."""
    random = Random(5)
    with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=3, sync=False) as env:
        trees = [env.open_db(name) for name in (b"a", b"b", b"c")]
        keys: list[set[bytes]] = [set(), set(), set()]
        for step in range(300):
            before = [set(tree_keys) for tree_keys in keys]
            with env.begin(write=True) as txn:
                for _ in range(random.choice((1, 5, 60))):
                    number = random.randrange(3)
                    if keys[number] and random.random() < (0.3, 0.7)[step // 50 % 2]:
                        key = random.choice(sorted(keys[number]))
                        keys[number].discard(key)
                        txn.delete(key, db=trees[number])
                    else:
                        key = random.randbytes(random.choice((1, 8, 40, 300)))
                        keys[number].add(key)
                        txn.put(key, random.randbytes(random.choice((0, 9, 70, 1500, 2500, 20_000))), db=trees[number])
                if step % 17 == 0:
                    txn.abort()
                    keys = before
            findings: list[str] = []
            with env.begin() as txn, reading(tmp_path) as read:
                pair = pages.metas(read)
                assert pair is not None
                assert pages.wrong_metas(pair) is None
                snapshot = pages.Snapshot(read, pair[txn.id() & 1], findings.append)
                for number, (name, tree) in enumerate(snapshot.databases().items()):
                    entries = {entry.key: snapshot.value(entry) for entry in snapshot.entries(tree, name)}
                    assert entries == dict(txn.cursor(db=trees[number]))
                snapshot.require_free()
            assert findings == []


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
