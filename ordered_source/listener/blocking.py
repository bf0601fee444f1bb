"""Watches the calls of an async listener, because a call that does not await blocks all other calls in its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import wraps
from time import monotonic
from types import coroutine
from typing import Any, Final

from orderedmq.listening.listener import name_of

log = logging.getLogger("orderedmq")

#: (messages, context) → coroutine that returns the status.
AsyncCalled = Callable[[Sequence[Any], Any], Coroutine[Any, Any, Any]]

#: If a call runs for at least this many seconds without an await, this counts as a block.
BLOCK: Final = 0.005
#: A warning is logged after WORTH seconds of blocks in total, if there was at least one block per ONE_OF calls. A busy machine, another
#: thread or an import makes single calls slow, but a listener that blocks does so in most calls.
WORTH: Final = 0.1
ONE_OF: Final = 10


class Cancelled(Exception):
    """A call was cancelled. This is an Exception, unlike asyncio.CancelledError, so that callers handle it as a failed call."""


def watched(listener: Any) -> Callable[[Any], AsyncCalled]:
    """Return a decorator that watches the calls of one task, and logs one warning if they block the loop.

    The decorator makes an async function from the listener's function or object. ``listener`` is the function, object or class that the
    warning names.
    """
    watch = _Watch(listener)

    def made(called: Callable[[Sequence[Any], Any], Awaitable[Any]]) -> AsyncCalled:
        @wraps(listener, updated=())
        async def call(messages: Sequence[Any], context: Any) -> Any:
            watch.calls += 1
            try:
                return await _timed(called(messages, context), watch)
            except asyncio.CancelledError:
                raise Cancelled("the call was cancelled, by its task or by code that it awaited") from None

        return call

    return made


class _Watch:
    """Counts the blocks in the calls of one task."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self.calls = self._blocks = 0
        self._longest = self._seconds = 0.0
        self._warned = False

    def blocked(self, seconds: float) -> None:
        """Count a block: a call did not await for this many seconds."""
        self._blocks += 1
        self._seconds += seconds
        self._longest = max(self._longest, seconds)
        if self._warned or self._blocks < 2 or self._seconds < WORTH or ONE_OF * self._blocks < self.calls:
            return
        self._warned = True
        log.warning(
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
