"""Tasks of listeners on a real store, mainly of listeners whose failed messages are parked. Here a micro-batch is one task.

The module is long because all its tests use the same `Rig`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from ordered_source import (
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeOrderlyStatus,
    partition_reader,
)
from ordered_source.columns import TICKET_TYPE, LotPlan, full_schema
from ordered_source.listener import calls, engine_task
from ordered_source.listener.engine_task import Consumer
from ordered_source.listener.settled import Settled
from ordered_source.partition_reader import QueuePartition
from orderedmq import pulls
from orderedmq.conditions import DataLossCondition, StoreCondition
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.errors import DataLossError, LockError, MessageError, OptionError, SchemaError, StoreError
from orderedmq.listening.concurrent_engine import ConcurrentSettings
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.model import MAX_BODY_BYTES, MAX_KEY_BYTES, MessageQueue, OffsetRange
from orderedmq.options.source import SourceOptions
from orderedmq.parking import Command, Lot, lot_token, parked_queue
from orderedmq.schema import MESSAGE_SCHEMA
from orderedmq.tools import parked
from tests.contract.support import locked, rows
from tests.waits import until

QUEUE = MessageQueue("orders", "embedded", 0)
LOT = parked_queue("g", QUEUE)
LETTERS = MessageQueue("%DLQ%g", "embedded", 0)
SUCCESS, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
DONE, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER
COLUMNS = tuple(full_schema("lock_token", "ticket").names)
#: The types of the columns that brokers do not have.
OWN = {"lock_token": pa.string(), "ticket": TICKET_TYPE}


class Rig:
    """A queue, its lot, and a clock for due times. ``heard``: the offsets of each call, in the order in which the calls began."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "store")
        self.broker = EmbeddedBroker(path / "store")
        if not (path / "store").exists():
            self.broker.admin.create_topic("orders", 1)
        (self.token,) = locked(self.broker, "g", self.broker.groups.join("me"), [QUEUE])
        self.now = 1_700_000_000.0
        committed = self.broker.groups.offsets("g", [QUEUE, LOT])
        self.position, self.lot_position = committed.get(QUEUE, 0), committed.get(LOT, 0)
        self.heard: list[list[int]] = []
        self.room = 100

    def send(self, *keys: str | None) -> None:
        self.broker.log.append({QUEUE: rows([f"body {key}" for key in keys], sharding_key=list(keys))})

    def ends(self) -> tuple[int, int]:
        return self.broker.log.bounds([QUEUE])[QUEUE].max_offset, pulls.end_of_lot(self.broker.log, LOT)

    def read(
        self, planned: bool, *, columns: tuple[str, ...] = COLUMNS, lot: bool = True, size: int = 1000
    ) -> Iterator[pa.RecordBatch]:
        """A task's rows: those of the queue from the committed offset on, and those of the lot if it is planned."""
        end, lot_end = self.ends()
        span = OffsetRange(self.lot_position, lot_end if planned else self.lot_position)
        where = (self.broker.identity, QUEUE, self.position, end, self.token)
        anchor = self.broker.log.topic("orders").incarnation
        part = QueuePartition(*where, anchor, streaming=True, lot=span if lot else None)
        options = SourceOptions(path=self.path, pull_batch_size=size, parking_lot=lot, parking_lot_max_messages=self.room)
        schema = pa.schema([pa.field(name, OWN[name]) if name in OWN else MESSAGE_SCHEMA.field(name) for name in columns])
        yield from partition_reader.read(part, options, columns, schema)

    def task(self, consumer: Consumer, planned: bool = False, **reading: Any) -> Iterator[pa.RecordBatch]:
        return engine_task.consume(self.read(planned, **reading), consumer, lambda: self.now)

    def run(self, consumer: Consumer, planned: bool = False, *, commit: bool = True, **reading: Any) -> list[tuple[Any, ...]]:
        """Run a micro-batch and commit it. Return its outcomes as (offset, status, attempts, seconds until due)."""
        end, lot_end = self.ends()
        told = [row for batch in self.task(consumer, planned, **reading) for row in batch.to_pylist()]
        if commit:
            self.position = end
            offsets = {self.token: end}
            if planned:
                self.lot_position = lot_end
                offsets[lot_token(self.token)] = lot_end
            self.broker.groups.commit(offsets)
        return [
            (
                row["begin_offset"],
                row["status"],
                row["attempts"],
                None if row["due_timestamp"] is None else round(row["due_timestamp"].timestamp() - self.now),
            )
            for row in told
        ]

    def listener(self, answer: Callable[[Any], Any]) -> Any:
        """A listener that returns ``answer(message)`` for the first message of each batch."""

        def listen(messages: Sequence[Any], context: Any) -> Any:
            self.heard.append([one.queue_offset for one in messages])
            return answer(messages[0])

        return listen

    def by_key(self, answer: Callable[[Any], Any], **settings: Any) -> Consumer:
        settings = {"in_batch_attempts": 1, "suspend_current_queue_time_millis": 10, **settings}
        return Consumer(self.listener(answer), OrderPerKey(**settings))

    def concurrently(self, listener: Any, **settings: Any) -> Consumer:
        return Consumer(listener, ConcurrentSettings(**settings))

    def lying(self) -> dict[object, list[int]]:
        """The offsets of the parked messages by key, from the lot's committed offset on."""
        lot = Lot(self.lot_position)
        pulls.read_lot(self.broker.log, lot, LOT, pulls.end_of_lot(self.broker.log, LOT))
        return {key: one.offsets for key, one in lot.keys.items()}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.broker.close()


