"""A small Spark session for tests, started with `orderedmq.tuned`. Its workers find the same modules as this process."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orderedmq.spark_support import require_pyspark
from orderedmq.startup.archive import BRIEF
from orderedmq.startup.tuning import tuned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS: Final = {
    "spark.master": "local[2]",
    "spark.app.name": "orderedmq-tests",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": BRIEF,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    # So that times are the same on every machine.
    "spark.sql.session.timeZone": "UTC",
}
#: Prefixes of settings that Spark sets differently in each session.
_OWN: Final = ("spark.app.", "spark.driver.host", "spark.driver.port", "spark.executor.id", "spark.submit.", "spark.repl.")


def start(config: Mapping[str, str]) -> SparkSession:
    """Return a new local session with settings for tests, which ``config`` can override.

    Raises JavaError MISSING or TOO_OLD.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder
    for name, value in (_DEFAULTS | dict(config)).items():
        builder = builder.config(name, value)
    with modules_for_workers():
        spark = tuned(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


@contextmanager
def local_session(config: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield the active session. If there is none, start one as `start` does, and stop it at the end.

    Raises JavaError MISSING or TOO_OLD, and OptionError MISSING without PySpark.
    """
    require_pyspark("a test with Spark")
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    spark = active or start(config)
    try:
        yield spark
    finally:
        if active is None:
            spark.stop()


def settings(spark: SparkSession) -> dict[str, str]:
    """Return the settings with which another session behaves like this one."""
    return {name: value for name, value in dict(spark.conf.getAll).items() if not name.startswith(_OWN)}


@contextmanager
def modules_for_workers() -> Iterator[None]:
    """Make processes that are started in this block find the modules that pytest has made importable in this process.

    pytest adds folders of tests, and the folders of its setting ``pythonpath``, to ``sys.path``, which other processes do not see.
    """
    before = os.environ.get("PYTHONPATH")
    places = [*(before or "").split(os.pathsep), *map(str, _added())]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, places)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _added() -> Iterator[Path]:
    """Yield the folders of ``sys.path`` that a new process of this interpreter would not have in its own ``sys.path``."""
    own_places = {
        Path(place) for place in (*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages())
    }
    own_places |= {
        Path(sys.base_prefix, place.relative_to(sys.prefix)) for place in own_places if place.is_relative_to(sys.prefix)
    }
    for entry in sys.path:
        place = Path(entry).absolute()
        if place.is_dir() and place not in own_places and place.name != "lib-dynload":
            yield place
