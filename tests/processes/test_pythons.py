"""Versions of Python: a query runs, stops within its work and resumes, on each version but the one that runs all other tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.environments import interpreter, run, spark_environment

#: The versions that the package's classifiers name.
VERSIONS = ("3.11", "3.12", "3.13")
#: Timeout in seconds. The installation of an environment with Spark takes minutes.
_TIMEOUT = 1200

_QUERY = """
import sys
import orderedmq
from ordered_source import ConsumeOrderlyStatus, OrderPerKey, consume_orderly
from pyspark.sql import SparkSession

assert f"{sys.version_info[0]}.{sys.version_info[1]}" == sys.argv[1]
# Spark waits only 10 s for a worker, which starts sooner without zip files.
spark = orderedmq.tuned(SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")).getOrCreate()
store = {"path": "store", "topicQueueNums": "4"}

def write(numbers):
    rows = spark.createDataFrame([(f"order-{n % 5}", str(n)) for n in numbers], "sharding_key string, body string").coalesce(1)
    rows.write.format("orderedmq").mode("append").options(**store, topic="orders").save()

def stream(group, **options):
    return spark.readStream.format("orderedmq").options(path="store", topic="orders", consumerGroup=group, **options).load()

def copy():
    sink = stream("copy").select("sharding_key", "body").writeStream.format("orderedmq").options(**store, topic="out")
    sink.option("checkpointLocation", "ck").trigger(availableNow=True).start().awaitTermination()

write(range(50))
copy()
write(range(50, 100))
copy()
rows = spark.read.format("orderedmq").options(path="store", topic="out").load()
bodies = {}
for row in sorted(rows.collect(), key=lambda row: row.queue_offset):
    bodies.setdefault(row.sharding_key, []).append(int(row.body))
assert bodies == {f"order-{key}": list(range(key, 100, 5)) for key in range(5)}, bodies

def listener(messages, context):
    return ConsumeOrderlyStatus.SUCCESS

statuses = []
outcomes = stream("heard", parkingLot="true").transform(consume_orderly, listener, OrderPerKey())
writer = outcomes.writeStream.foreachBatch(lambda batch, _: statuses.extend(row.status for row in batch.collect()))
writer.option("checkpointLocation", "ck-heard").trigger(availableNow=True).start().awaitTermination()
assert statuses == ["SUCCESS"] * 100, statuses
print("DONE")
"""


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("version", [one for one in VERSIONS if one != f"{sys.version_info[0]}.{sys.version_info[1]}"])
def test_a_query_runs_on_each_version_of_python(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None and os.environ.get("CI") != "true":
        pytest.skip(f"there is no Python {version}")
    assert python is not None
    assert "DONE" in run(spark_environment("4.3", python), "-c", _QUERY, version, cwd=tmp_path)
