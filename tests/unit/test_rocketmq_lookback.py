"""Attempts of a batch that crash, repeat, take over and lose answers leave each row in its queue once, in the order of its key.

The queue is a list in memory; what decides and encodes is the real thing. Each planted bug is noticed.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import RocketMQError, RocketMQUnavailableError, SinkError
from orderedmq.model import MESSAGE_SCHEMA, PRODUCER_SCHEMA, MessageQueue
from orderedmq.rocketmq import encode, lookback, queue_writer, stamp
from orderedmq.rocketmq.encode import SendBody
from orderedmq.rocketmq.lookback import KEPT, Ledger, Lookback
from orderedmq.rocketmq.properties import format_properties, parse_properties
from orderedmq.rocketmq.queue_writer import QueueWriter, Start
from orderedmq.rocketmq.receipts import QueueReport, Token, Verdict, judge, parse_token
from orderedmq.rocketmq.stamp import COLUMNS, Found, Writer, digests, found, sink_name

QUEUE = MessageQueue("t", "broker-a", 0)
SINK = "sink"


def rows_of(names: list[str]) -> pa.RecordBatch:
    """Rows whose key is their first letter."""
    columns: dict[str, Any] = {
        "body": [name.encode() for name in names],
        "sharding_key": [name[0] for name in names],
        "properties": [[("name", name)] for name in names],
    }
    return pa.record_batch({name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in columns.items()})


@dataclass
class Stored:
    body: bytes
    properties: dict[str, str]


def split(body: SendBody) -> list[Stored]:
    """What a broker makes of a batch."""
    out, data, at = [], bytes(body.body), 0
    while at < len(data):
        size, _, _, _, length = struct.unpack_from(">iiiii", data, at)
        (width,) = struct.unpack_from(">h", data, at + 20 + length)
        text = data[at + 22 + length : at + 22 + length + width]
        out.append(Stored(data[at + 20 : at + 20 + length], parse_properties(text)))
        at += size
    assert len(out) == body.rows
    return out


@dataclass
class Queue:
    """A queue, who has its lock, and the sink's bookmark in it."""

    messages: list[Stored] = field(default_factory=list)
    owner: object = None
    bookmark: int | None = None
    first_visit: bool = True

    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        for at in range(begin, end, 3):
            part = range(at, min(at + 3, end))
            chosen = [self.messages[offset] for offset in part]
            columns = {
                "queue_offset": list(part),
                "body": [message.body for message in chosen],
                "tags": [message.properties.get("TAGS") for message in chosen],
                "keys": [message.properties.get("KEYS") for message in chosen],
                "sharding_key": [message.properties.get("__SHARDINGKEY") for message in chosen],
                "properties": [list({**message.properties, "CLUSTER": "c"}.items()) for message in chosen],
            }
            yield pa.record_batch({name: pa.array(columns[name], MESSAGE_SCHEMA.field(name).type) for name in COLUMNS})

    def named(self, batch: int, partition: int) -> list[str]:
        """The rows that are there, by their names."""
        return [
            message.properties["name"]
            for message in self.messages
            if (message.properties.get("OMQ_BATCH"), message.properties.get("OMQ_PARTITION")) == (str(batch), str(partition))
        ]


class Crash(Exception):
    """The process is gone."""


