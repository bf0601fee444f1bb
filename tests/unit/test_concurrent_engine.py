"""Listeners without order: RocketMQ's rules for a listener's answer, and that each message is decided or parked exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import LockError
from orderedmq.listening.concurrent_engine import ConcurrentEngine, ConcurrentSettings
from orderedmq.listening.engine import (
    Batch,
    CheckLock,
    Consume,
    Done,
    LotView,
    Message,
    Outcome,
    Park,
    Pull,
    Suspend,
    Wait,
    WriteLetter,
)
from orderedmq.listening.listener import ALL, Answer, ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus
from orderedmq.model import MessageQueue
from tests.engine_messages import FULL, message

QUEUE = MessageQueue("orders", "embedded", 0)
SUCCESS, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER
#: A listener's answer, its ``ack_index`` and its ``delay_level_when_next_consume``.
Said = tuple[ConsumeConcurrentlyStatus | None, int, int]


class Task:
    """A task that runs one range. ``parked``: messages put into the lot; ``letters``: dead letters; ``slept``: seconds suspended."""

    def __init__(self, engine: ConcurrentEngine, answer: Callable[[Batch], Said]) -> None:
        self.engine, self.answer = engine, answer
        self.now = self.slept = 0.0
        self.parked: list[Message] = []
        self.letters: list[int] = []
        self.calls: list[list[int]] = []
        self.refuse = 0

    def run(self, coming: int = 0, random: Random | None = None) -> list[Outcome]:
        """Add ``coming`` messages, a few at a time, and return the outcomes. With ``random``, calls return in any order."""
        engine, out, at, flying = self.engine, list[Outcome](), 0, list[Batch]()
        while True:
            decided = {one.begin for one in out} | set(engine._places)
            undecided = next((offset for offset in range(at) if offset not in decided), at)
            assert engine.progress == undecided
            action = engine.next(self.now)
            match action:
                case Consume(batch):
                    flying.append(batch)
                    assert len(flying) <= engine.settings.concurrency
                    self.calls.append([one._offset for one in batch.messages])
                    if random is None:
                        out += self.finish(flying.pop())
                case Wait():
                    assert random is not None
                    out += self.finish(flying.pop(random.randrange(len(flying))))
                case Pull():
                    more = range(at, min(coming, at + 7))
                    at = more.stop
                    if more:
                        engine.add([Message(offset, None if offset % 3 else "a") for offset in more])
                    else:
                        engine.close()
                case Park(messages):
                    if self.refuse:
                        self.refuse -= 1
                        engine.refused(FULL, self.now)
                    else:
                        self.parked += messages
                        out += engine.was_parked([True] * len(messages))
                case WriteLetter(message):
                    if self.refuse:
                        self.refuse -= 1
                        engine.refused(FULL, self.now)
                    else:
                        self.letters.append(message._offset)
                        out += engine.dead_lettered()
                case CheckLock():
                    engine.lock(True, self.now)
                case Suspend(seconds):
                    self.now += seconds
                    self.slept += seconds
                case Done():
                    assert not flying
                    return out

    def finish(self, batch: Batch) -> list[Outcome]:
        status, ack_index, level = self.answer(batch)
        return self.engine.consumed(batch, Answer(status, None, ConsumeConcurrentlyContext(QUEUE, level, ack_index)), self.now)


def task(answer: Callable[[Batch], Said], capacity: int = 10_000, **settings: int) -> Task:
    return Task(ConcurrentEngine(QUEUE, ConcurrentSettings(**settings), 0.0, LotView(capacity), 0), answer)


def told(outcomes: list[Outcome]) -> list[tuple[int, str, int]]:
    return [(one.begin, one.status, one.attempts) for one in outcomes]


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        ((SUCCESS, ALL, 0), 4), ((SUCCESS, 3, 0), 4), ((SUCCESS, 9, 0), 4), ((SUCCESS, 1, 0), 2), ((SUCCESS, 0, 0), 1),
        ((SUCCESS, -1, 0), 0), ((SUCCESS, -7, 0), 0), ((LATER, ALL, 0), 0), ((LATER, 2, 0), 0), ((None, ALL, 0), 0),
    ],
)  # fmt: skip
def test_a_success_accepts_the_messages_up_to_ack_index(answer: Said, done: int) -> None:
    made = task(lambda batch: answer, consume_message_batch_max_size=4)
    outcomes = told(made.run(4))
    assert outcomes == [(at, "SUCCESS" if at < done else "PARKED", 1) for at in range(4)]
    assert made.calls == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("name", "answer", "counts_as"), [
    ("ack_index", (SUCCESS, None, 0), -1), ("ack_index", (SUCCESS, "3", 0), -1),
    ("delay_level_when_next_consume", (LATER, ALL, None), 0), ("delay_level_when_next_consume", (LATER, ALL, float("nan")), 0),
])  # fmt: skip
def test_warns_of_a_context_value_that_is_not_a_number(name: str, answer: Any, counts_as: int) -> None:
    made = task(lambda batch: answer)
    assert told(made.run(2)) == [(0, "PARKED", 1), (1, "PARKED", 1)]
    assert [one._level for one in made.parked] == [3, 3]
    [warning] = made.engine.warnings
    assert f"set {name} to an object of type" in warning
    assert f"so it counts as {counts_as}" in warning


@pytest.mark.parametrize(
    ("retried", "chosen", "level"),
    [(0, 0, 3), (1, 0, 4), (14, 0, 17), (15, 0, 18), (0, 1, 1), (9, 1, 1), (0, 18, 18), (0, 99, 18)],
)
def test_a_message_waits_at_the_level_that_was_chosen_or_longer_with_each_retry(retried: int, chosen: int, level: int) -> None:
    lot = [message(7, "a", attempts=retried)]
    made = Task(ConcurrentEngine(QUEUE, ConcurrentSettings(), 0.0, LotView(planned=lot), 0), lambda batch: (LATER, ALL, chosen))
    assert told(made.run()) == [(7, "PARKED", retried + 1)]
    assert [(one._again, one._level) for one in made.parked] == [(True, level)]


@pytest.mark.parametrize(
    ("most", "retried", "letter"), [(16, 15, False), (16, 16, True), (-1, 16, True), (-1, 15, False), (0, 0, True)]
)
def test_after_its_retries_a_message_is_a_dead_letter(most: int, retried: int, letter: bool) -> None:
    lot = [message(7, "a", attempts=retried)]
    made = Task(
        ConcurrentEngine(QUEUE, ConcurrentSettings(max_reconsume_times=most), 0.0, LotView(planned=lot), 0),
        lambda batch: (LATER, ALL, 0),
    )
    assert told(made.run()) == [(7, "DEAD_LETTER" if letter else "PARKED", retried + 1)]
    assert made.letters == [7] * letter


def test_a_level_below_zero_makes_dead_letters_of_messages_that_are_not_done() -> None:
    made = task(lambda batch: (SUCCESS, 0, -1), consume_message_batch_max_size=3)
    assert told(made.run(3)) == [(0, "SUCCESS", 1), (1, "DEAD_LETTER", 1), (2, "DEAD_LETTER", 1)]


@pytest.mark.holds("own failure")
@pytest.mark.parametrize(("ack_index", "retries"), [(ALL, 0), (ALL, 1), (0, 0), (-1, 0)])
def test_makes_no_dead_letter_of_a_message_whose_batch_failed(ack_index: int, retries: int) -> None:
    """Message 1 of a batch always fails. The listener may know that message 0 is done, or that none is."""

    def answer(batch: Batch) -> Said:
        offsets = [one._offset for one in batch.messages]
        return (SUCCESS, ALL, 0) if 1 not in offsets else (LATER if ack_index == ALL else SUCCESS, ack_index, 0)

    lot = [message(at, "a") for at in range(3)]
    engine = ConcurrentEngine(QUEUE, ConcurrentSettings(3, max_reconsume_times=retries), 0.0, LotView(planned=lot), 0)
    made = Task(engine, answer)
    outcomes = made.run()
    assert made.calls[0] == [0, 1, 2]
    if retries:
        # All come back when they are due, and each of them alone.
        assert all("one of 3 messages" in str(parked._error) for parked in made.parked)
        assert {one.status for one in outcomes} == {"PARKED"}
        engine = ConcurrentEngine(QUEUE, engine.settings, 0.0, LotView(planned=made.parked), 0)
        made = Task(engine, answer)
        outcomes = made.run()
        assert made.calls == [[0], [1], [2]]
    assert sorted((one.begin, one.status) for one in outcomes) == [(0, "SUCCESS"), (1, "DEAD_LETTER"), (2, "SUCCESS")]
    assert not any("one of" in str(outcome.error) for outcome in outcomes if outcome.status == "DEAD_LETTER")


def test_moves_messages_that_are_held_or_not_due() -> None:
    lot = [message(3, "a", due=False), message(4, "a", held=True), Message(5, "a"), message(6, None, attempts=2)]
    made = Task(
        ConcurrentEngine(QUEUE, ConcurrentSettings(), 0.0, LotView(planned=lot, parked_offsets={6}), 0),
        lambda batch: (SUCCESS, ALL, 0),
    )
    assert told(made.run()) == [(5, "SUCCESS", 1), (3, "PARKED", 0), (4, "PARKED", 0)]
    assert [one._again for one in made.parked] == [False, False]


def test_while_the_lot_is_full_a_message_comes_again_after_5_seconds() -> None:
    made = task(lambda batch: (LATER if len(made.calls) < 4 else SUCCESS, ALL, 0), capacity=0)
    assert told(made.run(1)) == [(0, "SUCCESS", 4)]
    assert made.slept == 15.0
    [warning] = made.engine.warnings
    assert "full" in warning


def test_a_lost_lock_waits_for_the_calls_under_way() -> None:
    lot = [Message(1, None), Message(2, None), Message(3, None)]
    engine = ConcurrentEngine(QUEUE, ConcurrentSettings(concurrency=2), 0.0, LotView(planned=lot), 0)
    engine.next(0.0)
    engine.lock(True, 0.0)
    first = engine.next(0.0)
    assert isinstance(first, Consume)
    engine.lock(False, 0.0)
    assert engine.next(0.0) == Wait(None)
    done = Answer(SUCCESS, None, ConsumeConcurrentlyContext(QUEUE))
    engine.consumed(first.batch, done, 0.0)
    with pytest.raises(LockError, match="LOST"):
        engine.next(0.0)
    with pytest.raises(RuntimeError):
        engine.consumed(first.batch, done, 0.0)


def test_messages_out_of_order_are_refused() -> None:
    engine = ConcurrentEngine(QUEUE, ConcurrentSettings(), 0.0, LotView(), 0)
    engine.add([Message(4, None)])
    with pytest.raises(ValueError, match="came after"):
        engine.add([Message(4, None)])


@pytest.mark.holds("concurrent listener")
@given(
    seed=st.integers(0, 2**32),
    coming=st.integers(0, 60),
    parked=st.integers(0, 8),
    size=st.integers(1, 5),
    concurrency=st.integers(1, 4),
    room=st.sampled_from([0, 3, 1000]),
    most=st.sampled_from([-1, 0, 2]),
)
def test_every_message_is_decided_or_parked_once(
    seed: int, coming: int, parked: int, size: int, concurrency: int, room: int, most: int
) -> None:
    random = Random(seed)
    lot = [message(1000 + at, None, attempts=random.randrange(3), due=random.random() < 0.5) for at in range(parked)]
    lying = {at for at in range(coming) if random.random() < 0.1} | {one._offset for one in lot if random.random() < 0.1}
    settings = ConcurrentSettings(size, concurrency, most)
    made = Task(
        ConcurrentEngine(QUEUE, settings, 0.0, LotView(room, lot, lying), 0),
        lambda batch: (random.choice((SUCCESS, SUCCESS, LATER, None)), random.choice((ALL, 0)), random.choice((0, 0, 1, -1))),
    )
    made.refuse = random.randrange(3)
    outcomes = made.run(coming, random)
    ended = Counter(one.begin for one in outcomes)
    assert set(ended) == {*range(coming), *(one._offset for one in lot)} - lying
    assert set(ended.values()) <= {1}
    put = [one._offset for one in made.parked]
    assert Counter(put) == Counter(one.begin for one in outcomes if one.status == "PARKED")
    assert all(len(offsets) <= size for offsets in made.calls)
