"""Platforms bring their own PySpark and other packages. Installing this project next to them leaves all of them as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.environments import RELEASES, copy_of, packages_of, pip, platform, wheel

#: Timeout in seconds. The first time, an environment with Spark is created.
_TIMEOUT = 1200


@pytest.mark.nightly
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("release", RELEASES)
def test_pip_adds_packages_to_a_platform_and_replaces_none(release: str, tmp_path: Path) -> None:
    """First by pip's own report of what it would install, then by the packages that are there after it did."""
    python = platform(release)
    before = packages_of(python)
    report = json.loads(pip(python, "install", "--quiet", "--dry-run", "--report", "-", str(wheel())))
    added = {item["metadata"]["name"]: item["metadata"]["version"] for item in report["install"]}
    assert {name: (before[name], version) for name, version in added.items() if name in before} == {}
    copy = copy_of(python, tmp_path / "copy")
    pip(copy, "install", "--quiet", "--no-compile", str(wheel()))
    assert packages_of(copy) == before | added
    assert "pyspark" not in added
    pip(copy, "check")