def bad(*keys: str) -> Callable[[Any], Any]:
    return lambda message: SUSPEND if message.sharding_key in keys else SUCCESS


def never(message: Any) -> Any:
    raise AssertionError(f"message {message.queue_offset} was given to the listener")


# -- order per key ----------------------------------------------------------------------------------------------------------


def test_a_failing_key_is_parked_and_returns_in_order_when_it_is_due(rig: Rig) -> None:
    rig.send("bad", "good", "bad", "good")
    assert rig.run(rig.by_key(bad("bad"))) == [
        (1, "SUCCESS", 1, None), (3, "SUCCESS", 1, None), (0, "PARKED", 1, 10), (2, "PARKED", 0, None),
    ]  # fmt: skip
    rig.send("bad", "good")
    rig.heard.clear()
    assert rig.run(rig.by_key(bad("bad"))) == [(5, "SUCCESS", 1, None), (4, "PARKED", 0, None)]
    assert rig.heard == [[5]]
    rig.now += 10
    rig.heard.clear()
    assert rig.run(rig.by_key(lambda message: SUCCESS), planned=True) == [
        (0, "SUCCESS", 2, None), (2, "SUCCESS", 1, None), (4, "SUCCESS", 1, None),
    ]  # fmt: skip
    assert rig.heard == [[0], [2], [4]]
    assert rig.lying() == {}


@pytest.mark.holds("waits of a key")
def test_a_failing_key_waits_longer_each_time_until_its_first_message_is_a_dead_letter(rig: Rig) -> None:
    rig.send("bad", "bad")
    waits: list[list[tuple[Any, ...]]] = []
    for _ in range(4):
        outcomes = rig.run(
            rig.by_key(lambda message: SUSPEND if message.queue_offset == 0 else SUCCESS, max_reconsume_times=3),
            planned=bool(waits),
        )
        waits.append(outcomes)
        rig.now += outcomes[0][3] or 0
    assert waits == [
        [(0, "PARKED", 1, 10), (1, "PARKED", 0, None)],
        [(0, "PARKED", 2, 30), (1, "PARKED", 0, None)],
        [(0, "PARKED", 3, 60), (1, "PARKED", 0, None)],
        [(0, "DEAD_LETTER", 4, None), (1, "SUCCESS", 1, None)],
    ]
    (letter,) = rig.broker.log.pull(LETTERS, 0, 9, 1 << 20, ("body", "properties")).to_pylist()
    origin = dict(letter["properties"])
    assert (letter["body"], origin["REAL_TOPIC"], origin["ORDEREDMQ_OFFSET"], origin["RECONSUME_TIME"]) == (
        b"body bad",
        "orders",
        "0",
        "3",
    )


def test_a_parked_message_returns_as_it_was_sent_with_its_count_of_attempts(rig: Rig) -> None:
    seen: list[tuple[Any, ...]] = []

    def answer(message: Any) -> Any:
        seen.append((message.body, message.topic, message.queue_id, message.message_id, message.reconsume_times))
        return SUCCESS if len(seen) > 2 else SUSPEND

    rig.send("a")
    rig.run(rig.by_key(answer, in_batch_attempts=2))
    [waiting] = parked.parked_keys(rig.broker, "g")
    assert waiting.ticket.error == (error := "the listener answered SUSPEND_CURRENT_QUEUE_A_MOMENT")
    rig.now += 10
    ((row,),) = [batch.to_pylist() for batch in rig.task(rig.by_key(answer), planned=True)]
    assert (row["status"], row["attempts"], row["error"]) == ("SUCCESS", 3, error)
    assert [one[:4] for one in seen] == [seen[0][:4]] * 3
    assert [one[4] for one in seen] == [0, 1, 2]


