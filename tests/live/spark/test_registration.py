"""Spark finds the format by itself, both from the wheel that users install and from an editable install.

In each session that uses any Python data source, Spark imports every top-level module whose name starts with ``pyspark_``. So this
package's module ``pyspark_orderedmq`` must be light and must not fail, because an error in it would break the data sources of
other packages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.quick_spark import QUICK_JVM
from tests.snippets import quick_start, snippets

ROOT = Path(__file__).resolve().parents[3]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without variables that lead to the source tree or make Spark run another Python."""
    ours = ("PYTHONPATH", "PYTHONHOME", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"SPARK_LOCAL_IP": "127.0.0.1"} | changes


def run(python: Path | str, code: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code], cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=150
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the environment omq after the documented `pip install '.[spark,java]'`, without the extra dev."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "omq", symlinks=True, with_pip=False)
    (packages,) = (folder / "omq").glob("lib/python*/site-packages")
    link((dependencies("orderedmq", "spark") | dependencies("orderedmq", "java")) - {"orderedmq"}, packages)
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "omq/bin/python",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        wheel,
    ]
    subprocess.run(install, cwd=folder, env=environment(), check=True)
    return folder


def link(names: Iterable[str], packages: Path) -> None:
    """Add installed packages to a folder as links instead of downloads, because pyspark alone has some 500 MB."""
    for name in names:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.parts[0] != "__pycache__" and not (packages / file.parts[0]).exists():
                (packages / file.parts[0]).symlink_to(Path(str(distribution(name).locate_file(file.parts[0]))))


@pytest.fixture(scope="module")
def bare_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of a user on a system without Java, and without a Python that has the package."""
    home = tmp_path_factory.mktemp("home")
    programs = home / "bin"
    programs.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if program.name != "java" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    return {"PATH": str(programs), "HOME": str(home), "LANG": "C.UTF-8"}


def dependencies(name: str, extra: str = "") -> set[str]:
    """Return the names of the packages that pip installs for a package."""
    names: set[str] = set()
    waiting = {(name, extra)}
    while waiting:
        name, extra = waiting.pop()
        names.add(canonicalize_name(name))
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting |= (
                    {(requirement.name, more) for more in {"", *requirement.extras}}
                    if canonicalize_name(requirement.name) not in names
                    else set()
                )
    return names


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_quick_start_of_the_documents_runs_as_it_stands_without_java_and_settings(
    bare: Path, bare_machine: dict[str, str]
) -> None:
    programs, (install, *commands) = quick_start()
    for name, program in programs.items():
        (bare / name).write_text(program)
    assert "pip install '.[spark,java]'" in install
    # These are options of the JVM and not of Spark. A JVM that lives for seconds should compile quickly rather than well.
    env = bare_machine | {"SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": " ".join(QUICK_JVM)}
    said = ""
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", f". omq/bin/activate && {command}"], cwd=bare, env=env, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr[-3000:]}"
        said = done.stdout
    assert re.findall(r"order-1 costs ([\d.,]+)", said) == ["20.50", "3.00"]
    assert re.findall(r"order-2 costs ([\d.,]+)", said) == ["7,00", "9.00"]
    code = "import orderedmq, pyspark_orderedmq; print(orderedmq.__file__, pyspark_orderedmq.__file__); import pytest"
    packages = subprocess.run([bare / "omq/bin/python", "-c", code], cwd=bare, env=env, capture_output=True, text=True)
    assert "No module named 'pytest'" in packages.stderr
    # The modules that Spark has found are those of the wheel.
    assert [Path(origin).is_relative_to(bare / "omq") for origin in packages.stdout.split()] == [True, True], packages.stdout


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_tests_of_the_guide_pass_in_a_folder_of_their_own_without_java_and_settings(
    bare: Path, bare_machine: dict[str, str], tmp_path: Path
) -> None:
    """This test also covers the pytest plugin, which pytest finds by the entry point of the wheel."""
    tools, project = tmp_path / "tools", tmp_path / "project"
    for folder in (tools, project):
        folder.mkdir()
    link(dependencies("pytest") | {"duckdb"}, tools)
    for snippet in snippets(ROOT / "docs" / "guides" / "testing.md"):
        file = snippet.code.partition("\n")[0].removeprefix("# ")
        assert file.endswith(".py"), snippet.line
        (project / file).write_text(snippet.code)
    done = subprocess.run(
        [bare / "omq/bin/python", "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--basetemp", tmp_path / "stores"],
        cwd=project,
        env=bare_machine | {"PYTHONPATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.findall(r"^PASSED (test_\w+\.py)::", done.stdout, re.MULTILINE) == [
        "test_entry.py", "test_history.py", "test_invoices.py", "test_ledger.py", "test_restart.py",
    ]  # fmt: skip
    assert "warning" not in done.stdout.lower(), done.stdout


def test_an_editable_install_is_where_spark_looks(tmp_path: Path) -> None:
    # Apply Spark's rule without Spark: import the top-level modules whose names start with pyspark_.
    code = (
        "import importlib, json, pkgutil\n"
        "names = [module.name for module in pkgutil.iter_modules() if module.name.startswith('pyspark_')]\n"
        "print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))\n"
    )
    done = run(sys.executable, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pyspark_orderedmq" in json.loads(done.stdout)


def test_the_command_is_installed_with_the_wheel(bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare / "omq/bin/orderedmq", "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_the_module_that_spark_discovers_imports_no_large_package(tmp_path: Path) -> None:
    code = (
        "import sys, pyspark.sql.datasource\n"
        "before = set(sys.modules)\n"
        "import pyspark_orderedmq\n"
        "assert pyspark_orderedmq.DefaultSource.name() == 'orderedmq'\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = run(sys.executable, code, tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "pyspark_orderedmq" in loaded
    heavy = {
        "pyarrow",
        "numpy",
        "pandas",
        "xxhash",
        "typer",
        "rich",
        "ordered_source",
        "ordered_sink",
    }
    assert not {name.partition(".")[0] for name in loaded} & heavy
    # Only the package itself and its errors are sure to be light. Other modules import pyarrow, or may import it in the future.
    assert {name for name in loaded if name.startswith("orderedmq")} <= {"orderedmq", "orderedmq.errors"}


@pytest.mark.parametrize(
    "fault", ["raise RuntimeError('broken')", "import no_such_module", "this is no Python", "raise SystemExit(3)"]
)
def test_the_module_that_spark_discovers_survives_a_broken_package(fault: str, tmp_path: Path) -> None:
    for package in ("orderedmq", "ordered_source", "ordered_sink", "pyarrow"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(fault + "\n")
    code = "import pyspark_orderedmq; print(pyspark_orderedmq.DefaultSource.name())"
    done = run(sys.executable, code, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "orderedmq\n"
