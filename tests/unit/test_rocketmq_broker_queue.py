"""When an attempt trusts its queue's lock, and how long it tolerates an unavailable broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import PullSettings
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import LockError, RocketMQUnavailableError, SinkError, aged_out
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.behind_proxy import HOLDS_BACK
from orderedmq.rocketmq.sink.bookmarks import WriterEntry
from orderedmq.rocketmq.sink.broker_lock import Attempt, BrokerLock, LockTiming
from orderedmq.rocketmq.sink.broker_queue import RocketMQQueue
from orderedmq.rocketmq.sink.message_stamp import Writer
from orderedmq.rocketmq.sink.queue_writer import QueueWriter, Start
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import PullResult
from orderedmq.rocketmq.wire.request import Request
from tests.unit.rocketmq_memory import FakeBroker, FakePending, FakeTime
from tests.unit.rocketmq_sink_queue import Queue, Stored, rows_of

QUEUE = MessageQueue("t", "broker-a", 0)
WRITER, COMMITTED = registers.writer(QUEUE).queue_id, registers.committed(QUEUE).queue_id
TIMING = LockTiming()


class FakeStop:
    """An event whose waits advance the simulated clock."""

    def __init__(self) -> None:
        self.is_set = False
        self.meanwhile: list[Callable[[], None]] = []

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return self.is_set


time = FakeTime()


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.sink.broker_lock.time", time)
    monkeypatch.setattr("orderedmq.rocketmq.append.broker_port.time", time)
    monkeypatch.setattr("orderedmq.rocketmq.net.deadline.time", time)


class FakeConnection:
    """Grants or refuses the lock after ``takes`` seconds."""

    def __init__(self, broker: FakeBroker | None = None) -> None:
        self.broker = broker or FakeBroker()
        self.closed = False
        self.grants = True
        self.takes = 0.0
        self.asked: list[RequestCode] = []
        #: The queues whose ends were requested.
        self.queues: list[str] = []
        self.writes = 0

    def call(self, request: Request[Any], deadline: float) -> Any:
        self.asked.append(request.code)
        if request.code == RequestCode.GET_MAX_OFFSET:
            self.queues.append(request.ext["queueId"])
        time.sleep(self.takes)
        if request.code == RequestCode.LOCK_BATCH_MQ and not self.grants:
            return frozenset()
        return self.broker.answer(request)

    def begin(self, request: Request[Any], deadline: float) -> Callable[[], Any]:
        return partial(self.call, request, deadline)

    def send_all(self, asked: list[tuple[Request[Any], None]], deadline: float) -> list[FakePending]:
        self.writes += 1
        return [FakePending(self.call(request, deadline)) for request, _ in asked]

    def close(self) -> None:
        self.closed = True


class FakeClient:
    """A client that always uses the same broker."""

    trace = None
    routed_by_proxy = False

    def __init__(self) -> None:
        self.used = FakeConnection()
        self.doubts = 0
        self.proxied = False
        self.unsettled: set[MessageQueue] = set()

    def behind_proxy(self, deadline: float) -> bool:
        return self.proxied

    def address(self, topic: str, broker_name: str, deadline: float) -> str:
        return "host:1"

    def connection(self, address: str, deadline: float) -> FakeConnection:
        if self.used.closed:
            self.used = FakeConnection(self.used.broker)
        return self.used

    def call(self, request: Request[Any], deadline: float, **where: str) -> Any:
        return self.used.call(request, deadline)

    def doubt(self, topic: str) -> None:
        self.doubts += 1


class FakeLog:
    """A log with a message without a stamp at each offset."""

    def __init__(self) -> None:
        self.pulls = 0
        #: Messages below this offset were deleted, although the broker may still count them.
        self.least = 0

    def reading(self, how: PullSettings) -> FakeLog:
        return self

    def pull_once(self, offsets: Mapping[MessageQueue, int], most: int) -> list[PullResult]:
        raise unavailable("UNREACHABLE")

    def pull(self, queue: MessageQueue, begin: int, count: int, most: int, columns: Sequence[str]) -> pa.RecordBatch:
        self.pulls += 1
        if begin < self.least:
            raise aged_out(queue, begin, self.least)
        return next(iter(Queue([Stored(b"", {})] * (begin + count)).read(begin, begin + count, count)))


class Case:
    def __init__(self, writer: Writer | None = Writer("s", 0, 0), name: str = "me", broker: FakeBroker | None = None) -> None:  # noqa: B008
        self.client = FakeClient()
        self.broker = self.client.used.broker = broker or FakeBroker()
        if broker is None and writer is not None:
            self.broker.numbers[WRITER] = WriterEntry.of(writer).value
        self.stop = FakeStop()
        self.waits = 0
        self.log = FakeLog()
        self.attempt = Attempt(self.client, self.log, writer, TIMING, name, self.stop)  # type: ignore[arg-type]
        self.lock: Any = BrokerLock(self.attempt, QUEUE, self._waits) if writer is not None else None
        self.port = RocketMQQueue(self.attempt, QUEUE, self.lock)

    def _waits(self) -> None:
        self.waits += 1

    def release(self) -> None:
        RocketMQQueue.release_all({self.port: 0})

    @property
    def locks(self) -> int:
        """The number of lock requests. The queue already names this run as its writer."""
        return self.client.used.asked.count(RequestCode.LOCK_BATCH_MQ)


def unavailable(sub: str) -> RocketMQUnavailableError:
    return RocketMQUnavailableError(UnavailableCondition(sub), "away")


def test_a_search_continues_after_deleted_messages_though_the_queues_minimum_is_old() -> None:
    case = Case()
    case.log.least = 6
    assert [batch.column("queue_offset").to_pylist() for batch in case.port.read(2, 10)] == [[6, 7, 8, 9]]


def test_a_lock_is_trusted_and_renewed_in_time() -> None:
    case = Case()
    assert not case.port.keep()
    case.port.acquire()
    assert case.port.keep()
    assert case.locks == 1
    time.sleep(TIMING.lock_renew + 1)
    assert case.port.keep()
    assert case.port.keep()
    assert case.locks == 2
    time.sleep(TIMING.lock_trust + 1)
    # In between, another task may have had the lock, so prolonging it proves nothing.
    assert not case.port.keep()
    assert case.locks == 2


def test_a_refused_or_late_renewal_is_a_lost_lock() -> None:
    for spoil in ({"grants": False}, {"takes": 12.0}):
        case = Case()
        case.port.acquire()
        time.sleep(TIMING.lock_renew + 1)
        vars(case.client.used).update(spoil)
        assert not case.port.keep()


def test_a_lock_ends_with_its_connection() -> None:
    case = Case()
    case.port.acquire()
    case.client.used.close()
    assert not case.port.keep()
    case.port.acquire()
    assert case.port.keep()


def test_an_attempt_waits_for_the_lock_of_another_and_then_fails_by_name() -> None:
    case = Case()
    case.client.used.grants = False
    with pytest.raises(LockError) as caught:
        case.port.acquire()
    assert caught.value.sub == "HELD_BY_OTHER"
    assert "topic 't' at broker broker-a" in caught.value.message
    # The request is repeated every few seconds.
    assert TIMING.lock_wait / (2 * TIMING.lock_yield) < case.waits < TIMING.lock_wait / (TIMING.lock_yield / 2)


def test_an_abandoned_attempt_stops_waiting() -> None:
    case = Case()
    case.client.used.grants = False
    case.stop.is_set = True
    with pytest.raises(SinkError) as caught:
        case.port.acquire()
    assert caught.value.sub == "TOKEN_GONE"


@pytest.mark.parametrize(("behind_proxy", "wait"), [(False, TIMING.settle), (True, TIMING.settle + HOLDS_BACK)])
def test_after_an_unknown_outcome_the_connection_is_dropped_and_the_next_lock_waits(behind_proxy: bool, wait: float) -> None:
    """A Proxy may still hold the request back."""
    case = Case()
    case.port.acquire()
    case.client.proxied = behind_proxy
    used = case.port._sending_on = case.client.used  # type: ignore[assignment]
    case.port.pause(unavailable("TIMEOUT"), 1)
    assert used.closed
    assert not case.port.keep()
    began = time.monotonic()
    case.port.acquire()
    assert time.monotonic() - began >= wait
    began = time.monotonic()
    case.port.acquire()
    assert time.monotonic() - began < TIMING.settle


def test_a_lock_is_released_only_after_abandoned_requests_have_settled() -> None:
    case = Case()
    case.port.acquire()
    case.port._sending_on = case.client.used  # type: ignore[assignment]
    case.port.pause(unavailable("CONNECTION_LOST"), 1)
    began = time.monotonic()
    case.client.connection("host:1", 0)
    case.release()
    assert time.monotonic() - began >= TIMING.settle
    assert case.client.used.asked[-1] == RequestCode.UNLOCK_BATCH_MQ


@pytest.mark.parametrize(("sub", "doubts"), [("BUSY", False), ("UNAVAILABLE", True), ("NO_BROKER", True)])
def test_a_busy_full_or_unreachable_broker_is_waited_for_with_a_bound(sub: str, doubts: bool) -> None:
    case = Case(None)
    error = unavailable(sub)
    began, failures = time.monotonic(), 0
    with pytest.raises(RocketMQUnavailableError) as caught:  # noqa: PT012
        while True:
            failures += 1
            case.port.pause(error, failures)
    assert caught.value is error
    assert TIMING.patience <= time.monotonic() - began < TIMING.patience + 2
    assert bool(case.client.doubts) is doubts


# --- the requests of a task


# The entry, the newest batch and the record of the queues; then the bookmark and the end.
NUMBERS = [RequestCode.QUERY_CONSUMER_OFFSET] * 3
START = [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.GET_MAX_OFFSET]


def test_a_task_asks_once_for_the_lock_and_for_each_number() -> None:
    case = Case()
    case.lock._entered = True
    writer = QueueWriter(case.port, Writer("s", 0, 0), 0)
    for first in (0, 2):
        writer.write(rows_of(["a1", "a2"]), first)
    send = RequestCode.SEND_BATCH_MESSAGE
    assert case.client.used.asked == [RequestCode.LOCK_BATCH_MQ, *NUMBERS, *START, send, send]
    assert case.log.pulls == 1
    RocketMQQueue.release_all({case.port: writer.end})
    # The answers to the sends contain the rows' offsets, so a single request checks whether the rows can be read yet.
    assert case.client.used.asked[8:] == [RequestCode.GET_MAX_OFFSET, RequestCode.UNLOCK_BATCH_MQ]


def test_the_first_task_of_a_batch_makes_its_run_the_broker_s_writer() -> None:
    case = attempt_of(FakeBroker(), NEW, 0)
    case.lock._entered = True
    case.broker.numbers[WRITER] = WriterEntry(4, 6, 10).value
    case.port.acquire()
    assert case.port.start() == Start(1, 1, -1)
    gate = [
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.UNLOCK_BATCH_MQ,
    ]
    assert case.client.used.asked == [RequestCode.LOCK_BATCH_MQ, *NUMBERS, *gate, *NUMBERS, *START]


def test_the_tasks_of_a_large_run_change_a_broker_s_entry_a_few_times() -> None:
    broker, changes = FakeBroker(), 0
    for partition in range(1000):
        case = attempt_of(broker, NEW, partition)
        case.port.acquire()
        changes += case.client.used.asked.count(RequestCode.UPDATE_CONSUMER_OFFSET)
        case.release()
    assert changes == 3


@pytest.mark.parametrize("reconnected", [False, True])
def test_a_release_waits_only_for_the_last_messages_of_a_commit_log(reconnected: bool) -> None:
    """``reconnected``: between the two sends, so that another broker may have become the master."""
    case = Case()
    ports = [RocketMQQueue(case.attempt, QUEUE._replace(queue_id=number), case.lock) for number in range(2)]
    for port, position in zip(ports, (900, 100)):
        case.broker.position = position
        QueueWriter(port, Writer("s", 0, 0), 0).write(rows_of(["a1"]), 0)
        if reconnected:
            case.client.used.close()
    case.client.connection("host:1", 0)
    case.client.used.queues.clear()
    case.broker.ends = iter([1, 1, 1, 2, 2])
    RocketMQQueue.release_all(dict.fromkeys(ports, 2))
    assert case.client.used.queues == ["0"] * 4 + ["1"] * reconnected


@pytest.mark.parametrize("unsettled", [False, True])
def test_queues_of_a_broker_are_given_back_in_one_request(unsettled: bool) -> None:
    case = Case()
    ports = {case.port: 0}
    for number in range(1, 5):
        case.broker.numbers[number] = 1
        ports[RocketMQQueue(case.attempt, QUEUE._replace(queue_id=number), case.lock)] = number
    for port in ports:
        port.acquire()
    if unsettled:
        case.port._unsettled = True
    case.broker.end = 4
    asked = len(case.client.used.asked)
    began = time.monotonic()
    RocketMQQueue.release_all(ports)
    assert not case.broker.locks
    assert case.client.used.asked[asked:].count(RequestCode.UNLOCK_BATCH_MQ) == 1
    assert (time.monotonic() - began >= TIMING.settle) is unsettled
    assert not any(port.keep() for port in ports)


def test_the_queue_is_read_again_after_a_task_of_another_run_has_ended() -> None:
    """Otherwise the rows that the other task sent in between would be sent twice."""
    broker = FakeBroker()
    old = attempt_of(broker, OLD, 0)
    old.port.acquire()

    def end_old() -> None:
        broker.end, broker.numbers[COMMITTED] = 9, 8
        old.release()

    new = attempt_of(broker, NEW, 0)
    new.stop.meanwhile = [end_old]
    new.port.acquire()
    assert not new.stop.meanwhile
    assert new.port.start() == Start(9, 1, 7)


@pytest.mark.parametrize("sibling", [False, True])
def test_the_queue_is_read_again_after_another_run_has_intervened(sibling: bool) -> None:
    """``sibling``: after the other run, a task with a lower partition has made this run the queue's writer again."""
    broker = FakeBroker()
    broker.numbers[WRITER] = known = WriterEntry(4, 6, 10).value
    new = attempt_of(broker, NEW, 5)
    locked = new.lock._lock_all

    def old_comes_first(keys: list[MessageQueue], **more: Any) -> Any:
        if broker.numbers[WRITER] == known and len(broker.locks) == 1:
            old = attempt_of(broker, OLD, 0)
            old.port.acquire()
            broker.end = 9
            old.release()
            if sibling:
                attempt_of(broker, NEW, 0).port.acquire()
        return locked(keys, **more)

    new.lock._lock_all = old_comes_first
    new.port.acquire()
    assert broker.end == 9
    assert new.port.start().end == 9


