"""Releases of Spark that are refused before anything is changed, and the releases of Java with which others run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq import spark_support
from orderedmq.errors import OptionError
from pyspark_orderedmq import DefaultSource


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes this interpreter have another release of PySpark, or none, that is not imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def install(version: str | None) -> None:
        monkeypatch.delitem(sys.modules, "pyspark", raising=False)
        package = tmp_path / "pyspark"
        package.mkdir()
        package.joinpath("__init__.py").write_text("raise ImportError")
        if version is not None:
            package.joinpath("version.py").write_text(f'__version__: str = "{version}"\n')

    return install


@pytest.mark.parametrize("version", ["3.5.7"])
def test_an_older_release_is_refused_before_anything_is_changed(
    version: str, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    installed(version)
    before = dict(os.environ)
    for refused in (orderedmq.prepare_spark, lambda: orderedmq.tuned(object()), lambda: DefaultSource({})):
        with pytest.raises(OptionError, match=rf"OPTION.UNSUPPORTED\] orderedmq needs Spark 4.0 .*this is {version}"):
            refused()
    assert dict(os.environ) == before


@pytest.mark.parametrize("version", ["4.0.0", "4.2.0.dev1", "4.10.0", "5.0"])
def test_versions_are_compared_as_numbers(version: str, installed: Any) -> None:
    installed(version)
    spark_support.require_release()


def test_a_pyspark_of_an_unknown_version_is_not_refused(installed: Any) -> None:
    installed(None)
    spark_support.require_release()
    assert spark_support.newest_java() is None


@pytest.mark.parametrize(("version", "newest"), [("4.0.5", 23), ("4.1.4", 23), ("4.2.0", None), ("5.0", None)])
def test_older_releases_need_an_older_java(version: str, newest: int | None, installed: Any) -> None:
    installed(version)
    assert spark_support.newest_java() == newest


@pytest.mark.parametrize(
    ("version", "progress", "repeated"),
    [("4.1.4", 7, True), ("4.1.4", 0, False), ("4.1.4", None, False), ("4.2.1", 7, False)],
)
def test_a_run_with_available_now_is_repeated_until_it_reads_nothing(
    version: str, progress: int | None, repeated: bool, installed: Any
) -> None:
    installed(version)
    assert spark_support.has_work_left(None if progress is None else {"numInputRows": progress}) is repeated
