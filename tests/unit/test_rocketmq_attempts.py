"""Attempts of a batch leave each row in its queue once, in the order of its key, even if attempts crash, repeat, take over or lose answers.

The queue is a list in memory; the code that decides and encodes is real. Each planted bug is detected.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.broker import Receipt, SinkBatch
from orderedmq.conditions import RocketMQCondition
from orderedmq.errors import RocketMQError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.ownership.micro_batch import KEPT_BATCHES
from orderedmq.rocketmq.codec import encode
from orderedmq.rocketmq.sink import commit_report, lookback, message_stamp, queue_writer
from orderedmq.rocketmq.sink.commit_report import QueueReport, Token, Verdict, judge, parse_token
from orderedmq.rocketmq.sink.lookback import Ledger, Lookback
from orderedmq.rocketmq.sink.message_stamp import SinkMessage, Writer, read_stamp
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, Start
from tests.unit.rocketmq_sink_queue import (
    QUEUE,
    SINK,
    Crash,
    FakePort,
    Queue,
    Stored,
    attempt,
    commit,
    rows_of,
    written,
)

FATES = ["busy", "lost", "stored", "crash", "crash after", "stolen", "others"]


def shuffled(names: list[str], draw: random.Random) -> list[str]:
    """The names in another order, in which the rows of each key keep their order."""
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


class Layout:
    """The division of a batch's rows into partitions in one run."""

    def __init__(self, names: list[str], run: str, draw: random.Random) -> None:
        self.run = run
        count = draw.randint(1, 3)
        kind = draw.choice(["by key", "by key", "split", "any"])
        numbers = {key: draw.randrange(count) for key in "ab"}
        cuts = sorted(draw.randint(0, len(names)) for _ in range(count))
        self.partitions: list[list[str]] = [[] for _ in range(count)]
        for index, name in enumerate(names):
            split = sum(index >= cut for cut in cuts[1:])
            number = {"by key": numbers[name[0]], "split": split, "any": draw.randrange(count)}[kind]
            self.partitions[number].append(name)
        #: Whether all rows of each key are in one task.
        self.ordered = all(sum(key in {name[0] for name in part} for part in self.partitions) < 2 for key in "ab")


def scenario(draw: random.Random) -> None:
    """Write each batch with several runs, each with its own partitions, until one run survives. Then check the result."""
    world = Queue([Stored(b"old", {}) for _ in range(draw.randint(0, 9))])
    expected: list[tuple[int, list[str], bool]] = []
    for number in range(draw.randint(1, 4)):
        batch = SinkBatch(SINK, number)
        names = [f"{draw.choice('ab')}{draw.randint(0, 2)}" for _ in range(draw.choice([0, 2, 6, 12, 18]))]
        # An early release did not stamp messages with a run, so the first run may have no name.
        first = draw.random() < 0.2
        runs = [Layout(names, "" if first and not run else f"{number}{run:07}", draw) for run in range(draw.randint(1, 4))]
        if draw.random() < 0.3:
            # In 30 % of the cases, all runs have the same rows in the same partitions.
            for layout in runs:
                layout.partitions, layout.ordered = runs[0].partitions, runs[0].ordered
        expected.append((number, names, all(layout.ordered for layout in runs)))
        for index, layout in enumerate(runs):
            last = index == len(runs) - 1
            # A driver may die before all its tasks have ended.
            lives = len(layout.partitions) if last or draw.random() < 0.5 else draw.randrange(len(layout.partitions))
            earlier = runs[: index + 1]
            receipts = []
            for partition in draw.sample(range(len(layout.partitions)), lives):
                receipts += run_task(world, number, layout, partition, earlier, draw)
                if draw.random() < 0.2:
                    world.messages.append(Stored(b"x", {"KEYS": "x"}))
            if not last and draw.random() < 0.4:
                spoilt = draw.randrange(len(layout.partitions))
                try_once(world, number, layout, spoilt, lambda: draw.choice(["ok", "ok", "crash", "crash after"]), draw)
            committed = world.bookmark
            if last or (lives == len(layout.partitions) and draw.random() < 0.3):
                verdict = commit_until_it_does_not_die(world, batch, receipts, draw)
                assert verdict.differs is None, verdict
            if draw.random() < 0.2:
                # The broker is killed and loses its newest bookmark and number of a committed batch.
                world.bookmark = draw.choice([None, committed])
                world.committed = draw.choice([world.committed, number - 1])
    for number, names, ordered in expected:
        there = world.named(number)
        assert Counter(there) == Counter(names), (number, names, there)
        for key in "ab" if ordered else "":
            assert [name for name in there if name[0] == key] == [name for name in names if name[0] == key]
    sequences = Counter(
        (stamp.batch, stamp.run, stamp.partition, stamp.sequence)
        for message in world.messages
        if (stamp := read_stamp(message.properties, SINK)) is not None
    )
    assert max(sequences.values(), default=1) == 1, sequences