def test_a_bookmark_after_the_end_of_its_queue_counts_as_lost() -> None:
    """The topic was deleted and created again, and its broker has kept the offsets."""
    case = Case()
    case.broker.numbers[0] = case.broker.end = 5
    case.port.acquire()
    assert case.port.start() == Start(5, 5, -1)
    case.broker.end, case.broker.numbers[COMMITTED] = 4, 9
    case.port.acquire()
    assert case.port.start() == Start(4, None, -1)
    assert case.broker.numbers[0] == case.broker.numbers[COMMITTED] == 0


# --- runs of one batch


def attempt_of(broker: FakeBroker, run: str, partition: int, batch: int = 7) -> Case:
    return Case(Writer("s", batch, partition, run), f"{run}-{partition}", broker)


OLD, NEW = "0000000a", "0000000b"


def test_tasks_of_one_run_have_a_queue_at_the_same_time() -> None:
    broker = FakeBroker()
    tasks = [attempt_of(broker, OLD, partition) for partition in (1, 0, 3)]
    began = time.monotonic()
    for task in tasks:
        task.port.acquire()
    assert all(task.port.keep() for task in tasks)
    assert time.monotonic() == began
    assert WriterEntry.parse(broker.numbers[WRITER]) == WriterEntry(64, 7, 10)
    for task in tasks:
        task.release()
    assert not broker.locks


