"""Calls of listeners: in threads, and of objects that a worker keeps.

A thread lives as long as its Python worker. A task borrows threads, and gives them back. So each thread keeps the objects that
were made in it, which some libraries demand of a connection to a database (sqlite3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from orderedmq import forks

T = TypeVar("T")
R = TypeVar("R")


class _Local(threading.local):
    """The objects of the current thread, by their class."""

    def __init__(self) -> None:
        self.objects: dict[type, Any] = {}


class _Process:
    """What this process keeps. A child begins anew after a fork: it has none of the threads, and may not use the connections."""

    def __init__(self) -> None:
        self.local = _Local()
        self.idle: list[_Thread] = []


def kept(listener: Any, around: Callable[[Any], Any] | None = None) -> Any:
    """Return the function to be called: ``listener`` itself or, if it is a class, one that calls the current thread's object.

    ``around`` makes what is called in place of the function or object; it does not cover the making of the object.

    The object is made by ``listener()`` at the thread's first call, and kept until the process ends. It is known by its class: a
    class that Spark sends to a worker with each task is the same class there (cloudpickle tracks those that a program defines).
    If making it raises an exception, that is the call's, and the next call tries again.
    """
    if not isinstance(listener, type):
        return listener if around is None else around(listener)
    made: type = listener

    def call(messages: Any, context: Any) -> Any:
        objects = _process.local.objects
        one = objects.get(made)
        if one is None:
            one = objects[made] = made()
        return (one if around is None else around(one))(messages, context)

    return call


class Calls(Generic[T, R]):
    """The calls of one task, at most ``most`` at a time, in threads of their own. An object belongs to one thread."""

    def __init__(self, function: Callable[[T], R], most: int) -> None:
        self._function = function
        self._most = most
        self._todo: SimpleQueue[T | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[T, R | None, BaseException | None]] = SimpleQueue()
        self._threads: list[_Thread] = []
        self._under_way = 0
        self._ended = False
        #: Whether the threads find their own way back, because their calls go on.
        self.abandoned = False

    @property
    def answered(self) -> bool:
        """Whether `answer` returns at once."""
        return not self._answers.empty()

    def start(self, work: T) -> None:
        """Call the function with ``work`` in a thread."""
        if self._under_way == len(self._threads) < self._most:
            thread = _borrow()
            self._threads.append(thread)
            thread.inbox.put(self)
        self._under_way += 1
        self._todo.put(work)

    def answer(self, timeout: float | None = None) -> tuple[T, R] | None:
        """Wait for a call to return. Return its work and answer; None after ``timeout`` seconds.

        Raises what the function raised.
        """
        try:
            work, answer, raised = self._answers.get(timeout=timeout)
        except Empty:
            return None
        self._under_way -= 1
        if raised is not None:
            raise raised
        return work, answer  # type: ignore[return-value]

    def end(self) -> None:
        """Let no further call start, and give the threads back. It does not wait for calls that are under way."""
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
            # They will take the next task's inbox when they have left this one.
            _process.idle.extend(reversed(self._threads))
        for _ in self._threads:
            self._todo.put(None)

    def serve(self) -> None:
        """Make calls until the end of the task. A thread's part."""
        while (work := self._todo.get()) is not None:
            try:
                self._answers.put((work, self._function(work), None))
            except BaseException as raised:
                self._answers.put((work, None, raised))
            del work


class _Thread(threading.Thread):
    """A thread that makes calls for one task after another."""

    def __init__(self) -> None:
        super().__init__(name="orderedmq-listener", daemon=True)
        self.inbox: SimpleQueue[Calls[Any, Any]] = SimpleQueue()

    def run(self) -> None:
        while True:
            calls = self.inbox.get()
            calls.serve()
            if calls.abandoned:
                _process.idle.append(self)
            del calls


def _borrow() -> _Thread:
    try:
        return _process.idle.pop()
    except IndexError:
        thread = _Thread()
        thread.start()
        return thread


_process: Final = _Process()
forks.call_in_child(_process.__init__)  # type: ignore[misc]
