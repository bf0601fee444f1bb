"""Drivers of tests start quickly, and tests that share servers or a driver run in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, quick_spark


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
    ("items", "quick"),
    [
        ([Item("tmp_path"), Item()], False),
        ([Item("tmp_path"), Item("tmp_path", "spark")], True),
        ([], False),
    ],
)
def test_drivers_are_quick_if_a_test_starts_one(items: Sequence[Item], quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[None] = []
    monkeypatch.setattr(quick_spark, "use", lambda: used.append(None))
    session: Any = SimpleNamespace(items=items)
    conftest.pytest_collection_finish(session)
    assert len(used) == quick


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("tests/spark/test_sink.py::test_x[a]", "spark"),
        ("tests/faults/test_stop.py::test_x", "faults"),
        ("tests/rocketmq/test_locks.py::test_x", "rocketmq"),
        ("tests/clusters/test_access.py::test_x[5.3.3]", "tests/clusters/test_access.py"),
        ("tests/unit/test_lock.py::test_x[rocketmq-5.5.0]", "tests/unit/test_lock.py"),
        ("tests/contract/test_log.py::test_x[embedded-1]", "embedded"),
        ("tests/contract/test_log.py::test_x[rocketmq-4.9.7-1]", "rocketmq-4.9.7"),
        ("tests/contract/test_log.py::test_x", "embedded"),
    ],
)
def test_tests_that_share_servers_or_a_driver_are_one_scope(test: str, scope: str) -> None:
    assert conftest.scope_of(test) == scope


def test_they_use_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_spark, "find_java", lambda: None)
    for name in ("SPARK_HOME", "SPARK_SUBMIT_OPTS"):
        # Set first, so that monkeypatch also undoes what the code under test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: None)
    quick_spark.use()
    assert quick_spark.jvm_options() == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    assert "SPARK_HOME" not in os.environ
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: "-XX:SharedArchiveFile=made")
    quick_spark.use()
    assert os.environ["SPARK_SUBMIT_OPTS"] == quick_spark.jvm_options()
    assert quick_spark.jvm_options().endswith("made")
    assert (Path(os.environ["SPARK_HOME"]) / "jars").is_dir()


def test_fixtures_of_a_package_are_in_a_package() -> None:
    # In a folder without ``__init__.py``, pytest treats the whole session as the package, so idle servers would run until the end.
    files = [file for file in Path(conftest.__file__).parent.rglob("conftest.py") if 'scope="package"' in file.read_text()]
    assert files
    assert [file for file in files if not file.with_name("__init__.py").exists()] == []
