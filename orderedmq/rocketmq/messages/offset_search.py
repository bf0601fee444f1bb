"""Binary search that begins at a hint. Pure."""

from __future__ import annotations

from collections.abc import Callable


def find_first(late: Callable[[int], bool], low: int, high: int, hint: int) -> int:
    """Return the first offset in [low, high) that is ``late``, or ``high`` if none is. Every offset after a late one must be late.

    ``hint`` may be any offset. If it is the result, two calls of ``late`` are enough. A broker's answer to a search by time is
    only a hint: before 5.1.1 it is the nearest message, which may be too early, and in any release it may be outside the bounds
    (ConsumeQueue.getOffsetInQueueByTime).
    """
    at = min(max(hint, low), high)
    step = 1
    while at < high and not late(at):
        low = at + 1
        at = min(at + step, high)
        step *= 2
    high = at
    step = 1
    while high > low:
        at = max(high - step, low)
        if not late(at):
            low = at + 1
            break
        high = at
        step *= 2
    while low < high:
        at = (low + high) // 2
        if late(at):
            high = at
        else:
            low = at + 1
    return low
