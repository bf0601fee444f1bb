"""What `orderedmq.rocketmq.append` promises its four users: each message is in its queue once, in order, whichever requests are
lost.

The broker is in memory. It carries out an abandoned request immediately, later or never, and it may pause. For each user, each
planted bug is detected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.broker import QueueBounds
from orderedmq.conditions import LockCondition, UnavailableCondition
from orderedmq.errors import LockError, RocketMQUnavailableError
from orderedmq.model import DEAD_LETTER_PREFIX, RETRY_PREFIX, MessageQueue
from orderedmq.parking import AT_ONCE, Parking, Ticket, parked_queue
from orderedmq.rocketmq.append import broker_port
from orderedmq.rocketmq.append.broker_port import BrokerPort
from orderedmq.rocketmq.append.once import Appender, AppendWait
from orderedmq.rocketmq.codec import encode
from orderedmq.rocketmq.group import dead_letters
from orderedmq.rocketmq.group.dead_letters import DeadLetterTopic
from orderedmq.rocketmq.group.parking_lots import ParkingLots
from orderedmq.rocketmq.messages.sender import Sender
from orderedmq.rocketmq.net import checks, deadline
from orderedmq.rocketmq.sink import broker_lock, lookback
from orderedmq.rocketmq.sink.bookmarks import WriterEntry
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock, LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.message_stamp import Writer
from orderedmq.rocketmq.sink.queue_writer import QueueWriter
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request
from tests.unit.rocketmq_memory import SENDS, FakePending, FakeTime, MemoryCluster
from tests.unit.rocketmq_sink_queue import Crash, Stored, rows_of

QUEUE, GROUP = MessageQueue("t", "broker-a", 0), "g"
LOT, DEAD = parked_queue(GROUP, QUEUE), MessageQueue(DEAD_LETTER_PREFIX + GROUP, "broker-a", 0)
#: The greatest number of seconds until the broker starts or refuses a received request, or until readers see a stored message.
AT_MOST = 0.9
#: Seconds after which the lock of a dead process has expired.
EXPIRED = 61.0

time = FakeTime()


@dataclass
class Late:
    """An abandoned request. ``due``: when the broker carries it out; None: within AT_MOST seconds after the broker's next answer."""

    request: Request[Any]
    connection: Connection
    due: float | None


