"""Spark releases: each supported one runs a pipeline in a separate environment, and older ones are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_orderedmq import require_spark
from tests.environments import run, spark_environment

#: The minor releases but the last one, on which all other tests run.
SUPPORTED, TOO_OLD = ("4.2",), ("4.1", "4.0")
#: Timeout in seconds. The installation of an environment with Spark takes minutes.
_TIMEOUT = 1200

_PIPELINE = """
import orderedmq, sys
from ordered_source import ConsumeOrderlyStatus, OrderPerKey, consume_orderly, stop_at_boundary
from pyspark.sql import SparkSession
import pyspark

assert pyspark.__version__.startswith(sys.argv[1] + ".")
orderedmq.prepare_spark()
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = [(f"order-{n % 5}", f"{n}") for n in range(100)]
def write(rows):
    made = spark.createDataFrame(rows, "sharding_key string, body string").coalesce(1)
    made.write.format("orderedmq").mode("append").options(path="store", topic="orders", topicQueueNums=4).save()
def listener(messages, context):
    again = messages[0].reconsume_times == 0 and messages[0].body == b"7"
    return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT if again else ConsumeOrderlyStatus.SUCCESS
def copy(**options):
    source = spark.readStream.format("orderedmq").options(path="store", topic="orders", consumerGroup="g", maxOffsetsPerTrigger=40)
    source = source.load()
    sink = source.select("sharding_key", "body").writeStream.format("orderedmq").options(path="store", topic="out", topicQueueNums=4)
    return sink.option("checkpointLocation", "ck").trigger(**options).start()
write(rows)
copy(availableNow=True).awaitTermination()
write([("order-1", "last")])
query = copy(processingTime="1 second")
query.processAllAvailable()
assert stop_at_boundary(query)
found = spark.read.format("orderedmq").options(path="store", topic="out").load()
found = found.selectExpr("sharding_key", "CAST(body AS STRING) b", "queue_offset")
of_key = {}
for row in sorted(found.collect(), key=lambda row: row.queue_offset):
    of_key.setdefault(row.sharding_key, []).append(row.b)
expected = {}
for key, body in [*rows, ("order-1", "last")]:
    expected.setdefault(key, []).append(body)
assert of_key == expected, of_key
heard = spark.readStream.format("orderedmq").options(path="store", topic="orders", consumerGroup="l", parkingLot="true").load()
outcomes = heard.transform(consume_orderly, listener, OrderPerKey())
seen = []
writer = outcomes.writeStream.foreachBatch(lambda batch, _: seen.extend(batch.collect())).option("checkpointLocation", "ckl")
writer.trigger(availableNow=True).start().awaitTermination()
assert sum(row.status == "SUCCESS" for row in seen) + sum(row.status == "PARKED" for row in seen) == 101, seen
print("DONE")
"""
_REFUSED = """
import os, sys
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
class Reader(DataSourceReader):
    def read(self, partition):
        yield (1,)
class Other(DataSource):
    @classmethod
    def name(cls):
        return "other"
    def schema(self):
        return "n int"
    def reader(self, schema):
        return Reader()
spark.dataSource.register(Other)
assert spark.read.format("other").load().collect()[0].n == 1, "a format of somebody else still works"
try:
    spark.readStream.format("orderedmq").options(path="store", topic="t").load()
except Exception as error:
    print(error)
import orderedmq
try:
    orderedmq.register(spark)
except RuntimeError as error:
    print("REGISTER", error)
"""


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("release", SUPPORTED)
def test_a_pipeline_runs_on_each_supported_release(release: str, tmp_path: Path) -> None:
    assert "DONE" in run(spark_environment(release), "-c", _PIPELINE, release, cwd=tmp_path)


@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(_TIMEOUT)
@pytest.mark.parametrize("release", TOO_OLD)
def test_an_older_release_says_what_it_lacks_and_other_formats_work(release: str, tmp_path: Path) -> None:
    said = run(spark_environment(release), "-c", _REFUSED, cwd=tmp_path)
    assert said.count(f"orderedmq needs PySpark 4.2 or newer, but this is {release}.") == 2, said
    assert "REGISTER orderedmq needs" in said


@pytest.mark.parametrize(
    ("version", "supported"), [("4.0.0", False), ("4.1.9", False), ("4.2.0.dev1", True), ("4.10.0", True), ("5.0", True)]
)
def test_versions_are_compared_as_numbers(version: str, supported: bool) -> None:
    if supported:
        require_spark(version)
    else:
        with pytest.raises(RuntimeError, match=f"this is {version}"):
            require_spark(version)
