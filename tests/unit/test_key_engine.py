"""Order per key: what the engine does with failed, parked and held messages. tests/sim runs it with crashes and repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from orderedmq.errors import LockError, OptionError
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
from orderedmq.listening.key_engine import KeyEngine, OrderPerKey
from orderedmq.listening.listener import Answer, ConsumeOrderlyContext, ConsumeOrderlyStatus
from orderedmq.model import MessageQueue
from tests.engine_messages import message

QUEUE = MessageQueue("orders", "embedded", 0)
SUCCESS, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


def answer(status: ConsumeOrderlyStatus | None, error: str | None = None) -> Answer:
    return Answer(status, error, ConsumeOrderlyContext(QUEUE))


def drained(
    engine: KeyEngine,
    listener: Callable[[Batch], ConsumeOrderlyStatus | Answer],
    put_aside: list[Message] | None = None,
    is_new: Callable[[Message], bool] = lambda _: True,
) -> list[Outcome]:
    """Run the engine without a task, one call at a time. Return its outcomes.

    ``put_aside`` gets the messages that are parked or dead letters. ``is_new``: whether a message was not parked before.
    """
    now, outcomes, messages_aside = 0.0, list[Outcome](), [] if put_aside is None else put_aside
    while True:
        match engine.next(now):
            case Consume(batch):
                given = listener(batch)
                outcomes += engine.consumed(batch, given if isinstance(given, Answer) else answer(given), now)
            case WriteLetter(letter):
                messages_aside.append(letter)
                outcomes += engine.dead_lettered()
            case Park(messages):
                messages_aside += messages
                outcomes += engine.was_parked([is_new(message) for message in messages])
            case CheckLock():
                engine.lock(True, now)
            case Suspend(seconds):
                now += seconds
            case Pull():
                engine.close()
            case Done():
                return outcomes


def engine(*keys: str | None, capacity: int = 10_000, **given: object) -> KeyEngine:
    made = KeyEngine(QUEUE, OrderPerKey(**given), 0.0, LotView(capacity), 0)  # type: ignore[arg-type]
    made.add([Message(offset, key) for offset, key in enumerate(keys)])
    return made


def told(outcomes: list[Outcome]) -> list[tuple[int, str]]:
    return [(one.begin, one.status) for one in outcomes]


@pytest.mark.holds("own failure")
@pytest.mark.parametrize(
    ("names", "attempts", "calls"),
    [
        (False, 1, [[*range(8)], [0], [1], [2], [3], [4], [5], [6], [7], [8, 9]]),
        (False, 3, [[*range(8)], [0], [1], [2], [3], [4], [5], [6], [7], [8, 9]]),
        (True, 1, [[*range(8)]]),
        (True, 3, [[*range(8)], [4], [*range(5, 10)]]),
    ],
)
def test_puts_only_the_failed_message_of_a_batch_aside(names: bool, attempts: int, calls: list[list[int]]) -> None:
    """Message 4 always fails. ``names``: whether the listener sets ack_index."""
    made = engine(*"a" * 10, consume_message_batch_max_size=8, max_reconsume_times=1, in_batch_attempts=attempts)
    called: list[list[int]] = []
    put_aside: list[Message] = []

    def listener(batch: Batch) -> Answer:
        offsets = [message._offset for message in batch.messages]
        called.append(offsets)
        context = ConsumeOrderlyContext(QUEUE)
        if 4 in offsets and names:
            context.ack_index = offsets.index(4) - 1
        error = f"the error of {offsets}" if 4 in offsets else None
        return Answer(None if error else SUCCESS, error, context)

    outcomes = drained(made, listener, put_aside)
    assert called == calls
    if calls == [[*range(8)]]:
        behind = [(at, "PARKED") for at in range(5, 10)]
        assert told(outcomes) == [(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS"), (4, "PARKED"), *behind]
        assert [(message._attempts, message._error, message._again) for message in put_aside[1:]] == [(0, None, False)] * 5
    else:
        assert sorted(told(outcomes)) == [(at, "DEAD_LETTER" if at == 4 else "SUCCESS") for at in range(10)]
    assert (put_aside[0]._offset, put_aside[0]._error) == (4, f"the error of {[call for call in calls if 4 in call][-1]}")


def test_a_batch_that_fails_after_its_time_is_divided_before_its_key_is_parked() -> None:
    made = engine(*"aaa", consume_message_batch_max_size=3, max_batch_seconds=0.5)

    def listener(batch: Batch) -> ConsumeOrderlyStatus:
        return SUSPEND if batch.messages[-1]._offset else SUCCESS

    assert told(drained(made, listener)) == [(0, "SUCCESS"), (1, "PARKED"), (2, "PARKED")]


def test_with_minus_one_no_message_is_ever_a_dead_letter() -> None:
    lot = LotView(planned=[message(7, "a", attempts=10**6)])
    made = KeyEngine(QUEUE, OrderPerKey(max_reconsume_times=-1), 0.0, lot, 0)
    assert told(drained(made, lambda batch: SUSPEND)) == [(7, "PARKED")]


def test_a_full_lot_is_a_warning_and_the_key_is_tried_again() -> None:
    tries = Counter[int]()

    def listener(batch: Batch) -> ConsumeOrderlyStatus:
        tries[batch.messages[0]._offset] += 1
        return SUSPEND if tries[0] < 6 else SUCCESS

    made = engine("a", "a", in_batch_attempts=2, capacity=1)
    assert told(drained(made, listener)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    [warning] = made.warnings
    assert "full" in warning
    assert {status for _, status in told(drained(engine("a", "a", in_batch_attempts=2, capacity=2), lambda _: SUSPEND))} == {
        "PARKED"
    }


def test_after_its_time_a_range_parks_the_first_failure() -> None:
    made = engine("a", in_batch_attempts=99, max_batch_seconds=5.0)
    calls: list[int] = []

    def listener(batch: Batch) -> ConsumeOrderlyStatus:
        calls.append(batch.messages[0]._offset)
        return SUSPEND

    assert told(drained(made, listener)) == [(0, "PARKED")]
    assert len(calls) == 5


def test_a_batch_has_one_key_and_messages_without_a_key_go_alone() -> None:
    made = engine("a", None, "a", None, "b", consume_message_batch_max_size=8)
    batches: list[list[int]] = []

    def listener(batch: Batch) -> ConsumeOrderlyStatus:
        batches.append([one._offset for one in batch.messages])
        return SUCCESS

    drained(made, listener)
    assert sorted(batches) == [[0, 2], [1], [3], [4]]


def test_a_lost_lock_starts_no_call_and_waits_for_those_under_way() -> None:
    made = engine("a", "b", "c", concurrency=2)
    made.next(0.0)
    made.lock(True, 0.0)
    first = made.next(0.0)
    assert isinstance(first, Consume)
    made.lock(False, 0.0)
    assert made.next(0.0) == Wait(None)
    made.consumed(first.batch, answer(SUCCESS), 0.0)
    with pytest.raises(LockError, match="LOST"):
        made.next(0.0)


def test_the_lock_is_checked_while_calls_are_under_way() -> None:
    made = engine("a", "b", concurrency=1)
    made.next(0.0)
    made.lock(True, 0.0)
    assert isinstance(made.next(0.0), Consume)
    assert made.next(1.0) == Wait(29.0)
    assert made.next(30.0) == CheckLock()
    made.lock(True, 30.0)
    assert made.next(31.0) == Wait(29.0)


def test_does_not_park_a_message_twice_and_gives_only_a_failed_one_a_new_time() -> None:
    parked: list[Message] = []
    outcomes = drained(
        engine("a", "a", "b", in_batch_attempts=1), lambda _: SUSPEND, parked, is_new=lambda message: message._key == "a"
    )
    assert told(outcomes) == [(0, "PARKED"), (1, "PARKED"), (2, "REPEATED")]
    assert [(message._offset, message._again) for message in parked] == [(0, True), (1, False), (2, True)]


@pytest.mark.parametrize("attempts", [0, 2], ids=["a first failure", "the last one"])
def test_puts_a_failed_message_before_a_parked_one_of_its_key_aside(attempts: int) -> None:
    """An earlier attempt has parked messages 2 and 4, or a seek back kept them parked. Messages 0 and 1 were never decided."""
    settings = OrderPerKey(in_batch_attempts=1, max_reconsume_times=2)
    made = KeyEngine(QUEUE, settings, 0.0, LotView(parked_in_range={"a": [2, 4]}), 0)
    made.add([message(offset, "a", attempts=attempts if offset == 0 else 0) for offset in range(6)])
    outcomes = drained(made, lambda _: SUSPEND)
    assert {outcome.begin: outcome.status for outcome in outcomes} == {
        0: "DEAD_LETTER" if attempts else "PARKED",
        **dict.fromkeys((1, 3, 5), "PARKED"),
    }


def test_a_message_counts_as_decided_once_it_is_parked() -> None:
    """Message 0 fails. Those of the other keys are done before it is, out of their order."""
    made = engine("a", "b", "c", "a", "b", in_batch_attempts=1, concurrency=3)
    made.next(0.0)
    made.lock(True, 0.0)
    calls = [action.batch for _ in range(3) if isinstance(action := made.next(0.0), Consume)]
    progress = [made.progress]
    for batch in reversed(calls):
        made.consumed(batch, answer(None if batch.messages[0]._offset == 0 else SUCCESS), 0.0)
        progress.append(made.progress)
    while not isinstance(action := made.next(0.0), Park):
        if isinstance(action, Consume):
            made.consumed(action.batch, answer(SUCCESS), 0.0)
        else:
            made.close()
    progress.append(made.progress)
    made.was_parked([True, True])
    assert [*progress, made.progress] == [0, 0, 0, 0, 0, 5]


def test_calls_out_of_turn_are_refused() -> None:
    made = engine("a")
    with pytest.raises(RuntimeError):
        made.dead_lettered()
    with pytest.raises(RuntimeError):
        made.was_parked([True])
    with pytest.raises(ValueError, match="came after"):
        made.add([Message(0, "a")])


@pytest.mark.parametrize(
    ("name", "value"),
    [("concurrency", 0), ("concurrency", True), ("in_batch_attempts", 0), ("max_batch_seconds", 0), ("on_exhausted", "drop")],
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        OrderPerKey(**{name: value})  # type: ignore[arg-type]


def test_consumes_messages_of_a_lot_in_the_order_of_their_queue() -> None:
    # A successor has parked 7 after 13, which the dead owner had parked from the same range.
    lot = [Message(1, "a"), Message(13, "a"), message(7, "a", due=False)]
    made = KeyEngine(QUEUE, OrderPerKey(), 0.0, LotView(planned=lot), 0)
    assert told(drained(made, lambda _: SUCCESS)) == [(1, "SUCCESS"), (7, "SUCCESS"), (13, "SUCCESS")]