class World(MemoryCluster):
    """A broker with queues that decides the fate of each request. It also serves as its client and log."""

    names = SimpleNamespace(spelled=lambda name: name)

    def __init__(self, draw: random.Random, faults: int) -> None:
        super().__init__()
        self.draw, self.faults = draw, faults
        self.late: list[Late] = []
        self.still_until = 0.0
        self.used = Connection(self)
        self.made = 0

    def require_own(self) -> None:
        """Do nothing, because no test forks this process."""

    # -- the broker

    def answer(self, request: Request[Any]) -> Any:
        time.now = max(time.now, self.still_until)
        for late_request in self.late:
            if late_request.due is None:
                late_request.due = time.now + self.draw.uniform(0, AT_MOST)
        self.carry_out()
        return super().answer(request)

    def place(self, queue: MessageQueue) -> MessageQueue:
        return DEAD if queue.topic == RETRY_PREFIX + GROUP else queue

    def carry_out(self) -> None:
        for late_request in [
            late_request for late_request in self.late if late_request.due is not None and late_request.due <= time.now
        ]:
            self.late.remove(late_request)
            self.store(late_request.request)

    def send(self, request: Request[Any], connection: Connection) -> Any:
        """Answer a send, or fail in one of several ways."""
        fate = "ok"
        if self.faults and self.draw.random() < 0.6:
            self.faults -= 1
            fate = self.draw.choice(["busy", "lost", "stored", "late", "late", "crash", "crash late", "others"])
        if fate == "busy":
            raise RocketMQUnavailableError(UnavailableCondition.BUSY, "busy")
        if fate == "crash":
            raise Crash
        if fate == "others":
            self.messages[QUEUE].append(Stored(b"x", {"UNIQ_KEY": "x"}))
        if fate in ("late", "crash late"):
            self.late.append(Late(request, connection, time.now + self.draw.uniform(0, 20)))
            self.still_until = time.now + self.draw.choice([0, 0, 5])
        if fate == "crash late":
            raise Crash
        if fate in ("ok", "others", "stored"):
            answer = self.answer(request)
        if fate in ("late", "lost", "stored"):
            # The longest delay exceeds every deadline.
            time.sleep(self.draw.choice([0.0, 0.0, 15.0, 70.0]))
            raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")
        return answer

    def restart_client(self) -> None:
        """End the client's process: its connections end, and its locks expire after a while."""
        self.unsettled.clear()
        self.used.close()
        self.answer(Request(RequestCode.GET_BROKER_CONFIG, "", "", lambda _: None))
        time.sleep(EXPIRED)
        self.locks.clear()
        self.carry_out()

    def named(self, queue: MessageQueue) -> list[str]:
        """The messages of the queue, without those of other writers, after all requests have been carried out."""
        self.restart_client()
        return [message.body.decode() for message in self.messages[queue] if message.body != b"x"]

    # -- the client

    def connection(self, address: str, deadline: float) -> Connection:
        if self.used.closed:
            self.used = Connection(self)
        return self.used

    def lane(self, address: str, deadline: float) -> Any:
        raise RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, "not here")

    def doubt(self, topic: str) -> None:
        pass

    # -- the log, and the group's offsets

    tail_loss = ""

    @property
    def sender(self) -> World:
        return self

    @property
    def keys(self) -> World:
        return self

    def take(self, count: int) -> pa.Array:
        self.made += count
        return pa.array([f"{number:032x}" for number in range(self.made - count, self.made)])

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        self.carry_out()
        return {queue: QueueBounds(0, len(self.messages[queue])) for queue in queues if queue in self.messages}

    def read(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        return {}

    def resets(self, group: str, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        return dict.fromkeys(queues, 0)


class Connection:
    """A connection of the client. Requests in flight when it is closed may or may not arrive."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.closed = False

    def call(self, request: Request[Any], deadline: float) -> Any:
        if request.code in SENDS:
            return self._world.send(request, self)
        return self._world.answer(request)

    def begin(self, request: Request[Any], deadline: float) -> Callable[[], Any]:
        return partial(self.call, request, deadline)

    def send_all(self, asked: list[tuple[Request[Any], None]], deadline: float) -> list[FakePending]:
        return [FakePending(self.call(request, deadline)) for request, _ in asked]

    def close(self) -> None:
        self.closed = True
        for late_request in [late_request for late_request in self._world.late if late_request.connection is self]:
            fate = self._world.draw.choice(["lost", "soon", "later"])
            if fate == "lost":
                self._world.late.remove(late_request)
            late_request.due = time.now + self._world.draw.uniform(0, AT_MOST) if fate == "soon" else None


class Stop:
    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


# -- the users: each returns the expected and the actual contents of the queue


def by_producer(world: World) -> tuple[list[str], list[str]]:
    expected: list[str] = []
    for _ in range(world.draw.randint(1, 3)):
        names = [f"a{len(expected) + number}" for number in range(world.draw.randint(1, 5))]
        sender = Sender(world, world)  # type: ignore[arg-type]
        # A producer that dies does not return, so nothing is promised for the messages that it was sending.
        while True:
            try:
                bodies, keys = sender.encoded(QUEUE, rows_of(names))
                offsets = sender.append_encoded(QUEUE, bodies, keys)
            except (Crash, RocketMQUnavailableError):
                world.restart_client()
                world.messages[QUEUE] = [one for one in world.messages[QUEUE] if one.body.decode() not in names]
            else:
                break
        there = [message.body.decode() for message in world.messages[QUEUE][offsets.begin : offsets.end]]
        assert [name for name in there if name != "x"] == names
        expected += names
    return expected, world.named(QUEUE)


def until_no_crash(world: World, attempt: Callable[[], object]) -> None:
    while True:
        try:
            attempt()
        except RocketMQUnavailableError:
            # The user gave up after its deadline, and soon tries again.
            time.sleep(0.01)
        except Crash:
            world.restart_client()
        else:
            return


def put(world: World, letters: pa.RecordBatch, offsets: Sequence[int], require_lock: Callable[[], None] = lambda: None) -> None:
    """Write dead letters as a new process does."""
    DeadLetterTopic(world, world, world).put(GROUP, QUEUE, letters, offsets, require_lock)  # type: ignore[arg-type]


def by_dead_letters(world: World) -> tuple[list[str], list[str]]:
    count = world.draw.randint(1, 8)
    names = [f"{number}" for number in range(count)]
    for end in sorted({world.draw.randint(1, count), count}):
        letters = pa.record_batch({"body": pa.array([name.encode() for name in names[:end]], pa.binary())})
        until_no_crash(
            world,
            lambda letters=letters, end=end: put(world, letters, range(end)),  # type: ignore[misc]
        )
    return names, world.named(DEAD)


def by_parking(world: World) -> tuple[list[str], list[str]]:
    names = [f"{number}" for number in range(8)]
    world.messages[QUEUE] = [Stored(name.encode(), {"UNIQ_KEY": f"{name:>032}"}) for name in names]
    world.messages[LOT] = []
    lots = ParkingLots(world, world, world)  # type: ignore[arg-type]
    expected: dict[str, None] = {}
    for _ in range(world.draw.randint(1, 3)):
        offsets = world.draw.sample(range(8), world.draw.randint(1, 8))
        parkings = [Parking(QUEUE, at, Ticket(at, 1, 1, AT_ONCE, "why")) for at in offsets]
        expected.update(dict.fromkeys(f"{at}" for at in offsets))

        def attempt(parkings: list[Parking] = parkings) -> None:
            nonlocal lots
            try:
                assert lots.park(GROUP, QUEUE, parkings, lambda: None) == [True] * len(parkings)
            except Crash:
                lots = ParkingLots(world, world, world)  # type: ignore[arg-type]
                raise

        until_no_crash(world, attempt)
    return list(expected), world.named(LOT)


def by_sink(world: World) -> tuple[list[str], list[str]]:
    names = [f"a{number}" for number in range(world.draw.randint(1, 8))]
    world.messages[QUEUE] = [Stored(b"x", {})]
    writer = Writer("s", 0, 0)
    world.numbers[registers.writer(QUEUE).queue_id] = WriterEntry.of(writer).value

    def attempt() -> None:
        opened = Attempt(world, world, writer, LockTiming(), f"{world.draw.random()}", Stop())  # type: ignore[arg-type]
        port = RocketMQQueue(opened, QUEUE, BrokerLock(opened, QUEUE))
        work = QueueWriter(port, writer, 0)
        half = world.draw.randint(0, len(names))
        try:
            work.write(rows_of(names[:half]), 0)
            work.write(rows_of(names[half:]), half)
        finally:
            work.look_again()
            RocketMQQueue.release_all({port: work.end})

    until_no_crash(world, attempt)
    return names, world.named(QUEUE)


USERS = [by_producer, by_dead_letters, by_parking, by_sink]


def scenario(user: Callable[[World], tuple[list[str], list[str]]], seed: int) -> None:
    draw = random.Random(seed)
    expected, there = user(World(draw, draw.randint(0, 6)))
    assert there == expected


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use requests of two messages and a simulated clock."""
    monkeypatch.setattr(encode, "TARGET_BYTES", 400)
    monkeypatch.setattr(lookback, "FIRST_STEP", 2)
    monkeypatch.setattr(checks, "require_rights", lambda *_: None)
    for module in (broker_port, broker_lock, deadline):
        monkeypatch.setattr(module, "time", time)


@pytest.mark.holds("sink once", "dead letter by condition")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("user", USERS)
@given(seed=st.integers(0, 2**62))
def test_each_message_is_stored_once_and_in_order(user: Callable[[World], tuple[list[str], list[str]]], seed: int) -> None:
    scenario(user, seed)


@pytest.mark.holds("orderly listener")
def test_letters_of_a_topic_that_was_created_again_since_are_stored_again() -> None:
    world = World(random.Random(0), 0)
    topic = DeadLetterTopic(world, world, world)  # type: ignore[arg-type]
    letters = pa.record_batch({"body": pa.array([b"a", b"b"], pa.binary())})
    assert topic.put(GROUP, QUEUE, letters, [1, 2], lambda: None) == 2
    assert topic.put(GROUP, QUEUE, letters, [1, 2], lambda: None) == 0
    world.messages[DEAD].clear()
    put(world, letters.slice(0, 1), [7])
    assert topic.put(GROUP, QUEUE, letters, [1, 2], lambda: None) == 2
    assert len(world.messages[DEAD]) == 3


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("requests", [0, 1, 2])
def test_nothing_is_sent_once_the_lock_is_lost(requests: int) -> None:
    world, left = World(random.Random(0), 0), requests

    def require_lock() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise LockError(LockCondition.LOST, "it is another's")

    letters = pa.record_batch({"body": pa.array([b"%d" % number for number in range(8)], pa.binary())})
    with pytest.raises(LockError):
        put(world, letters, range(8), require_lock)
    there = world.named(DEAD)
    assert there == [f"{number}" for number in range(8)][: len(there)]
    # The first request contains one letter.
    assert (len(there) > 1) == (requests > 1)
    assert len(there) < 8
    assert bool(there) == bool(requests)


@pytest.mark.usefixtures("small")
def test_an_append_continues_without_answers_while_messages_arrive() -> None:
    world = World(random.Random(0), 0)
    store = world.send

    def stores_and_says_nothing(request: Request[Any], connection: Connection) -> Any:
        store(request, connection)
        time.sleep(15.0)
        raise RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "no answer")

    world.send = stores_and_says_nothing  # type: ignore[method-assign]
    sender = Sender(world, world)  # type: ignore[arg-type]
    names = [f"a{number}" for number in range(20)]
    sender.append_encoded(QUEUE, *sender.encoded(QUEUE, rows_of(names)))
    assert world.named(QUEUE) == names


# -- planted bugs


def _does_not_wait_until_a_request_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle_all(ports: Iterable[BrokerPort], deadline: float) -> None:
        for port in ports:
            port._unsettled = False

    monkeypatch.setattr(BrokerPort, "settle_all", staticmethod(settle_all))


def _waits_before_the_broker_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle_all(ports: Iterable[BrokerPort], deadline: float) -> None:
        for port in ports:
            if port._unsettled:
                time.sleep(port._timing.settle)
                port._unsettled = False

    monkeypatch.setattr(BrokerPort, "settle_all", staticmethod(settle_all))


def _leaves_the_connection_of_a_request_that_it_gave_up_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BrokerPort.pause

    def pause(self: BrokerPort, error: RocketMQUnavailableError, failures: int) -> None:
        self._sending_on = None
        real(self, error, failures)

    monkeypatch.setattr(BrokerPort, "pause", pause)


def _does_not_look_after_a_lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Appender._enter

    def enter(self: Appender) -> Iterator[AppendWait]:
        if not self.in_doubt:
            yield from real(self)
        while not self._port.keep():
            self._port.acquire()

    monkeypatch.setattr(Appender, "_enter", enter)


def _forgets_what_has_not_settled_when_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "unsettled", property(lambda world: set(), lambda world, value: None), raising=False)


