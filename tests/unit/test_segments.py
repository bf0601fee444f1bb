"""Segment files: who may delete them, what readers see when they are deleted, and how much space they take."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.embedded import chunk_codec as codec
from orderedmq.embedded import garbage, index, liveness, payloads
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from orderedmq.embedded.clock import FORGOTTEN
from orderedmq.embedded.garbage import can_be_published
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.segment_file import HEADER_BYTES, Header, SegmentWriter, was_begun
from orderedmq.embedded.store.segments import Segments
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.lock import Instant
from orderedmq.ownership.micro_batch import SourceRun
from tests.contract.support import FakeClock, bodies, pull, queues_of, refused, rows

TOKEN = "0123456789abcdef" * 2
HEADER = Header(TOKEN, "f" * 32, own=False, sink="sink", batch=7, boot="boot", since=1000.0)
Q0, Q1 = (MessageQueue("orders", "embedded", number) for number in range(2))
#: The size of a message that fills a chunk, so that its append makes a separate segment.
LARGE = 1_100_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def broker(tmp_path: Path, clock: FakeClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        broker.admin.create_topic("orders", 2, compression="none")
        yield broker
    assert check(tmp_path / "store") == []


def files(broker: EmbeddedBroker) -> list[str]:
    return sorted(path.suffix for path in (broker.path / "segments").iterdir() if path.suffix)


def append(broker: EmbeddedBroker, *letters: str, queue: MessageQueue = Q0, size: int = LARGE) -> None:
    for letter in letters:
        broker.log.append({queue: rows([letter * size])})


def staged(broker: EmbeddedBroker, batch: SinkBatch, size: int = LARGE, partition: int = 0) -> Receipt:
    staging = broker.outbox.open(batch, partition)
    staging.add(Q0, rows(["s" * size]))
    return staging.receipt()


def collected(broker: EmbeddedBroker, clock: FakeClock) -> int:
    store = Store.open(broker.path)
    try:
        return garbage.collect_now(store, clock)
    finally:
        store.close()


# -- the file -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [HEADER, Header(TOKEN, "0" * 32, own=True), replace(HEADER, sink="ü€" * 16)])
def test_a_header_says_what_was_written_and_a_changed_one_says_nothing(header: Header) -> None:
    content = header.pack()
    assert len(content) == HEADER_BYTES
    assert Header.unpack(content + b"payload") == header
    for at in range(HEADER_BYTES):
        assert Header.unpack(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]) is None


@pytest.mark.parametrize(
    ("content", "begun"),
    [(b"", True), (bytes(600), True), (HEADER.pack()[:300], True), (HEADER.pack()[:9] + bytes(90), True), (HEADER.pack(), False),
     (b"somebody's", False), (HEADER.pack()[:100] + b"x" * 500, True)],
)  # fmt: skip
def test_recognises_a_header_after_a_loss_of_power(content: bytes, begun: bool) -> None:
    assert was_begun(content) is begun


def test_payloads_are_read_where_they_were_written_and_the_lock_shows_that_the_writer_lives(tmp_path: Path) -> None:
    segments = Segments(lambda: tmp_path, HEADER.store_id)
    segments.folder.mkdir()
    writer = segments.create(HEADER)
    places = [writer.append(payload) for payload in ([b"o", pa.py_buffer(b"ne")], [b""], [b"three"])]
    assert segments.size(writer.token) is None, "the segment must not have a name yet"
    writer.finish()
    assert [bytes(segments.read(writer.token, at, size)) for at, size in zip(places, (3, 0, 5), strict=True)] == [
        b"one",
        b"",
        b"three",
    ]
    assert bytes(segments.read(writer.token, places[2], 100)) == b"three", "the segment ends after these bytes"
    assert segments.size(writer.token) == HEADER_BYTES + 8
    writer.abandon()
    writer.abandon()
    assert segments.names() == []


def test_an_error_at_the_first_step_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(OSError, match="No space"):
        SegmentWriter(tmp_path, HEADER)
    assert list(tmp_path.iterdir()) == []


# -- garbage ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "latest", "may"),
    [
        (HEADER, None, True),
        (HEADER, 6, True),
        (HEADER, 7, False),
        (HEADER, 8, False),
        (replace(HEADER, boot="another"), None, False),
        (replace(HEADER, own=True), None, False),
        (replace(HEADER, sink=None), None, True),
        (replace(HEADER, since=999.0 - FORGOTTEN), None, False),
        (replace(HEADER, since=1000.0 - FORGOTTEN), None, True),
    ],
)
def test_who_may_still_publish_a_segment(header: Header, latest: int | None, may: bool) -> None:
    assert can_be_published(header, Instant("boot", 1000.0), latest) is may


def test_keeps_segments_of_living_tasks_and_deletes_those_of_dead_ones(broker: EmbeddedBroker, clock: FakeClock) -> None:
    staging = broker.outbox.open(SinkBatch("s", 0), 0)
    for _ in range(3):
        staging.add(Q0, rows(["s" * 1_500_000]))
    receipt = staging.receipt()
    segments = Store.open(broker.path).segments
    living = segments.create(replace(HEADER, store_id=segments.store_id))
    assert collected(broker, clock) == 0
    assert files(broker) == [".open", ".segment"]
    living.close()
    assert collected(broker, clock) == 1
    broker.outbox.publish(SinkBatch("s", 0), [receipt])
    assert collected(broker, clock) == 0
    assert len(bodies(broker, Q0)) == 3


@pytest.mark.holds("no leftovers")
def test_keeps_the_last_two_runs_of_a_batch(broker: EmbeddedBroker, clock: FakeClock) -> None:
    other = staged(broker, SinkBatch("s", 1, job="job 0"))
    late = broker.outbox.open(SinkBatch("s", 0, job="job 0"), 2)
    receipts = []
    for number in range(5):
        batch = SinkBatch("s", 0, job=f"job {number}")
        receipts.append([staged(broker, batch, partition=partition) for partition in range(2)])
        clock.pass_(1)
        collected(broker, clock)
        assert len(files(broker)) == 1 + 2 * min(2, number + 1)
    late.add(Q0, rows(["l" * LARGE]))
    late.receipt()
    assert collected(broker, clock) == 2, "the driver of the last run but one has ended"
    with refused("SINK.TOKEN_GONE"):
        broker.outbox.publish(SinkBatch("s", 0), receipts[2])
    assert broker.outbox.publish(SinkBatch("s", 0), receipts[4]).ranges
    assert broker.outbox.publish(SinkBatch("s", 1), [other]).ranges


def test_segments_from_before_a_reboot_replace_no_run(broker: EmbeddedBroker, clock: FakeClock) -> None:
    for run in ("first", "second"):
        staged(broker, SinkBatch("s", 0, job=run))
    clock.reboot()
    receipt = staged(broker, SinkBatch("s", 0, job="third"))
    assert collected(broker, clock) == 2
    assert broker.outbox.publish(SinkBatch("s", 0), [receipt]).ranges


def test_keeps_a_file_without_a_header_for_a_while(broker: EmbeddedBroker, clock: FakeClock) -> None:
    file = broker.path / "segments" / f"{TOKEN}.open"
    file.touch()
    assert collected(broker, clock) == 0
    os.utime(file, (1, 1))
    assert collected(broker, clock) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", [f"segments/{TOKEN}.open", f"owners/.{TOKEN}"])
def test_a_child_that_is_forked_during_a_collection_keeps_no_writer_waiting(
    broker: EmbeddedBroker, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The collection looks at a file that its writer has created but not locked yet, and the child inherits the descriptor."""
    broker.groups.join("me")
    there, here = os.pipe()
    children: list[int] = []

    def fork(*_: object) -> None:
        child = os.fork()
        if not child:
            os.close(here)
            os.read(there, 1)
            os._exit(0)
        children.append(child)
        raise OSError

    with open(broker.path / name, "xb") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", fork)
            patch.setattr(Path, "unlink", fork)
            collected(broker, clock)
            liveness.sweep(broker.path)
        assert len(children) == 1
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(here)
            os.waitpid(children[0], 0)
            os.close(there)
            (broker.path / name).unlink()