def commit_until_it_does_not_die(world: Queue, batch: SinkBatch, receipts: list[Receipt], draw: random.Random) -> Verdict:
    while True:
        faults = draw.randint(0, 2)

        def fate() -> str:
            nonlocal faults
            faults -= 1
            return draw.choice(["crash", "crash after", "stored", "lost"]) if faults >= 0 else "ok"

        try:
            return commit(world, batch, receipts, FakePort(world, fate))
        except Crash:
            continue


def try_once(world: Queue, number: int, layout: Layout, partition: int, fate: Callable[[], str], draw: random.Random) -> None:
    names = layout.partitions[partition]
    with contextlib.suppress(Crash):
        attempt(FakePort(world, fate), Writer(SINK, number, partition, layout.run), shuffled(names, draw), draw)


def run_task(
    world: Queue, number: int, layout: Layout, partition: int, earlier: list[Layout], draw: random.Random
) -> list[Receipt]:
    """Make attempts until one succeeds. At the same time, run other attempts of the task and late attempts of ``earlier`` runs."""
    names = layout.partitions[partition]
    while True:
        faults = draw.randint(0, 4)

        def fate() -> str:
            nonlocal faults
            if faults and draw.random() < 0.6:
                faults -= 1
                return draw.choice(FATES)
            return "ok"

        def rival() -> None:
            other = draw.choice(earlier)
            index = partition if other is layout else draw.randrange(len(other.partitions))
            try_once(world, number, other, index, lambda: draw.choice(["ok", "ok", "stored", "crash"]), draw)

        try:
            writer = Writer(SINK, number, partition, layout.run)
            return [attempt(FakePort(world, fate, rival), writer, shuffled(names, draw), draw)]
        except Crash:
            continue


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use requests of a few rows and look-backs of a few messages, so that there are many of them."""
    monkeypatch.setattr(encode, "TARGET_BYTES", 1500)
    monkeypatch.setattr(lookback, "FIRST_STEP", 1)
    monkeypatch.setattr(lookback, "LARGEST_STEP", 3)


@pytest.mark.usefixtures("small")
@given(st.integers(0, 2**62))
def test_any_faults_leave_each_row_once_in_the_order_of_its_key(seed: int) -> None:
    scenario(random.Random(seed))


# --- planted bugs


def _never_looks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lookback, "next", lambda self: None)


def _stops_at_the_first_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback.next
    monkeypatch.setattr(Lookback, "next", lambda self: None if self._firsts else real(self))


def _does_not_look_after_a_lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueWriter, "_look", lambda self, end, writer: self._ledger.read((), end))


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
    real = Ledger.record_sent

    def acknowledged(self: Ledger, offset: int, count: int) -> None:
        seen = self.seen
        real(self, offset, count)
        self.seen, self._acknowledged = seen, []

    monkeypatch.setattr(Ledger, "record_sent", acknowledged)


def _takes_anothers_partition_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes over even messages that another task of the same run sent."""
    real = message_stamp.find_messages

    def found_any(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
        return [message._replace(run="another") for message in real(messages, replace(writer, run="none"))]

    monkeypatch.setattr(queue_writer, "find_messages", found_any)


def _takes_only_what_its_own_partition_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores which run sent a message, as an early release did."""
    real = message_stamp.find_messages

    def found_own(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
        return [message._replace(run=writer.run) for message in real(messages, writer)]

    monkeypatch.setattr(queue_writer, "find_messages", found_own)


def _leaves_rows_out_for_which_one_message_was_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_report, "count_contested", lambda tokens: {})


def _sends_a_row_again_for_each_message_that_was_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores that other messages with the same content may exist that no task took."""
    real = commit_report.count_contested

    def taken(tokens: Sequence[Token]) -> dict[MessageQueue, dict[int, int]]:
        return {queue: {at: count for at, count in found.items() if count > 1} for queue, found in real(tokens).items()}

    monkeypatch.setattr(commit_report, "count_contested", taken)


def _goes_past_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback._skip_request

    def pass_by(self: Lookback, message: SinkMessage) -> None:
        is_own = self._is_own
        self._is_own = lambda message: False  # type: ignore[method-assign]
        real(self, message)
        self._is_own = is_own  # type: ignore[method-assign]

    monkeypatch.setattr(Lookback, "_skip_request", pass_by)


def _a_bookmark_that_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePort, "start", lambda self: Start(self.end(), self.end()))


def _sends_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePort, "keep", lambda self: not self._lost)


