"""The engine of order per queue: each of its rules, every answer in every situation, and random runs compared with a plain list.

The module is long because the engine has many rules. Each rule is tested alone before the random runs combine them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orderedmq.conditions import MessageCondition
from orderedmq.errors import ListenerError, LockError, MessageError, OptionError
from orderedmq.listening.engine import (
    REFUSED_PATIENCE,
    Batch,
    CheckLock,
    Consume,
    Done,
    Message,
    Outcome,
    Pull,
    Suspend,
    WriteLetter,
)
from orderedmq.listening.listener import ALL, Answer, ConsumeOrderlyContext, ConsumeOrderlyStatus, suspend_seconds
from orderedmq.listening.queue_engine import OrderPerQueue, QueueEngine
from orderedmq.model import MessageQueue
from orderedmq.text import MAX_ERROR_BYTES, clip
from tests.engine_messages import FULL, message

SUCCESS = ConsumeOrderlyStatus.SUCCESS
ROLLBACK = ConsumeOrderlyStatus.ROLLBACK
COMMIT = ConsumeOrderlyStatus.COMMIT
SUSPEND = ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
QUEUE = MessageQueue("orders", "embedded", 3)


def answer(status: ConsumeOrderlyStatus | None, *, auto: bool = True, suspend: int = -1, error: str | None = None) -> Answer:
    return Answer(status, error, ConsumeOrderlyContext(QUEUE, auto, suspend))


def offsets(messages: Sequence[Message]) -> list[int]:
    return [one._offset for one in messages]


class Task:
    """Drives an engine as a Spark task does, with a separate clock. Its steps are in `log`.

    Each piece of ``coming`` is added in one call. A piece is a list of offsets, or maps each offset to its message's retries.
    """

    def __init__(self, *coming: Any, batch: int = 1, **options: Any) -> None:
        self.now = 100.0
        self.engine = QueueEngine(QUEUE, OrderPerQueue(batch, **options), self.now, 0)
        self.log: list[str] = []
        self.outcomes: list[Outcome] = []
        self.came = 0
        self.coming: Iterator[Any] = iter(coming)

    def put(self, piece: Any) -> None:
        retried = piece if isinstance(piece, dict) else dict.fromkeys(piece, 0)
        self.engine.add([message(at, number=self.came + n, attempts=r) for n, (at, r) in enumerate(retried.items())])
        self.came += len(retried)

    def to(self, kind: type) -> Any:
        """Carry out the engine's actions until an action of this kind is next, and return it."""
        while True:
            action = self.engine.next(self.now)
            if isinstance(action, kind):
                return action
            if isinstance(action, Suspend):
                self.log.append(f"suspend {action.seconds:g}")
                self.now += action.seconds
            elif isinstance(action, CheckLock):
                self.log.append("check")
                self.engine.lock(True, self.now)
            elif isinstance(action, Pull):
                piece = next(self.coming, None)
                if piece is None:
                    self.engine.close()
                else:
                    self.put(piece)
            else:
                raise AssertionError(f"expected {kind.__name__}, but the engine asked for {action} first")

    def answer(self, status: ConsumeOrderlyStatus | None = SUCCESS, *, takes: float = 0.0, **how: Any) -> Batch:
        """Give the next batch to a listener with this answer."""
        batch: Batch = self.to(Consume).batch
        first, last = batch.messages[0], batch.messages[-1]
        self.log.append(f"{first._offset}-{last._offset + 1} #{batch.calls + 1}")
        self.now += takes
        self.outcomes += self.engine.consumed(batch, answer(status, **how), self.now)
        return batch

    def letter(self, refused: bool = False) -> Message:
        message: Message = self.to(WriteLetter).message
        self.log.append(f"letter {message._offset}")
        if refused:
            self.engine.refused(FULL, self.now)
        else:
            self.outcomes += self.engine.dead_lettered()
        return message

    def rows(self) -> list[tuple[int, str, int]]:
        """The (offset, status, attempts) of each message of the outcomes. The offsets must have no gaps."""
        return [(at, one.status, one.attempts) for one in self.outcomes for at in range(one.begin, one.end)]


