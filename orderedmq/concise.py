"""Shortens the tracebacks of errors that reach Spark. A notebook then shows one line, not two screens of frames.

Spark shows the frames of a Python source or sink twice, and our errors say what, where and the remedy in one line; a user
cannot do anything with the frames. Rules: only OrderedMQError is shortened; any other error is a fault and keeps everything. An
exception of the user's own function stays as the cause. The whole traceback goes to the logger ``orderedmq``, level DEBUG.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from orderedmq.errors import OrderedMQError

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

log = logging.getLogger("orderedmq")


def concise(call: Callable[P, T]) -> Callable[P, T]:
    """Return the same function, but errors of this package have no frames or causes, also those from a generator that it returns."""

    @functools.wraps(call)
    def short(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = call(*args, **kwargs)
        except OrderedMQError as error:
            raise _cut(error) from _users_error(error)
        return cast(T, _rows(result)) if isinstance(result, Generator) else result

    return short


def concise_calls(kind: C) -> C:
    """Return the class, with its constructor and public methods, which Spark calls, made concise."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, concise(member))
    return kind


def _rows(rows: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        return (yield from rows)
    except OrderedMQError as error:
        raise _cut(error) from _users_error(error)


def _cut(error: OrderedMQError) -> OrderedMQError:
    log.debug("%s", error, exc_info=error)
    return error.with_traceback(None)


def _users_error(error: OrderedMQError) -> BaseException | None:
    """Return the exception of the user's own code, if it raised one."""
    return error.__cause__ if error.from_users_code else None
