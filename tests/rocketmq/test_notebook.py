"""The notebook about RocketMQ runs on a real cluster, and leaves nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

import orderedmq
from orderedmq.rocketmq.servers import Cluster
from tests.spark.test_notebooks import ON_A_CLUSTER, run


@pytest.mark.timeout(400)
def test_the_notebook_runs_and_says_what_its_kept_outputs_say(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", cluster.address)
    run(ON_A_CLUSTER, tmp_path, monkeypatch)
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        assert not [topic.name for topic in broker.log.topics() if topic.name.startswith("shop-")]
        assert not [group for group in broker.admin.groups() if group.startswith("shop-")]
