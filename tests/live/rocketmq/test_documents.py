"""The site's Python snippets that need RocketMQ run on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.rocketmq.local.servers import Cluster
from tests.snippets import name, pages, run

pytestmark = pytest.mark.spark

PAGES = pages("rocketmq")
#: The address that `orderedmq rocketmq up` prints, and that the documents use.
ADDRESS = "127.0.0.1:9876"


@pytest.mark.parametrize("path", PAGES, ids=name)
@pytest.mark.timeout(400)
def test_the_snippets_of_a_page_run_on_a_cluster(
    path: Path, spark: SparkSession, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        before = {topic.name for topic in broker.log.topics()}
        try:
            run(PAGES[path], spark, tmp_path, {ADDRESS: cluster.address})
        finally:
            for topic in broker.log.topics():
                if topic.name not in before:
                    broker.admin.delete_topic(topic.name)


def test_pages_that_need_a_cluster_are_found() -> None:
    assert PAGES
    for some in PAGES.values():
        assert any(ADDRESS in one.code for one in some)
