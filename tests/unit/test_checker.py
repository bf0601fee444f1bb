"""The checker on hand-made histories: it finds nothing in good ones, and exactly the anomalies of each bad one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests import checker, evidence

Event = dict[str, Any]
IN = "in/embedded/0"
LANE = "out/embedded/3"


def send(offset: int | None, key: str | None = "k", outcome: str = "ok", name: str | None = None, queue: str = IN) -> Event:
    return {"event": "send", "queue": queue, "offset": offset, "key": key, "id": name or f"m{offset}", "outcome": outcome}


def deliver(*offsets: int, lane: str = LANE, batch: int | None = None, key: str | None = "k", queue: str = IN) -> Event:
    rows = [[queue, offset, key, f"m{offset}"] for offset in offsets]
    return {"event": "deliver", "lane": lane, "rows": rows} | ({} if batch is None else {"batch": batch})


def grant(epoch: int, owner: str = "a") -> Event:
    return {"event": "grant", "group": "g", "queue": IN, "epoch": epoch, "owner": owner}


def commit(offset: int, epoch: int, accepted: bool = True) -> Event:
    return {"event": "commit", "group": "g", "queue": IN, "offset": offset, "epoch": epoch, "accepted": accepted}


def offset(value: int) -> Event:
    return {"event": "offset", "group": "g", "queue": IN, "offset": value}


def read(batch: int, begin: int, end: int, epoch: int = 1, run: str = "r1", query: str = "a") -> Event:
    where = {"group": "g", "queue": IN, "begin": begin, "end": end, "epoch": epoch}
    return {"event": "read", "query": query, "run": run, "batch": batch, **where}


def publish(batch: int, run: str = "r1", query: str = "a", **more: Any) -> Event:
    return {"event": "publish", "query": query, "run": run, "batch": batch, "accepted": True, **more}


THREE = [send(0), send(1), send(2)]


@pytest.mark.parametrize(
    ("history", "kinds"),
    [
        pytest.param([*THREE, deliver(0, 1), offset(3)], {"lost"}, id="the group is past it"),
        pytest.param([*THREE, deliver(0, 1), commit(3, 1)], {"lost"}, id="committed past it"),
        pytest.param([*THREE, deliver(0, 2)], {"lost", "skip"}, id="in the middle of a key"),
        pytest.param([*THREE, deliver(0, 1), offset(2)], {"unseen"}, id="at the end"),
        pytest.param([*THREE, deliver(0, 1, 1, 2)], {"duplicate"}, id="twice in a batch"),
        pytest.param([*THREE, deliver(0, 1), deliver(0, 1), deliver(2)], {"duplicate"}, id="a batch twice"),
        pytest.param([*THREE, deliver(0, 1, 2), deliver(0, lane="x")], {"duplicate"}, id="twice in two lanes"),
        pytest.param([*THREE, deliver(0, 2, 1)], {"skip", "nonmonotonic"}, id="a key out of order"),
        pytest.param([send(0, "a"), send(1, "b"), {**deliver(0, 1), "rows": [[IN, 1, "b", "m1"], [IN, 0, "a", "m0"]]}],
                     {"nonmonotonic"}, id="a queue out of order, its keys not"),
        pytest.param([*THREE, deliver(0, 1), deliver(2, lane="x")], {"split_key"}, id="a key in two lanes"),
        pytest.param([send(0), send(0, name="x"), deliver(0)], {"inconsistent_offset"}, id="two at one offset"),
        pytest.param([send(0, name="x"), deliver(0)], {"inconsistent_offset"}, id="another body"),
        pytest.param([send(0, "a"), deliver(0)], {"inconsistent_offset"}, id="another key"),
        pytest.param([*THREE, deliver(0, 1, 2, 3)], {"aborted_read"}, id="never sent"),
        pytest.param([send(0), send(1, outcome="fail"), deliver(0, 1)], {"aborted_read"}, id="its send failed"),
        pytest.param([read(0, 0, 2), publish(0), read(1, 3, 4), publish(1)], {"silent_gap"}, id="ranges with a gap"),
        pytest.param([read(0, 0, 2), publish(0), read(1, 1, 4), publish(1)], {"range_overlap"}, id="ranges that overlap"),
        pytest.param([grant(2), grant(1, "b")], {"epoch_regression"}, id="a lower epoch"),
        pytest.param([grant(2), grant(2, "b")], {"epoch_regression"}, id="one epoch, two owners"),
        pytest.param([grant(1), grant(2, "b"), commit(5, 1)], {"fenced_write_accepted"}, id="a late commit"),
        pytest.param([read(0, 0, 2), grant(2, "b"), publish(0)], {"fenced_write_accepted"}, id="a late publish"),
        pytest.param([commit(5, 1), commit(4, 1)], {"offset_regression"}, id="a commit that goes back"),
        pytest.param([offset(5), offset(4)], {"offset_regression"}, id="an offset seen to go back"),
    ],
)  # fmt: skip
def test_each_anomaly_is_named(history: Sequence[Event], kinds: set[str]) -> None:
    found = checker.judge(history)
    assert {anomaly.kind for anomaly in found} == kinds, found


def test_a_history_that_is_not_drained_may_lack_its_end() -> None:
    assert checker.judge([*THREE, deliver(0, 1)], drained=False) == []
    assert [anomaly.kind for anomaly in checker.judge([*THREE, deliver(1)], drained=False)] == ["skip", "lost"]


def test_repeats_may_deliver_only_the_whole_last_batch_again() -> None:
    def kinds(*deliveries: Event) -> list[str]:
        return [anomaly.kind for anomaly in checker.judge([*THREE, *deliveries], repeats=True)]

    first, second = deliver(0, 1, batch=0), deliver(2, batch=1)
    assert kinds(first, first, second, second, second) == []
    assert kinds(first, second, first) == ["duplicate", "duplicate"], "an earlier batch was repeated"
    assert kinds(first, deliver(1, batch=0), second) == ["duplicate"], "part of a batch was repeated"
    assert kinds(first, deliver(0, 1, batch=1), second) == ["duplicate", "duplicate"], "the same rows under another number"
    assert {anomaly.kind for anomaly in checker.judge([*THREE, first, first, second])} == {"duplicate"}, (
        "no batch may be repeated"
    )


def test_lists_of_messages_are_compared_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_notes", {})
    evidence.note_lists({"k": "abcd", "j": "xx"}, {"k": ["b", "a", "a", "d", "z"], "j": "x"}, runs=3)
    [(_, counts)] = evidence.noted()
    assert counts == {"runs": 3, "acknowledged": 6, "lost": 2, "twice": 1, "disordered": 1, "wrong": 1}


def test_tests_that_continue_a_history_count_only_what_they_have_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_notes", {})
    for sends, new in (([send(0)], 1), (THREE, 2)):
        evidence.begin()
        evidence.note_history("one store", sends, checker.judge([*sends, deliver(0)]))
        [(_, counts)] = evidence.noted()
        assert counts == {"runs": 1, "acknowledged": new, "lost": len(sends) - 1, "twice": 0, "disordered": 0, "wrong": 0}