class FakePlace:
    """Spoils sends as its ``fate`` says: ok, busy, lost, stored (both without an answer), crash, crash after, stolen, others."""

    def __init__(self, world: Queue, fate: Callable[[], str], rival: Callable[[], None] = lambda: None) -> None:
        self.queue = QUEUE
        self._world = world
        self._fate = fate
        self._rival = rival
        self._lost = True
        self.limit = 10**9
        self.refusal = RocketMQError("MESSAGE_ILLEGAL", "too large")

    def acquire(self) -> None:
        # Who had it is dead, or waits.
        self._world.owner, self._lost = self, False

    def keep(self) -> bool:
        return not self._lost and self._world.owner is self

    def start(self) -> Start:
        if self._world.first_visit:
            self._world.bookmark, self._world.first_visit = len(self._world.messages), False
        return Start(len(self._world.messages), self._world.bookmark)

    def least(self) -> int:
        return 0

    def end(self) -> int:
        return len(self._world.messages)

    def read(self, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        return self._world.read(begin, end)

    def send(self, body: SendBody) -> int:
        assert self.keep(), "sent without the lock"
        if body.rows > self.limit:
            raise self.refusal
        fate = self._fate()
        if fate == "busy":
            raise RocketMQUnavailableError("BUSY", "busy")
        if fate == "lost":
            raise RocketMQUnavailableError("TIMEOUT", "lost")
        if fate == "crash":
            raise Crash
        if fate == "others":
            self._world.messages.append(Stored(b"x", {"KEYS": "x"}))
        offset = len(self._world.messages)
        self._world.messages += split(body)
        if fate == "stored":
            raise RocketMQUnavailableError("CONNECTION_LOST", "lost")
        if fate == "crash after":
            raise Crash
        if fate == "stolen":
            self._rival()
        return offset

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        if error.outcome_unknown:
            self._lost = True

    def release(self, end: int) -> None:
        assert end <= len(self._world.messages)
        if self._world.owner is self:
            self._world.owner = None


def attempt(place: FakePlace, writer: Writer, names: list[str], draw: random.Random) -> Receipt:
    """One attempt of a task, its rows added in portions."""
    work = QueueWriter(place, writer, writer.partition)
    at = 0
    while at < len(names):
        size = draw.randint(1, len(names))
        work.write(rows_of(names[at : at + size]), at)
        at += size
    work.let_go()
    reports = (work.report(),) if names else ()
    return Receipt(
        Token(writer.sink, writer.batch, writer.partition, reports).text(),
        writer.partition,
        {QUEUE: len(names)} if names else {},
    )


def commit(world: Queue, batch: SinkBatch, receipts: list[Receipt]) -> Verdict:
    verdict = judge(batch, [parse_token(batch, receipt) for receipt in receipts], {QUEUE: world.bookmark})
    for bookmark in verdict.bookmarks.values():
        world.bookmark = bookmark
    return verdict


FATES = ["busy", "lost", "stored", "crash", "crash after", "stolen", "others"]


def shuffled(names: list[str], draw: random.Random) -> list[str]:
    """Another order, in which the rows of one key keep theirs."""
    waiting: dict[str, list[str]] = {}
    for name in names:
        waiting.setdefault(name[0], []).append(name)
    out = []
    while waiting:
        key = draw.choice(sorted(waiting))
        out.append(waiting[key].pop(0))
        if not waiting[key]:
            del waiting[key]
    return out


def scenario(draw: random.Random) -> None:
    """Batches of two partitions, each written by attempts that may crash, until one does not. Asserts what must hold."""
    world = Queue([Stored(b"old", {}) for _ in range(draw.randint(0, 9))])
    expected: list[tuple[int, int, list[str]]] = []
    for number in range(draw.randint(1, 4)):
        batch = SinkBatch(SINK, number)
        plan = {
            partition: [f"{draw.choice('ab')}{draw.randint(0, 2)}" for _ in range(draw.choice([0, 2, 6, 12]))]
            for partition in range(2)
        }
        expected += [(number, partition, names) for partition, names in plan.items()]
        tries = draw.randint(1, 3)
        for run in range(tries):
            receipts = []
            for partition, names in plan.items():
                # Tasks that did not crash in an earlier run of the batch run again with it.
                receipts += run_task(world, Writer(SINK, number, partition), names, draw)
                if draw.random() < 0.2:
                    world.messages.append(Stored(b"x", {"KEYS": "x"}))
            committed = world.bookmark
            if run == tries - 1 or draw.random() < 0.3:
                verdict = commit(world, batch, receipts)
                assert verdict.differs is None, verdict
            if draw.random() < 0.2:
                # A broker that was killed.
                world.bookmark = draw.choice([None, committed])
    for number, partition, names in expected:
        there = world.named(number, partition)
        assert Counter(there) == Counter(names), (number, partition, names, there)
        for key in "ab":
            assert [name for name in there if name[0] == key] == [name for name in names if name[0] == key]
    sequences = Counter(
        tuple(message.properties[name] for name in ("OMQ_BATCH", "OMQ_PARTITION", "OMQ_SEQUENCE"))
        for message in world.messages
        if "OMQ_SINK" in message.properties
    )
    assert max(sequences.values(), default=1) == 1, sequences


def run_task(world: Queue, writer: Writer, names: list[str], draw: random.Random) -> list[Receipt]:
    while True:
        faults = draw.randint(0, 4)

        def fate() -> str:
            nonlocal faults
            if faults and draw.random() < 0.6:
                faults -= 1
                return draw.choice(FATES)
            return "ok"

        def rival() -> None:
            try:
                attempt(
                    FakePlace(world, lambda: draw.choice(["ok", "ok", "stored", "crash"])), writer, shuffled(names, draw), draw
                )
            except Crash:
                pass

        try:
            return [attempt(FakePlace(world, fate, rival), writer, shuffled(names, draw), draw)]
        except Crash:
            continue


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of some rows and looks of a few messages, so that there are many."""
    monkeypatch.setattr(encode, "TARGET_BYTES", 1500)
    monkeypatch.setattr(lookback, "FIRST_STEP", 1)
    monkeypatch.setattr(lookback, "LARGEST_STEP", 3)


@pytest.mark.usefixtures("small")
@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**62))
def test_any_faults_leave_each_row_once_in_the_order_of_its_key(seed: int) -> None:
    scenario(random.Random(seed))


# --- planted bugs


def _never_looks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookback, "next", lambda self: None)


def _stops_at_the_first_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback.next
    monkeypatch.setattr(Lookback, "next", lambda self: None if self._first is not None else real(self))


def _does_not_look_after_a_lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueWriter, "_look", lambda self, end: self._ledger.read((), end))


def _compares_sequences_and_not_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(self: Ledger, rows: pa.RecordBatch) -> pa.RecordBatch:
        known = min(sum(map(len, self._unclaimed.values())), rows.num_rows)
        for digest in list(self._unclaimed)[:known]:
            self._take(digest)
        self.found += known
        return rows.slice(known)

    monkeypatch.setattr(Ledger, "claim", claim)


def _takes_equal_rows_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_take", lambda self, digest: digest in self._unclaimed)


def _takes_its_own_acknowledged_rows_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.acknowledged

    def acknowledged(self: Ledger, offset: int, count: int) -> None:
        seen = self.seen
        real(self, offset, count)
        self.seen, self._acknowledged = seen, []

    monkeypatch.setattr(Ledger, "acknowledged", acknowledged)


def _takes_anothers_partition_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = stamp.found

    def found_any(messages: pa.RecordBatch, writer: Writer) -> list[Found]:
        every = [real(messages, Writer(writer.sink, writer.batch, partition)) for partition in range(2)]
        own = {message.offset: message for some in every for message in some if message.digest}
        return [own.get(message.offset, message)._replace(partition=writer.partition) for message in every[0]]

    monkeypatch.setattr(queue_writer, "found", found_any)


def _goes_past_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback._pass_by

    def pass_by(self: Lookback, message: Found) -> None:
        is_own = self._is_own
        self._is_own = lambda message: False  # type: ignore[method-assign]
        real(self, message)
        self._is_own = is_own  # type: ignore[method-assign]

    monkeypatch.setattr(Lookback, "_pass_by", pass_by)


def _a_bookmark_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlace, "start", lambda self: Start(self.end(), self.end()))


def _sends_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePlace, "keep", lambda self: not self._lost)


def _goes_on_after_the_lock_was_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets the lock again and does not look what came meanwhile."""
    real = FakePlace.keep

    def keep(self: FakePlace) -> bool:
        if not self._lost:
            self._world.owner = self
        return real(self)

    monkeypatch.setattr(FakePlace, "keep", keep)


BUGS = [
    _never_looks_back,
    _stops_at_the_first_of_its_own,
    _does_not_look_after_a_lost_answer,
    _compares_sequences_and_not_what_is_said,
    _takes_equal_rows_for_one,
    _takes_its_own_acknowledged_rows_for_others,
    _takes_anothers_partition_for_its_own,
    _goes_past_its_own_requests,
    _a_bookmark_that_is_too_high,
    _sends_without_the_lock,
    _goes_on_after_the_lock_was_another_s,
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_noticed(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def scenarios() -> None:
        for seed in range(400):
            scenario(random.Random(seed))

    with pytest.raises(AssertionError):
        scenarios()


# --- replays, and what a commit makes of them


def written(world: Queue, batch: int, names: list[str], partition: int = 0) -> Receipt:
    return attempt(FakePlace(world, lambda: "ok"), Writer(SINK, batch, partition), names, random.Random(0))


def test_a_replay_of_a_committed_batch_sends_nothing() -> None:
    world = Queue([Stored(b"old", {})])
    assert not commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1", "b1"])]).replayed
    assert world.bookmark == 2
    before = list(world.messages)
    for names in (["a1", "b1"], ["b1", "a1"]):
        verdict = commit(world, SinkBatch(SINK, 0), [written(world, 0, names)])
        assert (verdict.replayed, verdict.differs, verdict.bookmarks) == (True, None, {})
    assert world.messages == before


@pytest.mark.parametrize("names", [["a1"], ["a1", "b1", "c1"], ["a1", "b2"], ["a1", "b1", "b1"]])
def test_a_replay_with_other_rows_differs_and_sends_nothing(names: list[str]) -> None:
    world = Queue()
    commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1", "b1"])])
    verdict = commit(world, SinkBatch(SINK, 0), [written(world, 0, names)])
    assert verdict.replayed
    assert "committed already, with other content (queue t/broker-a/0" in (verdict.differs or "")
    assert world.named(0, 0) == ["a1", "b1"]


@pytest.mark.usefixtures("small")
def test_a_replay_of_the_second_partition_with_other_rows_differs_too() -> None:
    """Its own first message is not the batch's."""
    world = Queue()
    names = [f"a{number}" for number in range(9)]
    for number in range(2):
        commit(world, SinkBatch(SINK, number), [written(world, number, names, partition) for partition in range(2)])
    before = list(world.messages)
    for partition in range(2):
        verdict = commit(world, SinkBatch(SINK, 1), [written(world, 1, [*names, "b1"], partition)])
        assert verdict.replayed
        assert "1 rows are not there" in (verdict.differs or "")
        assert world.messages == before


@pytest.mark.usefixtures("small")
def test_that_a_look_ends_at_the_first_message_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback.next
    monkeypatch.setattr(Lookback, "next", lambda self: None if self._first == 0 else real(self))
    with pytest.raises(AssertionError):
        test_a_replay_of_the_second_partition_with_other_rows_differs_too()


def test_a_retry_with_other_rows_before_the_commit_is_added() -> None:
    world = Queue()
    written(world, 0, ["a1", "b1"])
    receipt = written(world, 0, ["a1", "b2"])
    verdict = commit(world, SinkBatch(SINK, 0), [receipt])
    assert (verdict.replayed, verdict.differs) == (False, None)
    [report] = parse_token(SinkBatch(SINK, 0), receipt).reports
    assert (report.found, report.sent, report.extra, report.missing) == (1, 1, 1, 0)
    assert world.named(0, 0) == ["a1", "b1", "b2"]


def test_an_old_batch_is_compared_as_long_as_a_hundred_are_and_refused_after_that() -> None:
    world = Queue()
    for number in range(KEPT):
        commit(world, SinkBatch(SINK, number), [written(world, number, ["a1", "b1"])])
    assert commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1", "b1"])]).replayed
    assert commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1"])]).differs
    commit(world, SinkBatch(SINK, KEPT), [written(world, KEPT, ["a1"])])
    receipt = written(world, 0, ["a1", "b1"])
    with pytest.raises(SinkError) as caught:
        commit(world, SinkBatch(SINK, 0), [receipt])
    assert caught.value.sub == "BATCH_TOO_OLD"
    assert world.named(0, 0) == ["a1", "b1"]


def test_a_commit_that_died_half_way_is_ended() -> None:
    """Of two queues only one got its bookmark."""
    other = QUEUE._replace(queue_id=1)
    batch = SinkBatch(SINK, 3)
    reports = (QueueReport(QUEUE, 5, 7, found=2, committed=True), QueueReport(other, 0, 2, found=2))
    verdict = judge(batch, [Token(SINK, 3, 0, reports)], {QUEUE: 6, other: 0})
    assert (verdict.replayed, verdict.differs, verdict.bookmarks) == (False, None, {other: 1})
    late = (reports[0], QueueReport(other, 0, 2, sent=1, found=1))
    assert "1 now, which have been sent" in (judge(batch, [Token(SINK, 3, 0, late)], {QUEUE: 6, other: 0}).differs or "")


def test_a_receipt_of_another_batch_is_refused() -> None:
    token = Token(SINK, 3, 0, (QueueReport(QUEUE, 5, 7, sent=2),))
    receipt = Receipt(token.text(), 0, {QUEUE: 2})
    assert parse_token(SinkBatch(SINK, 3), receipt) == token
    wrong = [
        (SinkBatch(SINK, 4), receipt),
        (SinkBatch(None), receipt),
        (SinkBatch(SINK, 3), Receipt(token.text(), 0, {QUEUE: 3})),
        (SinkBatch(SINK, 3), Receipt("0123", 0, {})),
        (SinkBatch(SINK, 3), Receipt("{}", 0, {})),
        (SinkBatch(SINK, 3), Receipt("no", 0, {})),
    ]
    for batch, one in wrong:
        with pytest.raises(SinkError) as caught:
            parse_token(batch, one)
        assert caught.value.sub == "TOKEN_GONE"


# --- looking and comparing


def test_the_usual_look_is_one_small_step() -> None:
    walk = Lookback(Writer(SINK, 9, 0), 500, 1_000_000)
    looked = walk.next()
    assert looked is not None
    assert looked.messages == 32
    walk.saw([Found(looked.end - 1, 8, 3, 0, b"", 0)])
    assert walk.next() is None


def test_a_look_goes_on_behind_what_should_not_be_there() -> None:
    writer = Writer(SINK, 9, 0)
    cases: list[tuple[list[Found], bool]] = [
        ([Found(99, 8, 0, 5, b"", 5)], False),
        ([Found(99, 9, 0, 5, b"x", 5)], True),
        # Two attempts of ours began at 0; a late attempt of the batch before ours.
        ([Found(99, 9, 0, 0, b"x", 0)], True),
        ([Found(98, 8, 0, 5, b"", 5), Found(99, 9, 0, 5, b"x", 5)], True),
        ([Found(98, 8, 0, 5, b"", 5), Found(99, 9, 0, 0, b"x", 0)], False),
        # An old batch: its first message, an older one, a hundred newer ones.
        ([Found(99, 10, 0, 0, b"", 0)], True),
        ([Found(98, 9, 0, 0, b"x", 0), Found(99, 10, 0, 0, b"", 0)], False),
        ([Found(98, 8, 0, 0, b"x", 0), Found(99, 10, 0, 0, b"", 0)], False),
        ([Found(99, 9 + KEPT - 1, 0, 0, b"", 0)], True),
        ([Found(99, 9 + KEPT, 0, 0, b"", 0)], False),
    ]
    for messages, goes_on in cases:
        walk = Lookback(writer, None, 100)
        walk.saw(messages)
        assert (walk.next() is not None) is goes_on, messages


def test_a_look_ends_at_the_bookmark_and_never_reads_a_message_twice() -> None:
    for bookmark, least in ((None, 0), (None, 77), (900_000, 0), (3, 50)):
        walk = Lookback(Writer(SINK, 9, 0), bookmark, 1_000_000)
        walk.begins(least)
        at, steps = 1_000_000, 0
        while (looked := walk.next()) is not None:
            assert looked.end == at
            at, steps = looked.begin, steps + 1
            walk.saw([])
        assert at == (899_999 if bookmark == 900_000 else least)
        assert steps <= 8 + 1_000_000 / 8192
    walk = Lookback(Writer(SINK, 0, 0), 6, 5)
    walk.begins(5)
    assert walk.next() is None


def walked(walk: Lookback, messages: list[Found | None]) -> tuple[list[Found], int]:
    """All of the queue's messages that a walk counts, as `stamp.found` tells of them; and how many reads it took."""
    counted: list[Found] = []
    reads = 0
    while (looked := walk.next()) is not None:
        there = [message for message in messages[looked.begin : looked.end] if message is not None]
        others = [message for message in there if not message.digest]
        seen = {message.batch: message for message in reversed(others)}
        chosen = {*seen.values(), *others[-1:], *(message for message in there if message.digest)}
        counted += walk.saw(sorted(chosen))
        reads += 1
    return counted, reads


def request(offset: int, batch: int, partition: int, first: int, count: int, own: bool) -> list[Found | None]:
    return [Found(offset + number, batch, partition, first + number, b"x" if own else b"", first) for number in range(count)]


def test_a_look_goes_past_what_the_batch_s_other_partitions_sent() -> None:
    messages: list[Found | None] = [None, *request(1, 8, 0, 0, 1, own=False)]
    bookmark = len(messages)
    for first in range(0, 70_000, 7_000):
        for partition in (0, 1):
            messages += request(len(messages), 9, partition, first, 7_000, own=False)
        if first == 35_000:
            messages += request(len(messages), 9, 3, 0, 3, own=True)
    counted, reads = walked(Lookback(Writer(SINK, 9, 3), bookmark, len(messages)), messages)
    assert [message.sequence for message in sorted(counted) if message.digest] == [0, 1, 2]
    assert reads <= 2 * 20 + 8
    # Small requests are read: to go past each would take longer.
    messages = [message for number in range(2_000) for message in request(5 * number, 9, 0, 5 * number, 5, own=False)]
    assert walked(Lookback(Writer(SINK, 9, 3), None, len(messages)), messages)[1] <= 10


def test_a_look_that_goes_past_requests_ends_where_messages_were_deleted() -> None:
    """The first of the request is gone, and how many are is told after the first step."""
    for least in range(0, 1_100, 25):
        messages = (
            request(0, 9, 0, 0, 500, own=False) + request(500, 9, 1, 0, 500, own=True)[:1] + request(501, 9, 0, 500, 500, False)
        )
        walk = Lookback(Writer(SINK, 9, 1), None, len(messages))
        looked = walk.next()
        assert looked is not None
        walk.saw([message for message in messages[looked.begin : looked.end] if message is not None])
        walk.begins(min(least, len(messages)))
        counted, _ = walked(walk, messages)
        assert [message.offset for message in counted if message.digest] == ([500] if least <= 500 else [])


def compare_walks(draw: random.Random) -> None:
    """Over requests that were cut, delivered twice, or that say what is not so: the same is found without going past anything."""
    messages: list[Found | None] = []
    sent = dict.fromkeys(range(3), 0)
    bookmark = None
    for _ in range(draw.randint(1, 12)):
        at, partition, count = len(messages), draw.randrange(3), draw.choice([1, 2, 40, 100, 300])
        part = request(at, 9, partition, sent[partition], count, own=partition == 0)
        sent[partition] += count
        kind = draw.choice(["whole", "whole", "whole", "cut", "twice", "lies", "nobody's", "older"])
        if kind == "cut":
            part = part[: draw.randint(1, count)]
        elif kind == "twice":
            part += [message._replace(offset=message.offset + count) for message in part if message is not None]
        elif kind == "lies":
            number = draw.randint(0, 500)
            part = [message._replace(request=max(0, message.sequence - number)) for message in part if message is not None]
        elif kind == "nobody's":
            part = [None] * count
        elif kind == "older":
            part = request(at, 8, partition, 0, count, own=False)
            bookmark = at + 1
        messages += part
    plain = Lookback(Writer(SINK, 9, 0), bookmark, len(messages))
    plain._believes = False
    expected, _ = walked(plain, messages)
    counted, _ = walked(Lookback(Writer(SINK, 9, 0), bookmark, len(messages)), messages)
    own = [sorted(message for message in some if message.digest) for some in (counted, expected)]
    assert own[0] == own[1]
    assert {message.batch for message in counted} == {message.batch for message in expected}


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**62))
def test_a_look_finds_what_it_would_without_going_past_anything(seed: int) -> None:
    compare_walks(random.Random(seed))


@pytest.mark.parametrize("bug", ["_arrived", "_is_own"])
def test_that_a_look_goes_past_what_it_should_not_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookback, bug, lambda self, message, messages=(): bug == "_arrived")

    def walks() -> None:
        for seed in range(300):
            compare_walks(random.Random(seed))

    with pytest.raises(AssertionError):
        walks()


