"""The progress of listeners: a repeat of a range continues where the killed or failed attempt was. On a real store, one task after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus
from ordered_source.columns import ReadContext
from ordered_source.listener import engine_task
from ordered_source.listener.engine_task import Consumer, numbered
from orderedmq.broker import Progress
from orderedmq.conditions import StoreCondition
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.errors import LockError, StoreError
from orderedmq.listening import engine
from orderedmq.listening.concurrent_engine import ConcurrentSettings
from orderedmq.listening.engine import Settings
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.listening.queue_engine import OrderPerQueue
from tests.contract.support import locked
from tests.unit.test_engine_task import DONE, QUEUE, SUCCESS, Rig, bad

KINDS: dict[str, Settings] = {
    "order per queue": OrderPerQueue(),
    "order per key": OrderPerKey(concurrency=2),
    "no order": ConcurrentSettings(concurrency=2),
}


class Killed(BaseException):
    """Ends the simulated process of an attempt."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.broker.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks record their progress after each action, and park each message immediately."""
    monkeypatch.setattr(engine_task, "PROGRESS_INTERVAL", 0.0)
    monkeypatch.setattr(engine, "PARK_WITHIN", 0.0)


def dies(at: int, answer: Callable[[Any], Any] = lambda message: SUCCESS) -> Callable[[Any], Any]:
    """The answers of an attempt that is killed when it reaches the message ``at``."""

    def given(message: Any) -> Any:
        if message.queue_offset == at:
            raise Killed
        return answer(message)

    return given


def settled(rig: Rig, consumer: Consumer, **reading: Any) -> list[tuple[int, str, int]]:
    """Run a task. Return its outcomes by message as (offset, status, attempts)."""
    reading = {"planned": False, "lot": consumer.settings.parks, **reading}
    rows = [row for batch in engine_task.consume(rig.read(**reading), consumer, lambda: rig.now) for row in batch.to_pylist()]
    return sorted((at, row["status"], row["attempts"]) for row in rows for at in range(row["begin_offset"], row["end_offset"]))


def recorded(rig: Rig, consumer: Consumer) -> Progress:
    return rig.broker.groups.progress(rig.token, consumer.name)


@pytest.mark.holds("orderly listener", "order per key", "concurrent listener", "async listener")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeat_gives_a_listener_nothing_below_the_progress_of_a_killed_attempt(
    rig: Rig, always: None, kind: str, asynchronous: bool
) -> None:
    rig.send(*"abcdefghij")
    answer = DONE if kind == "no order" else SUCCESS

    def attempt(last: int) -> tuple[Consumer, list[int]]:
        """Return the consumer of an attempt that is killed after the message ``last``, and the messages that its listener gets."""
        heard: list[int] = []

        def listen(messages: Sequence[Any], context: Any) -> Any:
            if messages[0].queue_offset > last:
                raise Killed
            heard.append(messages[0].queue_offset)
            return answer

        async def listen_async(messages: Sequence[Any], context: Any) -> Any:
            return listen(messages, context)

        return Consumer(listen_async if asynchronous else listen, KINDS[kind]), heard

    consumer, _ = attempt(last=6)
    with pytest.raises(Killed):
        settled(rig, consumer)
    done = recorded(rig, consumer).offset
    assert 4 <= done <= 7, "two calls may have been in flight"
    consumer, heard = attempt(last=9)
    rows = settled(rig, consumer)
    assert sorted(heard) == list(range(done, 10))
    assert [row[:2] for row in rows] == [(offset, "SUCCESS") for offset in range(10)]
    assert [attempts for *_, attempts in rows] == [0] * done + [1] * (10 - done)
    assert recorded(rig, consumer) == Progress(10)
    assert rig.broker.groups.offsets("g", [QUEUE]) == {}


def test_a_task_that_ends_soon_records_nothing_and_one_that_fails_records_how_far_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send(*"abc")
    good = Consumer(rig.listener(lambda message: SUCCESS), OrderPerQueue())
    settled(rig, good)
    assert recorded(rig, good) == Progress()

    def refusing(self: EmbeddedGroups, *what: Any) -> None:
        raise StoreError(StoreCondition.PERMISSION, "the store may not be written")

    monkeypatch.setattr(EmbeddedGroups, "dead_letter", refusing)
    with pytest.raises(StoreError, match="message 2"):
        settled(rig, Consumer(rig.listener(bad("c")), OrderPerQueue(max_reconsume_times=0)))
    assert recorded(rig, good) == Progress(2)