# -- parameters --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("millis", "default", "seconds"),
    [(-1, 1000, 1.0), (0, 1000, 0.01), (9, 1000, 0.01), (10, 1, 0.01), (-2, 1, 0.01), (30_001, 1, 30.0), (-1, 99_999, 30.0)],
)
def test_a_suspension_is_clamped_to_10_ms_and_30_s(millis: int, default: int, seconds: float) -> None:
    assert suspend_seconds(millis, default) == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consume_message_batch_max_size", 0),
        ("consume_message_batch_max_size", 1025),
        ("consume_message_batch_max_size", True),
        ("suspend_current_queue_time_millis", "1s"),
        ("suspend_current_queue_time_millis", -1),
        ("max_reconsume_times", -2),
        ("max_reconsume_times", None),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"ORDEREDMQ_OPTION.INVALID.*{name} is ") as raised:
        OrderPerQueue(**{name: value})
    assert repr(value) in raised.value.message


# -- messages and batches ----------------------------------------------------------------------------------------------------


def test_a_batch_is_the_same_however_the_range_was_cut() -> None:
    whole, single = Task(range(10), batch=4), Task(*([at] for at in range(10)), batch=4)
    for task in (whole, single):
        task.answer(), task.answer(SUSPEND), *(task.answer() for _ in range(5))
        task.to(Done)
    divided = [f"{at}-{at + 1} #2" for at in range(4, 8)]
    assert whole.log == single.log == ["check", "0-4 #1", "4-8 #1", "suspend 1", *divided, "8-10 #1"]
    assert whole.rows() == single.rows() == [(at, "SUCCESS", 2 if 4 <= at < 8 else 1) for at in range(10)]


def test_messages_out_of_order_are_refused() -> None:
    engine = QueueEngine(QUEUE, OrderPerQueue(), 0.0, 0)
    engine.add([message(3), message(4)])
    with pytest.raises(ValueError, match="message 4 "):
        engine.add([message(4)])
    engine.close()
    with pytest.raises(ValueError, match="the end"):
        engine.add([message(5)])


def test_fetching_ahead_stops_at_1000_messages() -> None:
    task = Task(batch=1024)
    task.to(Pull)
    task.put(range(999))
    assert not task.engine.full
    task.put([999])
    assert task.engine.full
    assert task.engine.next(task.now) == Pull()


# -- answers -----------------------------------------------------------------------------------------------------------------

ACCEPTED = (0, "SUCCESS", 1)
BOTH = [ACCEPTED, (1, "SUCCESS", 1)]
#: Auto-commit, the listener's answer and whether retries are left; then the next action, the offsets of the calls after a ROLLBACK of the
#: next message, and the outcome rows.
TABLE = [
    (True, SUCCESS, True, Consume, [2], BOTH),
    (True, SUCCESS, False, Consume, [2], BOTH),
    (True, COMMIT, True, Consume, [2], BOTH),
    (True, COMMIT, False, Consume, [2], BOTH),
    (True, ROLLBACK, True, Consume, [2], BOTH),
    (True, ROLLBACK, False, Consume, [2], BOTH),
    (True, SUSPEND, True, Suspend, [0, 1, 2], []),
    (True, SUSPEND, False, WriteLetter, [2], [ACCEPTED, (1, "DEAD_LETTER", 1)]),
    (True, None, True, Suspend, [0, 1, 2], []),
    (True, None, False, WriteLetter, [2], [ACCEPTED, (1, "DEAD_LETTER", 1)]),
    (False, SUCCESS, True, Consume, [0, 1, 2], []),
    (False, SUCCESS, False, Consume, [0, 1, 2], []),
    (False, COMMIT, True, Consume, [2], [ACCEPTED, (1, "COMMIT", 1)]),
    (False, COMMIT, False, Consume, [2], [ACCEPTED, (1, "COMMIT", 1)]),
    (False, ROLLBACK, True, Suspend, [0, 1, 2], []),
    (False, ROLLBACK, False, Suspend, [0, 1, 2], []),
    (False, SUSPEND, True, Suspend, [0, 1, 2], []),
    (False, SUSPEND, False, WriteLetter, [0, 2], [(1, "DEAD_LETTER", 1)]),
    (False, None, True, Suspend, [0, 1, 2], []),
    (False, None, False, WriteLetter, [0, 2], [(1, "DEAD_LETTER", 1)]),
]