@pytest.mark.holds("no leftovers")
@pytest.mark.parametrize("name", [f"{TOKEN}.segment", f"{TOKEN}.open", "notes.txt"])
def test_a_file_that_the_store_did_not_write_is_never_deleted(broker: EmbeddedBroker, clock: FakeClock, name: str) -> None:
    file = broker.path / "segments" / name
    for content in (b"mine", replace(HEADER, boot="earlier").pack(), b"x" * 5000):
        file.write_bytes(content)
        os.utime(file, (1, 1))
        assert collected(broker, clock) == 0
        assert file.read_bytes() == content
    broker.admin.trim("orders")
    broker.admin.delete_topic("orders")
    broker.admin.create_topic("orders", 2)
    assert file.exists()
    file.unlink()


@pytest.mark.holds("no leftovers")
def test_a_segment_under_another_ones_name_is_never_deleted(broker: EmbeddedBroker, clock: FakeClock) -> None:
    append(broker, "a")
    [file] = (broker.path / "segments").glob("*.segment")
    copied = file.with_name(f"{TOKEN}.segment")
    shutil.copy(file, copied)
    assert collected(broker, clock) == 0
    assert copied.exists()
    copied.unlink()


def test_collects_garbage_once_a_minute(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(garbage, "collect_now", lambda store, clock: looks.append(store))
    append(broker, "a", "b", size=10)
    assert looks == [], "connecting has already looked for garbage"
    looked = broker.path / "segments" / "looked"
    os.utime(looked, (looked.stat().st_mtime - 61,) * 2)
    append(broker, "c", "d", size=10)
    broker.outbox.publish(SinkBatch("s", 0), [])
    assert len(looks) == 1


def test_acknowledges_a_publish_after_which_no_descriptor_is_free(broker: EmbeddedBroker) -> None:
    """A publish removes old files after its commit. An error of that would make the caller write the rows again."""
    broker.outbox.register(SourceRun("query", 0, "run"), Q0, OffsetRange(0, 1), None)
    receipt = staged(broker, SinkBatch(None), size=10)
    os.utime(broker.path / "segments" / garbage.LOOKED, (1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        assert not broker.outbox.publish(SinkBatch(None), [receipt]).replayed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bodies(broker, Q0) == ["s" * 10]


def test_after_an_append_that_failed_no_segment_stays(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orderedmq.embedded.index.retain", refuse)
    with refused("STORE.FULL"):
        append(broker, "a")
    assert files(broker) == []
    assert bodies(broker, Q0) == []


def store_id(broker: EmbeddedBroker) -> str:
    store = Store.open(broker.path)
    try:
        return store.segments.store_id
    finally:
        store.close()


def test_a_segment_that_is_emptied_and_used_again_in_one_transaction_stays(broker: EmbeddedBroker) -> None:
    append(broker, "a")
    store = Store.open(broker.path)
    with store.write() as txn:
        chunk = index.holding(txn, Q0, 0)
        payloads.release(txn, chunk)
        payloads.hold(txn, chunk)
    store.close()
    assert bodies(broker, Q0) == ["a" * LARGE]


def test_bodies_that_compress_well_are_not_merged_beyond_the_size_of_a_chunk(broker: EmbeddedBroker) -> None:
    broker.admin.create_topic("zeros", 1, compression="lz4")
    queue = MessageQueue("zeros", "embedded", 0)
    for _ in range(5):
        broker.log.append({queue: rows([bytes(codec.CHUNK_BYTES // 2)])})
    assert [info.chunks for info in broker.admin.describe_topic("zeros")] == [3]


@pytest.fixture
def bad_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)


def test_appends_behind_an_unreadable_tail(tmp_path: Path, clock: FakeClock, request: pytest.FixtureRequest) -> None:
    with EmbeddedBroker(tmp_path / "other", clock=clock) as broker:
        broker.admin.create_topic("orders", 2, compression="none")
        broker.log.append({Q0: rows(["a" * 70_000])})
        request.getfixturevalue("bad_sector")
        broker.log.append({Q0: rows(["b"])})
        assert broker.log.bounds([Q0])[Q0].max_offset == 2
        with refused("STORE.IO", "Input/output error"):
            bodies(broker, Q0)
        assert any("cannot be read" in finding for finding in check(broker.path))


# -- readers during deletion --------------------------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Takes a function that is called once, after a reader has found its messages in the index and before it opens their segment."""

    def arrange(work: Callable[[], object]) -> None:
        read, left = Segments.read, [work]

        def late(self: Segments, *place: object) -> object:
            if left:
                left.pop()()
            return read(self, *place)  # type: ignore[arg-type]

        monkeypatch.setattr(Segments, "read", late)

    return arrange


def test_a_reader_whose_segment_was_merged_away_gets_the_messages(broker: EmbeddedBroker, meanwhile) -> None:
    broker.log.append({Q0: rows(["a" * 70_000])})
    meanwhile(lambda: broker.log.append({Q0: rows(["b" * 70_000])}))
    assert pull(broker, Q0, 0, ("body",)).num_rows == 2
    assert bodies(broker, Q0) == ["a" * 70_000, "b" * 70_000]
    assert files(broker) == [".segment"]


def test_a_lost_segment_is_damage_and_its_neighbours_can_be_read(tmp_path: Path, clock: FakeClock) -> None:
    with EmbeddedBroker(tmp_path / "other", clock=clock) as broker:
        broker.admin.create_topic("orders", 2, compression="none")
        append(broker, "a")
        [first] = (broker.path / "segments").glob("*.segment")
        append(broker, "b")
        first.unlink()
        with refused("STORE.CORRUPT", first.name, "is missing"):
            pull(broker, Q0, 0, ("body",))
        assert bodies(broker, Q0, 1) == ["b" * LARGE]
        append(broker, "c")
        assert len(check(broker.path)) == 1
        assert broker.admin.trim("orders", {Q0: 1}) == {Q0: 1}
        assert check(broker.path) == []


# -- disk space ---------------------------------------------------------------------------------------------------------------------


def test_frees_the_space_of_a_segment_with_its_last_message(broker: EmbeddedBroker) -> None:
    broker.log.append({Q0: rows(["a" * LARGE]), Q1: rows(["b" * LARGE])})
    broker.admin.trim("orders", {Q0: 1})
    assert files(broker) == [".segment"]
    broker.admin.trim("orders", {Q1: 1})
    assert files(broker) == []


def test_retention_by_size_deletes_a_batch_segment_by_segment(broker: EmbeddedBroker) -> None:
    """Each of three tasks has written to both queues, so a segment's file goes only when the messages of both queues do."""
    broker.admin.alter_topic("orders", retention_bytes=3 * LARGE)
    batch, receipts = SinkBatch("s", 0), []
    for partition in range(3):
        staging = broker.outbox.open(batch, partition)
        for queue in (Q0, Q1):
            staging.add(queue, rows([str(partition) * LARGE]))
        receipts.append(staging.receipt())
    broker.outbox.publish(batch, receipts)
    bounds = broker.log.bounds([Q0, Q1])
    assert (bounds[Q0].min_offset, bounds[Q1].min_offset) == (2, 1)
    assert files(broker) == [".segment"] * 2


def test_retention_by_size_waits_for_an_old_chunk_that_does_not_fit_into_the_excess(
    broker: EmbeddedBroker, clock: FakeClock
) -> None:
    broker.admin.alter_topic("orders", retention_bytes=3 * LARGE)
    append(broker, "a", size=2 * LARGE)
    for queue, first in ((Q1, (0, 0)), (Q1, (0, 0)), (Q1, (1, 0)), (Q1, (1, 1))):
        clock.pass_(1)
        append(broker, "b", queue=queue)
        bounds = broker.log.bounds([Q0, Q1])
        assert (bounds[Q0].min_offset, bounds[Q1].min_offset) == first


def test_retention_by_size_leaves_another_topic_in_the_same_segments_alone(broker: EmbeddedBroker, clock: FakeClock) -> None:
    broker.admin.create_topic("other", 1, compression="none")
    other = queues_of(broker, "other")[0]
    broker.admin.alter_topic("orders", retention_bytes=3 * LARGE)
    for number in range(6):
        broker.log.append({Q0: rows(["a" * LARGE]), other: rows(["b" * LARGE])})
        clock.pass_(1)
        at = broker.log.bounds([Q0])[Q0]
        assert at.max_offset - at.min_offset == min(3, number + 1)
    assert broker.log.bounds([other])[other].min_offset == 0


def test_stores_few_bytes_of_many_tasks_without_a_file(broker: EmbeddedBroker) -> None:
    batch = SinkBatch("s", 0)
    receipts = []
    for partition in range(3):
        staging = broker.outbox.open(batch, partition)
        staging.add(Q0, rows([f"{partition}" * 40_000]))
        receipts.append(staging.receipt())
    assert files(broker) == []
    broker.outbox.publish(batch, receipts[:1])
    assert files(broker) == []
    broker.outbox.publish(SinkBatch("s", 1), receipts[1:])
    assert files(broker) == [".segment"]
    assert [body[0] for body in bodies(broker, Q0)] == ["0", "1", "2"]


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_system_that_writes_a_part_only_is_asked_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    def some(descriptor: int, views: list[memoryview], position: int) -> int:
        return os.pwrite(descriptor, b"".join(views)[:most], position)

    monkeypatch.setattr(os, "pwritev", some)
    segments = Segments(lambda: tmp_path, HEADER.store_id)
    segments.folder.mkdir()
    writer = segments.create(HEADER)
    pieces = [bytes([number]) * number for number in range(40)]
    position = writer.append(pieces)
    writer.finish()
    assert bytes(segments.read(writer.token, position, 1000)) == b"".join(pieces)
    writer.close()
