"""A function that fails once and then works, whichever process calls it. Files record which calls have failed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.listening.listener import is_async


class FailedOnce(Exception):
    """The exception that a function made by `TemporaryStore.fails_once` raises."""


class FailsOnce:
    """Calls a function, but raises `FailedOnce` at the first call, or at the first call with each key."""

    def __init__(self, function: Callable[..., Any], folder: Path, *, per_key: bool, after: bool) -> None:
        self._function = function
        self._name = name_of(function)
        self._folder = folder
        self._per_key = per_key
        self._after = after

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self._failing(args):
            return self._function(*args, **named)

    @contextlib.contextmanager
    def _failing(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Raise `FailedOnce` before or after the block, if this call is to fail."""
        keys: list[str | None] = self._keys(args) if self._per_key else [None]
        if not self._after:
            self._fail(keys)
        yield
        if self._after:
            self._fail(keys)

    def _keys(self, args: tuple[Any, ...]) -> list[str | None]:
        try:
            return list(dict.fromkeys(message.sharding_key for message in args[0]))
        except (AttributeError, IndexError, TypeError) as error:
            raise OptionError(
                OptionCondition.INVALID,
                f"fails_once(per_key=True) is for listeners, whose messages have a sharding_key, but {self._name} was called with "
                f"{', '.join(type(arg).__name__ for arg in args) or 'nothing'}. Leave per_key out",
            ) from error

    def _fail(self, keys: list[str | None]) -> None:
        # Record all keys, so that a call with several keys fails only once.
        fresh = [key for key in keys if self._first(key)]
        if fresh:
            what = f" for the key {fresh[0]}" if self._per_key else ""
            raise FailedOnce(f"fails_once made the first call of {self._name}{what} fail")

    def _first(self, key: str | None) -> bool:
        """Return whether this is the first call (with this key) in any process. Only one call gets True."""
        place = f"{re.sub(r'[^-.0-9A-Za-z]', '_', self._name)}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        try:
            (self._folder / place).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class AsyncFailsOnce(FailsOnce):
    """Does the same for an async function."""

    async def __call__(self, *args: Any, **named: Any) -> Any:
        with self._failing(args):
            return await self._function(*args, **named)


def failing(function: Any, folder: Path, *, per_key: bool, after: bool) -> Any:
    """Return a function that fails once. For a class, return a class whose objects wrap its objects and all together fail once.

    A listener that is a class stays a class, because each thread makes a separate object of it.
    """
    kind = AsyncFailsOnce if is_async(function) else FailsOnce
    if not isinstance(function, type):
        return kind(function, folder, per_key=per_key, after=after)

    class Failing(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(function(), folder, per_key=per_key, after=after)

    Failing.__name__ = Failing.__qualname__ = function.__name__
    return Failing


def name_of(function: Any) -> str:
    """Return the name of a function or of the function in a partial, or the class name of another object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name)
