"""This package inside Spark: which releases it supports, with which releases of Java they run, and how its errors look there.

PySpark is not a dependency of this package, because a platform brings its own. What needs it asks here first.
`ordered_source.older_spark` has what differs between releases for the source.

Spark prints the frames of a Python source or sink twice. They do not help a user, because one line of our error says what
happened, where, and what to do. So a notebook shows that line instead of two screens of frames. Only OrderedMQError is shortened, because
any other error is a bug whose frames are needed. An exception raised by the user's own function stays as the cause. The whole traceback is
logged by ``orderedmq`` at level DEBUG.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, cast

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, OrderedMQError, missing_package

#: The oldest release of PySpark.
OLDEST: Final = (4, 0)
#: Since this release, Spark runs with Java 24 and later (the Hadoop of earlier ones asks for a security manager), and passes limits and the
#: trigger availableNow to a source in Python.
_NEWER: Final = (4, 2)
#: The newest Java for earlier releases.
_NEWEST_JAVA: Final = 23

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

logger = logging.getLogger("orderedmq")


def require_pyspark(feature: str) -> None:
    """Check that this interpreter has PySpark, without importing it. ``feature``: what needs it, for the error.

    A SPARK_HOME is enough, because a program may make its PySpark importable later. Raises OptionError MISSING.
    """
    if importlib.util.find_spec("pyspark") is None and "SPARK_HOME" not in os.environ:
        raise missing_package(feature, "pyspark", "spark", "where Spark is installed, use the Python that has its PySpark")


def require_release() -> None:
    """Check that the release of PySpark that this interpreter has is supported. Raises OptionError UNSUPPORTED."""
    version = _installed()
    if version is not None and _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"orderedmq needs Spark {oldest} or newer, but this is {version}. Upgrade Spark and PySpark",
        )


def newest_java() -> int | None:
    """Return the newest Java with which the installed release of Spark runs, None if it runs with each that is new enough."""
    return _NEWEST_JAVA if _is_older() else None


def has_work_left(progress: Mapping[str, Any] | None) -> bool:
    """Whether to repeat a run with the trigger availableNow. ``progress``: the last progress of that run.

    Newer releases process everything in one run. Older ones end it after one micro-batch, so the last run is one that reads nothing.
    """
    return _is_older() and progress is not None and progress["numInputRows"] > 0


def _is_older() -> bool:
    version = _installed()
    return version is not None and _numbers(version) < _NEWER


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _installed() -> str | None:
    """Return the version of the PySpark that this interpreter has, without importing it.

    A platform's PySpark may have no metadata of a package.
    """
    if "pyspark" in sys.modules:
        return getattr(sys.modules["pyspark"], "__version__", None)
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r'^__version__.*?"([^"]+)"', text, re.MULTILINE)
    return version[1] if version else None


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
    logger.debug("%s", error, exc_info=error)
    return error.with_traceback(None)


def _users_error(error: OrderedMQError) -> BaseException | None:
    """Return the exception that the user's code raised, if the error has one."""
    return error.__cause__ if error.from_users_code else None
