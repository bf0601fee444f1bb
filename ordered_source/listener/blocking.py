"""Watches the calls of an async listener: a call that does not await keeps its event loop from all other calls."""

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

#: (messages, context) → status, when it is awaited.
AsyncCalled = Callable[[Sequence[Any], Any], Coroutine[Any, Any, Any]]

#: Seconds without an await that count as a block.
BLOCK: Final = 0.005
#: What is worth a warning: so many seconds in blocks, and a block in one call of so many. A busy machine, another thread or an import makes
#: a call slow now and then, and a listener that blocks does it all the time.
WORTH: Final = 0.1
ONE_OF: Final = 10


class Cancelled(Exception):
    """A call was cancelled. An Exception, so that all around the call see a call that failed."""


def watched(listener: Any) -> Callable[[Any], AsyncCalled]:
    """Return what watches the calls of one task. ``listener`` is what a warning names, a function, an object or a class.

    What is returned makes an async function of the listener's function or object. It logs a warning, once, if calls block the loop.
    """
    watch = _Watch(listener)

    def made(called: Callable[[Sequence[Any], Any], Awaitable[Any]]) -> AsyncCalled:
        @wraps(listener, updated=())
        async def call(messages: Sequence[Any], context: Any) -> Any:
            watch.calls += 1
            try:
                return await _timed(called(messages, context), watch)
            except asyncio.CancelledError:
                raise Cancelled("the call was cancelled, by its task or in what it awaited") from None

        return call

    return made


class _Watch:
    """What the calls of one task have blocked so far."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self.calls = self._blocks = 0
        self._longest = self._seconds = 0.0
        self._warned = False

    def blocked(self, seconds: float) -> None:
        """A call did not await for this long."""
        self._blocks += 1
        self._seconds += seconds
        self._longest = max(self._longest, seconds)
        if self._warned or self._blocks < 2 or self._seconds < WORTH or ONE_OF * self._blocks < self.calls:
            return
        self._warned = True
        log.warning(
            "the async listener %s blocks its event loop, and with it all other calls of the task: %d times so far, for up to %.0f ms, "
            "%.0f ms in all. Await what waits (asyncio.sleep and an async client, not time.sleep and requests), or await "
            "asyncio.to_thread(...) for what blocks or computes; or make the listener a plain function, which is called in threads",
            name_of(self._listener),
            self._blocks,
            1000 * self._longest,
            1000 * self._seconds,
        )


@coroutine
def _timed(call: Awaitable[Any], watch: _Watch) -> Generator[Any, Any, Any]:
    """Await a call, and tell how long each of its steps from one await to the next took, if that was long."""
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
