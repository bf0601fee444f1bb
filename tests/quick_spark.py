"""Starts the drivers of tests as ``orderedmq.tuned`` does, in half the time, and with a Java for programs that live for seconds.

What that needs is made once, by ``orderedmq spark prepare``, after tests that start Spark were collected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from orderedmq.java import find_java
from orderedmq.startup.archive import BRIEF, archive_options, fitting_archive
from orderedmq.startup.home import compiled_home, installed_spark

#: Most JVMs of the tests live for seconds: without the optimising compiler they need 40 % less CPU. Benchmarks use it.
QUICK_JVM: Final = tuple(BRIEF.split())
#: RocketMQ's servers generate a certificate at each start, which takes 2 of about 4 s of CPU.
QUICK_SERVER: Final = (*QUICK_JVM, "-Dtls.server.mode=disabled")


def use() -> bool:
    """Make the drivers that this process starts quick. Return whether the archive of Spark's classes is there."""
    archive = _archive()
    if archive is None:
        return False
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{' '.join(QUICK_JVM)} {archive}")
    os.environ.setdefault("SPARK_HOME", str(_home()))
    return True


def jvm_options() -> str:
    """Options for a JVM of Spark that has the jars of SPARK_HOME: drivers have them, executors and Spark's own servers need them."""
    return " ".join(filter(None, (*QUICK_JVM, _archive())))


def begin() -> subprocess.Popen[bytes] | None:
    """Start the process that prepares Spark; None if that is done. Without it the tests run, only slower."""
    # One that is there may be of jars that were installed anew since.
    if fitting_archive(find_java(), _home()) is not None:
        use()
        return None
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    command = [sys.executable, "-m", "orderedmq", "spark", "prepare"]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.DEVNULL)


def _archive() -> str | None:
    return archive_options(find_java(), _home())


def _home() -> Path:
    installed = installed_spark()
    assert installed is not None
    return compiled_home(installed)
