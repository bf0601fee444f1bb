"""Calls listeners in the task's thread, in other threads, or in an event loop, and keeps the objects of listener classes.

A thread lives as long as its Python worker. A task borrows threads and gives them back. So a listener's object is always used in the
thread that made it, as some libraries require for a database connection (sqlite3). All calls of async listeners run in one event loop, in
a thread that lives as long as the worker, so the objects of these listeners and the connections that belong to the loop are also kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import wraps
from queue import Empty, SimpleQueue
from time import monotonic
from types import coroutine
from typing import Any, Final, Generic, TypeVar

from orderedmq.listening.listener import is_async, name_of

logger = logging.getLogger("orderedmq")

T = TypeVar("T")
R = TypeVar("R")

#: Seconds for which the calls of a task wait for cancelled calls of an earlier task to end.
PATIENCE: Final = 1.0
#: Seconds between two checks whether these calls have ended.
_LOOK: Final = 0.001


class _Local(threading.local):
    """The objects of the current thread, by their class."""

    def __init__(self) -> None:
        self.objects: dict[type, Any] = {}


class _Process:
    """The objects and threads of one process."""

    def __init__(self) -> None:
        self.local = _Local()
        self.idle: list[_Thread] = []
        self.loop: _Loop | None = None


def function_of(listener: Any, around: Callable[[Any], Any] | None = None) -> Any:
    """Return the function to call: ``listener`` itself or, if it is a class, a function that calls the current thread's object.

    ``around`` is a decorator for the function or object; it does not cover the creation of the object. The returned function is async if
    the listener is. A cancelled call of an async listener raises an Exception (`Cancelled`).

    The object is created by ``listener()`` at the thread's first call and kept until the process ends. The object is found again by its
    class. Spark sends the class to the worker with each task, but the worker gets the same class each time, because cloudpickle tracks
    the classes that a program defines. If ``listener()`` raises an exception, the call raises it, and the next call tries again.
    """
    asynchronous = is_async(listener)
    watch = watched(listener) if asynchronous else None

    def decorate(called: Any) -> Any:
        if watch is not None:
            called = watch(called)
        return called if around is None else around(called)

    if not isinstance(listener, type):
        return decorate(listener)

    #: The decorated function for each object, by the object's id.
    ready: dict[int, Any] = {}

    def own() -> Any:
        objects = _process().local.objects
        instance = objects.get(listener)
        if instance is None:
            instance = objects[listener] = listener()
        called = ready.get(id(instance))
        if called is None:
            called = ready[id(instance)] = decorate(instance)
        return called

    if asynchronous:

        @wraps(listener, updated=())
        async def call_async(messages: Any, context: Any) -> Any:
            return await own()(messages, context)

        return call_async

    @wraps(listener, updated=())
    def call(messages: Any, context: Any) -> Any:
        return own()(messages, context)

    return call


class Calls(ABC, Generic[T, R]):
    """The calls of one task. Only the task's thread calls the methods."""

    def __init__(self) -> None:
        #: The work and the answers of calls that have returned, some at a time, or the exception of a call.
        self._returned: SimpleQueue[list[tuple[T, R]] | BaseException] = SimpleQueue()

    @property
    def answered(self) -> bool:
        """Whether `answers` returns without waiting."""
        return not self._returned.empty()

    @abstractmethod
    def start(self, work: T) -> None:
        """Call the function with ``work``."""

    def answers(self, timeout: float | None = None) -> list[tuple[T, R]]:
        """Wait for calls to return. Return the work and the answers of some that have, or an empty list after ``timeout`` seconds.

        Raises the exception of the function.
        """
        try:
            returned = self._returned.get(timeout=timeout)
        except Empty:
            return []
        if isinstance(returned, BaseException):
            raise returned
        return returned

    def cancel(self) -> None:
        """Cancel the running calls if possible. `answers` still returns their answers. The caller must not start calls after this."""

    def end(self) -> None:
        """Prevent further calls from starting. Running calls are cancelled if that is possible. This does not wait for them."""


class Inline(Calls[T, R]):
    """Calls in the task's own thread. A call has returned when `start` returns."""

    def __init__(self, function: Callable[[T], R]) -> None:
        super().__init__()
        self._function = function
        self._answers: list[tuple[T, R]] = []

    @property
    def answered(self) -> bool:
        return bool(self._answers)

    def start(self, work: T) -> None:
        self._answers.append((work, self._function(work)))

    def answers(self, timeout: float | None = None) -> list[tuple[T, R]]:  # noqa: ARG002
        answers, self._answers = self._answers, []
        return answers


