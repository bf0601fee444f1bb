"""The report of a test run ends with the failures. The skipped tests are listed before them, by reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import report

ROOT = Path(__file__).parents[2]


def test_skips_are_counted_by_reason_whatever_the_release_of_the_broker() -> None:
    reasons = [f"Skipped: rocketmq-{version} has no fencing: a lock is a client's" for version in ("4.9.8", "5.3.3")]
    lines = report.skips([*reasons, "Skipped: only Linux tells", *["Skipped: long " + "x" * 500] * 3])
    assert lines[0].startswith("   3 x long x")
    assert len(lines[0]) == 140
    assert lines[1:] == ["   2 x rocketmq has no fencing: a lock is a client's", "   1 x only Linux tells"]


def run_pytest(folder: Path, *arguments: str) -> str:
    """Return the output of pytest with this project's configuration, run on the tests in the folder."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    # Ignore options that a developer has set for the outer run.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--rootdir={folder}", *arguments, str(folder)], env=env, cwd=folder, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_slow_tests_need_the_option_and_the_report_ends_with_what_failed(tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.nightly\n"
        "def test_long():\n    pass\n"
        "def test_wrong():\n    assert 1 == 2\n"
        "@pytest.mark.parametrize('version', ['4.9.8', '5.3.3'])\n"
        "def test_skipped(version):\n    pytest.skip(f'rocketmq-{version} has no fencing')\n"
    )
    short = run_pytest(tmp_path)
    assert "1 failed, 2 skipped, 1 deselected" in short, short
    lines = [line for line in short.splitlines() if line]
    assert lines[-2].startswith("FAILED tests/unit/test_some.py::test_wrong"), short
    assert "   2 x rocketmq has no fencing" in lines
    assert sum("SKIPPED" in line for line in lines) == 0
    assert "1 failed, 1 passed, 2 skipped" in run_pytest(tmp_path, "--nightly")


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_fails_if_a_module_is_above_its_budget_twice(times: int, tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit / "test_hungry.py").write_text(
        "import pathlib, time\n"
        "def test_computes():\n"
        "    runs = pathlib.Path(__file__).with_name('runs')\n"
        "    runs.touch()\n"
        "    runs.write_text(runs.read_text() + 'x')\n"
        "    end = time.process_time() + 0.6\n"
        f"    while len(runs.read_text()) <= {times} and time.process_time() < end: pass\n"
    )
    (tmp_path / "limits.py").write_text(
        "from tests import budget\n"
        "budget.SLACK, budget.QUIET = 0.3, 1.0\n"
        "budget.read = lambda: {'tests/unit/test_hungry.py': 0.1}\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\ntestpaths = ['tests']\n"
        "addopts = ['--import-mode=importlib', '-p', 'no:anyio', '-p', 'tests.conftest', '-p', 'limits']\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "1"], env=env, cwd=tmp_path, capture_output=True, text=True)
    verdict = (
        "above the budget"
        if times == 2
        else "within the budget of tests/budget.json after these modules had been measured again"
    )
    lines = done.stdout.splitlines()
    assert lines[-3].startswith(verdict), done.stdout + done.stderr
    assert lines[-2].startswith("tests/unit/test_hungry.py: ")
    assert "1 passed" in lines[-1]
    assert done.returncode == times - 1
    assert (unit / "runs").read_text() == "xx"
