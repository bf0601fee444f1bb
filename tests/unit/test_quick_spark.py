"""Spark is prepared once, and only if a test is marked ``spark``."""

from __future__ import annotations

import os
import subprocess
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
    ("test", "scope"),
    [
        ("tests/spark/test_sink.py::test_x[a]", "spark"),
        ("tests/faults/test_stop.py::test_x", "faults"),
        ("tests/rocketmq/test_locks.py::test_x", "rocketmq"),
        ("tests/unit/test_lock.py::test_x[rocketmq-5.5.0]", "tests/unit/test_lock.py"),
        ("tests/contract/test_log.py::test_x[embedded-1]", "embedded"),
        ("tests/contract/test_log.py::test_x[rocketmq-4.9.7-1]", "rocketmq-4.9.7"),
        ("tests/contract/test_log.py::test_x", "embedded"),
    ],
)
def test_tests_that_share_servers_or_a_driver_are_one_scope(test: str, scope: str) -> None:
    assert conftest.scope_of(test) == scope


def test_it_is_prepared_unless_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Sequence[str]] = []
    monkeypatch.setattr(quick_spark, "find_java", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: begun.append(command))
    for name in ("SPARK_HOME", "SPARK_SUBMIT_OPTS"):
        # Set first, so that what the code under test sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: None)
    monkeypatch.setattr(quick_spark, "fitting_archive", lambda java, home: None)
    quick_spark.begin()
    assert [command[-2:] for command in begun] == [["spark", "prepare"]]
    assert quick_spark.jvm_options() == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    assert "SPARK_HOME" not in os.environ
    # An archive that does not fit is no reason not to make one.
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: "-XX:SharedArchiveFile=made")
    quick_spark.begin()
    assert len(begun) == 2
    monkeypatch.setattr(quick_spark, "fitting_archive", lambda java, home: Path("made"))
    quick_spark.begin()
    assert len(begun) == 2
    assert os.environ["SPARK_SUBMIT_OPTS"] == quick_spark.jvm_options()
    assert quick_spark.jvm_options().endswith("made")
    assert (Path(os.environ["SPARK_HOME"]) / "jars").is_dir()


def test_fixtures_of_a_package_are_in_a_package() -> None:
    # Anywhere else pytest takes the session for the package, and idle servers run until the end.
    files = [file for file in Path(conftest.__file__).parent.rglob("conftest.py") if 'scope="package"' in file.read_text()]
    assert files
    assert [file for file in files if not file.with_name("__init__.py").exists()] == []
