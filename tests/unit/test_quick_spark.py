"""Spark is prepared once, and only if a test is marked ``spark``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, quick_spark, scopes


class Item:
    """A collected test, as the hooks of the suite see it."""

    def __init__(self, *fixtures: str) -> None:
        self.fixturenames = fixtures
        self.marks: list[str] = []
        conftest.pytest_itemcollected(self)  # type: ignore[arg-type]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.mark.parametrize(
    ("items", "prepared"),
    [
        ([Item("tmp_path"), Item()], False),
        ([Item("tmp_path"), Item("tmp_path", "spark")], True),
        ([], False),
    ],
)
@pytest.mark.parametrize("collect_only", [False, True])
def test_spark_is_prepared_only_if_a_test_starts_it(
    items: Sequence[Item], prepared: bool, collect_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []
    monkeypatch.setattr(quick_spark, "begin", lambda: begun.append(None))
    option = SimpleNamespace(collectonly=collect_only)
    session: Any = SimpleNamespace(items=items, config=SimpleNamespace(option=option, stash={}))
    conftest.pytest_collection_finish(session)
    assert len(begun) == (prepared and not collect_only)


@pytest.mark.parametrize(
    ("module", "scope"),
    [
        ("tests/spark/test_sink.py", "spark"),
        # Starts only drivers of its own.
        ("tests/spark/test_demo.py", "tests/spark/test_demo.py"),
        ("tests/faults/test_stop.py", "faults"),
        # It says so: pytestmark = pytest.mark.spark.
        ("tests/rocketmq/test_standalone.py", "rocketmq with Spark"),
        # Single tests use the session.
        ("tests/rocketmq/test_access.py", "rocketmq"),
        # Has a pytestmark, with another marker.
        ("tests/rocketmq/test_locks.py", "rocketmq"),
        ("tests/contract/test_log.py", "contract"),
        ("tests/unit/test_lock.py", "tests/unit/test_lock.py"),
    ],
)
def test_tests_that_share_servers_or_a_driver_are_one_scope(module: str, scope: str) -> None:
    assert scopes.scope_of(f"{module}::test_x[a]") == scope


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
