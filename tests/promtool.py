"""Runs promtool, the program of Prometheus that checks rules and metrics."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool with these arguments and ``given`` as its input. If the program is missing, the test is skipped; in CI, it fails."""
    found = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
    if found is None:
        why = "promtool is missing on this machine: run make tools, which fetches it from Debian's archive, or install it yourself"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return subprocess.run([found, *arguments], input=given, capture_output=True, text=True, timeout=60)
