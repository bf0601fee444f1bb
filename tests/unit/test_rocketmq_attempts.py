"""Attempts of a batch that crash, repeat, take over and lose answers leave each row in its queue once, in the order of its key.

The queue is a list in memory; what decides and encodes is the real thing. Each planted bug is noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.errors import RocketMQError, SinkError
from orderedmq.rocketmq import encode, lookback, queue_writer, stamp
from orderedmq.rocketmq.lookback import KEPT, Ledger, Lookback
from orderedmq.rocketmq.queue_writer import QueueWriter, Start
from orderedmq.rocketmq.receipts import QueueReport, Token, judge, parse_token
from orderedmq.rocketmq.stamp import Found, Writer
from tests.unit.rocketmq_sink_queue import QUEUE, SINK, Crash, FakePlace, Queue, Stored, attempt, commit, rows_of, written

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
