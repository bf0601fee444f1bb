"""Each supported release of Spark, in a separate environment with the wheel: what users do is audited, and the calls are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.environments import ROOT, run, spark_environment

RELEASES = ("4.0", "4.1", "4.2", "4.3")
#: What the audit of each step must say, in addition to: no message is lost, comes twice or comes out of order.
STEPS: dict[str, dict[str, Any]] = {
    "batch and SQL": {"read": 200},
    "hand-over": {"stopped": True},
    "listener": {"parked": True},
    "Spark Connect": {"connect": True},
    "kills": {"kills": 10},
}
#: Timeout in seconds. The installation of an environment with Spark takes minutes.
_TIMEOUT = 1800
#: On a busy machine, Spark 4.0 and 4.1 may not wait long enough for the process of a source.
_TOO_BUSY = "Python worker failed to connect back"


def attempt(release: str, *arguments: str, folder: Path, **variables: str) -> str:
    """Run a program in the environment of a release. If the machine was too busy for Spark, run it again."""
    for name in ("first", "second"):
        place = folder / name
        place.mkdir()
        program = [argument.replace("FOLDER", str(place)) for argument in arguments]
        try:
            return run(spark_environment(release), *program, cwd=place, timeout=_TIMEOUT, variables=variables)
        except AssertionError as error:
            if name == "second" or _TOO_BUSY not in str(error):
                raise
    raise AssertionError


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.holds("releases of Spark")
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("step", STEPS)
def test_no_message_is_lost_or_comes_twice_or_out_of_order(step: str, release: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("spark_scenario.py"))
    said = json.loads(attempt(release, program, "FOLDER", step, folder=tmp_path).splitlines()[-1])
    assert said["spark"].startswith(f"{release}.")
    expected = {"lost": 0, "twice": 0, "out of order": 0, **STEPS[step]}
    assert {name: said[name] for name in expected} == expected


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.holds("releases of Spark")
def test_a_query_continues_when_its_checkpoint_moves_between_releases(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("spark_scenario.py"))
    for turn, release in enumerate((*RELEASES, *RELEASES[::-1])):
        (tmp_path / str(turn)).mkdir()
        said = json.loads(attempt(release, program, str(tmp_path), "moved", folder=tmp_path / str(turn)).splitlines()[-1])
        assert (said["messages"], said["lost"], said["twice"], said["out of order"]) == (200 * (turn + 1), 0, 0, 0)


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("release", RELEASES[:-1])
def test_the_loop_calls_source_tasks_and_sink_as_each_release_does(release: str, tmp_path: Path) -> None:
    attempt(release, "-m", "tests.live.spark.test_micro_batches", "FOLDER", folder=tmp_path, PYTHONPATH=str(ROOT))
