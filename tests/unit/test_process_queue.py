"""ProcessQueue: exactly the results of RocketMQ's own class where they are meant to be equal, and random runs against single messages.

java_process_queue.json has the results of the class of rocketmq-client 5.3.3. JavaProcessQueue.java, next to it, wrote them and describes
the cases; `tests/live/rocketmq/test_process_queue.py` compares them with the class again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orderedmq.listening import process_queue
from orderedmq.listening.process_queue import ProcessQueue

JAVA: list[tuple[str, list[tuple[str, Any, int]]]] = json.loads(Path(__file__).with_name("java_process_queue.json").read_text())

#: (case, number of the step) → our result, if it is not Java's. A range's rows come once, so a message that is put twice is refused.
DIFFERENT: Final[dict[tuple[str, int], Any]] = {
    # Java returns the offset after the last taken message; ours also passes the offsets that no message has.
    ("offsets with gaps", 3): 9,
    ("offsets with gaps", 4): 9,
    # Java's result ignores taken messages, because its two ways of consuming never meet.
    ("removed while others are taken", 2): 0,
    ("put twice", 1): "ValueError",
    ("put twice", 3): "not comparable",
    ("put twice while it is taken", 2): "ValueError",
    ("put twice while it is taken", 4): [1],
    # Java waits for the message again, and then forgets that a higher one was put: its last result here is 2.
    ("put again after it is done", 2): "ValueError",
    ("put again after it is done", 3): 2,
    ("put again after it is done", 4): "not comparable",
    # Only waiting messages may be removed.
    ("removed twice", 2): "not comparable",
    ("removed from nothing", 0): "not comparable",
    ("commit and rollback of nothing", 2): 0,
    ("a message that is not taken again", 1): "ValueError",
}


def result(queue: ProcessQueue, step: str) -> Any:
    method, *numbers = step.split()
    offsets = [int(number) for number in numbers]
    try:
        match method:
            case "put":
                return queue.put_message(offsets)
            case "take":
                return [offset for span in queue.take_messages(offsets[0]) for offset in range(*span)]
            case "commit":
                return queue.commit()
            case "rollback":
                return queue.rollback()
            case "again":
                return queue.make_message_to_consume_again(offsets)
            case _:
                return queue.remove_message(offsets)
    except ValueError:
        return "ValueError"


@pytest.mark.parametrize(("name", "steps"), JAVA)
def test_as_java(name: str, steps: Sequence[tuple[str, Any, int]]) -> None:
    """The result of ``put`` is not compared: in Java it says whether a thread has to be started."""
    queue = ProcessQueue(0)
    alike = True
    for number, (step, java, span) in enumerate(steps):
        ours = DIFFERENT.get((name, number), java)
        if ours == "not comparable":
            alike = False
            continue
        answer = result(queue, step)
        alike = alike and answer != "ValueError"
        assert answer == (ours if not isinstance(ours, bool) else None), step
        assert not alike or queue.max_span == span, step


class Machine(RuleBasedStateMachine):
    """Compares the spans with sets of single messages. A step of a few offsets and a bound of a few cuts make spans of every kind."""

    @initialize(begin=st.integers(0, 3), together=st.sampled_from([0, 3, 10_000]))
    def begin(self, begin: int, together: int) -> None:
        self.bound, process_queue.CUT_TOGETHER = process_queue.CUT_TOGETHER, together  # type: ignore[misc]
        self.queue = ProcessQueue(begin)
        self.first = self.end = begin
        self.every: list[int] = []
        self.waiting: set[int] = set()
        self.taken: set[int] = set()

    def teardown(self) -> None:
        process_queue.CUT_TOGETHER = self.bound  # type: ignore[misc]

    @rule(gaps=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), max_size=9))
    def put(self, gaps: list[int]) -> None:
        offsets = []
        for gap in gaps:
            offsets.append(self.end + gap)
            self.end = offsets[-1] + 1
        self.queue.put_message(offsets)
        self.every += offsets
        self.waiting.update(offsets)

    @precondition(lambda self: self.end > self.first)
    @rule(offset=st.integers(0, 3), end=st.integers(0, 3))
    def refuses_what_does_not_ascend(self, offset: int, end: int) -> None:
        for offsets in ([self.end - 1 - offset], [self.end + 1, self.end + 1 - min(end, 1), self.end + 3]):
            with pytest.raises(ValueError, match="came after"):
                self.queue.put_message(offsets)

    @rule(most=st.integers(0, 6))
    def take(self, most: int) -> None:
        offsets = sorted(self.waiting)[:most]
        assert [offset for span in self.queue.take_messages(most) for offset in range(*span)] == offsets
        self.waiting.difference_update(offsets)
        self.taken.update(offsets)

    @rule()
    def commit(self) -> None:
        self.taken.clear()
        assert self.queue.commit() == self.queue.progress

    @rule()
    def rollback(self) -> None:
        self.queue.rollback()
        self.waiting |= self.taken
        self.taken.clear()

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        offsets = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True, min_size=1).map(sorted))
        self.queue.make_message_to_consume_again(offsets)
        self.taken.difference_update(offsets)
        self.waiting.update(offsets)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), far=st.booleans())
    def remove(self, data: st.DataObject, far: bool) -> None:
        waiting = sorted(self.waiting)
        if far:
            offsets = data.draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1).map(sorted))
        else:
            at = data.draw(st.integers(0, len(waiting) - 1))
            offsets = waiting[at : at + data.draw(st.integers(1, 4))]
        self.waiting.difference_update(offsets)
        assert self.queue.remove_message(offsets) == self.queue.progress

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.waiting == len(self.waiting)
        # The progress may be anywhere between the last done message and the first that is not done.
        undone = min(self.waiting | self.taken, default=self.end)
        done = max((offset + 1 for offset in self.every if offset < undone), default=self.first)
        assert done <= self.queue.progress <= undone

    @rule()
    def span(self) -> None:
        assert self.queue.max_span == (max(self.waiting) - min(self.waiting) if self.waiting else 0)


TestProcessQueue = Machine.TestCase