def test_another_run_of_the_batch_waits_until_no_task_of_the_first_has_the_queue() -> None:
    broker = FakeBroker()
    old = [attempt_of(broker, OLD, partition) for partition in (0, 2)]
    for task in old:
        task.port.acquire()
    new = attempt_of(broker, NEW, 0)
    new.stop.meanwhile = [old[1].release, lambda: None, old[0].release]
    new.port.acquire()
    assert not new.stop.meanwhile
    assert new.port.keep()
    assert WriterEntry.parse(broker.numbers[WRITER]) == WriterEntry(64, 7, 11)
    assert list(broker.locks.values()) == [f"{NEW}-0"]


def test_a_run_that_is_killed_while_it_waits_for_a_dead_one_keeps_no_lock_that_the_next_run_needs() -> None:
    """Otherwise a query that is restarted more often than locks expire would never write its batch."""
    broker = FakeBroker()
    attempt_of(broker, OLD, 0).port.acquire()
    killed = attempt_of(broker, NEW, 0)
    left: dict[Any, str] = {}

    def kill() -> None:
        left.update(broker.locks)
        killed.stop.is_set = True

    killed.stop.meanwhile = [lambda: None, kill]
    with pytest.raises(SinkError, match="TOKEN_GONE"):
        killed.port.acquire()
    broker.locks = {key: holder for key, holder in left.items() if holder != f"{OLD}-0"}
    began = time.monotonic()
    attempt_of(broker, "0000000c", 0).port.acquire()
    assert time.monotonic() == began
    assert WriterEntry.parse(broker.numbers[WRITER]) == WriterEntry(64, 7, 12)


