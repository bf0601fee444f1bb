"""Prepares Spark to start in half the time: once for a virtual environment, after tests that start Spark were collected.

- An archive of the classes that a driver loads (class data sharing): reading and verifying them takes seven of its thirteen
  seconds of CPU. A JVM that the archive does not fit runs without it.
- A SPARK_HOME without python/lib: workers prefer the zip of PySpark there, and compile each of its modules every time. Without
  it they find the compiled PySpark that pip has installed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

#: Most JVMs of the tests live for seconds: without the optimising compiler they need 40 % less CPU. Benchmarks use it.
QUICK_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
#: RocketMQ's servers generate a certificate at each start, which takes 2 of about 4 s of CPU.
QUICK_SERVER: Final = (*QUICK_JVM, "-Dtls.server.mode=disabled")
_FOLDER: Final = Path(sys.prefix) / "share" / "orderedmq-tests"
_HOME: Final = _FOLDER / "spark"
_ARCHIVE: Final = _FOLDER / "driver.jsa"
#: Holds the release of Spark for which the folder was made.
_STAMP: Final = _FOLDER / "made-for"
_SILENT: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def use() -> bool:
    """Make the drivers that this process starts quick. Return whether the preparation was done."""
    if not _made():
        return False
    os.environ.setdefault("SPARK_SUBMIT_OPTS", jvm_options())
    os.environ.setdefault("SPARK_HOME", str(_HOME))
    return True


def jvm_options() -> str:
    """Options for a JVM of Spark that has the jars of SPARK_HOME: drivers have them, executors and Spark's own servers need them."""
    options = " ".join(QUICK_JVM)
    return f"{options} -XX:SharedArchiveFile={_ARCHIVE} {_SILENT}" if _ARCHIVE.exists() else options


def begin() -> subprocess.Popen[bytes] | None:
    """Start the process that prepares Spark; None if that is done, or outside a writable virtual environment."""
    if use() or sys.prefix == sys.base_prefix or not os.access(sys.prefix, os.W_OK):
        return None
    return subprocess.Popen([sys.executable, "-m", "tests.quick_spark"], cwd=Path(__file__).parents[1])


def _made() -> bool:
    return _STAMP.exists() and _STAMP.read_text() == version("pyspark")


def make_once() -> None:
    """Prepare Spark unless that is done. If several processes ask at once, one does it and the others wait."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _made():
            make()
            _STAMP.write_text(version("pyspark"))


def make() -> None:
    """Make SPARK_HOME and the archive, which comes from a driver that does what most tests do."""
    import pyspark

    from orderedmq.java import ensure_java

    ensure_java()
    installed = Path(pyspark.__file__).parent
    _STAMP.unlink(missing_ok=True)
    _HOME.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "jars", "sbin"):
        link = _HOME / part
        link.unlink(missing_ok=True)
        link.symlink_to(installed / part)
    _ARCHIVE.unlink(missing_ok=True)
    made = _ARCHIVE.with_suffix(".new")
    options = f"{' '.join(QUICK_JVM)} -XX:ArchiveClassesAtExit={made} {_SILENT}"
    env = {**os.environ, "SPARK_HOME": str(_HOME), "SPARK_SUBMIT_OPTS": options, "PYSPARK_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.quick_spark", folder]
        done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if made.exists():
        made.replace(_ARCHIVE)
    if done.returncode:
        # The tests run without it, only slower.
        print(f"no archive of Spark's classes could be made, so drivers start slowly:\n{done.stderr[-2000:]}", file=sys.stderr)


def drive(folder: str) -> None:
    """Do with Spark what most tests do."""
    from pyspark.sql import SparkSession

    from orderedmq import connect

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.range(10).mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    store = f"{folder}/store"
    with connect(store) as broker:
        for topic in ("in", "out"):
            broker.admin.create_topic(topic, 2)
    rows = spark.range(10).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS body", "CAST(id AS STRING) AS sharding_key")
    rows.write.format("orderedmq").mode("append").options(path=store, topic="in").save()
    for form, options in (("orderedmq", {"path": store, "topic": "out"}), ("parquet", {"path": f"{folder}/parquet"})):
        read = spark.readStream.format("orderedmq").options(
            path=store, topic="in", consumerGroup=form, consumeFromWhere="first"
        )
        written = read.load().writeStream.format(form).options(checkpointLocation=f"{folder}/{form}-checkpoint", **options)
        written.trigger(availableNow=True).start().awaitTermination()
    spark.read.parquet(f"{folder}/parquet").orderBy("queue_offset").collect()
    process = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    # The JVM ends when its standard input is closed, and writes the archive then.
    process.stdin.close()
    process.wait(120)


if __name__ == "__main__":
    drive(sys.argv[1]) if len(sys.argv) > 1 else make_once()
