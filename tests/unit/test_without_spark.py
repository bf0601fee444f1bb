"""Without PySpark, the package, the command and the helpers for tests work, and what needs PySpark says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ordered_sink
import ordered_source
import orderedmq
from orderedmq.demo.play import Demo
from orderedmq.errors import OptionError, ServersError
from orderedmq.rocketmq.local.jars import fetch_packages
from tests.unit.test_imports import MODULES, ROOT, inside

#: What runs in Spark, or is a program that starts it.
OF_SPARK = (
    *("ordered_source", "ordered_sink", "pyspark_orderedmq"),
    *("orderedmq.startup.training", "orderedmq.testing.killed_run"),
)
#: Makes the imports of PySpark, and of the packages that come with it, fail in a new process.
WITHOUT = """
import sys

class NoPandas:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name=name)

sys.meta_path.insert(0, NoPandas())
sys.modules.update(dict.fromkeys(("pyspark", "py4j")))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.delenv("SPARK_HOME", raising=False)


def test_every_module_but_those_of_spark_is_imported_without_it() -> None:
    names = [name for name in MODULES if not inside(name, OF_SPARK) and not name.endswith("__main__")]
    imports = python(f"from importlib import import_module\nfor name in {names}: import_module(name)")
    assert imports.returncode == 0, imports.stderr


def test_the_command_and_the_helpers_of_tests_work_without_spark(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = "from orderedmq.cli import app; app()"
    assert python(command, "--path", store, "topic", "create", "orders", "--queues", "1").returncode == 0
    shown = python(command, "--path", store, "topic", "list")
    assert '"orders"' in shown.stdout, shown.stderr
    messages = python(
        "from orderedmq.testing import TemporaryStore\n"
        "with TemporaryStore() as store:\n"
        "    store.produce('orders', ('order-1', 'created'), queues=1)\n"
        "    print(store.by_key('orders'))"
    )
    assert messages.stdout == "{'order-1': ['created']}\n", messages.stderr


@pytest.mark.parametrize("name", ["consume_orderly", "consume_concurrently", "dead_letter", "stop_at_boundary"])
def test_what_runs_queries_says_which_extra_is_missing(name: str, without_spark: None) -> None:
    with pytest.raises(OptionError, match=rf"OPTION.MISSING\] ordered_source.{name} .*pip install 'orderedmq\[spark\]'"):
        getattr(ordered_source, name)


def test_the_sink_says_which_extra_is_missing(without_spark: None) -> None:
    with pytest.raises(OptionError, match=r"OPTION.MISSING\] ordered_sink.route .*pip install 'orderedmq\[spark\]'"):
        getattr(ordered_sink, "route")  # noqa: B009  mypy would see an unused expression


def test_tables_that_get_each_message_once_are_imported_without_spark_and_without_the_packages_of_tables() -> None:
    absent = "for name in ('deltalake', 'pyiceberg', 'psycopg'): sys.modules[name] = None\n"
    imports = python(absent + "from ordered_sink import once; once.sql(None, 'payments')")
    assert imports.returncode == 0, imports.stderr


def test_what_prepares_spark_says_which_extra_is_missing_before_it_changes_anything(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with pytest.raises(OptionError, match=r"OPTION.MISSING\] prepare_spark .*pip install 'orderedmq\[spark\]'"):
        orderedmq.prepare_spark()
    with pytest.raises(OptionError, match=r"OPTION.MISSING\] the demo .*pip install 'orderedmq\[spark\]'"):
        Demo(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_servers_for_trials_say_which_extra_has_the_program_that_fetches_their_jars(
    without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ServersError, match=r"NO_JARS\].*pip install 'orderedmq\[spark\]'"):
        fetch_packages("a package", ["a:b:1"], "none")


def test_a_pyspark_of_spark_home_is_enough(without_spark: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs such as findspark make it importable later."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", "python")
    monkeypatch.setenv("PYSPARK_DRIVER_PYTHON", "python")
    orderedmq.prepare_spark()
