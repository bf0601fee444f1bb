"""Shortens the tracebacks of errors that reach Spark, so that a notebook shows one line instead of two screens of frames.

Spark prints the frames of a Python source or sink twice. They do not help a user, because one line of our error says what
happened, where, and what to do. Rules: only OrderedMQError is shortened, because any other error is a bug whose frames are needed.
An exception raised by the user's own function stays as the cause. The whole traceback is logged by ``orderedmq`` at level DEBUG.
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
    """Wrap a function so that it, and a generator that it returns, raise errors of this package without frames and causes."""

    @functools.wraps(call)
    def short(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = call(*args, **kwargs)
        except OrderedMQError as error:
            raise _cut(error) from _users_error(error)
        return cast(T, _rows(result)) if isinstance(result, Generator) else result

    return short


def concise_calls(kind: C) -> C:
    """Apply `concise` to the constructor and the public methods of a class, which Spark calls. Return the class."""
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
    """Return the exception that the user's code raised, if the error has one."""
    return error.__cause__ if error.from_users_code else None
