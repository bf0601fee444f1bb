"""Batches in any order: a commit uses the numbers that brokers keep to decide which batches were committed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.broker import SinkBatch
from orderedmq.errors import SinkError
from orderedmq.ownership.micro_batch import KEPT_BATCHES, LARGEST_BATCH
from orderedmq.rocketmq.sink import commit_history, commit_report
from orderedmq.rocketmq.sink.commit_history import SLOTS, Committed, has, slot_of, with_batch
from orderedmq.rocketmq.sink.commit_report import QueueReport, Token, judge
from tests.examples import examples
from tests.unit.rocketmq_sink_queue import QUEUE, SINK, Queue, Stored, commit, written

BATCHES = st.integers(0, 300) | st.integers(LARGEST_BATCH - 300, LARGEST_BATCH)


@given(BATCHES)
def test_the_last_hundred_numbers_are_in_slots_of_their_own(newest: int) -> None:
    blocks = {batch // commit_history.WIDTH for batch in range(max(0, newest - KEPT_BATCHES + 1), newest + 1)}
    assert len({slot_of(block * commit_history.WIDTH) for block in blocks}) == len(blocks) <= SLOTS


@given(st.sets(BATCHES, max_size=20), BATCHES)
def test_a_slot_tells_which_batches_of_its_block_are_committed_and_nothing_of_another_block(
    batches: set[int], asked: int
) -> None:
    stored: dict[int, int] = {}
    for batch in sorted(batches):
        stored[slot_of(batch)] = with_batch(stored.get(slot_of(batch), 0), batch)
    assert all(0 < number < 2**63 for number in stored.values())
    later = [batch for batch in batches if slot_of(batch) == slot_of(asked) and batch // 32 > asked // 32]
    assert has(stored.get(slot_of(asked), 0), asked) is (asked in batches and not later)


def outcome(world: Queue, number: int, names: list[str]) -> str:
    """Write a batch as a task and a commit do, and return the result. A batch refused as out of order must also be refused with skip."""
    before = len(world.messages)
    receipt = written(world, number, names, run=f"{random.getrandbits(31):08x}")
    try:
        verdict = commit(world, SinkBatch(SINK, number), [receipt])
    except SinkError as error:
        assert len(world.messages) == before
        if error.sub == "OUT_OF_ORDER":
            with pytest.raises(SinkError, match="OUT_OF_ORDER"):
                commit(world, SinkBatch(SINK, number), [receipt], skip=True)
        return error.sub
    return "differs" if verdict.differs else "written" if len(world.messages) > before else "repeated"


def scenario(draw: random.Random) -> None:
    world = Queue([Stored(b"old", {})])
    sent: dict[int, list[str]] = {}
    kept = (world.bookmark, world.committed, dict(world.history))
    for _ in range(draw.randint(5, 20)):
        latest = max(sent, default=-1)
        kind = draw.choice(["higher", "higher", "any", "any", "again", "stored", "killed"])
        if kind == "stored":
            kept = (world.bookmark, world.committed, dict(world.history))
            continue
        if kind == "killed":
            # The broker restarts with the numbers that it stored last, and with all messages.
            world.bookmark, world.committed, world.history = *kept[:2], dict(kept[2])
            continue
        if kind == "higher":
            number = latest + draw.choice([1, 1, 2, 40, 150])
        else:
            number = draw.choice([*sent, 0]) if kind == "again" else max(0, latest - draw.randint(0, 120))
        names = sent.get(number, [f"{draw.choice('ab')}{number}.{row}" for row in range(draw.randint(1, 4))])
        said = outcome(world, number, names)
        if number > latest:
            assert said == "written"
            sent[number] = names
        elif latest - number >= KEPT_BATCHES:
            assert said == "BATCH_TOO_OLD"
        else:
            assert said == ("repeated" if number in sent else "OUT_OF_ORDER")
    there = Counter(message.properties["name"] for message in world.messages if "name" in message.properties)
    assert there == Counter(name for names in sent.values() for name in names)


@pytest.mark.holds("out of order")
@examples(2)
@given(st.integers(0, 2**62))
def test_batches_in_any_order_are_there_once_or_refused_whatever_a_killed_broker_forgot(seed: int) -> None:
    scenario(random.Random(seed))


def _takes_all_for_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committed, "has", lambda self, batch: True)


def _does_not_compare_the_blocks_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_history, "_block_of", lambda stored, batch: stored & (1 << commit_history.WIDTH) - 1)


def _believes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_report, "_is_complete", lambda reports, lacking: False)


@pytest.mark.parametrize(
    "bug", [_takes_all_for_committed, _does_not_compare_the_blocks_number, _believes_no_message], ids=lambda bug: bug.__name__
)
def test_a_planted_bug_is_noticed(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)

    def scenarios() -> None:
        for seed in range(300):
            scenario(random.Random(seed))

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenarios()


def refused(reports: tuple[QueueReport, ...], known: list[Committed]) -> str:
    """The message of the refused commit of batch 7, which must be the same with and without skip."""
    said = set()
    for skip in (False, True):
        with pytest.raises(SinkError, match="OUT_OF_ORDER") as caught:
            judge(SinkBatch("txn:a", 7), [Token("txn:a", 7, 0, reports)], {}, known, skip=skip)
        said.add(caught.value.message)
    return said.pop()


def test_a_batch_that_an_attempt_began_and_a_later_one_overtook_is_out_of_order_unless_all_of_it_is_there() -> None:
    began = QueueReport(QUEUE, 5, 6, found=1, missing=1, committed=True, newest=10)
    assert "(1 of its 2 rows have been sent, and readers see them)" in refused((began,), [Committed(10)])
    whole = QueueReport(QUEUE, 5, 7, found=2, committed=True, newest=10)
    verdict = judge(SinkBatch("txn:a", 7), [Token("txn:a", 7, 0, (whole,))], {QUEUE: 11}, [Committed(10)])
    assert (verdict.replayed, verdict.differs) == (True, None)


def test_rows_at_a_broker_that_did_not_know_of_the_later_batch_are_named() -> None:
    elsewhere = QueueReport(QUEUE, 5, 7, sent=2)
    assert "(2 of its 2 rows have been sent, and readers see them)" in refused((elsewhere,), [Committed(-1), Committed(10)])