@pytest.mark.parametrize(("auto", "status", "left", "follows", "again", "outcomes"), TABLE)
def test_each_answer_has_its_action_and_outcomes(
    auto: bool,
    status: ConsumeOrderlyStatus | None,
    left: bool,
    follows: type,
    again: list[int],
    outcomes: list[tuple[int, str, int]],
) -> None:
    task = Task({0: 7, 1: 6 if left else 7, 2: 7}, max_reconsume_times=7)
    task.answer(SUCCESS, auto=False)
    task.answer(status, auto=auto)
    if follows is WriteLetter:
        assert isinstance(task.engine.next(task.now), WriteLetter)
        task.letter()
    assert task.rows() == outcomes
    # After a rollback, all messages that were not decided return, in order.
    while (batch := task.to(Consume).batch).messages[0]._offset != 2:
        task.engine.consumed(batch, answer(SUCCESS, auto=False), task.now)
    assert any("suspend" in line for line in task.log) == (follows is Suspend)
    task.engine.consumed(batch, answer(ROLLBACK, auto=False), task.now)
    assert [task.answer(SUCCESS, auto=False).messages[0]._offset for _ in again] == again


@pytest.mark.parametrize("status", [COMMIT, ROLLBACK])
def test_commit_and_rollback_with_auto_commit_count_as_success_with_one_warning(status: ConsumeOrderlyStatus) -> None:
    task = Task(range(2))
    task.answer(status)
    task.answer(status)
    task.to(Done)
    assert [row.status for row in task.outcomes] == ["SUCCESS"] * 2
    [warning] = task.engine.warnings
    assert status.name in warning
    assert str(QUEUE) in warning


def test_a_rollback_returns_all_uncommitted_messages_without_counting_a_retry() -> None:
    task = Task(range(3), max_reconsume_times=0)
    task.answer(auto=False, takes=1.0)
    task.answer(ROLLBACK, auto=False, suspend=250)
    again = task.answer(auto=False, takes=2.0)
    assert (offsets(again.messages), again.calls, again.messages[0]._attempts) == ([0], 2, 0)
    task.answer(COMMIT, auto=False)
    task.answer()
    task.to(Done)
    assert task.log == ["check", "0-1 #1", "1-2 #1", "suspend 0.25", "check", "0-1 #2", "1-2 #2", "2-3 #1"]
    assert task.rows() == [(0, "SUCCESS", 2), (1, "COMMIT", 2), (2, "SUCCESS", 1)]
    assert task.outcomes[0].seconds == 3.0


def test_the_listener_chooses_the_suspension() -> None:
    task = Task([0], suspend_current_queue_time_millis=20)
    task.answer(SUSPEND)
    task.answer(SUSPEND, suspend=3000)
    task.answer(SUSPEND, suspend=99_999)
    task.answer(SUSPEND, suspend=None)
    task.answer()
    assert [line for line in task.log if "suspend" in line] == ["suspend 0.02", "suspend 3", "suspend 30", "suspend 0.02"]
    assert "set suspend_current_queue_time_millis to an object of type NoneType" in task.engine.warnings[0]


# -- retries and dead letters ------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_is_retried_message_by_message() -> None:
    task = Task(range(9), batch=3)
    task.answer()
    task.answer(None, error="boom")
    calls = [task.answer(None if at == 4 else SUCCESS, error="its own" if at == 4 else None) for at in (3, 4)]
    calls += [task.answer(), task.answer(), task.answer()]
    assert [(offsets(call.messages), call.calls) for call in calls] == [([3], 2), ([4], 3), ([4], 3), ([5], 2), ([6, 7, 8], 1)]
    assert task.rows()[3:6] == [(3, "SUCCESS", 2), (4, "SUCCESS", 3), (5, "SUCCESS", 2)]
    company = "one of 3 messages of a call failed: boom"
    assert [one.error for one in task.outcomes] == [None, company, "its own", company, None]
    assert [line for line in task.log if "suspend" in line] == ["suspend 1", "suspend 1"]


@pytest.mark.holds("own failure")
@pytest.mark.parametrize("most", [0, 2])
def test_only_a_message_that_fails_alone_becomes_a_dead_letter(most: int) -> None:
    task = Task(range(6), batch=5, max_reconsume_times=most)
    task.answer(None, error="boom")
    task.answer(), task.answer()
    for _ in range(max(most, 1)):
        task.answer(None, error="its own")
    assert (letter := task.letter())._error == "its own"
    assert letter._offset == 2
    task.answer(), task.answer(), task.answer()
    task.to(Done)
    assert [row[:2] for row in task.rows()] == [(at, "DEAD_LETTER" if at == 2 else "SUCCESS") for at in range(6)]


