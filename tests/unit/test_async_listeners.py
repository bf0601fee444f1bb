"""Async listeners in tasks on a real store: many calls await at the same time, keep the order per key, are cancelled, and are watched."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from pyspark.sql import DataFrame

from ordered_source import ConsumeOrderlyStatus, consume_concurrently, consume_orderly
from ordered_source.listener import calls, engine_task
from ordered_source.listener.engine_task import Consumer
from orderedmq.errors import ListenerError, LockError, OptionError
from orderedmq.listening.key_engine import OrderPerKey
from tests.unit.test_engine_task import QUEUE, Rig, Running, rig
from tests.waits import until

__all__ = ["rig"]

SUCCESS, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
MANY = 1000


class Await:
    """A listener whose calls await what the test chooses. It records the keys whose calls have begun, are running and were cancelled."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.under_way: set[str] = set()
        self.cut_off: list[str] = []
        self.cleaning_up: set[str] = set()
        self.clean_up = 0.02
        self.most = 0
        self.threads: set[int] = set()
        #: The action of a call, by key. By default, a call awaits `go`.
        self.acts: dict[str, Callable[[], Any]] = {}
        self.going = threading.Event()

    async def __call__(self, messages: Sequence[Any], context: Any) -> Any:
        key = messages[0].sharding_key
        assert key not in self.under_way
        self.begun.append(key)
        self.under_way.add(key)
        self.most = max(self.most, len(self.under_way))
        self.threads.add(threading.get_ident())
        try:
            if key in self.acts:
                return await self.acts[key]()
            while not self.going.is_set():
                await asyncio.sleep(0.001)
            return SUCCESS
        except asyncio.CancelledError:
            # The clean-up of a cancelled call takes some time.
            self.cleaning_up.add(key)
            await asyncio.sleep(self.clean_up)
            self.cut_off.append(key)
            raise
        finally:
            self.under_way.discard(key)


def by_key(listener: Any, **settings: Any) -> Consumer:
    return Consumer(listener, OrderPerKey(**{"concurrency": MANY, "suspend_current_queue_time_millis": 10, **settings}))


# -- order ------------------------------------------------------------------------------------------------------------------


@pytest.mark.holds("async listener")
def test_a_thousand_calls_await_at_once_in_one_thread_each_of_another_key(rig: Rig) -> None:
    listener = Await()
    rig.send(*(f"k{number % MANY}" for number in range(2 * MANY + 7)))
    running = Running(rig.task(by_key(listener)))
    until(lambda: len(listener.under_way) == MANY, "all keys are at the listener")
    listener.going.set()
    running.join(60)
    assert (running.error, running.rows, listener.most) == (None, 2 * MANY + 7, MANY)
    assert len(listener.threads) == 1
    assert listener.threads.isdisjoint({threading.get_ident(), running.ident})


# -- cancellation --------------------------------------------------------------------------------------------------------------


def release(rig: Rig, listener: Await, key: str, others: int) -> None:
    """Make the call of ``key`` release the lock and fail as soon as more than ``others`` calls are running."""

    async def lose() -> Any:
        while len(listener.under_way) <= others:
            await asyncio.sleep(0.001)
        rig.broker.admin.release("g", [QUEUE], force=True)
        return SUSPEND

    listener.acts[key] = lose


@pytest.mark.holds("lost lock")
@pytest.mark.parametrize("attempts", [2, 1], ids=["noticed before a retry", "noticed when a message is parked"])
def test_after_a_lost_lock_calls_that_await_are_cut_off_and_the_task_fails_when_they_have_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    monkeypatch.setattr("orderedmq.listening.engine.RETRY_TRUST", -1.0)
    listener = Await()
    release(rig, listener, "bad", 3)
    rig.send("bad", *"abc", "later")
    running = Running(rig.task(by_key(listener, concurrency=4, in_batch_attempts=attempts)))
    running.join(60)
    assert isinstance(running.error, LockError)
    # A call that was already passed to the loop may still begin. It is also cancelled.
    assert sorted(listener.cut_off) == sorted({*listener.begun} - {"bad"})
    assert {*"abc"} <= {*listener.cut_off}
    assert listener.under_way == set()
    assert rig.lying() == {}


