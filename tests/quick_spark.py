"""Starts the drivers of tests as ``orderedmq.tuned`` does, in half the time, with Java settings for programs that live for seconds.

This needs files that ``orderedmq spark prepare`` makes once; ``make test`` calls it. Without them, drivers start as they do by
default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from orderedmq.java import find_java
from orderedmq.startup.archive import BRIEF, archive_options
from orderedmq.startup.tuning import compiled_home, installed_spark

#: Most JVMs of the tests live for seconds. They need 40 % less CPU without the optimising compiler, which benchmarks do use.
QUICK_JVM: Final = tuple(BRIEF.split())
#: RocketMQ's servers generate a certificate at each start, which takes about 2 of the 4 s of CPU.
QUICK_SERVER: Final = (*QUICK_JVM, "-Dtls.server.mode=disabled")


def use() -> None:
    """If Spark is prepared, make the drivers of this process start quickly."""
    archive = _archive()
    if archive is not None:
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{' '.join(QUICK_JVM)} {archive}")
        os.environ.setdefault("SPARK_HOME", str(_home()))


def jvm_options() -> str:
    """Options for a Spark JVM with the jars of SPARK_HOME. Executors and Spark's servers need them; drivers get them from `use`."""
    return " ".join(filter(None, (*QUICK_JVM, _archive())))


def _archive() -> str | None:
    return archive_options(find_java(), _home())


def _home() -> Path:
    installed = installed_spark()
    assert installed is not None
    return compiled_home(installed)