def test_what_is_said_is_compared_and_nothing_else() -> None:
    same: list[dict[str, Any]] = [
        {"body": b"a", "tags": "t", "keys": None, "sharding_key": "k", "properties": [("x", "1"), ("y", "2")]},
        {"body": b"a", "tags": "t", "keys": "", "sharding_key": "k", "properties": [("y", "2"), ("UNIQ_KEY", "u"), ("x", "1")]},
        {"body": b"a", "tags": "t", "keys": None, "sharding_key": "k", "properties": [("x", "0"), ("y", "2"), ("x", "1")]},
    ]
    other = [
        {**same[0], "body": b"b"},
        {**same[0], "tags": None},
        {**same[0], "keys": "t"},
        {**same[0], "sharding_key": "kk"},
        {**same[0], "properties": None},
        {**same[0], "properties": [("x", "1"), ("y", "3")]},
        {**same[0], "properties": [("x", "1\0y"), ("2", "")]},
        {**same[0], "tags": "t\0", "keys": None},
    ]
    found_digests = digests(pa.RecordBatch.from_pylist(same + other, PRODUCER_SCHEMA))
    assert len(set(found_digests[:3])) == 1
    assert len(set(found_digests)) == 1 + len(other)
    assert digests(rows_of(["a1"]).select(["body"])) != digests(rows_of(["a1"]))