def test_messages_that_are_taken_and_not_committed_are_undecided(rig: Rig, always: None) -> None:
    rig.send(*"abcde")

    def listen(messages: Sequence[Any], context: ConsumeOrderlyContext) -> Any:
        context.auto_commit = False
        if messages[0].queue_offset == 4:
            raise Killed
        return ConsumeOrderlyStatus.COMMIT if messages[0].queue_offset == 1 else SUCCESS

    consumer = Consumer(listen, OrderPerQueue())
    with pytest.raises(Killed):
        settled(rig, consumer)
    assert recorded(rig, consumer) == Progress(2)


def test_the_next_owner_continues_and_a_former_one_records_nothing(rig: Rig, always: None) -> None:
    rig.send(*"abcdef")
    with pytest.raises(Killed):
        settled(rig, Consumer(rig.listener(dies(3)), OrderPerQueue()))
    former = list(rig.read(planned=False, lot=False))
    rig.broker.admin.release("g", [QUEUE], force=True)
    [rig.token] = locked(rig.broker, "g", rig.broker.groups.join("them"), [QUEUE])
    rig.heard.clear()
    good = Consumer(rig.listener(lambda message: SUCCESS), OrderPerQueue())
    rows = settled(rig, good)
    assert (rig.heard, rows[2:4]) == ([[3], [4], [5]], [(2, "SUCCESS", 0), (3, "SUCCESS", 1)])
    with pytest.raises(LockError):
        list(engine_task.consume(former, good))
    assert recorded(rig, good) == Progress(6)


def test_progress_is_that_of_one_listener_that_gets_all_rows_of_the_queue(rig: Rig, always: None) -> None:
    """Two listeners may share a queue, and a shuffle may divide its rows among tasks."""
    rig.send(*"abcdef")
    consumer = Consumer(rig.listener(dies(3)), OrderPerQueue())
    with pytest.raises(Killed):
        settled(rig, consumer)

    def other(messages: Sequence[Any], context: Any) -> Any:
        return SUCCESS

    assert {attempts for *_, attempts in settled(rig, Consumer(other, OrderPerQueue()))} == {1}
    rig.broker.groups.record_progress(rig.token, Progress(3), consumer.name)
    rig.heard.clear()
    part = next(rig.read(planned=False, lot=False))
    context = ReadContext.from_text(part.column("lock_token")[0].as_py())
    text = pa.array([replace(context, attempt=7).to_text()] * part.num_rows)
    part = part.set_column(part.schema.get_field_index("lock_token"), "lock_token", text)
    list(engine_task.consume([part], Consumer(rig.listener(lambda message: SUCCESS), OrderPerQueue())))
    assert len(rig.heard) == 6
    assert recorded(rig, consumer) == Progress(3)