class Threads(Calls[T, R]):
    """At most ``most`` calls at a time, in separate threads. Running calls cannot be cancelled, because threads cannot be interrupted."""

    def __init__(self, function: Callable[[T], R], most: int) -> None:
        super().__init__()
        self._function = function
        self._most = most
        self._todo: SimpleQueue[T | None] = SimpleQueue()
        self._threads: list[_Thread] = []
        self._under_way = 0
        self._ended = False
        #: Whether calls were still running when the task ended. In that case, each thread adds itself to the idle threads when its
        #: call has returned.
        self.abandoned = False

    def start(self, work: T) -> None:
        if self._under_way == len(self._threads) < self._most:
            thread = _borrow()
            self._threads.append(thread)
            thread.inbox.put(self)
        self._under_way += 1
        self._todo.put(work)

    def answers(self, timeout: float | None = None) -> list[tuple[T, R]]:
        answers = super().answers(timeout)
        self._under_way -= len(answers)
        return answers

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self.abandoned = self._under_way > 0
        while True:
            try:
                self._todo.get_nowait()
            except Empty:
                break
        if not self.abandoned:
            # A thread serves the next task only after it has taken the None that is put into this task's queue below.
            _process().idle.extend(reversed(self._threads))
        for _ in self._threads:
            self._todo.put(None)

    def serve(self) -> None:
        """Make calls until the end of the task. Each thread runs this."""
        while (work := self._todo.get()) is not None:
            try:
                self._returned.put([(work, self._function(work))])
            except BaseException as raised:
                self._returned.put(raised)
            del work