def test_a_late_attempt_of_the_first_run_waits_for_the_other_one_in_turn() -> None:
    """The late attempt has either never used the queue before, or has lost its lock."""
    for came_before in (False, True):
        broker = FakeBroker()
        attempt_of(broker, OLD, 3).port.acquire()
        broker.locks.clear()
        late = attempt_of(broker, OLD, 1)
        if came_before:
            late.port.acquire()
            broker.locks.clear()
            late.client.used.close()
        new = attempt_of(broker, NEW, 0)
        new.port.acquire()
        with pytest.raises(LockError, match="HELD_BY_OTHER"):
            late.port.acquire()
        late.stop.meanwhile = [lambda new=new: new.release()]  # type: ignore[misc]
        late.port.acquire()
        assert WriterEntry.parse(broker.numbers[WRITER]).run == 10
        # The next task of the new run must wait for the late attempt.
        sibling = attempt_of(broker, NEW, 1)
        with pytest.raises(LockError, match="HELD_BY_OTHER"):
            sibling.port.acquire()


def proxied(broker: FakeBroker, run: str, partition: int, batch: int = 7) -> Case:
    """An attempt whose connection leads to a Proxy, and so survives a restart of the broker."""
    case = attempt_of(broker, run, partition, batch)
    case.client.proxied = True
    return case


