"""Order per key: the engine is compared with a plain model of a queue, its parking lot, and micro-batches that crash and repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from orderedmq.parking import lane_key
from tests.engine_messages import FULL, message
from tests.examples import examples

QUEUE = MessageQueue("orders", "embedded", 0)
SUCCESS, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


def answer(status: ConsumeOrderlyStatus | None, error: str | None = None) -> Answer:
    return Answer(status, error, ConsumeOrderlyContext(QUEUE))


def again(one: Message, due: bool = True) -> Message:
    """A copy of the message as the next task reads it from the lot."""
    return message(one._offset, one._key, attempts=one._attempts, held=one._held, error=one._error, due=due)


def lanes(messages: list[Message]) -> dict[object, list[int]]:
    out: dict[object, list[int]] = {}
    for one in messages:
        out.setdefault(lane_key(one._key, one._offset), []).append(one._offset)
    return out


@dataclass
class World:
    """A queue, its parking lot, and the calls of the listener. ``micro_batch`` plans, runs and commits one micro-batch."""

    random: Random
    settings: OrderPerKey
    keys: list[str | None]
    #: How many times the listener fails at an offset before it accepts the message; -1: always.
    failures: dict[int, int]
    #: How many messages the lot can hold.
    room: int
    now: float = 0.0
    committed: int = 0
    lot: list[Message] = field(default_factory=list)
    lot_begin: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    #: The decided offsets of each key, in the order in which they were first decided.
    decided: dict[object, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    #: The statuses that committed attempts decided, by offset, and the greatest offset of each key among the successes.
    final: dict[int, str] = field(default_factory=dict)
    best: dict[object, int] = field(default_factory=dict)
    #: The statuses that this attempt has decided, by offset.
    here: dict[int, str] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)

    def live(self) -> list[Message]:
        return self.lot[self.lot_begin :]

    def lane(self, message: Message) -> object:
        return message._offset if message._key is None else message._key

    def heads(self) -> dict[object, Message]:
        heads: dict[object, Message] = {}
        for one in self.live():
            head = heads.setdefault(self.lane(one), one)
            if one._offset < head._offset:
                heads[self.lane(one)] = one
        return heads

    def micro_batch(self, size: int, ripe: Callable[[Message], bool], crashes: int) -> None:
        """Plan a range, run parts of it in ``crashes`` attempts that crash, run the whole range, and commit it."""
        end = min(len(self.keys), self.committed + size)
        due = {key for key, head in self.heads().items() if not head._held and ripe(head)}
        planned = (self.lot_begin, len(self.lot)) if due else (self.lot_begin, self.lot_begin)
        known = len(self.lot)
        for attempt in range(crashes + 1):
            steps = self.random.randrange(1, 40) if attempt < crashes else None
            self.run(end, due, planned, known, steps)
        self.lot_begin, self.committed = planned[1], end
        self.final |= self.here
        for offset, status in self.here.items():
            key = offset if self.keys[offset] is None else self.keys[offset]
            if status == "SUCCESS":
                self.best[key] = max(offset, self.best.get(key, -1))
        self.check()

    def run(self, end: int, due: set[object], planned: tuple[int, int], known: int, steps: int | None) -> None:
        self.here = {}
        lot = [
            again(one, due=one._key in due if one._key is not None else one._offset in due)
            for one in self.lot[planned[0] : planned[1]]
        ]
        waiting = lanes(self.lot[planned[1] : known])
        attempted = lanes(self.lot[known:])
        self.reached["repeated after parking"] += bool(attempted)
        engine = KeyEngine(QUEUE, self.settings, self.now, LotView(self.room, lot, (), waiting, attempted))
        at, in_flight = self.committed, list[Batch]()
        refused: set[object] = {self.lane(one) for one in self.live() if self.lane(one) not in due}
        while steps is None or steps > 0:
            if steps is not None:
                steps -= 1
            self.now += self.random.choice((0.0, 0.001, 0.4, 2.0))
            if in_flight and self.random.random() < 0.5:
                self.finish(engine, in_flight.pop(self.random.randrange(len(in_flight))))
                continue
            action = engine.next(self.now)
            match action:
                case Consume(batch):
                    assert len(in_flight) < self.settings.concurrency
                    assert self.lane(batch.messages[0]) not in {self.lane(one.messages[0]) for one in in_flight}
                    assert len({one._key for one in batch.messages}) == 1
                    assert len(batch.messages) == 1 or not any(one._attempts for one in batch.messages)
                    for one in batch.messages:
                        # K4: newer messages of a parked key are diverted, even if an earlier attempt parked the key in this batch.
                        key = self.lane(one)
                        older = [o._offset for o in self.live() if self.lane(o) == key and o._offset < one._offset]
                        assert key not in refused or not older, f"{one._offset} was not diverted"
                        # K2: a key's messages are consumed in offset order.
                        assert one._offset > self.best.get(key, -1), f"{one._offset} after {self.best[key]}"
                        last = max((at for at in self.here if self.lane(Message(at, self.keys[at])) == key), default=-1)
                        assert one._offset > last, f"{one._offset} after {last}"
                        self.reached["older than what is parked"] += any(one._offset < o for o in attempted.get(key, ()))
                    in_flight.append(batch)
                case WriteLetter(letter):
                    # A good message never becomes a dead letter.
                    assert self.failures[letter._offset], letter._offset
                    if self.random.random() < 0.1:
                        engine.refused(FULL, self.now)
                        continue
                    self.reached["dead letter"] += 1
                    self.note(engine.dead_lettered())
                case Park(messages):
                    if self.random.random() < 0.1:
                        engine.refused(FULL, self.now)
                        continue
                    # A crash in the middle of the write stores only the first messages.
                    some = len(messages) if steps is None or steps else self.random.randrange(len(messages) + 1)
                    for one in messages[:some]:
                        self.lot.append(again(one))
                        self.reached["parked"] += 1
                        self.reached["diverted"] += not one._attempts
                    if some == len(messages):
                        self.note(engine.was_parked([True] * len(messages)))
                case CheckLock():
                    engine.lock(True, self.now)
                case Pull():
                    more = [Message(offset, self.keys[offset]) for offset in range(at, min(at + 7, end))]
                    at += len(more)
                    if more:
                        engine.add(more)
                    else:
                        engine.close()
                case Wait():
                    assert in_flight
                    self.finish(engine, in_flight.pop(self.random.randrange(len(in_flight))))
                case Suspend(seconds):
                    assert not in_flight
                    self.now += seconds
                case Done():
                    assert not in_flight
                    return

    def finish(self, engine: KeyEngine, batch: Batch) -> None:
        context = ConsumeOrderlyContext(QUEUE)
        names = self.random.random() < 0.5
        status = SUCCESS
        for number, one in enumerate(batch.messages):
            self.calls[one._offset] += 1
            if 0 <= self.failures[one._offset] < self.calls[one._offset]:
                continue
            status = SUSPEND
            if names:
                context.ack_index = number - 1
                break
        self.note(engine.consumed(batch, Answer(status, None, context), self.now))

    def note(self, outcomes: list[Outcome]) -> None:
        for one in outcomes:
            key: object = one.begin if one.key is None else one.key
            assert one.status != "REPEATED"
            if one.status != "PARKED":
                self.here[one.begin] = one.status
                if one.begin not in self.ended:
                    # K1: first decisions are in offset order.
                    before = self.decided.setdefault(key, [])
                    assert not before or before[-1] < one.begin, f"{one.begin} after {before[-1]}"
                    before.append(one.begin)
                self.ended.setdefault(one.begin, one.status)

    def check(self) -> None:
        """K3: each committed message is either decided or in the lot, and in the lot only once."""
        parked = Counter(one._offset for one in self.live())
        assert all(count == 1 for count in parked.values()), parked
        for offset in range(self.committed):
            assert (offset in self.final) != (offset in parked), offset


@pytest.mark.holds("order per key")
@examples(3)
@given(
    seed=st.integers(0, 2**32),
    keys=st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=60),
    poison=st.floats(0, 0.5),
    settings=st.builds(
        OrderPerKey,
        consume_message_batch_max_size=st.integers(1, 4),
        concurrency=st.integers(1, 4),
        in_batch_attempts=st.integers(1, 3),
        max_reconsume_times=st.sampled_from([0, 2, 5, 16]),
        max_batch_seconds=st.sampled_from([1.0, 30.0]),
    ),
    room=st.sampled_from([0, 3, 1000]),
    crashes=st.floats(0, 0.7),
)
def test_processes_every_key_in_order_and_decides_every_message(
    seed: int, keys: list[str | None], poison: float, settings: OrderPerKey, room: int, crashes: float
) -> None:
    walk(seed, keys, poison, settings, room, crashes)


def walk(seed: int, keys: list[str | None], poison: float, settings: OrderPerKey, room: int, crashes: float) -> World:
    random = Random(seed)
    failures = {at: random.choice((1, 2, 4, 9, -1)) if random.random() < poison else 0 for at in range(len(keys))}
    world = World(random, settings, keys, failures, room)
    for _ in range(200):
        if world.committed == len(keys) and not world.live():
            break
        world.micro_batch(
            random.randrange(1, 20), lambda _: random.random() < 0.7, random.randrange(1, 3) if random.random() < crashes else 0
        )
    assert set(world.final) == set(range(len(keys)))
    return world


def test_each_branch_is_reached() -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        random = Random(seed)
        keys: list[str | None] = [random.choice(["a", "b", "c", None]) for _ in range(50)]
        settings = OrderPerKey(
            2, concurrency=3, in_batch_attempts=2, max_reconsume_times=5, max_batch_seconds=random.choice((1.0, 30.0))
        )
        reached += walk(seed, keys, 0.3, settings, 1000, 0.5).reached
    names = ("parked", "diverted", "dead letter", "repeated after parking", "older than what is parked")
    assert all(reached[name] for name in names), reached


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
    made = KeyEngine(QUEUE, OrderPerKey(**given), 0.0, LotView(capacity))  # type: ignore[arg-type]
    made.add(Message(offset, key) for offset, key in enumerate(keys))
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


def test_a_full_lot_is_a_warning_and_the_key_is_tried_again() -> None:
    tries = Counter[int]()

    def listener(batch: Batch) -> ConsumeOrderlyStatus:
        tries[batch.messages[0]._offset] += 1
        return SUSPEND if tries[0] < 6 else SUCCESS

    made = engine("a", "a", in_batch_attempts=2, capacity=1)
    assert told(drained(made, listener)) == [(0, "SUCCESS"), (1, "SUCCESS")]
    [warning] = made.warnings
    assert "full" in warning


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
    made = KeyEngine(QUEUE, settings, 0.0, LotView(attempted={"a": [2, 4]}))
    made.add(message(offset, "a", attempts=attempts if offset == 0 else 0) for offset in range(6))
    outcomes = drained(made, lambda _: SUSPEND)
    assert {outcome.begin: outcome.status for outcome in outcomes} == {
        0: "DEAD_LETTER" if attempts else "PARKED",
        **dict.fromkeys((1, 3, 5), "PARKED"),
    }


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
    made = KeyEngine(QUEUE, OrderPerKey(), 0.0, LotView(planned=lot))
    assert told(drained(made, lambda _: SUCCESS)) == [(1, "SUCCESS"), (7, "SUCCESS"), (13, "SUCCESS")]
