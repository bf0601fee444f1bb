"""Platforms bring their own PySpark and other packages. Installing this project next to them leaves all of them as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from tests.environments import FOLDER, RELEASES, ROOT, command, copy_of, environment, packages_of, pip, platform, run, wheel

#: What the light tests need in addition to the package.
TOOLS: Final = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "nbformat", "fastavro", "pyyaml")
EXTRAS: Final = ("ui", "opentelemetry", "spark", "audit")
#: The modules of tests/unit whose code depends on the packages of the core: rows, what RocketMQ stores, the command, the audit.
LIGHT: Final = ("rocketmq_*", "cli_*", "audit", "rows", "content", "selector", "sharding_key", "parking", "lot*")

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


def oldest(extras: tuple[str, ...]) -> list[str]:
    """The oldest version of each package that the metadata allow, PySpark first. Extras that name extras are followed."""
    versions: dict[str, str] = {}
    waiting = ["", *extras]
    for extra in waiting:
        for requirement in map(Requirement, requires("orderedmq") or ()):
            marker = requirement.marker
            if marker.evaluate({"extra": extra}) and "extra" in str(marker) if marker else not extra:
                if requirement.name == "orderedmq":
                    waiting += sorted(requirement.extras)
                else:
                    [version] = (clause.version for clause in requirement.specifier if clause.operator == ">=")
                    versions[requirement.name] = version
    return [f"{name}=={versions[name]}" for name in sorted(versions, key=lambda name: (name != "pyspark", name))]


@pytest.mark.nightly
@pytest.mark.timeout(2 * _TIMEOUT)
def test_the_light_tests_pass_with_the_oldest_packages_that_the_metadata_allow(tmp_path: Path) -> None:
    packages = oldest(EXTRAS)
    assert {requirement.partition("==")[0] for requirement in packages} >= {"pyspark", "pandas", "pyarrow", "numpy"}
    python = environment(FOLDER / "oldest", [*packages, "opentelemetry-sdk==1.30.0", "click==8.2.1", *TOOLS])
    light = ["tests/contract", *(str(path) for name in LIGHT for path in ROOT.glob(f"tests/unit/test_{name}.py"))]
    options = ("-q", "-n", "2", "-p", "no:cacheprovider", "--hypothesis-profile", "quick", "-m", "not spark and not rocketmq")
    command([str(python), "-m", "pytest", *options, *light], cwd=ROOT, timeout=2 * _TIMEOUT)


@pytest.mark.nightly
@pytest.mark.timeout(_TIMEOUT)
def test_the_wheel_alone_has_the_command_and_says_which_extra_has_spark(tmp_path: Path) -> None:
    command([sys.executable, "-m", "venv", str(tmp_path / "alone")])
    python = tmp_path / "alone" / "bin" / "python"
    pip(python, "install", "--quiet", "--no-compile", str(wheel()))
    assert {"pyspark", "py4j", "pandas"} & packages_of(python).keys() == set()
    tool = str(python.with_name("orderedmq"))
    (tmp_path / "events").write_text("order-1:created\norder-1:paid\n")
    for arguments in (
        "topic create orders --queues 1",
        "produce orders --key-separator : --file events",
        "group list",
        "check",
    ):
        command([tool, "--path", "store", *arguments.split()], cwd=tmp_path)
    assert command([tool, "--path", "store", "peek", "orders"], cwd=tmp_path).count("order-1") == 2
    code = "from orderedmq import Producer, connect; print(connect(path='store').log.topics())"
    assert "orders" in run(python, "-c", code, cwd=tmp_path)
    for refused_arguments in (["spark", "prepare"], ["demo"]):
        refused = subprocess.run(
            [tool, *refused_arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
        )
        assert refused.returncode == 2
        assert "ORDEREDMQ_OPTION.MISSING" in refused.stderr
        assert "pip install 'orderedmq[spark]'" in refused.stderr
