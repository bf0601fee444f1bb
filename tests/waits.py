"""Waits for conditions, never for a fixed time: each wait ends as soon as its condition holds, and fails after a generous time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Seconds between the first checks of a condition. A check takes CPU time here, and often in a server or a driver.
STEP: Final = 0.01
#: Seconds between two checks in a long wait, which must not last more than 3 % longer because of them.
LONG_STEP: Final = 0.1
_PART: Final = 0.03


def soon(seconds: float = 30.0) -> float:
    """A deadline on the monotonic clock, in seconds. A test that passes never reaches the default deadline."""
    return time.monotonic() + seconds


def until(condition: Callable[[], Any], what: str = "the condition is true", timeout: float = 90.0) -> Any:
    """Wait until the condition is true and return its value. Raises AssertionError with ``what`` after ``timeout`` seconds."""
    begun = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < begun + timeout, f"not within {timeout:.0f} s: {what}"
        _sleep(begun)


def first_good(get: Callable[[], T], good: Callable[[T], bool], timeout: float = 90.0) -> T:
    """Wait until ``get`` returns a value that is ``good``, and return it. Raises AssertionError with the last value."""
    begun = time.monotonic()
    while not good(value := get()):
        assert time.monotonic() < begun + timeout, f"not within {timeout:.0f} s: {value}"
        _sleep(begun)
    return value


def _sleep(begun: float) -> None:
    """Sleep until the next check of a wait that began at ``begun``."""
    time.sleep(min(max(STEP, (time.monotonic() - begun) * _PART), LONG_STEP))