def _goes_on_after_the_lock_was_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acquires the lock again without checking which messages others sent in between."""
    real = FakePort.keep

    def keep(self: FakePort) -> bool:
        if not self._lost:
            self._world.owner = self
        return real(self)

    monkeypatch.setattr(FakePort, "keep", keep)


BUGS = [
    _never_looks_back,
    _stops_at_the_first_of_its_own,
    _does_not_look_after_a_lost_answer,
    _compares_sequences_and_not_what_is_said,
    _takes_equal_rows_for_one,
    _takes_its_own_acknowledged_rows_for_others,
    _takes_anothers_partition_for_its_own,
    _takes_only_what_its_own_partition_sent,
    _leaves_rows_out_for_which_one_message_was_taken_twice,
    _sends_a_row_again_for_each_message_that_was_taken_twice,
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


# --- replays, and the result of their commits


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
    assert "queue t/broker-a/0: " in (verdict.differs or "")
    assert world.named(0, 0) == ["a1", "b1"]


@pytest.mark.usefixtures("small")
def test_a_replay_of_the_second_partition_with_other_rows_differs_too() -> None:
    """The second partition does not have the batch's first message, so only its bookmark shows that the batch was committed."""
    world = Queue()
    names = [f"a{number}" for number in range(9)]
    for number in range(2):
        commit(world, SinkBatch(SINK, number), [written(world, number, names, partition) for partition in range(2)])
    before = list(world.messages)
    for partition in range(2):
        world.committed = -1
        verdict = commit(world, SinkBatch(SINK, 1), [written(world, 1, [*names, "b1"], partition)])
        assert verdict.replayed
        assert "1 rows are missing" in (verdict.differs or "")
        assert world.messages == before


@pytest.mark.usefixtures("small")
def test_that_a_look_ends_at_the_first_message_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lookback.next
    monkeypatch.setattr(Lookback, "next", lambda self: None if 0 in self._firsts.values() else real(self))
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
    for number in range(KEPT_BATCHES):
        commit(world, SinkBatch(SINK, number), [written(world, number, ["a1", "b1"])])
    assert commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1", "b1"])]).replayed
    assert commit(world, SinkBatch(SINK, 0), [written(world, 0, ["a1"])]).differs
    commit(world, SinkBatch(SINK, KEPT_BATCHES), [written(world, KEPT_BATCHES, ["a1"])])
    receipt = written(world, 0, ["a1", "b1"])
    with pytest.raises(SinkError) as caught:
        commit(world, SinkBatch(SINK, 0), [receipt])
    assert caught.value.sub == "BATCH_TOO_OLD"
    assert world.named(0, 0) == ["a1", "b1"]


def test_an_interrupted_commit_is_completed() -> None:
    """Only one of two queues has its bookmark."""
    other = QUEUE._replace(queue_id=1)
    batch = SinkBatch(SINK, 3)
    reports = (QueueReport(QUEUE, 5, 7, found=2, committed=True), QueueReport(other, 0, 2, found=2))
    verdict = judge(batch, [Token(SINK, 3, 0, reports)], {QUEUE: 6, other: 0}, [])
    assert (verdict.replayed, verdict.differs, verdict.bookmarks) == (False, None, {other: 1})
    late = (reports[0], QueueReport(other, 0, 2, sent=1, found=1))
    assert "1 now, which have been sent" in (judge(batch, [Token(SINK, 3, 0, late)], {QUEUE: 6, other: 0}, []).differs or "")


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
    for batch, other in wrong:
        with pytest.raises(SinkError) as caught:
            parse_token(batch, other)
        assert caught.value.sub == "TOKEN_GONE"


@pytest.mark.parametrize(
    "refusal",
    [
        RocketMQError(RocketMQCondition.MESSAGE_ILLEGAL, "code 13"),
        RocketMQError(RocketMQCondition.SERVER_ERROR, "RuntimeException: message body size exceeded"),
    ],
)
def test_requests_shrink_until_the_broker_takes_them_and_a_row_that_it_never_takes_is_named(refusal: RocketMQError) -> None:
    world = Queue()
    port = FakePort(world, lambda: "ok")
    port.refusal = refusal
    port.limit = 3
    names = [f"a{number}" for number in range(20)]
    work = QueueWriter(port, Writer(SINK, 0, 0), 0)
    work.write(rows_of(names), 0)
    assert world.named(0, 0) == names
    port.limit = 0
    with pytest.raises(RocketMQError) as caught:
        work.write(rows_of(["a1"]), 20)
    assert "row 20 for queue t/broker-a/0 (partition 0) is larger than the broker accepts" in caught.value.message
    assert refusal.message in caught.value.message
    port.refusal = RocketMQError(RocketMQCondition.SERVER_ERROR, "NullPointerException")
    with pytest.raises(RocketMQError, match="NullPointerException"):
        work.write(rows_of(["a1", "a2"]), 20)
