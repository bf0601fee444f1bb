"""The notebook about RocketMQ runs on a real cluster and leaves no topics or groups there."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.rocketmq.local.servers import Cluster
from tests.live.spark.test_notebooks import ON_A_CLUSTER, assert_says_what_is_kept, run, run_in_this_session

pytestmark = pytest.mark.spark


def nothing_is_left(cluster: Cluster) -> None:
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        assert not [topic.name for topic in broker.log.topics() if topic.name.startswith("shop-")]
        assert not [group for group in broker.admin.groups() if group.startswith("shop-")]


@pytest.mark.nightly
def test_cells_print_the_stored_outputs(
    spark: SparkSession, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells run in this process and Spark session, because a separate notebook run starts a kernel and a JVM."""
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", cluster.address)
    run_in_this_session(ON_A_CLUSTER, spark, tmp_path, monkeypatch)
    nothing_is_left(cluster)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_notebook_prints_the_stored_outputs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", cluster.address)
    assert_says_what_is_kept(ON_A_CLUSTER, run([ON_A_CLUSTER], tmp_path, monkeypatch)[ON_A_CLUSTER])
    nothing_is_left(cluster)
