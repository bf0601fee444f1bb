"""The notebook about RocketMQ runs on a real cluster, and leaves nothing there."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import orderedmq
from orderedmq.rocketmq.local.servers import Cluster
from tests.spark.test_notebooks import FOLDER, ON_A_CLUSTER, assert_says_what_is_kept, code_cells, run

pytestmark = pytest.mark.spark


class Shared:
    """The tests' session, which outlives the notebook."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Another test needs it."""


def nothing_is_left(cluster: Cluster) -> None:
    with orderedmq.connect(namesrv_addr=cluster.address) as broker:
        assert not [topic.name for topic in broker.log.topics() if topic.name.startswith("shop-")]
        assert not [group for group in broker.admin.groups() if group.startswith("shop-")]


def test_its_cells_say_what_its_kept_outputs_say(
    spark: SparkSession, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and session: a notebook of its own starts a kernel and a JVM."""
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", cluster.address)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    shop = importlib.import_module("shop")
    monkeypatch.setattr(shop, "local_spark", lambda _: Shared(spark))
    names: dict[str, Any] = {}
    try:
        for cell in code_cells(ON_A_CLUSTER):
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(cell.source, ON_A_CLUSTER.name, "exec"), names)
            kept = [output.text for output in cell.outputs if output.output_type == "stream"]
            assert said.getvalue() == "".join(kept), cell.source
    finally:
        for query in spark.streams.active:
            query.stop()
        for module in ("shop", "pictures"):
            sys.modules.pop(module, None)
    nothing_is_left(cluster)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_notebook_runs_and_says_what_its_kept_outputs_say(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", cluster.address)
    assert_says_what_is_kept(ON_A_CLUSTER, run([ON_A_CLUSTER], tmp_path, monkeypatch)[ON_A_CLUSTER])
    nothing_is_left(cluster)