def test_with_minus_one_a_message_is_retried_without_limit() -> None:
    task = Task([0], max_reconsume_times=-1)
    for _ in range(20):
        task.answer(None)
    assert isinstance(task.to(Consume), Consume)


@pytest.mark.holds("own failure")
@pytest.mark.parametrize(("auto", "status"), [(True, None), (True, SUCCESS), (False, None), (False, SUCCESS), (False, COMMIT)])
def test_ack_index_accepts_the_messages_up_to_it_and_names_the_one_that_failed(
    auto: bool, status: ConsumeOrderlyStatus | None
) -> None:
    task = Task(range(6), batch=6, max_reconsume_times=1)
    batch = task.to(Consume).batch
    context = ConsumeOrderlyContext(QUEUE, auto, ack_index=1)
    error = "boom" if status is None else None
    task.outcomes += task.engine.consumed(batch, Answer(status, error, context), task.now)
    committed = auto or status is COMMIT
    assert task.rows() == [(at, status.name if status is COMMIT else "SUCCESS", 1) for at in range(2 * committed)]
    assert offsets(task.answer(None).messages) == [2]
    assert task.letter()._offset == 2
    last = task.answer(COMMIT, auto=False)
    assert [(one._offset, one._attempts) for one in last.messages] == [(3, 0), (4, 0), (5, 0)]
    task.to(Done)
    assert sorted(row[:2] for row in task.rows() if row[1] == "DEAD_LETTER") == [(2, "DEAD_LETTER")]
    assert sorted(row[0] for row in task.rows()) == list(range(6))


def test_a_write_that_fails_permanently_or_for_a_minute_ends_the_task() -> None:
    permanent = MessageError(MessageCondition.TOO_LARGE, "the body is too large")
    for error, patience in ((permanent, 0.0), (FULL, REFUSED_PATIENCE)):
        task = Task([0], max_reconsume_times=0)
        task.answer(None)
        task.to(WriteLetter)
        began = task.now
        while task.now - began < patience:
            task.letter(refused=True)
            task.to(WriteLetter)
        with pytest.raises(type(error), match=error.message):
            task.engine.refused(error, task.now)
        assert patience <= task.now - began <= patience + 1


def test_retries_a_failed_write_of_a_dead_letter_before_the_next_message() -> None:
    task = Task(range(2), max_reconsume_times=0, suspend_current_queue_time_millis=500)
    task.answer(None, error="boom")
    for _ in range(3):
        task.letter(refused=True)
    task.letter()
    task.answer()
    task.to(Done)
    assert task.log == ["check", "0-1 #1", *["letter 0", "check", "suspend 0.5"] * 3, "letter 0", "1-2 #1"]
    assert task.rows() == [(0, "DEAD_LETTER", 1), (1, "SUCCESS", 1)]
    assert task.outcomes[0].error == "boom"
    [warning] = task.engine.warnings
    assert "no room" in warning


# -- the end of the range ----------------------------------------------------------------------------------------------------


def test_messages_taken_and_not_committed_at_the_end_of_the_range_fail_the_task() -> None:
    task = Task(range(10, 13))
    task.answer()
    task.answer(auto=False)
    task.answer(auto=False)
    with pytest.raises(
        ListenerError, match="^.ORDEREDMQ_LISTENER.UNCOMMITTED. 2 messages of queue .*orders.* 11 to 12"
    ) as raised:
        task.to(Done)
    assert raised.value.condition == "ORDEREDMQ_LISTENER.UNCOMMITTED"
    assert "Answer COMMIT" in raised.value.message
    assert "\n" not in raised.value.message


def test_more_than_the_threshold_may_stay_taken() -> None:
    task = Task(*(range(at, at + 500) for at in range(0, 3000, 500)), batch=500)
    for _ in range(5):
        task.answer(auto=False)
        assert not task.engine.full
    task.answer(COMMIT, auto=False)
    task.to(Done)
    assert len(task.rows()) == 3000


# -- lock and drop -----------------------------------------------------------------------------------------------------------


def test_the_lock_is_checked_at_the_start_and_before_a_retry_if_the_last_check_is_a_second_old() -> None:
    task = Task([0])
    task.answer(SUSPEND, takes=0.1)
    task.answer(SUSPEND, takes=0.1, suspend=700)
    task.answer()
    assert task.log == ["check", "0-1 #1", "suspend 1", "check", "0-1 #2", "suspend 0.7", "0-1 #3"]


