"""Short tracebacks where Spark calls: an error of this package arrives in a notebook as its one line, not under two screens of frames.

Spark shows the frames of a Python source or sink twice, and our errors say what, where and the remedy in one line; the way there helps
nobody who cannot change it. Rules: only OrderedMQError is shortened, any other error is a fault and keeps everything. What a user's own
function raised stays as the cause. The whole traceback goes to the logger ``orderedmq``, level DEBUG.
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
    """The same function, whose errors of this package have no frames and causes; also while a generator that it returns is run."""

    @functools.wraps(call)
    def short(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = call(*args, **kwargs)
        except OrderedMQError as error:
            raise _cut(error) from _users(error)
        return cast(T, _rows(result)) if isinstance(result, Generator) else result

    return short


def concise_calls(kind: C) -> C:
    """The class with its constructor and its public methods concise: those that Spark calls."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, concise(member))
    return kind


def _rows(rows: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        return (yield from rows)
    except OrderedMQError as error:
        raise _cut(error) from _users(error)


def _cut(error: OrderedMQError) -> OrderedMQError:
    log.debug("%s", error, exc_info=error)
    return error.with_traceback(None)


def _users(error: OrderedMQError) -> BaseException | None:
    """What the user's own code raised, if it did."""
    return error.__cause__ if error.from_users_code else None
