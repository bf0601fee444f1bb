"""Waits for conditions, never for a time: each ends as soon as its condition holds, and fails after a generous time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Seconds between two looks at a condition.
STEP: Final = 0.01


def soon(seconds: float = 30.0) -> float:
    """A deadline in monotonic seconds. A test that passes never reaches the default one."""
    return time.monotonic() + seconds


def until(condition: Callable[[], Any], what: str = "the condition is true", timeout: float = 90.0) -> Any:
    """Wait until the condition is true and return its value. Raises AssertionError with ``what`` after ``timeout`` seconds."""
    deadline = soon(timeout)
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(STEP)


def first_good(get: Callable[[], T], good: Callable[[T], bool], timeout: float = 90.0) -> T:
    """Wait until ``get`` returns a value that is ``good``, and return it. Raises AssertionError with the last value."""
    deadline = soon(timeout)
    while not good(value := get()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {value}"
        time.sleep(STEP)
    return value