@pytest.mark.parametrize("status", [SUCCESS, SUSPEND, None])
@pytest.mark.parametrize("most", [0, 16])
def test_a_lost_lock_stops_the_task_before_its_next_message(status: ConsumeOrderlyStatus | None, most: int) -> None:
    task = Task(range(3), max_reconsume_times=most)
    task.answer()
    batch = task.to(Consume).batch
    task.engine.lock(False, 0.0)
    # The listener's answer is still accepted, but no suspension, dead letter or message follows.
    task.engine.consumed(batch, answer(status), task.now)
    for _ in range(2):
        with pytest.raises(LockError, match="ORDEREDMQ_LOCK.LOST.*orders.*was lost") as raised:
            task.engine.next(task.now)
    assert "Restart the query" in raised.value.message


def test_an_error_becomes_a_text_that_can_be_stored() -> None:
    task = Task([0])
    task.answer(None, error="bad \udc80 \x01\x02" + "é" * MAX_ERROR_BYTES)
    task.answer()
    error = task.outcomes[0].error
    assert error is not None
    assert error.startswith("bad ?   éé")
    assert len(error.encode()) <= MAX_ERROR_BYTES
    assert clip("ééé", 5) == "éé"


# -- random runs --------------------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Compares the engine with lists of offsets: ``todo``, ``taken`` batches, ``decided``, and ``dying`` (future dead letters).

    ``cell`` maps an offset to a pair: the number of its batch, and the count of skipped messages before it. ``part`` has a number for each
    part of a batch that was divided after a failure. The offsets of a batch have equal pairs and the same part.
    """

    @initialize(batch=st.integers(1, 4), most=st.integers(-1, 3))
    def begin(self, batch: int, most: int) -> None:
        self.batch, self.most = batch, most
        self.now = 0.0
        self.engine = QueueEngine(QUEUE, OrderPerQueue(batch, max_reconsume_times=most), self.now, 0)
        self.sent: list[int] = []
        self.cell: dict[int, tuple[int, int]] = {}
        self.part: dict[int, int] = {}
        self.came = self.skipped = 0
        self.closed = False
        self.todo: list[int] = []
        self.taken: list[list[int]] = []
        self.dying: list[int] = []
        self.auto = True
        self.failed: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.decided: list[int] = []

    def fresh(self, gap: int, retried: list[int], skipped: int) -> list[Message]:
        """Messages after a gap of ``gap`` offsets and after ``skipped`` messages that earlier attempts have settled."""
        self.came += skipped
        self.skipped += skipped
        begin = (self.sent[-1] + 1 if self.sent else 0) + gap + skipped
        made = [message(begin + n, number=self.came + n, attempts=count) for n, count in enumerate(retried)]
        self.came += len(made)
        for one in made:
            self.sent.append(one._offset)
            self.todo.append(one._offset)
            self.cell[one._offset] = one._number // self.batch, self.skipped
            self.failed[one._offset] = one._attempts
        return made

    @precondition(lambda self: not self.closed)
    @rule(gap=st.integers(0, 2), retried=st.lists(st.integers(0, 2), max_size=7), skipped=st.sampled_from([0, 0, 1, 3]))
    def put(self, gap: int, retried: list[int], skipped: int) -> None:
        self.engine.add(self.fresh(gap, retried, skipped))

    @precondition(lambda self: not self.closed and len(self.sent) > 15)
    @rule()
    def close(self) -> None:
        self.engine.close()
        self.closed = True

    @rule(seconds=st.sampled_from([0.001, 0.5, 2.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        status=st.sampled_from([SUCCESS, SUCCESS, COMMIT, ROLLBACK, SUSPEND, None]),
        auto=st.booleans(),
        written=st.sampled_from([True, True, False]),
        takes=st.sampled_from([0.0, 0.01, 25.0]),
        ack_index=st.sampled_from([ALL, ALL, -1, 0, 1]),
    )
    def step(self, status: ConsumeOrderlyStatus | None, auto: bool, written: bool, takes: float, ack_index: int) -> None:
        if self.uncommitted():
            self.fails()
            return
        self.act(status, auto, written, takes, ack_index)

    def act(self, status: ConsumeOrderlyStatus | None, auto: bool, written: bool, takes: float, ack_index: int) -> bool:
        """Carry out the next action. Return whether the range is finished."""
        match self.engine.next(self.now):
            case Consume(batch):
                found = offsets(batch.messages)
                assert not self.dying
                assert found == next(
                    list(cell) for _, cell in groupby(self.todo, lambda at: (self.cell[at], self.part.get(at)))
                )
                cell, run = self.cell[found[0]]
                whole = self.came >= (cell + 1) * self.batch or run < self.cell[self.sent[-1]][1]
                assert self.closed or whole or found[0] in self.part, "the batch is not complete"
                assert batch.calls == self.calls.get(found[0], 0)
                self.calls |= dict.fromkeys(found, batch.calls + 1)
                del self.todo[: len(found)]
                self.now += takes
                context = ConsumeOrderlyContext(QUEUE, auto, ack_index=ack_index)
                self.outcomes += self.engine.consumed(batch, Answer(status, None, context), self.now)
                self.answered(found, status, auto, ack_index)
            case WriteLetter(letter):
                assert [letter._offset] == self.dying
                if not written:
                    self.engine.refused(FULL, self.engine._refused_since or self.now)
                else:
                    self.outcomes += self.engine.dead_lettered()
                    self.dying, dead = [], self.dying
                    self.committed(dead) if self.auto else self.decided.extend(dead)
            case Suspend(seconds):
                assert 0 < seconds <= 30
                self.now += seconds
            case CheckLock():
                self.engine.lock(True, self.now)
            case Pull():
                assert not self.closed
                self.engine.add(self.fresh(0, [0, 1], 0))
            case Done():
                assert self.closed
                assert not self.todo
                assert not self.taken
                assert sorted(self.decided) == self.sent
                return True
            case action:
                raise AssertionError(f"unexpected {action}")
        return False

    def answered(self, batch: list[int], status: ConsumeOrderlyStatus | None, auto: bool, ack_index: int) -> None:
        if auto and status in (COMMIT, ROLLBACK):
            status = SUCCESS
        if status is ROLLBACK:
            self.todo = [offset for held in self.taken for offset in held] + batch + self.todo
            self.taken = []
            return
        known = ack_index < len(batch) - 1
        done = ack_index + 1 if known else len(batch) if status in (SUCCESS, COMMIT) else 0
        accepted, failed = batch[:done], batch[done:]
        if accepted and (auto or status is COMMIT):
            self.committed(accepted)
        elif accepted:
            self.taken.append(accepted)
        if not failed:
            return
        alone = known or len(failed) == 1
        for offset in failed[:1] if alone else failed:
            self.failed[offset] += 1
        if len(batch) > 1:
            # Offsets are unique, and so are numbers above the greatest one.
            self.part |= dict.fromkeys(failed[1:], 1000 + failed[-1]) if known else {at: at for at in failed}
            self.part[failed[0]] = failed[0]
        if alone and 0 <= self.most < self.failed[failed[0]]:
            self.dying, self.auto = failed[:1], auto
            failed = failed[1:]
        self.todo = failed + self.todo

    def committed(self, batch: list[int]) -> None:
        self.decided += [*(offset for held in self.taken for offset in held), *batch]
        self.taken = []

    def uncommitted(self) -> bool:
        return self.closed and not self.todo and not self.dying and bool(self.taken)

    def fails(self) -> None:
        """The range ends while messages are taken and not committed."""
        while True:
            try:
                action = self.engine.next(self.now)
            except ListenerError:
                return
            assert isinstance(action, CheckLock | Suspend)
            self.now += 30
            self.engine.lock(True, self.now)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "engine"):
            return
        covered = [[at for at in self.sent if one.begin <= at < one.end] for one in self.outcomes]
        assert [at for batch in covered for at in batch] == self.decided
        assert all(one.attempts == self.calls[at] for one, batch in zip(self.outcomes, covered, strict=True) for at in batch)
        undecided = [at for at in self.sent if at not in self.decided]
        assert next((at for at in self.sent if at >= self.engine.progress), None) == next(iter(undecided), None)
        # No message is lost or counted twice.
        assert sorted([*self.decided, *self.todo, *self.dying, *(o for held in self.taken for o in held)]) == self.sent

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        self.closed = True
        while not self.uncommitted():
            if self.act(SUCCESS, True, True, 0.0, ALL):
                return
        self.fails()


Machine.TestCase.settings = settings(stateful_step_count=60)
TestMachine = Machine.TestCase