class Awaiting(Calls[T, R]):
    """Calls of a function that returns coroutines, in the worker's event loop."""

    def __init__(self, function: Callable[[T], Coroutine[Any, Any, R]]) -> None:
        super().__init__()
        self._function = function
        self._todo: deque[T] = deque()
        self._scheduled = self._ended = False
        #: The running calls by the id of their work. Only the loop's thread uses this.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        #: Calls that have returned in this iteration of the loop. The task's thread gets them together, because each time it wakes up, the
        #: loop's thread has to wait for the interpreter.
        self._ended_now: list[tuple[T, R]] = []
        process = _process()
        if process.loop is None:
            process.loop = _Loop()
        self._loop, self._cancelled = process.loop.loop, process.loop.cancelled
        #: The loop's time from which calls begin even if cancelled calls of an earlier task still run; None before the first check.
        self._patience: float | None = None

    def start(self, work: T) -> None:
        self._todo.append(work)
        # One call of `_begin` starts all the work that was added before it runs.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def end(self) -> None:
        self._ended = True
        self.cancel()

    # -- the loop's part

    def _begin(self) -> None:
        self._scheduled = False
        # A cancelled call of an earlier task may be for the same key, and it ends only some iterations of the loop later.
        if self._todo and any(task not in self._tasks.values() for task in self._cancelled):
            now = self._loop.time()
            self._patience = self._patience or now + PATIENCE
            if now < self._patience:
                self._scheduled = True
                self._loop.call_later(_LOOK, self._begin)
                return
        self._begin_all()

    def _begin_all(self) -> None:
        while self._todo and not self._ended:
            work = self._todo.popleft()
            self._tasks[id(work)] = self._loop.create_task(self._run(work))

    async def _run(self, work: T) -> None:
        if self._ended:
            # The task has ended since the call was planned.
            del self._tasks[id(work)]
            return
        try:
            answer = await self._function(work)
        except BaseException as raised:
            # Catch SystemExit and KeyboardInterrupt too, because in an asyncio task they would end the loop.
            self._returned.put(raised)
        else:
            if not self._ended_now:
                self._loop.call_soon(self._give)
            self._ended_now.append((work, answer))
        del self._tasks[id(work)]

    def _give(self) -> None:
        returned, self._ended_now = self._ended_now, []
        self._returned.put(returned)

    def _cancel(self) -> None:
        self._begin_all()
        for task in self._tasks.values():
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
        # Cancel in the next iteration of the loop. By then each task has begun, so each call gets an answer.
        self._loop.call_soon(self._cancel_begun)

    def _cancel_begun(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()


class _Thread(threading.Thread):
    """A thread that makes calls for one task after another."""

    def __init__(self) -> None:
        super().__init__(name="orderedmq-listener", daemon=True)
        self.inbox: SimpleQueue[Threads[Any, Any]] = SimpleQueue()

    def run(self) -> None:
        while True:
            calls = self.inbox.get()
            calls.serve()
            if calls.abandoned:
                _process().idle.append(self)
            del calls


def _borrow() -> _Thread:
    try:
        return _process().idle.pop()
    except IndexError:
        thread = _Thread()
        thread.start()
        return thread


class _Loop(threading.Thread):
    """The thread of the event loop that runs all async calls of this process."""

    def __init__(self) -> None:
        super().__init__(name="orderedmq-listener-loop", daemon=True)
        self.loop = asyncio.new_event_loop()
        #: Calls that were cancelled and have not ended yet. Only the loop's thread uses this.
        self.cancelled: set[asyncio.Task[None]] = set()
        self.start()

    def run(self) -> None:
        while True:
            try:
                self.loop.run_forever()
            except BaseException:
                # A task that the listener has started without awaiting it raised SystemExit or KeyboardInterrupt.
                logger.exception("a task of an async listener tried to end the event loop, which continues")


#: By process number. A child after a fork has its own, because its parent's threads do not run in it.
_processes: Final[dict[int, _Process]] = {}


def _process() -> _Process:
    return _processes.get(os.getpid()) or _processes.setdefault(os.getpid(), _Process())


#: (messages, context) → coroutine that returns the status.
AsyncCalled = Callable[[Sequence[Any], Any], Coroutine[Any, Any, Any]]

#: If a call runs for at least this many seconds without an await, this counts as a block.
BLOCK: Final = 0.005
#: A warning is logged after WORTH seconds of blocks in total, if there was at least one block per ONE_OF calls. A busy machine, another
#: thread or an import makes single calls slow, but a listener that blocks does so in most calls.
WORTH: Final = 0.1
ONE_OF: Final = 10
#: The calls with which a task begins are all watched, and one of SAMPLE later calls, because that costs as much as an eighth of a call.
BEGINNING: Final = 200
SAMPLE: Final = 16


class Cancelled(Exception):
    """A call was cancelled. This is an Exception, unlike asyncio.CancelledError, so that callers handle it as a failed call."""


def watched(listener: Any) -> Callable[[Any], AsyncCalled]:
    """Return a decorator that watches the calls of one task, and logs one warning if they block the loop.

    The decorator makes an async function from the listener's function or object. ``listener`` is the function, object or class that the
    warning names.
    """
    watch = _Watch(listener)

    def decorate(called: Callable[[Sequence[Any], Any], Awaitable[Any]]) -> AsyncCalled:
        @wraps(listener, updated=())
        async def call(messages: Sequence[Any], context: Any) -> Any:
            watched = watch.begins()
            try:
                return await (_timed(called(messages, context), watch) if watched else called(messages, context))
            except asyncio.CancelledError:
                raise Cancelled("the call was cancelled, by its task or by code that it awaited") from None

        return call

    return decorate


class _Watch:
    """Counts the blocks in the calls of one task: a call that does not await blocks all other calls in its event loop."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._begun = self._calls = self._blocks = 0
        self._longest = self._seconds = 0.0
        self._warned = False

    def begins(self) -> bool:
        """Count a call. Return whether it is watched."""
        self._begun += 1
        watched = self._begun <= BEGINNING or not self._begun % SAMPLE
        self._calls += watched
        return watched

    def blocked(self, seconds: float) -> None:
        """Count a block: a call did not await for this many seconds."""
        self._blocks += 1
        self._seconds += seconds
        self._longest = max(self._longest, seconds)
        if self._warned or self._blocks < 2 or self._seconds < WORTH or ONE_OF * self._blocks < self._calls:
            return
        self._warned = True
        logger.warning(
            "the async listener %s blocks its event loop, and with it all other calls of the task: %d times so far, for up to %.0f ms, "
            "%.0f ms in total. Use asyncio.sleep and an async client instead of time.sleep and requests, await asyncio.to_thread(...) for "
            "code that blocks or computes, or make the listener a plain function, which is called in threads",
            name_of(self._listener),
            self._blocks,
            1000 * self._longest,
            1000 * self._seconds,
        )


@coroutine
def _timed(call: Awaitable[Any], watch: _Watch) -> Generator[Any, Any, Any]:
    """Await a call, and report each step between two awaits that took BLOCK seconds or more."""
    steps: Any = call.__await__()
    step, value = steps.send, None
    while True:
        began = monotonic()
        try:
            awaited = step(value)
        except StopIteration as done:
            return done.value
        finally:
            took = monotonic() - began
            if took >= BLOCK:
                watch.blocked(took)
        try:
            step, value = steps.send, (yield awaited)
        except BaseException as raised:
            step, value = steps.throw, raised
