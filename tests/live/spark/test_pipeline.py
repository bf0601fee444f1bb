"""The project of examples/pipeline, run by spark-pipelines in a copy of the folder, as its README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import orderedmq
from orderedmq.java import ensure_java
from tests.contract.support import bodies
from tests.snippets import snippets

ROOT = Path(__file__).resolve().parents[3]
PROJECT = ROOT / "examples" / "pipeline"
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", (PROJECT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROJECT, tmp_path / "project"))


def typed(commands: str, folder: Path) -> str:
    """Run commands in a shell in a folder, and return their output. A command that fails ends the test."""
    ensure_java()
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **paths, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(["bash", "-euc", commands], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / "spark-warehouse" / name).to_pylist()


def places(folder: Path) -> list[tuple[int, int]]:
    """The queue and offset of each row in the table events."""
    return [(row["queue_id"], row["queue_offset"]) for row in table(folder, "events")]


def paid(folder: Path) -> list[str]:
    """The orders in the messages that the sink wrote."""
    with orderedmq.connect(folder / "data" / "omq") as broker:
        return sorted(json.loads(body)["order"] for queue in broker.log.queues("paid") for body in bodies(broker, queue))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_runs_of_the_pipeline_each_take_what_is_new(folder: Path) -> None:
    first, later = BLOCKS
    typed(first, folder)
    first_rows = places(folder)
    assert len(first_rows) == len(set(first_rows)) == 5
    assert sorted(table(folder, "revenue"), key=str) == [
        {"event": "cancelled", "orders": 1, "total": 35.0},
        {"event": "created", "orders": 3, "total": 67.0},
        {"event": "paid", "orders": 1, "total": 20.0},
    ]
    assert paid(folder) == ["order-1"]
    typed(later, folder)
    all_rows = places(folder)
    assert len(all_rows) == len(set(all_rows)) == 8
    assert set(first_rows) < set(all_rows)
    assert sum(row["orders"] for row in table(folder, "revenue")) == 8
    assert paid(folder) == ["order-1", "order-3", "order-4"]
    with orderedmq.connect(folder / "data" / "omq") as broker:
        for group in ("warehouse", "shipping"):
            assert sum(broker.admin.group_offsets(group).values()) == 8


#: The newest release of Spark whose jar of tests Maven Central has. It has a catalog with MERGE.
CATALOG_JAR = "https://repo1.maven.org/maven2/org/apache/spark/spark-catalyst_2.13/4.2.0/spark-catalyst_2.13-4.2.0-tests.jar"
CATALOG = "org.apache.spark.sql.connector.catalog.SharedTablesInMemoryRowLevelOperationTableCatalog"
#: The catalog's tables are lost when the run ends.
LATEST = """
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession


@dp.materialized_view
def latest() -> DataFrame:
    return SparkSession.active().read.table("lake.shop.orders").select("order_id", "status")
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_auto_cdc_flow_keeps_the_latest_state_of_each_key(folder: Path) -> None:
    """Orders change before and after a resize of the topic, and all changes are in one micro-batch."""
    jar = folder / "catalog.jar"
    try:
        urllib.request.urlretrieve(CATALOG_JAR, jar)
    except OSError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    for definitions in (folder / "transformations").iterdir():
        definitions.unlink()
    (changes,) = (one for one in snippets(ROOT / "docs" / "guides" / "pipelines.md") if "create_auto_cdc_flow" in one.code)
    (folder / "transformations" / "changes.py").write_text(changes.code)
    (folder / "transformations" / "latest.py").write_text(LATEST)
    produce = "orderedmq --path data/omq produce orders --key order --tags-field event --file"
    typed(
        f"""
        echo "storage: file://$PWD/storage" >> spark-pipeline.yml
        orderedmq --path data/omq topic create orders --queues 2
        {produce} first.jsonl
        orderedmq --path data/omq topic resize orders --queues 3
        {produce} later.jsonl
        spark-pipelines run --conf spark.jars={jar} --conf spark.sql.catalog.lake={CATALOG}
        """,
        folder,
    )
    latest = {row["order_id"]: row["status"] for row in table(folder, "latest")}
    assert latest == {"order-1": "paid", "order-3": "paid", "order-4": "paid"}


def test_the_guide_has_the_definitions_of_the_project() -> None:
    page = (ROOT / "docs" / "guides" / "pipelines.md").read_text()
    for name, language in (("events.py", "python"), ("revenue.sql", "sql")):
        assert f"```{language}\n{(PROJECT / 'transformations' / name).read_text()}```" in page