def _believes_that_a_lost_request_was_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BrokerPort._offset

    def offset(self: BrokerPort, answer: Callable[[], Any]) -> int:
        try:
            return real(self, answer)
        except RocketMQUnavailableError as error:
            if not error.outcome_unknown:
                raise
            return self.end()

    monkeypatch.setattr(BrokerPort, "_offset", offset)


BUGS = [
    _does_not_wait_until_a_request_has_settled,
    _waits_before_the_broker_has_answered,
    _leaves_the_connection_of_a_request_that_it_gave_up_open,
    _does_not_look_after_a_lost_answer,
    _believes_that_a_lost_request_was_carried_out,
    _forgets_what_has_not_settled_when_it_gives_up,
]


#: Pairs of a user and a bug that does not affect it: the broker always answers the sink's request for its lock; the lock of a sink's
#: attempt that gave up expires; and a producer that gave up sends other messages next.
NOT_OF = {
    (by_sink, _waits_before_the_broker_has_answered),
    (by_sink, _forgets_what_has_not_settled_when_it_gives_up),
    (by_producer, _forgets_what_has_not_settled_when_it_gives_up),
}
CASES = [(user, bug) for user in USERS for bug in BUGS if (user, bug) not in NOT_OF]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("user", "bug"), CASES, ids=lambda one: one.__name__)
def test_a_planted_bug_is_noticed(
    bug: Callable[[pytest.MonkeyPatch], None],
    user: Callable[[World], tuple[list[str], list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)

    def scenarios() -> None:
        for seed in range(400):
            scenario(user, seed)

    with pytest.raises(AssertionError):
        scenarios()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("user", [by_dead_letters, by_parking])
def test_an_identity_that_the_next_attempt_does_not_compute_again_is_noticed(
    user: Callable[[World], tuple[list[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    monkeypatch.setattr(dead_letters, "key_of", lambda *_: f"{draw.random()}")
    monkeypatch.setattr(Parking, "place", property(lambda put: f"{draw.random()}"))

    def scenarios() -> None:
        for seed in range(400):
            scenario(user, seed)

    with pytest.raises(AssertionError):
        scenarios()
