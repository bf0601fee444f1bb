"""Starts the drivers of tests as ``orderedmq.tuned`` does, in half the time, and with a Java for programs that live for seconds.

What that needs is made once, by ``orderedmq spark prepare``, which ``make test`` calls. Without it drivers start as they do by default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from orderedmq.java import find_java
from orderedmq.startup.archive import BRIEF, archive_options
from orderedmq.startup.home import compiled_home, installed_spark

#: Most JVMs of the tests live for seconds: without the optimising compiler they need 40 % less CPU. Benchmarks use it.
QUICK_JVM: Final = tuple(BRIEF.split())
#: RocketMQ's servers generate a certificate at each start, which takes 2 of about 4 s of CPU.
QUICK_SERVER: Final = (*QUICK_JVM, "-Dtls.server.mode=disabled")


def use() -> None:
    """Make the drivers that this process starts quick, if Spark is prepared."""
    archive = _archive()
    if archive is not None:
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{' '.join(QUICK_JVM)} {archive}")
        os.environ.setdefault("SPARK_HOME", str(_home()))


def jvm_options() -> str:
    """Options for a JVM of Spark that has the jars of SPARK_HOME: drivers have them, executors and Spark's own servers need them."""
    return " ".join(filter(None, (*QUICK_JVM, _archive())))


def _archive() -> str | None:
    return archive_options(find_java(), _home())


def _home() -> Path:
    installed = installed_spark()
    assert installed is not None
    return compiled_home(installed)
