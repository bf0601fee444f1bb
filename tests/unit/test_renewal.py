"""The renewal thread: the locks that it keeps, the locks that it finds lost, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ordered_source.renewal import Renewal
from orderedmq.conditions import StoreCondition
from orderedmq.errors import StoreError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from tests.waits import until

FIRST, SECOND = (LockToken("g", MessageQueue("orders", "embedded", number), "me", "me@1", 1, 1) for number in range(2))


class Groups:
    """Answers renewals. The tokens in ``gone`` are lost."""

    def __init__(self) -> None:
        self.asked: list[tuple[LockToken, ...]] = []
        self.gone: set[LockToken] = set()
        self.fails = False
        self.beats = 0
        self.beat_fails = False
        self.round = threading.Event()

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        self.asked.append(tuple(tokens))
        if self.fails:
            raise StoreError(StoreCondition.IO, "the disk is away")
        return [token for token in tokens if token in self.gone]

    def beat(self) -> None:
        self.beats += 1
        if self.beat_fails:
            raise StoreError(StoreCondition.IO, "the disk is away")


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def renewal(groups: Any) -> Iterator[Renewal]:
    made = Renewal(groups, groups.beat, 0.005)
    made.keep([FIRST, SECOND])
    made.start()
    yield made
    made.stop()


def rounds(groups: Groups, more: int = 2) -> None:
    at = len(groups.asked)
    until(lambda: len(groups.asked) >= at + more, "locks have been renewed", 10.0)


def test_it_renews_exactly_what_is_to_be_kept_and_beats(renewal: Renewal, groups: Groups) -> None:
    rounds(groups)
    assert groups.asked[-1] == (FIRST, SECOND)
    renewal.keep([SECOND])
    rounds(groups)
    assert list(groups.asked[-1]) == [SECOND]
    assert groups.beats > 0
    assert renewal.lost == ()


@pytest.mark.parametrize("beat_fails", [False, True])
def test_reports_a_lost_lock_although_the_heartbeat_fails(renewal: Renewal, groups: Groups, beat_fails: bool) -> None:
    groups.beat_fails = beat_fails
    groups.gone = {FIRST}
    until(lambda: renewal.lost == (FIRST,), "the loss is known", 10.0)
    renewal.keep([SECOND])
    assert renewal.lost == ()


def test_after_a_failure_the_next_try_does_not_wait_for_its_time(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ordered_source.renewal.RENEWAL_RETRY", 0.01)
    made = Renewal(groups, groups.beat, 0.5)
    groups.fails = True
    made.start()
    until(lambda: len(groups.asked) >= 30, "there were 30 tries, for which the usual interval would need 15 s", 10.0)
    made.stop()


def test_sends_a_heartbeat_soon_after_a_client_was_cut_off(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ordered_source.renewal.RENEWAL_RETRY", 0.02)
    monkeypatch.setattr("ordered_source.renewal.LOOK", 0.01)
    cut_off = threading.Event()
    made = Renewal(groups, groups.beat, 60.0, cut_off.is_set)
    made.start()
    cut_off.wait(0.2)
    assert groups.beats == 0
    cut_off.set()
    until(lambda: groups.beats >= 3, "the client repeats its heartbeat while it is cut off", 10.0)
    cut_off.clear()
    made.stop()


def test_it_ends_when_it_is_stopped_and_when_the_parent_process_is_gone(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Renewal(groups, groups.beat, 0.005)
    monkeypatch.setattr("ordered_source.renewal.os.getppid", lambda: 1)
    made._parent = 2
    made.start()
    assert made._thread is not None
    made._thread.join(10.0)
    assert not made._thread.is_alive()
    assert groups.asked == []
    made.stop()
