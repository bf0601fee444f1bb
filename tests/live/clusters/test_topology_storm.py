"""Storms that change queues, brokers and accounts: each message is copied once and in order, on every kind of broker.

    make test-all ARGS="tests/live/clusters/test_topology_storm.py -n0 -s"

ORDEREDMQ_STORM_SECONDS and ORDEREDMQ_STORM_SEED set the length and the seed of each storm.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq.rocketmq.local.jars import DEFAULT_VERSION
from orderedmq.rocketmq.local.servers import Cluster
from tests.jars import jars_required
from tests.live.clusters.accounts import ADMIN, BEHIND_PROXY, PROPERTIES
from tests.live.clusters.topology_storm import Place, Servers, Storm
from tests.live.rocketmq.rocketmq_proxy import ProxyServer
from tests.quick_spark import QUICK_SERVER

SECONDS = float(os.environ.get("ORDEREDMQ_STORM_SECONDS", "240"))
SEED = int(os.environ.get("ORDEREDMQ_STORM_SEED", "1"))


@contextlib.contextmanager
def servers(folder: Path, *, proxied: bool) -> Iterator[Servers]:
    cluster = Cluster(folder / "cluster", DEFAULT_VERSION, brokers=3, properties=PROPERTIES[DEFAULT_VERSION], jvm=QUICK_SERVER)
    with jars_required():
        cluster.start()
    with cluster, contextlib.ExitStack() as stack:
        proxy = None
        if proxied:
            (folder / "proxy").mkdir()
            proxy = ProxyServer(folder / "proxy", cluster, BEHIND_PROXY, credentials=ADMIN)
            stack.callback(proxy.stop)
            proxy.start()
        place = Servers(cluster, folder, proxy)
        stack.callback(place.close)
        yield place


def endure(place: Place, folder: Path) -> None:
    with Storm(place, folder, SEED) as storm:
        storm.run(SECONDS)
        storm.settle()


@pytest.mark.fault("topology", "RocketMQ")
@pytest.mark.nightly
@pytest.mark.holds("sink once", "source to sink once")
@pytest.mark.timeout(SECONDS + 1200)
@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxy"])
def test_a_storm_of_changes_to_a_cluster_loses_and_repeats_nothing(tmp_path: Path, proxied: bool) -> None:
    with servers(tmp_path, proxied=proxied) as place:
        endure(place, tmp_path)
