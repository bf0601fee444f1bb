"""A session of ``orderedmq.tuned``: compiled PySpark in its Python processes, and a class archive that does not fit the jars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

import orderedmq
from orderedmq.java import find_java
from orderedmq.startup.archive import fitting_archive
from orderedmq.startup.tuning import compiled_home, installed_spark
from tests.quick_spark import QUICK_JVM

#: Settings that the tests have and a user's program does not.
OURS = ("SPARK_HOME", "SPARK_SUBMIT_OPTS", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")

PROGRAM = """
import json, os, sys
import orderedmq
from pyspark.sql import SparkSession
store, checkpoint = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = orderedmq.tuned(builder.config("spark.sql.shuffle.partitions", "1")).getOrCreate()
def where(batches):
    import pyarrow as pa, pyspark
    for batch in batches:
        yield pa.record_batch({"pyspark": [pyspark.__file__] * len(batch), "body": batch["body"]})
seen = (spark.readStream.format("orderedmq").options(path=store, topic="t", consumerGroup="g", consumeFromWhere="first").load()
        .mapInArrow(where, "pyspark string, body binary"))
query = (seen.writeStream.format("memory").queryName("seen").option("checkpointLocation", checkpoint)
         .trigger(availableNow=True).start())
query.awaitTermination()
rows = spark.table("seen").collect()
java = list(spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
print(json.dumps({
    "bodies": [bytes(row.body).decode() for row in rows],
    "pyspark": sorted({row.pyspark for row in rows}),
    "java": [option for option in java if "Archive" in option],
}))
spark.stop()
"""


def test_a_session_whose_archive_is_stale_gives_the_same_rows(tmp_path: Path) -> None:
    installed = installed_spark()
    assert installed is not None
    good = fitting_archive(find_java(), compiled_home(installed))
    assert good is not None, "the tests' own sessions start without an archive: see the output of `orderedmq spark prepare`"
    # This is the cache of another user, whose archive is for other jars, although its name says that it fits.
    cache = tmp_path / "cache" / "orderedmq"
    cache.mkdir(parents=True, mode=0o700)
    names = "import sys; from orderedmq.startup import archive, tuning; from orderedmq.java import find_java\n"
    names += "print(archive.archive_name(find_java(), tuning.compiled_home(tuning.installed_spark()), sys.argv[1]))"
    environment = {name: value for name, value in os.environ.items() if name not in OURS} | {
        "XDG_CACHE_HOME": str(cache.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # A JVM that lives for seconds should compile quickly rather than well.
        "JDK_JAVA_OPTIONS": " ".join(QUICK_JVM),
    }

    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    stale = cache / run(names, str(good.stat().st_size)).strip()
    shutil.copyfile(good, stale)
    with orderedmq.connect(tmp_path / "store") as broker:
        broker.admin.create_topic("t", 1)
        orderedmq.Producer(broker.log, "t").send(pa.record_batch({"body": [f"{number}" for number in range(100)]}))
    # The output must contain only what the program prints.
    said = json.loads(run(PROGRAM, str(tmp_path / "store"), str(tmp_path / "checkpoint")))
    assert said["bodies"] == [f"{number}" for number in range(100)]
    assert said["java"] == [f"-XX:SharedArchiveFile={stale}"]
    assert said["pyspark"] == [str(installed / "__init__.py")]
