"""Retention by age never takes a message for older than it is, however often the wall clock is set."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from orderedmq.ownership.lock import Instant
from orderedmq.rows.retention import MOST, STEP, Clocks

HOUR = 3600
MONTH = 30 * 24 * HOUR


@given(st.lists(st.integers(-10 * HOUR, 10 * HOUR) | st.sampled_from([120, MONTH, -MONTH]), min_size=1, max_size=2 * MOST))
@example([12 * MONTH, *[120] * MOST])
def test_no_message_looks_older_than_it_is(steps: list[int]) -> None:
    """A message is stored before each step, and the steps are an hour apart."""
    clocks, wall, stored = Clocks(Instant("boot", 0.0), 0), 0, []
    for number, step in enumerate(steps, 1):
        stored.append((number * HOUR - 1, wall + (HOUR - 1) * 1_000_000))
        wall += (HOUR + step) * 1_000_000
        clocks = clocks.read(Instant("boot", float(number * HOUR)), wall)
    assert len(clocks.steps) <= MOST
    now = len(steps) * HOUR
    for at, stamp in stored:
        age = wall - stamp - clocks.ahead(Instant("boot", float(now)), now - at + 1)
        # Differences below STEP are not noticed.
        assert age < (now - at) * 1_000_000 + STEP
