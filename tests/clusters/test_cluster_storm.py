"""Storms over a replicated cluster: no acknowledged message is lost, none is out of order, and repeats occur only where documented.

    make test-all ARGS="tests/clusters/test_cluster_storm.py -s"

ORDEREDMQ_STORM_SECONDS and ORDEREDMQ_STORM_SEED set the length and the seed of the storm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, fetch_jars
from tests.clusters.cluster_storm import Storm
from tests.clusters.replicated import ASYNC, SYNC, ReplicatedCluster
from tests.jars import jars_required

pytestmark = pytest.mark.spark

SECONDS = float(os.environ.get("ORDEREDMQ_STORM_SECONDS", "300"))
SEED = int(os.environ.get("ORDEREDMQ_STORM_SEED", "1"))
EVERY = 15.0


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize("role", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_storm_over_masters_and_replicas_loses_and_reorders_nothing(
    role: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jars_required():
        fetch_jars(DEFAULT_VERSION)
    with ReplicatedCluster(tmp_path / "cluster", role) as cluster, Storm(cluster, tmp_path, monkeypatch, SEED) as storm:
        storm.run(SECONDS, EVERY)
        counted = storm.settle()
    assert counted["acknowledged"] > 0