def test_a_key_that_is_not_due_is_moved_behind_as_it_is_when_its_lot_is_planned(rig: Rig) -> None:
    rig.send("a", "b")
    rig.run(rig.by_key(bad("a")))
    rig.now += 5
    rig.send("b", "a")
    assert rig.run(rig.by_key(bad("b"))) == [(3, "PARKED", 0, None), (2, "PARKED", 1, 10)]
    rig.now += 5
    rig.heard.clear()
    outcomes = rig.run(rig.by_key(bad()), planned=True)
    assert outcomes == [(0, "SUCCESS", 2, None), (3, "SUCCESS", 1, None), (2, "PARKED", 1, 5)]
    assert rig.heard == [[0], [3]]
    assert rig.lying() == {"b": [2]}


@pytest.mark.holds("waits of a key")
def test_a_held_key_stays_parked_until_an_order_releases_or_drops_it(rig: Rig) -> None:
    rig.send("a", "a", "b")
    rig.run(rig.by_key(bad("a", "b"), max_reconsume_times=0, on_exhausted="hold"))
    rig.now += 1e6
    assert rig.run(rig.by_key(never), planned=True) == [(0, "PARKED", 1, None), (1, "PARKED", 0, None), (2, "PARKED", 1, None)]
    rig.broker.admin.command_parked("g", QUEUE, [Command("retry", "b"), Command("drop", "a")])
    rig.send("a")
    assert rig.run(rig.by_key(bad()), planned=True) == [
        (0, "DROPPED", 1, None), (1, "DROPPED", 0, None), (2, "SUCCESS", 2, None), (3, "SUCCESS", 1, None),
    ]  # fmt: skip


# -- one parked message ------------------------------------------------------------------------------------------------------


def poisoned(message: Any) -> Any:
    return SUSPEND if message.queue_offset == 0 and message.body != b"right" else SUCCESS


def letters(rig: Rig) -> list[tuple[int, bytes]]:
    rows = rig.broker.log.pull(LETTERS, 0, 9, 1 << 20, ("properties", "body")).to_pylist()
    return [(int(dict(row["properties"])["ORDEREDMQ_OFFSET"]), row["body"]) for row in rows]


@pytest.mark.holds("one parked message")
@pytest.mark.parametrize("action", ["drop", "dead_letter", "replace"])
@pytest.mark.parametrize("is_moving", [False, True])
def test_a_key_continues_in_order_after_a_command_for_its_first_message(rig: Rig, action: Any, is_moving: bool) -> None:
    rig.send("a", "b", "a")
    rig.run(rig.by_key(poisoned))
    body = b"right" if action == "replace" else None

    def give() -> None:
        assert parked.repair_parked(rig.broker, "g", action, key="a", body=body) == [(QUEUE, 0)]

    if is_moving:
        # The command comes when a task has read the lot and the listener fails again.
        def answer(message: Any) -> Any:
            if message.queue_offset == 0:
                give()
            return poisoned(message)

        rig.now += 10
        assert rig.run(rig.by_key(answer), planned=True) == [(0, "PARKED", 2, 30), (2, "PARKED", 0, None)]
    else:
        give()
    rig.send("a")
    rig.heard.clear()
    status = {"drop": "DROPPED", "dead_letter": "DEAD_LETTER", "replace": "SUCCESS"}[action]
    attempts = 1 + is_moving
    assert rig.run(rig.by_key(poisoned), planned=True) == [
        # A corrected message has the attempts that it had when it was corrected.
        (0, status, 2 if action == "replace" else attempts, None), (2, "SUCCESS", 1, None), (3, "SUCCESS", 1, None),
    ]  # fmt: skip
    assert rig.heard == [*([[0]] if action == "replace" else []), [2], [3]]
    assert rig.lying() == {}
    if action == "dead_letter":
        assert letters(rig) == [(0, b"body a")]


