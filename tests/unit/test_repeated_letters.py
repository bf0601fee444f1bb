"""Repeats of a range in which a killed attempt has stored dead letters: on a real store, in tasks of every kind of listener."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ordered_source.listener import engine_task
from ordered_source.listener.dead_letter import separate
from ordered_source.listener.engine_task import Consumer
from orderedmq.conditions import UnavailableCondition
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.model import OffsetRange
from orderedmq.tools import dead_letters
from orderedmq.tools.replay import Replayed, replay
from tests.contract.support import letters, locked
from tests.unit.test_engine_task import DONE, LATER, LETTERS, QUEUE, SUCCESS, SUSPEND, Rig

Row = tuple[int, str, int]


class Killed(BaseException):
    """Ends the simulated process of an attempt."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.broker.close()


def dies(at: int, *, bad: Collection[int] = (), suspends: Any = SUSPEND) -> Callable[[Any], Any]:
    """The answers of an attempt that fails for the messages ``bad`` and is killed when it reaches the message ``at``."""

    def answer(message: Any) -> Any:
        if message.queue_offset == at:
            raise Killed
        return suspends if message.queue_offset in bad else SUCCESS

    return answer


def queue(rig: Rig, listener: Any, size: int = 1) -> list[Row]:
    """Run a task with order per queue. Return its outcomes by message as (offset, status, attempts)."""
    settings = OrderPerQueue(size, suspend_current_queue_time_millis=10, max_reconsume_times=0)
    told = [
        row
        for batch in engine_task.consume(rig.read(planned=False, lot=False), Consumer(listener, settings))
        for row in batch.to_pylist()
    ]
    rows: list[Row] = [
        (at, row["status"], row["attempts"]) for row in told for at in range(row["begin_offset"], row["end_offset"])
    ]
    return sorted(rows)


def stored(rig: Rig) -> list[int | None]:
    """The offsets of the messages that have dead letters, in the order of the letters."""
    end = rig.broker.log.bounds([LETTERS])[LETTERS].max_offset
    return [one.origin_offset for piece in dead_letters.read(rig.broker.log, LETTERS, 0, end) for one in piece]


# -- order per queue --------------------------------------------------------------------------------------------------------


@pytest.mark.holds("final dead letter")
def test_order_per_queue_skips_the_dead_letters_of_a_killed_attempt(rig: Rig) -> None:
    rig.send(*"aaaa")
    with pytest.raises(Killed):
        queue(rig, rig.listener(dies(3, bad=[1, 2])))
    assert (stored(rig), rig.heard) == ([1, 2], [[0], [1], [2], [3]])
    rig.heard.clear()
    assert queue(rig, rig.listener(lambda message: SUCCESS)) == [
        (0, "SUCCESS", 1),
        (1, "DEAD_LETTER", 0),
        (2, "DEAD_LETTER", 0),
        (3, "SUCCESS", 1),
    ]
    assert (stored(rig), rig.heard) == ([1, 2], [[0], [3]])


