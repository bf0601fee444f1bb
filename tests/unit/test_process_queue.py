"""ProcessQueue and the commits of QueueEngine: the results of RocketMQ's own class, and random runs against single messages.

java_process_queue.json has the results of the class of rocketmq-client 5.3.3. JavaProcessQueue.java, next to it, wrote them and describes
the cases; `tests/live/rocketmq/test_process_queue.py` compares them with the class again. The results of ``put`` are not compared: in Java
they say whether a thread has to be started.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orderedmq.listening.engine import Batch, Consume
from orderedmq.listening.process_queue import ProcessQueue
from tests.unit.test_queue_engine import COMMIT, ROLLBACK, SUCCESS, SUSPEND, Task, answer

#: (name, [(step, result, number of undecided messages), ...])
Case = tuple[str, list[tuple[str, Any, int]]]
JAVA: Final[list[Case]] = json.loads(Path(__file__).with_name("java_process_queue.json").read_text())
IN_ORDER: Final = [case for case in JAVA if any(step.startswith("take") for step, *_ in case[1])]
IN_ANY_ORDER: Final = [case for case in JAVA if case not in IN_ORDER]


def numbers(step: str) -> list[int]:
    return [int(number) for number in step.split()[1:]]


@pytest.mark.parametrize(("name", "steps"), IN_ANY_ORDER)
def test_removes_as_java(name: str, steps: Sequence[tuple[str, Any, int]]) -> None:
    queue = ProcessQueue(0)
    for step, java, undecided in steps:
        if step.startswith("put"):
            queue.put_message(numbers(step))
        else:
            assert queue.remove_message(numbers(step)) == queue.progress == java, step
        assert queue.waiting == undecided, step


@pytest.mark.parametrize(("name", "steps"), IN_ORDER)
def test_a_listener_with_order_per_queue_commits_as_java(name: str, steps: Sequence[tuple[str, Any, int]]) -> None:
    """A batch is taken by SUCCESS without auto-commit. SUSPEND lets a message be consumed again."""
    task = Task(batch=next(numbers(step)[0] for step, *_ in steps if step.startswith("take")))
    statuses = {"take": SUCCESS, "commit": COMMIT, "rollback": ROLLBACK, "again": SUSPEND}
    batch: Batch | None = None
    for step, java, undecided in steps:
        method = step.split()[0]
        if batch is not None and method in statuses:
            task.engine.consumed(batch, answer(statuses[method], auto=False), task.now)
            batch = None
        if method == "put":
            task.put(numbers(step))
        elif method == "take":
            batch = task.to(Consume).batch
            assert [message._offset for message in batch.messages] == java, step
        elif method == "commit":
            # Java's offset is the one after the last committed message. Ours also passes offsets that no message has.
            assert task.engine.progress == (9 if (name, java) == ("taken with gaps", 8) else java), step
        assert task.engine._range.waiting == undecided, step


class Machine(RuleBasedStateMachine):
    """Compares the runs with sets of single messages."""

    @initialize(begin=st.integers(0, 3))
    def begin(self, begin: int) -> None:
        self.queue = ProcessQueue(begin)
        self.first = self.end = begin
        self.every: list[int] = []
        self.undecided: set[int] = set()

    @rule(gaps=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), max_size=9))
    def put(self, gaps: list[int]) -> None:
        offsets = []
        for gap in gaps:
            offsets.append(self.end + gap)
            self.end = offsets[-1] + 1
        self.queue.put_message(offsets)
        self.every += offsets
        self.undecided.update(offsets)

    @precondition(lambda self: self.end > self.first)
    @rule(offset=st.integers(0, 3), end=st.integers(0, 3))
    def refuses_what_does_not_ascend(self, offset: int, end: int) -> None:
        for offsets in ([self.end - 1 - offset], [self.end + 1, self.end + 1 - min(end, 1), self.end + 3]):
            with pytest.raises(ValueError, match="came after"):
                self.queue.put_message(offsets)

    @precondition(lambda self: self.undecided)
    @rule(data=st.data(), far=st.booleans())
    def remove(self, data: st.DataObject, far: bool) -> None:
        undecided = sorted(self.undecided)
        if far:
            offsets = data.draw(st.lists(st.sampled_from(undecided), unique=True, min_size=1).map(sorted))
        else:
            at = data.draw(st.integers(0, len(undecided) - 1))
            offsets = undecided[at : at + data.draw(st.integers(1, 4))]
        self.undecided.difference_update(offsets)
        assert self.queue.remove_message(offsets) == self.queue.progress == min(self.undecided, default=self.end)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.waiting == len(self.undecided)
        assert self.queue.progress <= min(self.undecided, default=self.end)
        # However many messages behind an undecided one are decided, they take no memory.
        assert len(self.queue._ends) == len(self.queue._begins) <= len(self.undecided)


TestProcessQueue = Machine.TestCase
