"""Versions of Python: a query runs, stops within its work and resumes, on each version but the one that runs all other tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.environments import interpreter, run, spark_environment

#: The versions that the package's classifiers name.
VERSIONS = ("3.11", "3.12", "3.13")
#: Timeout in seconds. The installation of an environment with Spark takes minutes.
_TIMEOUT = 1200


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("version", [one for one in VERSIONS if one != f"{sys.version_info[0]}.{sys.version_info[1]}"])
def test_a_query_runs_on_each_version_of_python(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None and os.environ.get("CI") != "true":
        pytest.skip(f"there is no Python {version}")
    assert python is not None
    program = str(Path(__file__).with_name("spark_scenario.py"))
    # The second step continues the query of the first one.
    output = run(spark_environment("4.3", python), program, str(tmp_path), "moved", "moved", "listener", cwd=tmp_path)
    audits = [json.loads(line) for line in output.splitlines()[-3:]]
    assert [(audit["messages"], audit["lost"], audit["twice"], audit["out of order"]) for audit in audits] == [
        (200, 0, 0, 0),
        (400, 0, 0, 0),
        (400, 0, 0, 0),
    ]
