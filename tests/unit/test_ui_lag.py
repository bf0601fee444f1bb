"""The history of a lag, the hand-overs that two looks reveal, and how a lag is drawn."""

from __future__ import annotations

import itertools
import re
import sys
import threading

from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.ui import lag_history
from orderedmq.ui.lag_history import MOST_HAND_OVERS, STEP, STEPS, LagHistory, Owners, Series

A, B, C = (MessageQueue("orders", EMBEDDED_BROKER, number) for number in range(3))


def known(series: Series) -> dict[int, int]:
    """The known lags, by the number of steps before the current one."""
    return {STEPS - 1 - place: lag for place, lag in enumerate(series) if lag is not None}


def test_each_step_of_the_history_has_its_greatest_known_lag() -> None:
    lags = LagHistory()
    lags.see(0.0, {A: 5, B: 1})
    lags.see(STEP * 0.9, {A: 3, B: 4})
    lags.see(STEP * 3, {B: 2, C: 7})
    now = STEP * 3.5
    assert known(lags.of(now, A)) == {3: 5}
    assert known(lags.of(now, B)) == {3: 4, 0: 2}
    assert known(lags.of(now, C)) == {0: 7}
    assert known(lags.total(now)) == {3: 7, 0: 9}
    assert len(lags.total(now)) == STEPS


def test_forgets_lags_older_than_the_history() -> None:
    lags = LagHistory()
    for step in range(STEPS + 10):
        lags.see(step * STEP, {A: step})
    assert known(lags.of((STEPS + 9) * STEP, A)) == {STEPS + 9 - step: step for step in range(10, STEPS + 10)}
    assert known(lags.of((2 * STEPS + 20) * STEP, A)) == {}


def test_after_the_clock_was_set_back_the_lag_is_known_again_at_once() -> None:
    lags = LagHistory()
    for step in range(1000, 1010):
        lags.see(step * STEP, {A: 9})
    for step in range(1007, 1009):
        lags.see(step * STEP, {A: 1})
    assert known(lags.of(1008 * STEP, A)) == known(lags.total(1008 * STEP)) == dict.fromkeys(range(1, 9), 9) | {0: 1}
    lags.see(10 * STEP, {A: 2})
    assert known(lags.of(10 * STEP, A)) == known(lags.total(10 * STEP)) == {0: 2}


def test_a_history_is_read_while_it_grows() -> None:
    lags, done = LagHistory(), threading.Event()

    def grow() -> None:
        for step in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
            lags.see(step * STEP, {A: 1})

    growing, interval = threading.Thread(target=grow), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    growing.start()
    try:
        for _ in range(3000):
            lags.of(0.0, A)
            lags.total(0.0)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        growing.join()


def test_joins_the_hand_overs_of_one_look() -> None:
    owners = Owners()
    owners.see(1.0, {A: "one", B: "one"})
    assert list(owners.hand_overs) == []
    owners.see(2.0, {A: "two", B: "two", C: "one"})
    owners.see(3.0, {A: "two", B: "two", C: "one"})
    owners.see(4.0, {B: "two", C: "one"})
    assert [(one.when, one.before, one.after, one.queues) for one in owners.hand_overs] == [
        (4.0, "two", None, (A,)),
        (2.0, None, "one", (C,)),
        (2.0, "one", "two", (A, B)),
    ]
    for number in range(100):
        owners.see(5.0 + number, {A: str(number)})
    assert len(owners.hand_overs) == MOST_HAND_OVERS


def test_a_picture_has_a_line_for_each_stretch_without_a_gap() -> None:
    series: Series = [None, 0, 0, 0, 0, 8, None, None, 4, None]
    drawn = lag_history.small(series)
    lines = re.findall(r'<polyline points="([^"]+)"/>', drawn)
    assert len(lines) == 2
    # The line goes from the bottom to the top. Level stretches have no points inside.
    assert lines[0].split() == ["12,21.0", "48,21.0", "60,1.0", "72,1.0"]
    assert "lag 4, between 0 and 8 in the last 10 minutes" in drawn
    assert "lag not known" in lag_history.small([None] * STEPS)
    assert ">8 messages<" in lag_history.large(series)