@pytest.mark.holds("lost lock")
def test_a_lost_lock_is_noticed_while_all_calls_await(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.listening.engine.HOLDER_TRUST", 0.05)
    listener = Await()
    rig.send(*"abc")
    running = Running(rig.task(by_key(listener, concurrency=3)))
    until(lambda: len(listener.under_way) == 3, "all calls await")
    rig.broker.admin.release("g", [QUEUE], force=True)
    running.join(60)
    assert isinstance(running.error, LockError)
    assert sorted(listener.cut_off) == [*"abc"]


def test_a_closed_task_cancels_its_calls_and_frees_the_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_task, "GIVE_TOGETHER", 1)
    listener = Await()
    listener.clean_up = 0.2

    async def first() -> Any:
        while len(listener.under_way) < 3:
            await asyncio.sleep(0.001)
        return SUCCESS

    listener.acts["first"] = first
    rig.send("first", *"abcd")
    task = rig.task(by_key(listener, concurrency=3))
    next(task)
    task.close()  # type: ignore[attr-defined]
    until(lambda: {*listener.cleaning_up, "first"} == {*listener.begun}, "the calls are cancelled")
    assert len(listener.begun) > 2
    listener.going.set()
    listener.acts.clear()
    # A call of a key would fail if the cancelled call of this key still ran. The closed task has recorded that the first call is done.
    assert sorted(row[:3] for row in rig.run(by_key(listener, concurrency=3))) == [
        (offset, "SUCCESS", min(offset, 1)) for offset in range(5)
    ]


def test_no_call_begins_after_the_end_of_its_task() -> None:
    """The task ends when the loop has planned the call, and has not begun it."""
    begun: list[int] = []

    async def listen(number: int) -> None:
        begun.append(number)

    awaiting: calls.Awaiting[int, None] = calls.Awaiting(listen)
    loop = awaiting._loop
    idle, started, planned, ended = (threading.Event() for _ in range(4))

    def wait_until(event: threading.Event, reached: threading.Event) -> None:
        reached.set()
        assert event.wait(30)

    loop.call_soon_threadsafe(wait_until, started, idle)
    assert idle.wait(30)
    awaiting.start(1)
    loop.call_soon_threadsafe(wait_until, ended, planned)
    started.set()
    assert planned.wait(30)
    awaiting.end()
    ended.set()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(30)
    assert begun == []


