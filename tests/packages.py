"""Fetches packages from Maven Central with Spark's own resolver, once for all runs, for tests that start a separate Spark."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError
from orderedmq.rocketmq.local.jars import fetch_packages
from tests.quick_spark import jvm_options

ROOT: Final = Path(__file__).resolve().parents[1]
#: The exit code of a program that could not get its jars.
NO_JARS: Final = 77


def keep() -> None:
    """Make sessions of this process take the packages in ``spark.jars.packages`` from the cache, so that they do not ask Maven Central."""
    from pyspark.sql import SparkSession

    config = SparkSession.Builder.config

    def kept(self: Any, key: Any = None, value: Any = None, **more: Any) -> Any:
        if key != "spark.jars.packages":
            return config(self, key, value, **more)
        try:
            folder = fetch_packages(value, value.split(","), f"packages-{hashlib.sha256(value.encode()).hexdigest()[:16]}")
        except ServersError as error:
            print(error, file=sys.stderr)
            sys.exit(NO_JARS)
        return config(self, "spark.jars", ",".join(map(str, sorted(folder.glob("*.jar")))))

    setattr(SparkSession.Builder, "config", kept)  # noqa: B010


def start(module: str, arguments: Sequence[str], folder: Path, errors: Path, cores: int = 2) -> subprocess.Popen[bytes]:
    """Start a test program in ``folder``, with a session of ``cores`` cores. Its errors are written to the file ``errors``."""
    conf = {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    options = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_SUBMIT_ARGS": f"--master local[{cores}] {options} pyspark-shell",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": jvm_options(),
    }
    with errors.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
        )  # fmt: skip


def require_success(process: subprocess.Popen[bytes], errors: Path, timeout: float = 170.0) -> None:
    """Wait until a program has ended. Raises ServersError NO_JARS if it could not get its jars, and AssertionError if it failed."""
    code = process.wait(timeout)
    text = errors.read_text(errors="replace")
    if code == NO_JARS:
        raise ServersError(ServersCondition.NO_JARS, text.strip().splitlines()[-1])
    assert code == 0, text[-6000:]
