"""When an attempt believes in its queue's lock, and how long it bears with a broker."""

from __future__ import annotations

from typing import Any

import pytest

from orderedmq.errors import LockError, RocketMQUnavailableError, SinkError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codes import RequestCode
from orderedmq.rocketmq.queue_place import RocketMQQueue, Timing
from orderedmq.rocketmq.request import Request
from orderedmq.rocketmq.stamp import Writer

QUEUE = MessageQueue("t", "broker-a", 0)
TIMING = Timing()


class FakeTime:
    """Passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeStop:
    """An event that is awaited in that time."""

    def __init__(self) -> None:
        self.is_set = False

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.is_set


time = FakeTime()


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.queue_place.time", time)


class FakeConnection:
    """Grants the lock, or not, after a while."""

    def __init__(self) -> None:
        self.closed = False
        self.grants = True
        self.takes = 0.0
        self.asked: list[RequestCode] = []

    def call(self, request: Request[Any], deadline: float) -> Any:
        self.asked.append(request.code)
        time.sleep(self.takes)
        if request.code == RequestCode.LOCK_BATCH_MQ:
            return frozenset({QUEUE}) if self.grants else frozenset()
        return 0

    def close(self) -> None:
        self.closed = True


class FakeClient:
    """Always the same broker."""

    def __init__(self) -> None:
        self.used = FakeConnection()
        self.doubts = 0

    def address(self, topic: str, broker_name: str, deadline: float) -> str:
        return "host:1"

    def connection(self, address: str, deadline: float) -> FakeConnection:
        if self.used.closed:
            self.used = FakeConnection()
        return self.used

    def call(self, request: Request[Any], deadline: float, **where: str) -> Any:
        return self.used.call(request, deadline)

    def doubt(self, topic: str) -> None:
        self.doubts += 1


class Case:
    def __init__(self, writer: Writer | None = Writer("s", 0, 0)) -> None:  # noqa: B008
        self.client = FakeClient()
        self.stop = FakeStop()
        self.waits = 0
        self.place = RocketMQQueue(self.client, None, QUEUE, writer, "me", TIMING, self.stop, self._waits)  # type: ignore[arg-type]

    def _waits(self) -> None:
        self.waits += 1

    @property
    def locks(self) -> int:
        return self.client.used.asked.count(RequestCode.LOCK_BATCH_MQ)


def unavailable(sub: str) -> RocketMQUnavailableError:
    return RocketMQUnavailableError(sub, "away")


def test_a_lock_is_believed_in_and_prolonged_when_it_is_time_to() -> None:
    case = Case()
    assert not case.place.keep()
    case.place.acquire()
    assert case.place.keep()
    assert case.locks == 1
    time.sleep(TIMING.lock_renew + 1)
    assert case.place.keep()
    assert case.place.keep()
    assert case.locks == 2
    time.sleep(TIMING.lock_trust + 1)
    # It may have been another's: prolonging it proves nothing.
    assert not case.place.keep()
    assert case.locks == 2


def test_a_prolongation_that_is_refused_or_late_is_none() -> None:
    for spoil in ({"grants": False}, {"takes": 12.0}):
        case = Case()
        case.place.acquire()
        time.sleep(TIMING.lock_renew + 1)
        vars(case.client.used).update(spoil)
        assert not case.place.keep()


def test_a_lock_ends_with_its_connection() -> None:
    case = Case()
    case.place.acquire()
    case.client.used.close()
    assert not case.place.keep()
    case.place.acquire()
    assert case.place.keep()


def test_anothers_lock_is_waited_for_and_named_at_the_end() -> None:
    case = Case()
    case.client.used.grants = False
    with pytest.raises(LockError) as caught:
        case.place.acquire()
    assert caught.value.sub == "HELD_BY_OTHER"
    assert str(QUEUE) in caught.value.message
    # Not at once, and then every few seconds.
    assert TIMING.lock_wait / (2 * TIMING.lock_yield) < case.waits < TIMING.lock_wait / (TIMING.lock_yield / 2)


def test_an_attempt_that_was_abandoned_waits_no_more() -> None:
    case = Case()
    case.client.used.grants = False
    case.stop.is_set = True
    with pytest.raises(SinkError) as caught:
        case.place.acquire()
    assert caught.value.sub == "TOKEN_GONE"


def test_after_an_unknown_outcome_the_connection_is_dropped_and_the_next_lock_waits() -> None:
    case = Case()
    case.place.acquire()
    used = case.place._sending_on = case.client.used  # type: ignore[assignment]
    case.place.pause(unavailable("TIMEOUT"), 1)
    assert used.closed
    assert not case.place.keep()
    began = time.monotonic()
    case.place.acquire()
    assert time.monotonic() - began >= TIMING.settle
    began = time.monotonic()
    case.place.acquire()
    assert time.monotonic() - began < TIMING.settle


def test_nobody_is_let_in_before_what_was_given_up_is_settled() -> None:
    case = Case()
    case.place.acquire()
    case.place._sending_on = case.client.used  # type: ignore[assignment]
    case.place.pause(unavailable("CONNECTION_LOST"), 1)
    began = time.monotonic()
    case.client.connection("host:1", 0)
    case.place.release(0)
    assert time.monotonic() - began >= TIMING.settle
    assert case.client.used.asked[-1] == RequestCode.UNLOCK_BATCH_MQ


@pytest.mark.parametrize(("sub", "doubts"), [("BUSY", False), ("UNAVAILABLE", True), ("NO_BROKER", True)])
def test_a_broker_that_is_busy_full_or_away_is_borne_with_for_a_while(sub: str, doubts: bool) -> None:
    case = Case(None)
    error = unavailable(sub)
    began, failures = time.monotonic(), 0
    with pytest.raises(RocketMQUnavailableError) as caught:  # noqa: PT012
        while True:
            failures += 1
            case.place.pause(error, failures)
    assert caught.value is error
    assert TIMING.patience <= time.monotonic() - began < TIMING.patience + 2
    assert bool(case.client.doubts) is doubts