def test_retries_a_call_whose_awaited_task_was_cancelled(rig: Rig) -> None:
    tries: list[int] = []

    async def listen(messages: Sequence[Any], context: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            inner = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner
        return SUCCESS

    rig.send("a")
    [row] = [row for batch in rig.task(by_key(listen)) for row in batch.to_pylist()]
    assert (row["status"], row["attempts"]) == ("SUCCESS", 2)
    assert row["error"].startswith("Cancelled: ")


# -- objects, hooks -----------------------------------------------------------------------------------------------------------


class Client:
    """A listener that is a class. Its attributes belong to the loop in which it was created."""

    made: ClassVar[list[int]]

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.made.append(threading.get_ident())

    async def __call__(self, messages: Sequence[Any], context: Any) -> Any:
        await asyncio.sleep(0)
        assert self.loop is asyncio.get_running_loop()
        assert self.made == [threading.get_ident()]
        return SUCCESS


def test_the_loop_makes_one_object_of_a_class(rig: Rig) -> None:
    class Own(Client):
        made: ClassVar[list[int]] = []

    for _ in range(3):
        rig.send(*"abcdefghij")
        told = rig.run(by_key(Own))
        assert [one[1:3] for one in told] == [("SUCCESS", 1)] * 10
    assert len(Own.made) == 1
    assert threading.get_ident() not in Own.made


def test_recognises_async_objects_and_partial_functions(rig: Rig) -> None:
    class Ledger:
        async def __call__(self, messages: Sequence[Any], context: Any) -> Any:
            return SUCCESS

        async def book(self, account: str, messages: Sequence[Any], context: Any) -> Any:
            await asyncio.sleep(0)
            return SUCCESS if account == "cash" else None

    for listener in (Ledger(), functools.partial(Ledger().book, "cash"), Ledger().__call__):
        rig.send("a")
        assert [one[1:3] for one in rig.run(by_key(listener))] == [("SUCCESS", 1)]


def test_a_child_has_a_loop_of_its_own_after_a_fork() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    def answer() -> Any:
        made: calls.Awaiting[int, int] = calls.Awaiting(double)
        made.start(4)
        return made.answers(30)[0]

    assert answer() == (4, 8)
    child = os.fork()
    if not child:
        os._exit(0 if answer() == (4, 8) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Hook:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def consume_message_before(self, messages: Sequence[Any], context: Any) -> None:
        self.told.append(("before", messages[0].sharding_key, threading.get_ident()))

    def consume_message_after(self, messages: Sequence[Any], context: Any, status: Any, error: Any) -> None:
        self.told.append(("after", messages[0].sharding_key, threading.get_ident(), status, error))


def test_hooks_are_called_in_the_loop_before_a_call_and_when_it_was_awaited_or_cut_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orderedmq.listening.engine.RETRY_TRUST", -1.0)
    listener, hook = Await(), Hook()
    release(rig, listener, "bad", 2)
    rig.send("bad", "a", "b")
    with pytest.raises(LockError):
        rig.run(Consumer(listener, OrderPerKey(concurrency=3, suspend_current_queue_time_millis=10), [hook]))
    assert [one[:2] for one in hook.told[:4]] == [("before", "bad"), ("before", "a"), ("before", "b"), ("after", "bad")]
    after = {one[1]: one[3:] for one in hook.told if one[0] == "after"}
    assert after["bad"] == (SUSPEND, None)
    assert [(status, error.partition(":")[0]) for status, error in (after["a"], after["b"])] == [(None, "Cancelled")] * 2
    assert {one[2] for one in hook.told} == listener.threads


# -- refused listeners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "consume", [consume_orderly, functools.partial(consume_orderly, order=OrderPerKey()), consume_concurrently]
)
def test_refuses_a_hook_that_would_be_awaited_and_a_listener_that_cannot_be_called(consume: Any) -> None:
    class Late(Hook):
        async def consume_message_after(self, messages: Any, context: Any, status: Any, error: Any) -> None:  # type: ignore[override]
            raise AssertionError

    names = ["topic", "broker_name", "queue_id", "queue_offset", "body", "lock_token", "sharding_key", "ticket"]
    df = cast(DataFrame, SimpleNamespace(columns=names, mapInArrow=lambda run, schema: pytest.fail("planned")))
    with pytest.raises(OptionError, match=r"INVALID.*Late.consume_message_after is async, but hooks are not awaited"):
        consume(df, Await(), hooks=[Hook(), Late()])
    for listener in (Hook, Hook(), None):
        with pytest.raises(OptionError, match=r"INVALID.*cannot be called with messages and a context"):
            consume(df, listener)


async def book(messages: Sequence[Any], context: Any) -> Any:
    return SUCCESS


def plain(messages: Sequence[Any], context: Any) -> Any:
    return book(messages, context)


async def forgetful(messages: Sequence[Any], context: Any) -> Any:
    return book(messages, context)


class Plain:
    def __call__(self, messages: Sequence[Any], context: Any) -> Any:
        return book(messages, context)


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize(
    ("listener", "name"), [(plain, "plain"), (forgetful, "forgetful"), (Plain, "Plain"), (Plain(), "Plain")]
)
def test_fails_a_task_whose_listener_returns_a_coroutine(rig: Rig, listener: Any, name: str, concurrency: int) -> None:
    rig.send("a")
    with pytest.raises(
        ListenerError, match=rf"LISTENER.NOT_AWAITED.*test_async_listeners.{name} returned a coroutine.*async def"
    ):
        rig.run(by_key(listener, concurrency=concurrency))
    assert rig.lying() == {}


# -- calls that block the loop --------------------------------------------------------------------------------------------------


def blocks(messages: Sequence[Any], context: Any) -> Any:
    time.sleep(0.06)
    return SUCCESS


async def blocking_now_and_then(messages: Sequence[Any], context: Any) -> Any:
    await asyncio.sleep(0)
    return blocks(messages, context)


@pytest.mark.parametrize("beginning", [6, 0], ids=["every call is watched", "one of two is"])
def test_warns_once_of_a_listener_that_blocks_the_loop(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, beginning: int
) -> None:
    monkeypatch.setattr(calls, "BEGINNING", beginning)
    monkeypatch.setattr(calls, "SAMPLE", 2)
    rig.send(*"abcdef")
    assert len(rig.run(by_key(blocking_now_and_then))) == 6
    [warned] = [record for record in caplog.records if record.name == "orderedmq"]
    assert warned.levelno == logging.WARNING
    text = warned.getMessage()
    assert "test_async_listeners.blocking_now_and_then blocks its event loop" in text
    assert "times so far, for up to" in text
    assert "asyncio.to_thread" in text


def test_does_not_warn_of_a_plain_or_awaiting_listener(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    async def waits(messages: Sequence[Any], context: Any) -> Any:
        await asyncio.sleep(0.06)
        if messages[0].queue_offset % 50 == 0:
            await asyncio.to_thread(time.sleep, 0.06)
        return SUCCESS

    # There are so many messages that even on a busy machine fewer than one call in ten is slow.
    rig.send(*map(str, range(300)))
    assert len(rig.run(by_key(waits))) == 300
    rig.send("a", "b")
    assert len(rig.run(by_key(blocks, concurrency=2))) == 2
    assert [record for record in caplog.records if record.name == "orderedmq"] == []
