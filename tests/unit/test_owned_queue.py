"""One owned queue is compared with a plain model of single messages, and steps that its state does not allow are refused."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.ownership.owned_queue import TRANSITIONS, Owned, Phase, Step

QUEUE = MessageQueue("t", "b", 0)


class Machine(RuleBasedStateMachine):
    """A model like RocketMQ's ProcessQueue: ``waiting`` has the messages found, ``taken`` those being consumed."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Owned(QUEUE, None)
        self.waiting: list[int] = []
        self.taken: list[int] = []
        self.end = 0

    def begin_at(self, offset: int) -> None:
        self.waiting, self.taken, self.end = [], [], offset

    @precondition(lambda self: self.real.phase is Phase.UNPLACED)
    @rule(offset=st.integers(0, 50), entered=st.booleans())
    def place(self, offset: int, entered: bool) -> None:
        self.real.place(offset, entered=entered)
        self.begin_at(offset)

    @precondition(lambda self: self.real.phase is Phase.UNPLACED)
    @rule(begin=st.integers(0, 50), count=st.integers(0, 9))
    def repeat(self, begin: int, count: int) -> None:
        self.real.repeat(OffsetRange(begin, begin + count))
        self.begin_at(begin + count)
        self.taken = list(range(begin, begin + count))
        assert self.real.phase is (Phase.IN_FLIGHT if count else Phase.IDLE)

    @precondition(lambda self: self.real.phase is Phase.IDLE)
    @rule(offset=st.integers(0, 50))
    def skip(self, offset: int) -> None:
        self.real.skip(offset)
        self.begin_at(offset)
        assert self.real.entered

    @precondition(lambda self: self.real.position is not None)
    @rule(end=st.integers(0, 60))
    def found(self, end: int) -> None:
        self.real.found(end)
        # The end may be lower than before, if the queue has to wait for others.
        position = self.real.position
        assert position is not None
        self.end = max(position, end)
        self.waiting = list(range(position, self.end))

    @precondition(lambda self: self.real.phase is Phase.IDLE and self.waiting)
    @rule(count=st.integers(1, 60))
    def plan(self, count: int) -> None:
        count = min(count, len(self.waiting))
        self.real.plan(count)
        self.taken, self.waiting = self.waiting[:count], self.waiting[count:]

    @precondition(lambda self: self.real.position is not None)
    @rule()
    def commit(self) -> None:
        assert self.real.commit() == (max(self.taken) + 1 if self.taken else None)
        self.taken = []
        assert not self.real.entered

    @precondition(lambda self: self.real.position is not None)
    @rule()
    def roll_back(self) -> None:
        self.real.roll_back()
        self.waiting, self.taken = self.taken + self.waiting, []

    @invariant()
    def is_what_the_model_says(self) -> None:
        assert (self.real.phase is Phase.UNPLACED) == (self.real.position is None)
        assert (self.real.phase is Phase.IN_FLIGHT) == bool(self.taken)
        if self.real.position is not None:
            assert list(range(*self.real.in_flight)) == self.taken
            assert list(range(self.real.position, self.real.known)) == self.waiting


TestMachine = Machine.TestCase


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("step", Step)
def test_a_step_that_the_table_does_not_have_is_refused(phase: Phase, step: Step) -> None:
    owned = Owned(QUEUE, None)
    owned.phase = phase
    if (phase, step) in TRANSITIONS:
        owned.on(step)
        assert owned.phase is TRANSITIONS[phase, step]
        return
    with pytest.raises(AssertionError, match=f"queue t/b/0 is {phase.value}, so this step is impossible: "):
        owned.on(step)
    assert owned.phase is phase
