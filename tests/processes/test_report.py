"""The report of a test run ends with the failures. The skipped tests are listed before them, by reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