@pytest.mark.parametrize("few", [0, 8])
def test_a_stamp_that_makes_no_sense_is_none(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp, "_FEW", few)
    good = {"OMQ_SINK": SINK, "OMQ_BATCH": "1", "OMQ_PARTITION": "2", "OMQ_SEQUENCE": "3", "OMQ_REQUEST": "2"}
    stamps = [
        {},
        good,
        {**good, "OMQ_SINK": "other"},
        {**good, "OMQ_BATCH": "-1"},
        {**good, "OMQ_SEQUENCE": "9" * 30},
        {name: value for name, value in good.items() if name != "OMQ_PARTITION"},
        {**good, "OMQ_PARTITION": "1"},
        {**good, "OMQ_REQUEST": "4"},
        {**good, "OMQ_REQUEST": ""},
    ]
    world = Queue([Stored(b"a", properties) for properties in stamps])
    messages = [message for batch in world.read(0, len(stamps)) for message in found(batch, Writer(SINK, 1, 2))]
    assert [message[:4] for message in messages] == [(1, 1, 2, 3), (6, 1, 1, 3), (7, 1, 2, 3)]
    assert [message.request for message in messages] == [2, 2, 3]
    assert [bool(message.digest) for message in messages] == [True, False, True]


def test_sinks_have_names_of_their_own_that_a_property_can_have() -> None:
    ids = ["a", "a/b", "ä", "", "#", "x" * 1000, "x" * 1001, "a\0b", "a\x01b", "\ud800", sink_name("ä")]
    named = [sink_name(sink) for sink in ids]
    assert len(set(named)) == len(ids)
    for name in named:
        format_properties({"OMQ_SINK": name})
    assert named[:2] == ids[:2]


@pytest.mark.parametrize(
    "refusal",
    [
        RocketMQError("MESSAGE_ILLEGAL", "code 13"),
        RocketMQError("SERVER_ERROR", "RuntimeException: message body size exceeded"),
    ],
)
def test_requests_shrink_until_the_broker_takes_them_and_a_row_that_it_never_takes_is_named(refusal: RocketMQError) -> None:
    world = Queue()
    place = FakePlace(world, lambda: "ok")
    place.refusal = refusal
    place.limit = 3
    names = [f"a{number}" for number in range(20)]
    work = QueueWriter(place, Writer(SINK, 0, 0), 0)
    work.write(rows_of(names), 0)
    assert world.named(0, 0) == names
    place.limit = 0
    with pytest.raises(RocketMQError) as caught:
        work.write(rows_of(["a1"]), 20)
    assert "row 20 for queue t/broker-a/0 (partition 0) is larger than the broker takes" in caught.value.message
    assert refusal.message in caught.value.message
    place.refusal = RocketMQError("SERVER_ERROR", "NullPointerException")
    with pytest.raises(RocketMQError, match="NullPointerException"):
        work.write(rows_of(["a1", "a2"]), 20)