@pytest.mark.parametrize(("given_up", "heard"), [
    ([4, 5], [[0, 1, 2, 3], [6, 7], [8, 9, 10, 11], [12, 13]]),
    ([2, 3, 4, 5, 6], [[0, 1], [7], [8, 9, 10, 11], [12, 13]]),
    ([5], [[0, 1, 2, 3], [4], [6, 7], [8, 9, 10, 11], [12, 13]]),
    ([0, 13], [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]),
    (range(14), []),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_gives_the_messages_without_stored_letters_to_the_listener(
    rig: Rig, given_up: Sequence[int], heard: list[list[int]], size: int
) -> None:
    """Over RocketMQ an attempt can be killed between two letters of a batch. ``size``: the number of rows in an Arrow batch."""
    rig.send(*"a" * 14)
    rig.broker.groups.dead_letter(rig.token, letters(given_up), given_up)
    consumer = Consumer(rig.listener(lambda message: SUCCESS), OrderPerQueue(4))
    told = engine_task.consume(rig.read(planned=False, lot=False, size=size), consumer)
    found = [row for batch in told for row in batch.to_pylist()]
    rows = sorted((at, row["status"]) for row in found for at in range(row["begin_offset"], row["end_offset"]))
    assert rig.heard == heard
    assert [offset for offset, _ in rows] == list(range(14)), "each message must have exactly one outcome"
    assert [offset for offset, status in rows if status == "DEAD_LETTER"] == list(given_up)


@pytest.mark.parametrize("stored_before", [True, False])
@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_write_of_letters_that_failed_is_repeated_until_they_are_there_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, order: str, stored_before: bool
) -> None:
    write, failures = EmbeddedGroups.dead_letter, [1, 1]

    def fails(self: EmbeddedGroups, *what: Any) -> int:
        if not failures:
            return write(self, *what)
        failures.pop()
        if stored_before:
            write(self, *what)
        raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")

    rig.send("a", "a")
    monkeypatch.setattr(EmbeddedGroups, "dead_letter", fails)
    bad = dies(9, bad=[0])
    told = queue(rig, rig.listener(bad)) if order == "queue" else rig.run(rig.by_key(bad, max_reconsume_times=0))
    assert [row[:3] for row in told] == [(0, "DEAD_LETTER", 1), (1, "SUCCESS", 1)]
    assert (rig.heard, stored(rig)) == ([[0], [1]], [0])


# -- order per key, and no order --------------------------------------------------------------------------------------------


@pytest.mark.holds("final dead letter")
def test_order_per_key_skips_the_dead_letters_of_a_killed_attempt(rig: Rig) -> None:
    rig.send("a", "a", "b", "a")
    with pytest.raises(Killed):
        rig.run(rig.by_key(dies(3, bad=[0, 1]), max_reconsume_times=0))
    assert stored(rig) == [0, 1]
    rig.heard.clear()
    assert sorted(rig.run(rig.by_key(lambda message: SUCCESS))) == [
        (0, "DEAD_LETTER", 0, None), (1, "DEAD_LETTER", 0, None), (2, "SUCCESS", 1, None), (3, "SUCCESS", 1, None),
    ]  # fmt: skip
    assert (sorted(rig.heard), stored(rig), rig.lying()) == ([[2], [3]], [0, 1], {})


def test_a_dead_letter_of_a_killed_attempt_leaves_its_lot(rig: Rig) -> None:
    """The dead letter replaces the parked message. Messages that the killed attempt parked later stay parked, and newer ones follow them."""
    rig.send("a", "a", "b", "b")
    rig.run(rig.by_key(lambda message: SUSPEND))
    rig.now += 10
    rig.send("a", "c")
    planned = rig.ends()
    answer = dies(5, bad=[0, 1, 2])
    with pytest.raises(Killed):
        rig.run(rig.by_key(answer, max_reconsume_times=1), planned=True)
    assert stored(rig) == [0, 2], "message 1 failed only once, so it must have no letter"
    rig.ends = lambda: planned  # type: ignore[method-assign]
    rig.heard.clear()
    told = sorted(rig.run(rig.by_key(lambda message: SUCCESS), planned=True))
    assert [one[:3] for one in told if one[0] in (0, 2)] == [(0, "DEAD_LETTER", 0), (2, "DEAD_LETTER", 0)]
    heard = sorted(offset for call in rig.heard for offset in call)
    parked = [one[0] for one in told if one[1] == "PARKED"]
    assert sorted([*heard, *parked]) == [1, 3, 4, 5]
    assert sorted(offset for offsets in rig.lying().values() for offset in offsets) == parked


@pytest.mark.holds("final dead letter")
def test_no_order_skips_the_dead_letters_of_a_killed_attempt(rig: Rig) -> None:
    rig.send("a", "a", "b")
    with pytest.raises(Killed):
        rig.run(
            rig.concurrently(rig.listener(lambda one: dies(2, bad=[0], suspends=LATER)(one) and LATER), max_reconsume_times=0)
        )
    assert stored(rig) == [0, 1]
    rig.heard.clear()
    assert sorted(rig.run(rig.concurrently(rig.listener(lambda message: DONE)))) == [
        (0, "DEAD_LETTER", 0, None), (1, "DEAD_LETTER", 0, None), (2, "SUCCESS", 1, None),
    ]  # fmt: skip
    assert rig.heard == [[2]]


# -- dead letters by condition ------------------------------------------------------------------------------------------------


@pytest.mark.holds("final dead letter")
def test_a_dead_letter_of_a_killed_attempt_does_not_pass(rig: Rig) -> None:
    rig.send(*"abcd")

    def passed(bad: Collection[int]) -> list[int]:
        rows = next(rig.read(planned=False, lot=False))
        why = [f"bad {offset}" if offset in bad else None for offset in range(4)]
        marked = rows.append_column("why", pa.array(why, pa.string()))
        return [offset for batch in separate(iter([marked])) for offset in batch.column("queue_offset").to_pylist()]

    assert passed([1]) == [0, 2, 3]
    assert passed([]) == [0, 2, 3]
    assert (passed([1, 3]), stored(rig)) == ([0, 2], [1, 3])


# -- operators --------------------------------------------------------------------------------------------------------------


@pytest.mark.holds("final dead letter")
@pytest.mark.parametrize("order", ["queue", "key"])
def test_letters_that_were_sent_again_before_the_range_is_repeated_are_processed_once(rig: Rig, order: str) -> None:
    """The copy that was sent again comes after the other messages. The message at its former place is not processed again."""
    rig.send("a", "a")
    first, again = rig.listener(dies(1, bad=[0])), rig.listener(lambda message: SUCCESS)
    with pytest.raises(Killed):
        queue(rig, first) if order == "queue" else rig.run(rig.by_key(dies(1, bad=[0]), max_reconsume_times=0))
    done = Replayed()
    replay(rig.broker, [LETTERS], dead_letters.ALL, done)
    assert done.letters == 1
    rig.heard.clear()
    if order == "queue":
        assert queue(rig, again) == [(0, "DEAD_LETTER", 0), (1, "SUCCESS", 1), (2, "SUCCESS", 1)]
    else:
        told = rig.run(rig.by_key(lambda message: SUCCESS))
        assert told == [(0, "DEAD_LETTER", 0, None), (1, "SUCCESS", 1, None), (2, "SUCCESS", 1, None)]
    assert (rig.heard, stored(rig)) == ([[1], [2]], [0])


def test_after_a_seek_back_the_listener_gets_messages_again_that_were_dead_letters(rig: Rig) -> None:
    rig.send("a", "a")
    fails = rig.by_key(lambda message: SUSPEND, max_reconsume_times=0)
    assert rig.run(fails) == [(0, "DEAD_LETTER", 1, None), (1, "DEAD_LETTER", 1, None)]
    rig.broker.groups.unlock([rig.token])
    rig.broker.admin.seek("g", {QUEUE: 1}, force=True)
    [rig.token] = locked(rig.broker, "g", rig.broker.groups.join("me"), [QUEUE])
    rig.position = 1
    rig.heard.clear()
    assert rig.run(rig.by_key(lambda message: SUCCESS), commit=False) == [(1, "SUCCESS", 1, None)]
    assert rig.run(fails) == [(1, "DEAD_LETTER", 1, None)], "a message that fails again must become a dead letter again"
    assert stored(rig) == [0, 1, 1]
    assert rig.broker.groups.letters(rig.token, [OffsetRange(0, 9)]) == {0, 1}
