"""A function that fails once and then works, whichever process calls it. Files record which calls have failed."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError


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
        keys: list[str | None] = self._keys(args) if self._per_key else [None]
        if self._after:
            returned = self._function(*args, **named)
            self._fail(keys)
            return returned
        self._fail(keys)
        return self._function(*args, **named)

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


def failing_class(made: type, folder: Path, *, per_key: bool, after: bool) -> type:
    """Return a class whose objects wrap objects of the class ``made``. All objects together fail once.

    Use it for listeners that are classes, because each thread makes a separate object of such a class.
    """

    class Failing:
        def __init__(self) -> None:
            self._call = FailsOnce(made(), folder, per_key=per_key, after=after)

        def __call__(self, *args: Any, **named: Any) -> Any:
            return self._call(*args, **named)

    Failing.__name__ = Failing.__qualname__ = made.__name__
    return Failing


def name_of(function: Any) -> str:
    """Return the name of a function or of the function in a partial, or the class name of another object."""
    while isinstance(function, functools.partial):
        function = function.func
    found = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(found)
