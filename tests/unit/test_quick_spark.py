"""Spark is prepared once, and only for tests that start it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import quick_spark, scopes


class Item:
    def __init__(self, nodeid: str, *fixtures: str) -> None:
        self.nodeid, self.fixturenames = nodeid, fixtures


@pytest.mark.parametrize(
    ("item", "starts"),
    [
        (Item("tests/spark/test_sink.py::test_x"), True),
        (Item("tests/faults/test_stop.py::test_x"), True),
        (Item("tests/rocketmq/test_standalone.py::test_x"), True),
        (Item("tests/rocketmq/test_access.py::test_x", "spark"), True),
        (Item("tests/rocketmq/test_log.py::test_x", "cluster"), False),
        (Item("tests/contract/test_log.py::test_x"), False),
        (Item("tests/unit/test_lock.py::test_x", "tmp_path"), False),
    ],
)
def test_what_starts_spark_waits_for_it(item, starts):
    assert scopes.starts_spark(item) is starts


def test_it_is_prepared_once_for_a_release_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    monkeypatch.setattr(quick_spark, "_FOLDER", tmp_path)
    monkeypatch.setattr(quick_spark, "_STAMP", tmp_path / "made-for")
    monkeypatch.setattr(quick_spark, "make", lambda: made.append(None))
    quick_spark.make_once()
    quick_spark.make_once()
    assert len(made) == 1
    monkeypatch.setattr(quick_spark, "version", lambda name: "5.0.0")
    assert not quick_spark.use()
    quick_spark.make_once()
    assert len(made) == 2