@pytest.mark.holds("one parked message")
def test_a_corrected_message_says_so_and_is_itself_also_after_it_failed_again(rig: Rig) -> None:
    columns = (*COLUMNS, "properties")
    seen: list[tuple[Any, ...]] = []

    def answer(message: Any) -> Any:
        names = ("queue_offset", "message_id", "sharding_key", "tags", "keys", "born_timestamp", "store_timestamp")
        seen.append(
            (bytes(message.body), "ORDEREDMQ_CORRECTED" in dict(message.properties or ()), *map(message.__getattr__, names))
        )
        return SUSPEND

    rig.send("a")
    rig.run(rig.by_key(answer), columns=columns)
    parked.repair_parked(rig.broker, "g", "replace", offset=0, body=b"wrong")
    rig.run(rig.by_key(answer), planned=True, columns=columns)
    rig.now += 1e5
    rig.run(rig.by_key(answer, max_reconsume_times=2), planned=True, columns=columns)
    assert [one[:2] for one in seen] == [(b"body a", False), (b"wrong", True), (b"wrong", True)]
    assert len({one[2:] for one in seen}) == 1
    assert letters(rig) == [(0, b"wrong")]


@pytest.mark.parametrize("action", ["drop", "dead_letter", "replace"])
def test_a_message_of_a_listener_without_order_obeys_its_own_command(rig: Rig, action: Any) -> None:
    later = rig.concurrently(lambda messages, context: DONE if messages[0].body == b"right" else LATER)
    rig.send("a", "a")
    rig.run(later)
    parked.repair_parked(rig.broker, "g", action, offset=1, body=b"right" if action == "replace" else None)
    outcomes = sorted(rig.run(later, planned=True))
    status = {"drop": "DROPPED", "dead_letter": "DEAD_LETTER", "replace": "SUCCESS"}[action]
    assert [one[:2] for one in outcomes] == [(0, "PARKED"), (1, status)]


