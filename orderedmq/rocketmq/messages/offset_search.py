"""Binary search from a hint. Pure."""

from __future__ import annotations

from collections.abc import Callable


def find_first(late: Callable[[int], bool], low: int, high: int, hint: int) -> int:
    """Return the first offset in [low, high) that is ``late``, else ``high``. Every offset after a late one is late, too.

    ``hint`` may be any offset; if it is right, two calls of ``late`` are enough. A broker before 5.1.1 answers a search for a
    time with the nearest message, which may be too early, and any broker with an offset outside the bounds
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