@pytest.mark.parametrize("run", ["0000000a", "0000000b"], ids=["another_attempt", "another_run"])
def test_a_lock_that_a_broker_forgot_behind_a_proxy_is_not_trusted(run: str) -> None:
    broker = FakeBroker()
    late = proxied(broker, OLD, 0)
    late.port.acquire()
    time.sleep(1.1)
    assert late.port.keep()
    broker.locks.clear()
    again = proxied(broker, run, 0)
    began = time.monotonic()
    again.port.acquire()
    if run == NEW:
        # The Proxy may still hold a request of the late attempt.
        assert time.monotonic() - began >= HOLDS_BACK
    broker.end = 9
    again.release()
    time.sleep(1.1)
    assert not late.port.keep()
    late.port.acquire()
    assert late.port.start().end == 9
    assert late.port.keep()
    late.release()
    assert not broker.locks


def test_an_attempt_through_a_proxy_asks_once_a_second_whether_its_lock_is_remembered() -> None:
    case = proxied(FakeBroker(), OLD, 0)
    case.port.acquire()
    asked = case.locks
    for _ in range(50):
        time.sleep(0.1)
        assert case.port.keep()
    assert 3 <= case.locks - asked <= 5
    case.client.used.takes = 2.0
    time.sleep(1.1)
    assert not case.port.keep()


def test_a_task_of_another_batch_does_not_wait() -> None:
    broker = FakeBroker()
    attempt_of(broker, OLD, 0).port.acquire()
    began = time.monotonic()
    attempt_of(broker, NEW, 0, batch=8).port.acquire()
    assert time.monotonic() == began


def test_the_first_batch_through_a_proxy_does_not_wait() -> None:
    """A queue without an entry has the number 0 as its entry, which is also the number of the first batch."""
    began = time.monotonic()
    first = proxied(FakeBroker(), NEW, 0, batch=0)
    first.port.acquire()
    assert time.monotonic() == began
    assert first.port.keep()


def test_an_entry_is_one_number_of_63_bits() -> None:
    for entry in (
        WriterEntry(1, 0, 1),
        WriterEntry(65535, 32767, 0xFFFF_FFFF),
        WriterEntry.of(Writer("s", 2**62, 10**6, "ffffffff")),
    ):
        assert WriterEntry.parse(entry.value) == entry
        assert 0 < entry.value < 2**63
    assert WriterEntry.parse(0) == (0, 0, 0)