@pytest.mark.holds("one parked message")
@pytest.mark.parametrize("action", ["dead_letter", "replace"])
def test_a_command_for_a_message_survives_kill_9_between_its_steps(tmp_path: Path, action: Any) -> None:
    """The task is killed when its letter is stored, or when the corrected message, which fails again, is parked again."""
    fails = lambda message: SUSPEND if message.queue_offset == 0 else SUCCESS  # noqa: E731
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            rig = Rig(tmp_path)
            rig.send("a", "a")
            rig.run(rig.by_key(fails))
            parked.repair_parked(rig.broker, "g", action, key="a", body=b"right" if action == "replace" else None)
            name = "dead_letter" if action == "dead_letter" else "park"
            write = getattr(EmbeddedGroups, name)

            def killed(self: EmbeddedGroups, *what: Any) -> None:
                write(self, *what)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(EmbeddedGroups, name, killed)
            rig.run(rig.by_key(fails), planned=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    rig = Rig(tmp_path)
    # The repeat has the plan of the killed run: the two messages and the command.
    ends = rig.ends()
    rig.ends = lambda: (ends[0], 3)  # type: ignore[method-assign]
    outcomes = sorted(one[:2] for one in rig.run(rig.by_key(fails), planned=True))
    if action == "dead_letter":
        assert (outcomes, rig.heard) == ([(0, "DEAD_LETTER"), (1, "SUCCESS")], [[1]])
        assert letters(rig) == [(0, b"body a")]
    else:
        assert (outcomes, rig.heard) == ([(0, "PARKED"), (1, "PARKED")], [])
        del rig.ends
        rig.now += 1e5
        rig.run(
            rig.by_key(lambda message: SUCCESS if message.body == b"right" or message.queue_offset else SUSPEND), planned=True
        )
        assert (rig.heard, rig.lying()) == ([[0], [1]], {})
    rig.broker.close()


@pytest.mark.holds("repeat knows what was parked")
def test_a_repeat_parks_no_message_twice(rig: Rig) -> None:
    rig.send("a", "b", "a", "c")
    first = rig.run(rig.by_key(bad("a", "b")), commit=False)
    assert first == [(3, "SUCCESS", 1, None), (0, "PARKED", 1, 10), (2, "PARKED", 0, None), (1, "PARKED", 1, 10)]
    rig.heard.clear()
    rig.send("a")
    assert sorted(rig.run(rig.by_key(bad()))) == [
        (0, "PARKED", 0, None), (1, "PARKED", 0, None), (2, "PARKED", 0, None), (3, "SUCCESS", 1, None), (4, "PARKED", 0, None),
    ]  # fmt: skip
    assert rig.heard == [[3]]
    assert rig.lying() == {"a": [0, 2, 4], "b": [1]}


@pytest.mark.holds("repeat knows what was parked")
def test_a_repeat_of_a_planned_lot_parks_no_message_twice(rig: Rig) -> None:
    rig.send("a", "b")
    rig.run(rig.by_key(bad("a", "b")))
    rig.now += 10
    assert rig.run(rig.by_key(bad("a")), planned=True, commit=False) == [(1, "SUCCESS", 2, None), (0, "PARKED", 2, 30)]
    rig.heard.clear()
    # The repeat uses the logged plan.
    end = pulls.end_of_lot(rig.broker.log, LOT)
    part = rig.read(planned=True)
    rig_end, LotEnd = rig.ends, 2
    rig.ends = lambda: (rig_end()[0], LotEnd)  # type: ignore[method-assign]
    outcomes = rig.run(rig.by_key(bad()), planned=True)
    assert (outcomes, rig.heard) == ([(0, "PARKED", 0, None), (1, "SUCCESS", 2, None)], [[1]])
    part.close()  # type: ignore[attr-defined]
    assert end == 3


@pytest.mark.holds("orderly listener")
@pytest.mark.parametrize("write", ["park", "dead_letter"])
def test_a_refusal_that_cannot_pass_ends_the_task_with_the_queue_and_the_offset(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    def refusing(self: EmbeddedGroups, *what: Any) -> None:
        raise StoreError(StoreCondition.PERMISSION, "the store may not be written")

    monkeypatch.setattr(EmbeddedGroups, write, refusing)
    rig.send("good", "bad")
    with pytest.raises(StoreError, match="message 1 of queue orders/embedded/0 cannot .*may not be written") as raised:
        rig.run(rig.by_key(bad("bad"), max_reconsume_times=0 if write == "dead_letter" else 16))
    assert raised.value.condition == "ORDEREDMQ_STORE.PERMISSION"


def replaced(batches: Iterator[pa.RecordBatch], name: str, value: pa.Array) -> Iterator[pa.RecordBatch]:
    """Yield the rows with another column, as after a query's transformation."""
    for batch in batches:
        names, columns = batch.schema.names, dict(zip(batch.schema.names, batch.columns, strict=True))
        columns[name] = pa.concat_arrays([value] * batch.num_rows)
        yield pa.RecordBatch.from_arrays(list(columns.values()), names=[*names, *(set(columns) - set(names))])


UNFIT = {
    "a null body": ("body", pa.array([None], pa.binary())),
    "a body that is too large": ("body", pa.array([b"x" * (MAX_BODY_BYTES + 1)])),
    "a decoded body": ("body", pa.array([{"amount": 1}])),
    "a key that is too long": ("sharding_key", pa.array(["k" * (MAX_KEY_BYTES + 1)])),
    "a key of another type": ("sharding_key", pa.array([7])),
    "properties that are a text": ("properties", pa.array(["colour=red"])),
}


@pytest.mark.holds("orderly listener")
@pytest.mark.parametrize("unfit", UNFIT)
def test_if_a_row_cannot_be_stored_its_dead_letter_is_the_message_as_it_was_sent(rig: Rig, unfit: str) -> None:
    rig.broker.log.append({QUEUE: rows(["sent"], sharding_key=["k"], properties=[[("colour", "red")]])})
    consumer = Consumer(rig.listener(lambda _: SUSPEND), OrderPerQueue(max_reconsume_times=0))
    batches = replaced(rig.read(planned=False, lot=False), *UNFIT[unfit])
    [outcome] = [row for batch in engine_task.consume(batches, consumer) for row in batch.to_pylist()]
    assert outcome["status"] == "DEAD_LETTER"
    (letter,) = rig.broker.log.pull(LETTERS, 0, 9, 1 << 20, ("body", "sharding_key", "properties")).to_pylist()
    assert (letter["body"], letter["sharding_key"], dict(letter["properties"])["colour"]) == (b"sent", "k", "red")


def test_a_row_that_cannot_be_stored_ends_the_task_if_its_message_is_gone(rig: Rig) -> None:
    rig.send("k", "k")
    consumer = Consumer(rig.listener(lambda _: SUSPEND), OrderPerQueue(max_reconsume_times=0))
    batches = list(replaced(rig.read(planned=False, lot=False), *UNFIT["a null body"]))
    rig.broker.admin.trim("orders", {QUEUE: 2})
    with pytest.raises(MessageError, match="message 0 of queue orders/embedded/0 cannot become a dead letter") as raised:
        list(engine_task.consume(batches, consumer))
    assert raised.value.condition == "ORDEREDMQ_MESSAGE.NULL_BODY"


def test_a_dead_letter_names_the_properties_for_which_it_has_no_room(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    own = [(f"p{number:02}", "x" * 1013) for number in range(32)]
    rig.broker.log.append({QUEUE: rows(["sent"], properties=[own])})
    consumer = Consumer(rig.listener(lambda _: SUSPEND), OrderPerQueue(max_reconsume_times=0))
    list(engine_task.consume(rig.read(planned=False, lot=False), consumer))
    (letter,) = rig.broker.log.pull(LETTERS, 0, 9, 1 << 20, ("properties",)).to_pylist()
    properties = dict(letter["properties"])
    assert [name for name, _ in own if name not in properties] == ["p30", "p31"]
    assert properties["ORDEREDMQ_ERROR"].startswith("there was no room for the properties p30, p31: the listener answered ")
    assert "message 0 of queue orders/embedded/0 has no room for its properties p30, p31" in caplog.text


def test_the_garbage_collector_leaves_out_what_is_older_than_the_task_until_it_ends(rig: Rig) -> None:
    frozen: list[int] = []

    def listen(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
        frozen.append(gc.get_freeze_count())
        return SUCCESS

    rig.send("a")
    rig.run(Consumer(listen, OrderPerKey()))
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("answer", [ConsumeOrderlyStatus.COMMIT, ConsumeOrderlyStatus.ROLLBACK, None])
def test_commit_by_hand_belongs_to_order_per_queue(rig: Rig, answer: Any) -> None:
    def listen(messages: Sequence[Any], context: Any) -> Any:
        context.auto_commit = answer is not None
        return answer or SUCCESS

    rig.send("a")
    ((row,),) = [batch.to_pylist() for batch in rig.task(Consumer(listen, OrderPerKey(in_batch_attempts=1)))]
    assert row["status"] == "PARKED"
    assert "is only for OrderPerQueue" in row["error"]


def test_reads_more_rows_only_when_the_engine_pulls(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.listening.engine.PULL_THRESHOLD", 4)
    rig.send(*["a"] * 12)
    taken: list[int] = []

    def told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            taken.append(len(rig.heard))
            yield batch

    kind = rig.by_key(bad())
    for _ in engine_task.consume(told(rig.read(planned=False, size=2)), kind, lambda: rig.now):
        pass
    # A batch is two messages, and two batches fill the engine. So one batch must be decided before the next one is fetched.
    assert taken[0] == 0
    assert len(rig.heard) == 12
    assert max(2 * (number + 1) - calls for number, calls in enumerate(taken)) <= 4 + 2


@pytest.mark.parametrize("order", [OrderPerQueue(2, 10), OrderPerKey(2, 10), ConcurrentSettings(2)])
def test_a_listener_cannot_change_the_messages_of_its_task(rig: Rig, order: Any) -> None:
    def listen(messages: list[Any], context: Any) -> Any:
        rig.heard.append([one.queue_offset for one in messages])
        with pytest.raises(AttributeError):
            messages[0].body = b"changed"
        messages.clear()
        if isinstance(order, ConcurrentSettings):
            return DONE
        return SUSPEND if len(rig.heard) == 1 else SUCCESS

    rig.send("a", "a", "a")
    told = rig.run(Consumer(listen, order), lot=not isinstance(order, OrderPerQueue))
    assert {one[:2] for one in told} <= {(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS")}
    rest = [[0, 1], [2]] if isinstance(order, ConcurrentSettings) else [[0, 1], [0], [1], [2]]
    assert rig.heard == rest


# -- threads ------------------------------------------------------------------------------------------------------------------


class Gate:
    """Shows a test which calls are running, and lets it end them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.go = threading.Event()

    def __call__(self, messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
        self.begun.append(messages[0].sharding_key)
        assert self.go.wait(60)
        self.ended.append(messages[0].sharding_key)
        return SUCCESS


class Running(threading.Thread):
    """A task in a separate thread, so that a test can act while the task waits for its listener."""

    def __init__(self, task: Iterator[pa.RecordBatch]) -> None:
        super().__init__(daemon=True)
        self.task, self.error, self.rows = task, None, 0
        self.start()

    def run(self) -> None:
        try:
            for batch in self.task:
                self.rows += batch.num_rows
        except BaseException as error:
            self.error = error  # type: ignore[assignment]


def test_keys_are_at_the_listener_at_once_each_with_one_call(rig: Rig) -> None:
    gate = Gate()
    rig.send(*"aabbccddee")
    running = Running(rig.task(Consumer(gate, OrderPerKey(concurrency=4))))
    until(lambda: len(gate.begun) == 4, "four calls are under way")
    assert sorted(gate.begun) == [*"abcd"]
    gate.go.set()
    running.join(60)
    assert (running.rows, running.error, sorted(gate.ended)) == (10, None, sorted("aabbccddee"))


def test_a_task_that_is_closed_does_not_wait_for_its_threads_and_starts_no_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_task, "GIVE_TOGETHER", 1)
    gate = Gate()
    first = threading.Event()

    def listen(messages: Sequence[Any], context: Any) -> Any:
        if messages[0].sharding_key == "first":
            first.wait(60)
            return SUCCESS
        return gate(messages, context)

    rig.send("first", *"abcdefgh")
    task = rig.task(Consumer(listen, OrderPerKey(concurrency=3)))

    def watching() -> None:
        until(lambda: len(gate.begun) == 2, "two calls wait")
        first.set()

    watch = threading.Thread(target=watching)
    watch.start()
    next(task)
    until(lambda: len(gate.begun) == 2, "the other calls wait")
    task.close()  # type: ignore[attr-defined]
    begun = list(gate.begun)
    gate.go.set()
    until(lambda: len(gate.ended) == len(begun), "the calls under way have ended")
    assert gate.begun == begun
    watch.join()


@pytest.mark.holds("lost lock")
def test_after_a_lost_lock_no_call_starts_those_under_way_are_waited_for_and_the_task_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orderedmq.listening.engine.RETRY_TRUST", -1.0)
    gate, lost = Gate(), threading.Event()

    def listen(messages: Sequence[Any], context: Any) -> Any:
        if messages[0].sharding_key == "c":
            until(lambda: len(gate.begun) == 2, "the other calls are under way")
            rig.broker.admin.release("g", [QUEUE], force=True)
            return SUSPEND
        return gate(messages, context)

    check = EmbeddedGroups.check

    def checked(self: EmbeddedGroups, token: Any) -> bool:
        held = check(self, token)
        if not held:
            lost.set()
        return held

    monkeypatch.setattr(EmbeddedGroups, "check", checked)
    rig.send(*"abc")
    kind = Consumer(listen, OrderPerKey(concurrency=3, suspend_current_queue_time_millis=10))
    task = rig.task(kind)
    running = Running(task)
    assert lost.wait(90)
    assert running.is_alive()
    assert gate.ended == []
    gate.go.set()
    running.join(60)
    assert isinstance(running.error, LockError)
    assert sorted(gate.begun) == sorted(gate.ended) == ["a", "b"]


def test_an_error_of_the_broker_ends_the_task_at_once_and_no_call_starts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def failing(self: EmbeddedGroups, *what: Any) -> list[bool]:
        until(lambda: len(gate.begun) == 2, "two calls are under way")
        raise DataLossError(DataLossCondition.UNREADABLE, "the message is gone")

    def listen(messages: Sequence[Any], context: Any) -> Any:
        return SUSPEND if messages[0].sharding_key == "bad" else gate(messages, context)

    monkeypatch.setattr(EmbeddedGroups, "park", failing)
    rig.send("bad", "a", "b", "later")
    with pytest.raises(DataLossError):
        rig.run(Consumer(listen, OrderPerKey(concurrency=2, in_batch_attempts=1)))
    assert gate.ended == []
    gate.go.set()
    until(lambda: len(gate.ended) == 2, "the calls under way have ended")
    assert sorted(gate.begun) == ["a", "b"]


def test_a_terminated_process_does_not_wait_for_its_threads(rig: Rig, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def listen(messages: Sequence[Any], context: Any) -> Any:
        begun.touch()
        threading.Event().wait()

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(7)

    rig.send("a", "b", "c")
    child = os.fork()
    if not child:
        # The child process must not continue with the test suite, whatever happens.
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGTERM, leave)
            rig.broker = EmbeddedBroker(Path(rig.path))
            try:
                rig.run(Consumer(listen, OrderPerKey(concurrency=2)))
            except SystemExit as end:
                os._exit(int(str(end.code)))
        os._exit(1)
    until(begun.exists, "a call is under way")
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Connection:
    """A listener that is a class. Its attributes belong to the thread in which it was created."""

    made: list[int]
    used: list[tuple[int, int]]

    def __init__(self) -> None:
        type(self).made.append(threading.get_ident())

    def __call__(self, messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
        type(self).used.append((id(self), threading.get_ident()))
        return SUCCESS


@pytest.fixture
def connection() -> type[Connection]:
    class Own(Connection):
        made, used = [], []

    return Own


@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_thread_makes_one_object_of_a_class(rig: Rig, connection: type[Connection], concurrency: int) -> None:
    for _ in range(4):
        rig.send(*"abcdefghij")
        rig.run(Consumer(connection, OrderPerKey(concurrency=concurrency)))
    assert len(connection.used) == 40
    assert 1 <= len(connection.made) <= concurrency
    assert len(set(connection.made)) == len(connection.made)
    assert len(set(connection.used)) == len(connection.made)
    assert (threading.get_ident() in connection.made) is (concurrency == 1)


def test_a_class_that_a_program_defines_is_the_same_in_every_task_of_a_worker() -> None:
    code = "class Own:\n    def __call__(self, messages, context): return id(self)\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    sent = cloudpickle.dumps(names.pop("Own"))
    first, second = (calls.function_of(cloudpickle.loads(sent)) for _ in range(2))
    assert first([], None) == second([], None)


# -- refusals --------------------------------------------------------------------------------------------------------------------


def test_refuses_rows_that_do_not_fit_the_kind_of_listener(rig: Rig) -> None:
    rig.send("a")
    for kind in (rig.by_key(never), rig.concurrently(rig.listener(never))):
        with pytest.raises(OptionError, match=r"UNSUPPORTED.*without a parking lot.*parkingLot=true"):
            rig.run(kind, lot=False)
    with pytest.raises(OptionError, match=r"UNSUPPORTED.*parkingLot=true.*OrderPerKey"):
        list(engine_task.consume(rig.read(planned=False), Consumer(rig.listener(never), OrderPerQueue())))
    without_lock = next(rig.read(planned=False)).drop_columns(["lock_token"])
    without_lock = without_lock.append_column("lock_token", pa.array([None], pa.string()))
    with pytest.raises(OptionError, match="without a lock"):
        list(engine_task.consume([without_lock], rig.by_key(never)))
    without_ticket = next(rig.read(planned=False)).drop_columns(["ticket"])
    with pytest.raises(SchemaError, match=r"MISSING_COLUMN.*no column ticket"):
        list(engine_task.consume([without_ticket], rig.by_key(never)))


def test_rows_of_the_lot_behind_others_are_refused(rig: Rig) -> None:
    rig.send("a", "b")
    rig.run(rig.by_key(bad("a")))
    rig.send("c")
    batches = list(rig.read(planned=True))
    with pytest.raises(OptionError, match="neither sorted nor shuffled"):
        list(engine_task.consume(batches[::-1], rig.by_key(bad()), lambda: rig.now))


def test_continues_the_lot_of_a_former_task_of_the_same_lock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    read = pulls.read_lot

    def counted(log: Any, lot: Lot, queue: MessageQueue, end: int) -> None:
        begun.append(lot.end)
        read(log, lot, queue, end)

    monkeypatch.setattr(pulls, "read_lot", counted)
    rig.send("a")
    rig.run(rig.by_key(bad("a")))
    for _ in range(2):
        rig.send("a")
        rig.run(rig.by_key(never))
    # The first two readings begin at 0, because the lot is empty until the first task ends. The third one begins after the message.
    assert begun == [0, 0, 1]
    other = replace(rig.token, epoch=rig.token.epoch - 1)
    Settled.read(rig.broker, other, LOT, LotPlan(3, 0, 0, 9))
    assert begun[-1] == 0


# -- no order ---------------------------------------------------------------------------------------------------------------------


def test_no_order_parks_only_the_failed_message_of_a_key(rig: Rig) -> None:
    def listen(messages: Sequence[Any], context: ConsumeConcurrentlyContext) -> Any:
        return LATER if messages[0].queue_offset == 0 else DONE

    rig.send("a", "a", "a")
    assert rig.run(rig.concurrently(listen)) == [(1, "SUCCESS", 1, None), (2, "SUCCESS", 1, None), (0, "PARKED", 1, 10)]
    rig.send("a")
    assert rig.run(rig.concurrently(listen)) == [(3, "SUCCESS", 1, None)]
    rig.now += 10
    assert rig.run(rig.concurrently(listen), planned=True) == [(0, "PARKED", 2, 30)]


def test_a_repeat_without_order_does_not_consume_what_its_first_attempt_parked(rig: Rig) -> None:
    rig.send("a", "a")
    assert rig.run(rig.concurrently(lambda messages, context: LATER), commit=False) == [
        (0, "PARKED", 1, 10),
        (1, "PARKED", 1, 10),
    ]
    assert rig.run(rig.concurrently(never)) == [(0, "PARKED", 0, None), (1, "PARKED", 0, None)]
    assert rig.lying() == {0: [0], 1: [1]}