def test_a_task_goes_on_if_its_progress_cannot_be_recorded(
    rig: Rig, always: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(self: EmbeddedGroups, *what: Any) -> None:
        raise StoreError(StoreCondition.IO, "the disk is full")

    rig.send(*"ab")
    monkeypatch.setattr(EmbeddedGroups, "record_progress", refusing)
    assert len(settled(rig, Consumer(rig.listener(lambda message: SUCCESS), OrderPerQueue()))) == 2
    assert "progress of queue orders/embedded/0 up to 1 is not recorded" in caplog.text


# -- with a parking lot ----------------------------------------------------------------------------------------------------------


@pytest.mark.holds("repeat knows what was parked", "final dead letter")
def test_what_an_earlier_attempt_parked_or_gave_up_keeps_its_outcome(rig: Rig, always: None) -> None:
    rig.send("a", "bad", "a", "bad", "worse", "a", "bad", "a")

    def listen(messages: Sequence[Any], context: Any) -> Any:
        [message] = messages
        context.delay_level_when_next_consume = -1 if message.sharding_key == "worse" else 0
        return DONE if message.sharding_key == "a" else None

    settled(rig, rig.concurrently(listen))
    good = rig.concurrently(rig.listener(lambda message: DONE))
    rig.broker.groups.record_progress(rig.token, Progress(7), good.name)
    assert settled(rig, good) == [
        (0, "SUCCESS", 0), (1, "PARKED", 0), (2, "SUCCESS", 0), (3, "PARKED", 0), (4, "DEAD_LETTER", 0), (5, "SUCCESS", 0),
        (6, "PARKED", 0), (7, "SUCCESS", 1),
    ]  # fmt: skip
    assert rig.heard == [[7]]


def test_a_message_that_is_to_be_parked_is_undecided_until_it_is(
    rig: Rig, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: EmbeddedGroups, *what: Any) -> None:
        raise Killed

    rig.send("a", "bad", "a")
    monkeypatch.setattr(EmbeddedGroups, "park", killed)
    with pytest.raises(Killed):
        settled(rig, consumer := rig.by_key(bad("bad")))
    assert recorded(rig, consumer) == Progress(1)


@pytest.fixture
def waiting(rig: Rig) -> Rig:
    """A rig with messages of three keys in its lot, which are due, and newer ones in its queue."""
    rig.send("k", "l", "m")
    rig.run(rig.by_key(bad("k", "l", "m")))
    rig.now += 10
    rig.send("k", "l", "m", "k")
    return rig


@pytest.mark.holds("order per key")
@pytest.mark.parametrize("last", [1, 2, 3, 4, 6])
def test_a_repeat_gives_no_parked_message_after_newer_ones_of_its_key(waiting: Rig, always: None, last: int) -> None:
    """The attempt is killed at message ``last``. The repeat reads the same part of the lot."""
    rig, ends = waiting, waiting.ends()
    with pytest.raises(Killed):
        settled(rig, rig.by_key(dies(last, bad("m"))), planned=True)
    rig.ends = lambda: ends  # type: ignore[method-assign]
    rows = settled(rig, rig.by_key(bad("m")), planned=True)
    decided = [offset for offset, status, attempts in rows if status == "SUCCESS" and not attempts]
    heard = [call[0] for call in rig.heard[3:]]
    again = heard[heard.index(last) + 1 :]
    assert again[0] == last
    for key in ([0, 3, 6], [1, 4]):
        of_key = [offset for offset in again if offset in key]
        assert of_key == key[len(key) - len(of_key) :], "a repeat of a key ends with its newest message"
    assert decided == [offset for offset in (0, 1, 3, 4) if offset < min(again)]
    assert {offset: status for offset, status, _ in rows} == {
        0: "SUCCESS", 1: "SUCCESS", 2: "PARKED", 3: "SUCCESS", 4: "SUCCESS", 5: "PARKED", 6: "SUCCESS",
    }  # fmt: skip


@pytest.mark.holds("order per key")
def test_the_next_owner_does_not_take_for_parked_what_was_accepted_from_the_lot(waiting: Rig, always: None) -> None:
    """The lot has newer messages now, so the next owner reads the queue first, and the lot's messages wait."""
    rig = waiting
    with pytest.raises(Killed):
        settled(rig, rig.by_key(dies(6, bad("m"))), planned=True)
    rig.heard.clear()
    good = rig.by_key(lambda message: SUCCESS)
    assert recorded(rig, good) == Progress(6, 3)
    rows = settled(rig, good, planned=False)
    assert (rig.heard, rows) == ([[6]], [(3, "SUCCESS", 0), (4, "SUCCESS", 0), (5, "PARKED", 0), (6, "SUCCESS", 1)])
    assert recorded(rig, good) == Progress(7, 3)
    rig.position = rig.ends()[0]
    rig.broker.groups.commit({rig.token: rig.position})
    rig.now += 1e6
    rig.heard.clear()
    rows = settled(rig, good, planned=True)
    assert rig.heard == [[2], [5]]
    assert rows == [(0, "SUCCESS", 0), (1, "SUCCESS", 0), (2, "SUCCESS", 2), (5, "SUCCESS", 1)]


def test_progress_that_does_not_cover_the_lot_is_not_extended(waiting: Rig, always: None) -> None:
    """The killed attempt had read more of the lot than the next owner, and left one of its messages undecided."""
    rig = waiting
    with pytest.raises(Killed):
        settled(rig, rig.by_key(dies(1)), planned=True)
    good = rig.by_key(lambda message: SUCCESS)
    assert recorded(rig, good) == Progress(1, 3)
    rig.heard.clear()
    assert settled(rig, good, planned=False)[-1] == (6, "SUCCESS", 1)
    assert recorded(rig, good) == Progress(1, 3), "messages 1 and 2 are parked still"
    assert rig.heard == [[3], [6]]


def test_listeners_of_one_name_have_progress_of_their_own_and_the_same_in_another_run_of_the_program() -> None:
    class Shop:
        def bill(self, messages: Any, context: Any) -> None: ...

    def made(table: str) -> Callable[[Any, Any], Any]:
        return lambda messages, context: table

    one, other = made("one"), made("other")
    berlin, paris = Shop(), Shop()
    names = [
        numbered(Consumer(listener, OrderPerQueue())).name
        for listener in (one, other, one, berlin.bill, paris.bill, berlin.bill, partial(one, 1), partial(one, 2))
    ]
    first, second, again, *methods, bound, bound_otherwise = names
    assert first == again != second
    assert methods[0] == methods[2] != methods[1]
    assert len({first, second, bound, bound_otherwise}) == 4
    engine_task._NAMED.clear()
    assert numbered(Consumer(made("one"), OrderPerQueue())).name == first
