"""What ``orderedmq.tuned`` sets before a session, and which settings it does not change. These tests start no Spark."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq import java
from orderedmq.errors import JavaError
from orderedmq.java import Java, find_java
from orderedmq.startup import archive, tuning

#: The settings with which the tests' own Spark starts (tests/quick_spark.py).
SETTINGS = (
    *("SPARK_HOME", "SPARK_SUBMIT_OPTS", "SPARK_CONF_DIR", "SPARK_REMOTE", "MASTER"),
    *("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT"),
)


class Builder:
    """Stores the user's settings as SparkSession.builder does."""

    def __init__(self, **options: Any) -> None:
        self._options = {f"spark.{name.replace('_', '.')}": value for name, value in options.items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which is empty. The environment has no settings of a session, and is restored afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (*SETTINGS, "JAVA_HOME"):
        # Set first, so that monkeypatch also undoes what the code under test sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Another test in this process may have started Spark.
    monkeypatch.delitem(sys.modules, "pyspark.core.context", raising=False)
    monkeypatch.setattr(tuning, "find_java", lambda _newest: JAVA)
    return tmp_path / "cache" / "orderedmq"


JAVA = Java(Path("/opt/java/bin/java"), 17, 'openjdk version "17.0.15"')


def given() -> dict[str, str]:
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def an_archive(cache: Path, spark_home: Path, content: bytes = b"classes", runtime: Java = JAVA) -> Path:
    path = cache / archive.archive_name(runtime, spark_home, len(content))
    path.write_bytes(content)
    return path


def test_a_local_session_gets_compiled_pyspark_and_the_archive(cache: Path) -> None:
    builder = Builder(master="local[2]")
    assert orderedmq.tuned(builder) is builder
    assert builder._options == {"spark.master": "local[2]"}
    set_now = given()
    spark_home = Path(set_now.pop("SPARK_HOME"))
    assert spark_home.parent == cache
    assert set_now == {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    # The folder has everything of the installed Spark except the zip files of Python modules.
    installed = tuning.installed_spark()
    assert installed is not None
    assert (installed / "python" / "lib" / "pyspark.zip").exists()
    assert not (spark_home / "python").exists()
    assert (spark_home / "bin" / "spark-submit").samefile(installed / "bin" / "spark-submit")
    assert (spark_home / "jars").samefile(installed / "jars")
    # A second session of the program finds all of this and, by then, an archive.
    made = an_archive(cache, spark_home)
    orderedmq.tuned(builder)
    assert os.environ["SPARK_SUBMIT_OPTS"] == f"-XX:SharedArchiveFile={made} -Xlog:cds=off -Xlog:cds+dynamic=off"
    before = given()
    orderedmq.tuned(builder)
    assert given() == before


def test_keeps_the_settings_of_the_user(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {
        "SPARK_HOME": str(tmp_path),
        "SPARK_SUBMIT_OPTS": "-Dmine=1",
        "PYSPARK_PYTHON": "/usr/bin/python3",
        "PYSPARK_DRIVER_PYTHON": "/usr/bin/python3",
    }
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    orderedmq.tuned(Builder(master="local"))
    assert given() == mine
    # Java options that the user has set are kept, and ours are added.
    java.cache_folder()
    made = an_archive(cache, tmp_path)
    orderedmq.tuned(Builder(master="local"))
    assert os.environ["SPARK_SUBMIT_OPTS"].startswith(f"-Dmine=1 -XX:SharedArchiveFile={made} ")


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({"PYSPARK_GATEWAY_PORT": "4711"}, {}, "spark-submit has started the JVM"),
        ({}, {"remote": "sc://spark:15002"}, "the session runs on the server sc://spark:15002"),
        ({"SPARK_REMOTE": "sc://spark"}, {}, "the session runs on the server sc://spark"),
    ],
)
def test_nothing_is_set_where_it_would_have_no_effect(
    cache: Path,
    environment: dict[str, str],
    options: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Java may be missing in these cases.
    monkeypatch.setattr(tuning, "find_java", None)
    caplog.set_level(logging.INFO, "orderedmq")
    orderedmq.tuned(Builder(**options))
    assert given() == environment
    assert f"orderedmq.tuned has no effect: {said}" in caplog.text


def test_nothing_is_set_after_the_first_session(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SparkContext:
        _gateway = object()

    module = type(sys)("pyspark.core.context")
    module.SparkContext = SparkContext  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark.core.context", module)
    orderedmq.tuned(Builder(master="local"))
    assert given() == {}


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({}, {"master": "yarn"}, "the master is yarn"),
        ({}, {"master": "k8s://https://there"}, "the master is k8s://https://there"),
        ({"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"}, {}, "the builder names no master"),
        ({"MASTER": "yarn"}, {}, "the builder names no master"),
        ({"PYSPARK_PYTHON": "/usr/bin/python3"}, {"master": "local"}, "a different interpreter"),
        ({}, {"master": "local", "pyspark_python": "/usr/bin/python3"}, "a different interpreter"),
    ],
)
def test_python_processes_that_may_need_the_zip_keep_it(
    cache: Path,
    environment: dict[str, str],
    options: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO, "orderedmq")
    orderedmq.tuned(Builder(**options))
    assert "SPARK_HOME" not in os.environ
    assert said in caplog.text


def test_a_master_in_sparks_own_settings_counts(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text("spark.master yarn\n")
    orderedmq.tuned(Builder())
    assert "SPARK_HOME" not in os.environ
    (tmp_path / "spark-defaults.conf").unlink()
    orderedmq.tuned(Builder())
    assert "SPARK_HOME" in os.environ


def test_a_pyspark_that_only_this_program_finds_keeps_its_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tuning.importable_by_workers(tmp_path / "pyspark")
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{tmp_path}")
    assert tuning.importable_by_workers(tmp_path / "pyspark")


def test_the_links_follow_what_is_installed(cache: Path, tmp_path: Path) -> None:
    spark = tmp_path / "pyspark"
    for name in ("bin", "jars", "python", "sbin", "__pycache__"):
        (spark / name).mkdir(parents=True)
    made = tuning.compiled_home(spark)
    assert sorted(entry.name for entry in made.iterdir()) == ["bin", "jars", "sbin"]
    (spark / "sbin").rmdir()
    (spark / "conf").mkdir()
    assert tuning.compiled_home(spark) == made
    assert sorted(entry.name for entry in made.iterdir()) == ["bin", "conf", "jars"]
    # A worker of a standalone cluster creates its folder in the Spark home.
    (made / "work").mkdir()
    assert tuning.compiled_home(spark) == made
    (spark / "conf").rmdir()
    assert tuning.compiled_home(spark) == made
    assert sorted(entry.name for entry in made.iterdir()) == ["bin", "jars", "work"]


def test_an_archive_that_another_process_has_made_meanwhile_is_not_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java.cache_folder()
    there = an_archive(cache, tmp_path)
    monkeypatch.setattr(archive, "fitting_archive", lambda java, home: there)
    monkeypatch.setattr("orderedmq.startup.archive.subprocess.run", None)
    assert archive.make_archive(JAVA, tmp_path) == there
    assert there.exists()


def test_an_archive_that_others_could_have_written_is_not_used(cache: Path, tmp_path: Path) -> None:
    java.cache_folder()
    an_archive(cache, tmp_path)
    assert archive.archive_options(JAVA, tmp_path) is not None
    cache.chmod(0o777)
    assert archive.archive_options(JAVA, tmp_path) is None


def test_an_archive_that_was_cut_off_is_not_used(cache: Path, tmp_path: Path) -> None:
    """Java 17 crashes on such an archive."""
    java.cache_folder()
    made = an_archive(cache, tmp_path)
    assert archive.archive_options(JAVA, tmp_path) is not None
    os.truncate(made, 3)
    assert archive.archive_options(JAVA, tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"this is no archive", bytes(100_000)])
def test_java_ignores_a_damaged_archive(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = find_java()
    an_archive(java.cache_folder(), tmp_path, content, found)
    options = archive.archive_options(found, tmp_path)
    assert options is not None
    done = subprocess.run([found.path, *options.split(), "-version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert found.build in done.stderr
    assert archive.fitting_archive(found, tmp_path) is None


def test_quotes_the_path_of_a_cache_with_a_blank(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    made = an_archive(java.cache_folder(), tmp_path)
    assert str(archive.archive_options(JAVA, tmp_path)).startswith(f'"-XX:SharedArchiveFile={made}" ')


def test_an_archive_is_not_made_where_no_session_would_find_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    java.cache_folder().chmod(0o777)
    with pytest.raises(JavaError, match=r"NO_ARCHIVE.*Set XDG_CACHE_HOME"):
        archive.make_archive(JAVA, tmp_path)


def test_reports_a_driver_that_does_not_start_in_one_line(cache: Path, tmp_path: Path) -> None:
    broken = Java(Path("/bin/true"), 17, "broken")
    with pytest.raises(JavaError, match=r"NO_ARCHIVE.*/bin/true made no archive.*Spark session starts here") as raised:
        archive.make_archive(broken, tmp_path)
    assert "\n" not in str(raised.value)
    assert [entry.name for entry in cache.iterdir()] == ["archive.lock"]
