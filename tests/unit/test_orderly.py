"""The orderly listener's engine: each of its rules, every answer in every situation, and random lives against a plain list.

Long because the engine has that many rules, and each is tested alone before the random lives combine them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orderedmq.core.listener import (
    MAX_ERROR_BYTES,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    OrderlySettings,
    call_listener,
    clip,
    dead_letter_id,
    dead_letter_properties,
    suspend_seconds,
)
from orderedmq.core.orderly import Batch, CheckLock, Consume, DeadLetter, Done, OrderlyQueue, Outcome, Pull, Suspend
from orderedmq.core.process_queue import Slice
from orderedmq.errors import ListenerError, LockError, OptionError
from orderedmq.model import MAX_PROPERTIES_BYTES, MessageQueue

SUCCESS = ConsumeOrderlyStatus.SUCCESS
ROLLBACK = ConsumeOrderlyStatus.ROLLBACK
COMMIT = ConsumeOrderlyStatus.COMMIT
SUSPEND = ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
QUEUE = MessageQueue("orders", "embedded", 3)


def rows(begin: int, reconsumed: list[int | None]) -> Slice:
    end = begin + len(reconsumed)
    columns = {"queue_offset": pa.array(range(begin, end), pa.int64()), "reconsume_times": pa.array(reconsumed, pa.int32())}
    return Slice(begin, end, 0, pa.record_batch(columns))


def offsets(slices: list[Slice]) -> list[int]:
    return [offset for piece in slices for offset in range(piece.begin, piece.end)]


class Task:
    """Drives an engine as a Spark task does, with a clock of its own. What happens is in `log`."""

    def __init__(self, *slices: Slice, batch: int = 1, **options: Any) -> None:
        self.now = 100.0
        self.engine = OrderlyQueue(QUEUE, OrderlySettings(batch, **options), self.now)
        self.log: list[str] = []
        self.outcomes: list[Outcome] = []
        self.coming: Iterator[Slice] = iter(slices)

    def to(self, kind: type) -> Any:
        """Do what is asked for until an action of this kind is due, and return it."""
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
                    self.engine.put(piece)
            else:
                raise AssertionError(f"{action} came before {kind.__name__}")

    def answer(
        self,
        status: ConsumeOrderlyStatus | None = SUCCESS,
        *,
        auto: bool = True,
        suspend: int = -1,
        error: str | None = None,
        takes: float = 0.0,
    ) -> Batch:
        """The next batch goes to a listener that answers so."""
        batch: Batch = self.to(Consume).batch
        self.log.append(f"{batch.begin}-{batch.end} #{batch.attempts + 1}")
        self.now += takes
        context = ConsumeOrderlyContext(QUEUE, auto, suspend)
        self.outcomes += self.engine.consumed(context, status, error, self.now)
        self.engine._check()
        return batch

    def letters(self, ok: bool = True, error: str | None = None) -> Batch:
        batch: Batch = self.to(DeadLetter).batch
        self.log.append(f"letters {batch.begin}-{batch.end}")
        self.outcomes += self.engine.dead_lettered(ok, error, self.now)
        self.engine._check()
        return batch

    def rows(self) -> list[tuple[int, int, str, int]]:
        return [(row.begin_offset, row.end_offset, row.status, row.attempts) for row in self.outcomes]


# -- parameters --------------------------------------------------------------------------------------------------------------


def test_parameters_and_defaults_are_rocketmqs_except_max_reconsume_times() -> None:
    assert OrderlySettings() == OrderlySettings(1, 1000, 16, 60.0)
    context = ConsumeOrderlyContext(QUEUE)
    assert (context.auto_commit, context.suspend_current_queue_time_millis) == (True, -1)
    assert [status.name for status in ConsumeOrderlyStatus] == [
        "SUCCESS",
        "ROLLBACK",
        "COMMIT",
        "SUSPEND_CURRENT_QUEUE_A_MOMENT",
    ]


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
        ("max_time_consume_continuously", 0),
        ("max_time_consume_continuously", float("nan")),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"ORDEREDMQ_OPTION.INVALID.*{name} is ") as raised:
        OrderlySettings(**{name: value})
    assert repr(value) in raised.value.message


# -- messages and batches ----------------------------------------------------------------------------------------------------


def test_messages_go_to_the_listener_in_order_and_each_batch_is_a_row() -> None:
    task = Task(Slice(5, 8), Slice(8, 10), batch=2)
    for _ in range(3):
        task.answer(takes=0.5)
    task.to(Done)
    assert task.rows() == [(5, 7, "SUCCESS", 1), (7, 9, "SUCCESS", 1), (9, 10, "SUCCESS", 1)]
    assert task.outcomes[0] == Outcome(QUEUE, 5, 7, "SUCCESS", 1, 0.5, None)


def test_a_batch_is_the_same_however_the_range_was_cut() -> None:
    whole, single = Task(Slice(0, 10), batch=4), Task(*(Slice(i, i + 1) for i in range(10)), batch=4)
    for task in (whole, single):
        task.answer(), task.answer(SUSPEND), task.answer(), task.answer()
        task.to(Done)
    assert whole.rows() == single.rows() == [(0, 4, "SUCCESS", 1), (4, 8, "SUCCESS", 2), (8, 10, "SUCCESS", 1)]


def test_a_batch_may_have_gaps_and_its_rows_are_not_copied() -> None:
    first, second = rows(0, [0] * 3), rows(7, [0] * 3)
    task = Task(first, second, batch=4)
    batch = task.answer()
    assert (batch.begin, batch.end, offsets(batch.slices)) == (0, 8, [0, 1, 2, 7])
    assert first.rows is not None
    assert batch.slices[0].rows is not None
    column, original = batch.slices[0].rows.column("queue_offset"), first.rows.column("queue_offset")
    assert column.buffers()[1].address == original.buffers()[1].address


def test_an_empty_range_is_done() -> None:
    task = Task()
    task.to(Done)
    assert task.to(Done) == Done()
    assert task.outcomes == []


def test_next_says_the_same_until_it_has_the_outcome() -> None:
    engine = OrderlyQueue(QUEUE, OrderlySettings(), 0.0)
    assert engine.next(0.0) == engine.next(1.0) == CheckLock()
    engine.lock(True, 1.0)
    assert engine.next(1.0) == engine.next(1.0) == Pull()
    engine.put(Slice(0, 2))
    assert engine.next(2.0) is engine.next(3.0)
    engine.consumed(ConsumeOrderlyContext(QUEUE), None, None, 3.0)
    assert engine.next(3.0) == Suspend(1.0)
    assert engine.next(3.75) == Suspend(0.25)
    assert engine.next(4.0) == CheckLock()


def test_an_outcome_that_nobody_waits_for_is_a_bug_of_the_caller() -> None:
    engine = OrderlyQueue(QUEUE, OrderlySettings(), 0.0)
    with pytest.raises(RuntimeError):
        engine.consumed(ConsumeOrderlyContext(QUEUE), SUCCESS, None, 0.0)
    with pytest.raises(RuntimeError):
        engine.dead_lettered(True, None, 0.0)


def test_messages_out_of_order_are_refused() -> None:
    engine = OrderlyQueue(QUEUE, OrderlySettings(), 0.0)
    engine.put(Slice(3, 5))
    with pytest.raises(ValueError, match="from 4 "):
        engine.put(Slice(4, 6))
    engine.close()
    with pytest.raises(ValueError, match="its end"):
        engine.put(Slice(5, 6))


def test_fetching_ahead_stops_above_1000_messages_and_a_pull_is_asked_for_all_the_same() -> None:
    engine = OrderlyQueue(QUEUE, OrderlySettings(1024), 0.0)
    engine.next(0.0)
    engine.lock(True, 0.0)
    engine.put(Slice(0, 1000))
    assert not engine.full
    engine.put(Slice(1000, 1001))
    assert engine.full
    assert engine.next(0.0) == Pull()


# -- answers -----------------------------------------------------------------------------------------------------------------


def after(task: Task) -> tuple[list[int], list[int]]:
    """Offsets pending and taken."""
    process = task.engine._process
    return [o for span in process.pending() for o in range(*span)], [o for span in process.taken() for o in range(*span)]


#: auto-commit, answer, retries left → what follows, what is pending and taken then, and the rows.
HELD = (0, 1, "SUCCESS", 1)
TABLE = [
    (True, SUCCESS, True, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, SUCCESS, False, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, COMMIT, True, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, COMMIT, False, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, ROLLBACK, True, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, ROLLBACK, False, Consume, [2], [], [HELD, (1, 2, "SUCCESS", 1)]),
    (True, SUSPEND, True, Suspend, [1, 2], [0], []),
    (True, SUSPEND, False, DeadLetter, [2], [], [HELD, (1, 2, "DEAD_LETTER", 1)]),
    (True, None, True, Suspend, [1, 2], [0], []),
    (True, None, False, DeadLetter, [2], [], [HELD, (1, 2, "DEAD_LETTER", 1)]),
    (False, SUCCESS, True, Consume, [2], [0, 1], []),
    (False, SUCCESS, False, Consume, [2], [0, 1], []),
    (False, COMMIT, True, Consume, [2], [], [HELD, (1, 2, "COMMIT", 1)]),
    (False, COMMIT, False, Consume, [2], [], [HELD, (1, 2, "COMMIT", 1)]),
    (False, ROLLBACK, True, Suspend, [0, 1, 2], [], []),
    (False, ROLLBACK, False, Suspend, [0, 1, 2], [], []),
    (False, SUSPEND, True, Suspend, [1, 2], [0], []),
    (False, SUSPEND, False, DeadLetter, [2], [0], [(1, 2, "DEAD_LETTER", 1)]),
    (False, None, True, Suspend, [1, 2], [0], []),
    (False, None, False, DeadLetter, [2], [0], [(1, 2, "DEAD_LETTER", 1)]),
]


@pytest.mark.parametrize(("auto", "status", "left", "follows", "pending", "taken", "outcomes"), TABLE)
def test_an_answer_does_what_the_table_says(
    auto: bool,
    status: ConsumeOrderlyStatus | None,
    left: bool,
    follows: type,
    pending: list[int],
    taken: list[int],
    outcomes: list[tuple[int, int, str, int]],
) -> None:
    task = Task(rows(0, [7, 6 if left else 7, 7]), max_reconsume_times=7)
    task.answer(SUCCESS, auto=False)
    task.answer(status, auto=auto)
    if follows is DeadLetter:
        assert isinstance(task.engine.next(task.now), DeadLetter)
        task.letters()
    assert after(task) == (pending, taken)
    assert task.rows() == outcomes
    assert isinstance(task.engine.next(task.now), Consume if follows is DeadLetter else follows)


@pytest.mark.parametrize("status", [COMMIT, ROLLBACK])
def test_commit_and_rollback_with_auto_commit_count_as_success_with_one_warning(status: ConsumeOrderlyStatus) -> None:
    task = Task(Slice(0, 2))
    task.answer(status)
    task.answer(status)
    task.to(Done)
    assert [row.status for row in task.outcomes] == ["SUCCESS"] * 2
    [warning] = task.engine.warnings
    assert status.name in warning
    assert str(QUEUE) in warning


def test_commit_commits_everything_taken_so_far() -> None:
    task = Task(Slice(0, 3))
    task.answer(auto=False)
    task.answer(auto=False)
    assert task.outcomes == []
    task.answer(COMMIT, auto=False)
    assert task.rows() == [(0, 1, "SUCCESS", 1), (1, 2, "SUCCESS", 1), (2, 3, "COMMIT", 1)]
    task.to(Done)


def test_rollback_puts_everything_taken_back_and_suspends_and_is_no_retry() -> None:
    task = Task(Slice(0, 3), max_reconsume_times=0)
    task.answer(auto=False, takes=1.0)
    task.answer(ROLLBACK, auto=False, suspend=250)
    again = task.answer(auto=False, takes=2.0)
    assert (again.begin, again.attempts, again.retries) == (0, 2, 0)
    task.answer(COMMIT, auto=False)
    task.answer()
    task.to(Done)
    assert task.log == ["check", "0-1 #1", "1-2 #1", "suspend 0.25", "check", "0-1 #2", "1-2 #2", "2-3 #1"]
    assert task.rows() == [(0, 1, "SUCCESS", 2), (1, 2, "COMMIT", 2), (2, 3, "SUCCESS", 1)]
    assert task.outcomes[0].duration == 3.0


def test_an_answer_counts_with_the_auto_commit_that_the_listener_left() -> None:
    task = Task(Slice(0, 2))
    task.to(Consume)
    context = ConsumeOrderlyContext(QUEUE)
    context.auto_commit = False
    assert task.engine.consumed(context, SUCCESS, None, task.now) == []
    # The next call's context starts with auto-commit on, and commits both.
    task.answer()
    assert task.rows() == [(0, 1, "SUCCESS", 1), (1, 2, "SUCCESS", 1)]


@pytest.mark.parametrize(("status", "error"), [(None, None), (None, "ValueError: no"), (SUSPEND, None)])
def test_none_and_exceptions_count_as_suspend(status: ConsumeOrderlyStatus | None, error: str | None) -> None:
    task = Task(Slice(0, 1))
    task.answer(status, error=error, takes=0.25)
    task.answer(takes=0.5)
    task.to(Done)
    assert task.log == ["check", "0-1 #1", "suspend 1", "check", "0-1 #2"]
    text = error or "the listener answered SUSPEND_CURRENT_QUEUE_A_MOMENT"
    assert task.outcomes == [Outcome(QUEUE, 0, 1, "SUCCESS", 2, 0.75, text)]


def test_the_listener_chooses_the_suspension() -> None:
    task = Task(Slice(0, 1), suspend_current_queue_time_millis=20)
    task.answer(SUSPEND)
    task.answer(SUSPEND, suspend=3000)
    task.answer(SUSPEND, suspend=99_999)
    task.answer()
    assert [line for line in task.log if "suspend" in line] == ["suspend 0.02", "suspend 3", "suspend 30"]


# -- retries and dead letters ------------------------------------------------------------------------------------------------


def test_the_batch_is_retried_as_a_whole() -> None:
    task = Task(Slice(0, 9), batch=3)
    task.answer()
    for retries in range(4):
        assert task.to(Consume).batch.retries == retries
        assert offsets(task.answer(None).slices) == [3, 4, 5]
    task.answer()
    assert task.answer().begin == 6


def test_a_message_is_put_to_the_listener_17_times_by_default() -> None:
    task = Task(Slice(0, 2))
    for _ in range(17):
        task.answer(None, error="boom")
    letter = task.letters()
    assert (letter.error, letter.attempts, letter.retries, offsets(letter.slices)) == ("boom", 17, 16, [0])
    assert task.rows() == [(0, 1, "DEAD_LETTER", 17)]
    assert task.outcomes[0].error == "boom"


def test_a_batch_is_dead_lettered_when_all_its_messages_have_reached_the_maximum() -> None:
    # Counted from the column: the freshest message of the batch decides, and one without a value is fresh.
    task = Task(rows(0, [9, 2, 5, 5, None, 3]), batch=3, max_reconsume_times=3)
    task.answer(None)
    task.answer(None)
    task.letters()
    for _ in range(4):
        task.answer(None)
    task.letters()
    task.to(Done)
    assert task.rows() == [(0, 3, "DEAD_LETTER", 2), (3, 6, "DEAD_LETTER", 4)]


def test_a_maximum_of_zero_dead_letters_at_once_and_of_minus_one_never() -> None:
    task = Task(Slice(0, 1), max_reconsume_times=0)
    task.answer(None)
    task.letters()
    task.to(Done)
    forever = Task(rows(0, [1000]), max_reconsume_times=-1)
    for _ in range(100):
        forever.answer(None)
    assert isinstance(forever.to(Consume), Consume)


def test_only_when_its_dead_letters_are_written_the_queue_goes_on() -> None:
    task = Task(Slice(0, 2), max_reconsume_times=1)
    task.answer(None)
    task.answer(None)
    assert isinstance(task.engine.next(task.now), DeadLetter)
    assert isinstance(task.engine.next(task.now + 5), DeadLetter)
    assert task.outcomes == []
    task.letters()
    assert task.answer().begin == 1
    task.to(Done)
    assert task.rows() == [(0, 1, "DEAD_LETTER", 2), (1, 2, "SUCCESS", 1)]


def test_a_dead_letter_write_that_fails_suspends_and_the_listener_is_asked_again() -> None:
    task = Task(Slice(0, 2), max_reconsume_times=0)
    task.answer(None, error="boom", suspend=500)
    task.letters(ok=False, error="disk full")
    assert after(task) == ([0, 1], [])
    batch = task.answer(None, error="boom")
    assert (batch.begin, batch.attempts, batch.retries) == (0, 2, 1)
    assert task.letters().error == "boom"
    assert task.log == ["check", "0-1 #1", "letters 0-1", "suspend 0.5", "check", "0-1 #2", "letters 0-1"]
    assert task.rows() == [(0, 1, "DEAD_LETTER", 2)]


def test_an_outcome_after_a_failed_dead_letter_write_says_both_errors() -> None:
    task = Task(Slice(0, 1), max_reconsume_times=0)
    task.answer(None, error="boom")
    task.letters(ok=False, error="disk full")
    task.answer()
    assert task.outcomes[0].error == "dead letters not written (disk full) after: boom"


def test_dead_letters_without_auto_commit_settle_their_batch_and_no_other() -> None:
    task = Task(Slice(0, 3), max_reconsume_times=0)
    task.answer(auto=False)
    task.answer(None, auto=False)
    task.letters()
    task.answer(ROLLBACK, auto=False)
    # What was dead-lettered does not come back; what was taken before does.
    assert [task.answer(auto=False).begin, task.answer(COMMIT, auto=False).begin] == [0, 2]
    task.to(Done)
    assert task.rows() == [(1, 2, "DEAD_LETTER", 1), (0, 1, "SUCCESS", 2), (2, 3, "COMMIT", 2)]


def test_dead_letters_at_the_end_of_the_range_leave_nothing_uncommitted() -> None:
    task = Task(Slice(0, 2), max_reconsume_times=0)
    task.answer(COMMIT, auto=False)
    task.answer(None, auto=False)
    task.letters()
    task.to(Done)


# -- the end of the range ----------------------------------------------------------------------------------------------------


def test_messages_taken_and_not_committed_at_the_end_of_the_range_fail_the_task() -> None:
    task = Task(Slice(10, 13))
    task.answer()
    task.answer(auto=False)
    task.answer(auto=False)
    with pytest.raises(
        ListenerError, match="^.ORDEREDMQ_LISTENER.UNCOMMITTED. 2 messages of queue .*orders.* 11 to 12"
    ) as raised:
        task.to(Done)
    assert raised.value.condition == "ORDEREDMQ_LISTENER.UNCOMMITTED"
    assert "answer COMMIT" in raised.value.message
    assert "\n" not in raised.value.message


def test_more_than_the_threshold_may_stay_taken() -> None:
    task = Task(*(Slice(at, at + 500) for at in range(0, 3000, 500)), batch=500)
    for _ in range(5):
        task.answer(auto=False)
    task.answer(COMMIT, auto=False)
    task.to(Done)
    assert len(task.outcomes) == 6


# -- lock and drop -----------------------------------------------------------------------------------------------------------


def test_the_lock_is_checked_at_the_start_and_after_each_suspension() -> None:
    task = Task(Slice(0, 1))
    task.answer(SUSPEND)
    task.answer()
    assert task.log == ["check", "0-1 #1", "suspend 1", "check", "0-1 #2"]


def test_news_of_the_lock_prolong_its_trust_and_do_not_replace_a_check() -> None:
    task = Task(Slice(0, 3))
    task.engine.lock(True, task.now)
    task.answer(takes=25.0)
    task.engine.lock(True, task.now)
    task.answer(SUSPEND, takes=25.0)
    task.engine.lock(True, task.now)
    task.answer()
    assert task.log == ["check", "0-1 #1", "1-2 #1", "suspend 1", "check", "1-2 #2"]


def test_after_60_s_of_continuous_work_the_engine_pauses_10_ms_and_checks_its_lock() -> None:
    task = Task(Slice(0, 9))
    for _ in range(8):
        task.answer(takes=20.0)
    # Besides, a lock is trusted for 30 s.
    assert task.log == [
        "check", "0-1 #1", "1-2 #1",
        "check", "2-3 #1", "3-4 #1",
        "check", "suspend 0.01",
        "check", "4-5 #1", "5-6 #1",
        "check", "6-7 #1", "7-8 #1",
    ]  # fmt: skip


def test_every_run_consumes_something_however_short_its_time() -> None:
    task = Task(Slice(0, 3), max_time_consume_continuously=1e-9)
    for _ in range(3):
        task.answer(takes=1.0)
    task.to(Done)
    assert len(task.outcomes) == 3


def test_a_lock_that_was_not_confirmed_for_30_s_is_checked_before_dead_letters_too() -> None:
    task = Task(Slice(0, 1), max_reconsume_times=0)
    task.answer(None, takes=31.0)
    assert task.engine.next(task.now) == CheckLock()
    task.letters()
    task.to(Done)


def lose(engine: OrderlyQueue) -> None:
    engine.lock(False, 0.0)


@pytest.mark.parametrize(("how", "text"), [(lose, "was lost"), (OrderlyQueue.drop, "was dropped")])
@pytest.mark.parametrize("answer", [SUCCESS, SUSPEND, None])
@pytest.mark.parametrize("most", [0, 16])
def test_a_lock_lost_or_a_queue_dropped_stops_the_task_before_its_next_message(
    how: Callable[[OrderlyQueue], None], text: str, answer: ConsumeOrderlyStatus | None, most: int
) -> None:
    task = Task(Slice(0, 3), max_reconsume_times=most)
    task.answer()
    task.to(Consume)
    how(task.engine)
    # The listener's answer is still taken, and nothing follows: no suspension, no dead letter, no message.
    task.engine.consumed(ConsumeOrderlyContext(QUEUE), answer, None, task.now)
    for _ in range(2):
        with pytest.raises(LockError, match=f"ORDEREDMQ_LOCK.LOST.*orders.*{text}") as raised:
            task.engine.next(task.now)
    assert "restart" in raised.value.message


def test_a_lock_that_is_lost_at_a_check_stops_the_task() -> None:
    task = Task(Slice(0, 3))
    assert task.to(CheckLock) == CheckLock()
    task.engine.lock(False, task.now)
    with pytest.raises(LockError):
        task.engine.next(task.now)
    task.engine.lock(True, task.now)
    with pytest.raises(LockError):
        task.engine.next(task.now)


# -- listener and hooks ------------------------------------------------------------------------------------------------------


class Hook:
    def __init__(self, log: list[Any], fails: bool = False) -> None:
        self.log = log
        self.fails = fails

    def consume_message_before(self, messages: Any, context: ConsumeOrderlyContext) -> None:
        self.log.append(("before", messages, context.message_queue))
        if self.fails:
            raise ValueError("hook")

    def consume_message_after(self, messages: Any, context: ConsumeOrderlyContext, status: Any, error: str | None) -> None:
        self.log.append(("after", messages, context.message_queue, status, error))
        if self.fails:
            raise ValueError("hook")


def call(listener: Any, *hooks: Hook) -> tuple[tuple[ConsumeOrderlyStatus | None, str | None], list[str]]:
    warnings: list[str] = []
    return call_listener(listener, ["m"], ConsumeOrderlyContext(QUEUE), hooks, warnings.append), warnings


@pytest.mark.parametrize("status", list(ConsumeOrderlyStatus))
def test_hooks_are_called_before_and_after_the_listener(status: ConsumeOrderlyStatus) -> None:
    log: list[Any] = []

    def listener(messages: Any, context: Any) -> ConsumeOrderlyStatus:
        log.append((messages, context.message_queue))
        return status

    assert call(listener, Hook(log)) == ((status, None), [])
    assert log == [("before", ["m"], QUEUE), (["m"], QUEUE), ("after", ["m"], QUEUE, status, None)]


def test_what_a_listener_raises_or_returns_by_mistake_is_its_error() -> None:
    log: list[Any] = []

    def raises(messages: Any, context: Any) -> None:
        raise KeyError("id")

    assert call(raises, Hook(log)) == ((None, "KeyError: 'id'"), [])
    assert log[-1] == ("after", ["m"], QUEUE, None, "KeyError: 'id'")
    assert call(lambda m, c: None) == ((None, "the listener returned None, not a ConsumeOrderlyStatus"), [])
    assert call(lambda m, c: "SUCCESS") == ((None, "the listener returned 'SUCCESS', not a ConsumeOrderlyStatus"), [])


def test_being_interrupted_is_no_answer() -> None:
    def interrupted(messages: Any, context: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


def test_a_hook_that_raises_is_a_warning() -> None:
    log: list[Any] = []
    answer, warnings = call(lambda m, c: SUCCESS, Hook(log, fails=True), Hook(log))
    assert answer == (SUCCESS, None)
    assert len(log) == 4
    assert warnings == ["a hook of the listener of queue orders/embedded/3 raised ValueError: hook"] * 2


# -- dead letters ------------------------------------------------------------------------------------------------------------


def test_a_dead_letters_id_is_group_queue_and_offset() -> None:
    assert dead_letter_id("billing", QUEUE, 17) == "billing/orders/embedded/3/17"
    others = {
        dead_letter_id(g, MessageQueue(t, b, q), o) for g in "ab" for t in "ab" for b in "ab" for q in (1, 11) for o in (1, 11)
    }
    assert len(others) == 32


def size(properties: dict[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())


def test_a_dead_letter_has_its_origin_in_properties() -> None:
    properties = dead_letter_properties(
        QUEUE, 17, message_id="7F01", reconsume_times=16, error="ValueError: no", properties={"colour": "red"}
    )
    assert properties == {
        "colour": "red",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "ORIGIN_MESSAGE_ID": "7F01",
        "RECONSUME_TIME": "16",
        "ORDEREDMQ_BROKER": "embedded",
        "ORDEREDMQ_OFFSET": "17",
        "ORDEREDMQ_ERROR": "ValueError: no",
    }


def test_a_message_that_was_a_dead_letter_before_keeps_its_first_id_and_gets_its_new_origin() -> None:
    first = dead_letter_properties(QUEUE, 17, message_id="A", reconsume_times=16, error="old", properties={})
    other = MessageQueue("replayed", "embedded", 0)
    second = dead_letter_properties(other, 5, message_id="B", reconsume_times=2, error="", properties=first)
    assert second["ORIGIN_MESSAGE_ID"] == "A"
    assert (second["REAL_TOPIC"], second["ORDEREDMQ_OFFSET"]) == ("replayed", "5")
    assert second["ORDEREDMQ_ERROR"] == ""


@pytest.mark.parametrize("own", [0, 20_000, 31_000, 32_300, 32_450])
def test_the_error_is_cut_so_that_properties_stay_below_their_limit(own: int) -> None:
    properties = {"big": "x" * own, "small": "y"}
    result = dead_letter_properties(QUEUE, 17, message_id="A", reconsume_times=1, error="é" * 50_000, properties=properties)
    assert size(result) < MAX_PROPERTIES_BYTES - 200
    assert len(result["ORDEREDMQ_ERROR"].encode()) <= MAX_ERROR_BYTES
    assert result["REAL_TOPIC"] == "orders"
    assert result["small"] == "y"
    assert ("big" in result) == (own < 32_450)


def test_an_error_becomes_a_text_that_can_be_stored() -> None:
    task = Task(Slice(0, 1))
    task.answer(None, error="bad \udc80 \x01\x02" + "é" * MAX_ERROR_BYTES)
    task.answer()
    error = task.outcomes[0].error
    assert error is not None
    assert error.startswith("bad ?   éé")
    assert len(error.encode()) <= MAX_ERROR_BYTES
    assert clip("ééé", 5) == "éé"


# -- random lives ------------------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """The engine against lists: ``todo`` (offset, reconsume_times) in order, ``taken`` batches, ``decided`` offsets."""

    @initialize(batch=st.integers(1, 4), most=st.integers(-1, 3))
    def begin(self, batch: int, most: int) -> None:
        self.batch, self.most = batch, most
        self.now = 0.0
        self.engine = OrderlyQueue(QUEUE, OrderlySettings(batch, max_reconsume_times=most), self.now)
        self.sent: list[int] = []
        self.closed = False
        self.todo: list[int] = []
        self.taken: list[list[int]] = []
        self.reconsumed: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.decided: list[int] = []

    def piece(self, gap: int, reconsumed: list[int]) -> Slice:
        begin = (self.sent[-1] + 1 if self.sent else 0) + gap
        fresh = list(range(begin, begin + len(reconsumed)))
        self.sent += fresh
        self.todo += fresh
        self.reconsumed.update(zip(fresh, reconsumed))
        bare = not any(reconsumed)
        return Slice(begin, begin + len(fresh)) if bare else rows(begin, list(reconsumed))

    @precondition(lambda self: not self.closed)
    @rule(gap=st.integers(0, 2), reconsumed=st.lists(st.integers(0, 2), max_size=7))
    def put(self, gap: int, reconsumed: list[int]) -> None:
        self.engine.put(self.piece(gap, reconsumed))

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
    )
    def step(self, status: ConsumeOrderlyStatus | None, auto: bool, written: bool, takes: float) -> None:
        if self.uncommitted():
            self.fails()
            return
        match self.engine.next(self.now):
            case Consume() as action:
                batch = offsets(action.batch.slices)
                assert batch == self.todo[: self.batch]
                assert len(batch) == self.batch or self.closed
                assert (action.batch.begin, action.batch.end) == (batch[0], batch[-1] + 1)
                assert not set(batch) & set(self.decided)
                assert action.batch.attempts == self.calls.get(batch[0], 0)
                self.calls[batch[0]] = action.batch.attempts + 1
                del self.todo[: len(batch)]
                self.now += takes
                self.outcomes += self.engine.consumed(ConsumeOrderlyContext(QUEUE, auto), status, None, self.now)
                self.answered(batch, status, auto, written)
            case DeadLetter():
                raise AssertionError("dead letters are due only right after an answer")
            case Suspend() as action:
                assert 0 < action.seconds <= 30
                self.now += action.seconds
            case CheckLock():
                self.engine.lock(True, self.now)
            case Pull():
                assert not self.closed
                assert len(self.todo) < self.batch
                self.engine.put(self.piece(0, [0, 1]))
            case Done():
                assert self.closed
                assert not self.todo
                assert not self.taken
                assert self.decided == self.sent

    def answered(self, batch: list[int], status: ConsumeOrderlyStatus | None, auto: bool, written: bool) -> None:
        if auto and status in (SUCCESS, COMMIT, ROLLBACK):
            self.committed(batch)
        elif status is SUCCESS:
            self.taken.append(batch)
        elif status is COMMIT:
            self.committed(batch)
        elif status is ROLLBACK:
            self.todo = [offset for held in self.taken for offset in held] + batch + self.todo
            self.taken = []
        elif self.most >= 0 and all(self.reconsumed[offset] >= self.most for offset in batch):
            while isinstance(self.engine.next(self.now), CheckLock):
                self.engine.lock(True, self.now)
            letter = self.engine.next(self.now)
            assert isinstance(letter, DeadLetter)
            assert offsets(letter.batch.slices) == batch
            self.outcomes += self.engine.dead_lettered(written, None, self.now)
            if not written:
                self.given_back(batch)
            elif auto:
                self.committed(batch)
            else:
                self.decided = sorted(self.decided + batch)
        else:
            self.given_back(batch)

    def given_back(self, batch: list[int]) -> None:
        for offset in batch:
            self.reconsumed[offset] += 1
        self.todo = batch + self.todo

    def committed(self, batch: list[int]) -> None:
        self.decided = sorted([*self.decided, *(offset for held in self.taken for offset in held), *batch])
        self.taken = []

    def uncommitted(self) -> bool:
        return self.closed and not self.todo and bool(self.taken)

    def fails(self) -> None:
        """The end of the range with something taken."""
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
        self.engine._check()
        # A row for each batch that is decided, and its messages in no other.
        covered = sorted(o for row in self.outcomes for o in self.sent if row.begin_offset <= o < row.end_offset)
        assert covered == self.decided
        for row in self.outcomes:
            assert row.attempts == self.calls[row.begin_offset]
        # Nothing lost, nothing twice.
        assert sorted([*self.decided, *self.todo, *(o for held in self.taken for o in held)]) == self.sent

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        self.closed = True
        if self.uncommitted():
            self.fails()
            return
        while not isinstance(self.engine.next(self.now), Done):
            self.step(SUCCESS, True, True, 0.0)
        assert self.decided == self.sent


Machine.TestCase.settings = settings(stateful_step_count=60)
TestMachine = Machine.TestCase
