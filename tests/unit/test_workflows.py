"""The workflows of the forge: what they may do, which actions they use, and that they cover what the metadata promise.

Their syntax is checked by `make lint`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from orderedmq.spark_support import OLDEST
from tests.environments import RELEASES

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".github" / "workflows"
#: An action at a commit, with the release that it is in a comment.
PINNED: Final = re.compile(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="an sdist has no workflows")


def workflow(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = workflow(name)["jobs"]
    return found


def test_every_action_of_others_is_pinned_to_a_commit_and_each_has_one_release() -> None:
    lines = [line.strip(" -") for path in FOLDER.iterdir() for line in path.read_text().splitlines() if "uses:" in line]
    assert [line for line in lines if not PINNED.fullmatch(line)] == ["uses: ./.github/workflows/ci.yml"]
    actions = {line.partition("@")[0]: line for line in lines}
    assert set(actions.values()) == set(lines)


def test_only_the_job_that_publishes_may_do_more_than_read() -> None:
    assert workflow("ci.yml")["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs("ci.yml").items() if "permissions" in job] == []
    assert workflow("release.yml")["permissions"] == {}
    permissions = {name: job["permissions"] for name, job in jobs("release.yml").items()}
    assert permissions.pop("publish") == {"id-token": "write", "attestations": "write"}
    assert all(granted == {"contents": "read"} for granted in permissions.values())


def test_what_publishes_runs_no_code_of_the_repository_and_waits_for_the_tests_and_a_person() -> None:
    publish = jobs("release.yml")["publish"]
    assert publish["needs"] == ["tests", "build"]
    assert publish["environment"]["name"] == "pypi"
    assert [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]] == []


def test_the_matrix_has_every_version_of_python_and_every_supported_release_of_spark() -> None:
    matrix = jobs("ci.yml")["spark"]["strategy"]["matrix"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [classifier.rpartition(" ")[2] for classifier in classifiers if ":: Python :: 3." in classifier]
    assert matrix["python"] == jobs("ci.yml")["check"]["strategy"]["matrix"]["python"] == versions
    assert matrix["spark"] == [release for release in RELEASES if tuple(map(int, release.split("."))) >= OLDEST]


def test_a_change_is_tested_by_the_script_that_tests_it_here() -> None:
    assert "bash .ci/run" in [step.get("run") for step in jobs("ci.yml")["tests"]["steps"]]
    assert {step.get("run") for step in jobs("release.yml")["build"]["steps"]} >= {"make dist"}
