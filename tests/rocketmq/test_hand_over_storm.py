"""Order per key in a group whose broker is killed in each hand-over: no message of any key is lost or out of order.

    make test-all ARGS="tests/rocketmq/test_hand_over_storm.py -n0 -s"

ORDEREDMQ_STORM_ROUNDS and ORDEREDMQ_STORM_SEED set the number of rounds and the seed of the storm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from orderedmq.rocketmq.local.servers import Cluster
from tests.rocketmq.hand_over_storm import HandOverStorm
from tests.rocketmq.test_key_storm import World

pytestmark = pytest.mark.spark

ROUNDS: Final = int(os.environ.get("ORDEREDMQ_STORM_ROUNDS", "4"))
SEED: Final = int(os.environ.get("ORDEREDMQ_STORM_SEED", "1"))


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    made = World(cluster, tmp_path, queues=5)
    yield made
    made.broker.close()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_broker_that_is_killed_in_each_hand_over_loses_and_reorders_nothing_of_any_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = HandOverStorm(world, tmp_path / "calls", monkeypatch, seed=SEED).storm(
        messages=3000, poison=3, rounds=ROUNDS, seconds=1500.0
    )
    assert seen["dead letters"] > 0
    assert seen["repeats of a committed batch"] == 0
