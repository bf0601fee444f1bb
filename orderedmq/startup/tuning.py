"""``tuned``: sets what lets a session of Spark start sooner. Everything is a variable of this process's environment.

Rules: what the user has set stays, in the builder and in the environment. Where it is not certain that a setting does no harm, it
is not set, and the log says why.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from orderedmq.java import Java, find_java, set_interpreter
from orderedmq.startup.archive import archive_options
from orderedmq.startup.home import compiled_home, importable_by_workers, installed_spark

log = logging.getLogger("orderedmq")

Builder = TypeVar("Builder")

#: Settings by which a user names another Python, or class data sharing of his own.
_PYTHONS: Final = ("spark.pyspark.python", "spark.pyspark.driver.python")
_SHARING: Final = ("-Xshare", "SharedArchiveFile", "ArchiveClassesAtExit")


class Installation(NamedTuple):
    """The Java and the SPARK_HOME that a session will have. ``home`` is None if it is not known."""

    java: Java
    home: Path | None


def tuned(builder: Builder) -> Builder:
    """Return the builder of a SparkSession, after setting what lets its session and its first queries start sooner.

    Does what ``prepare_spark`` does, and sets variables of this process's environment: SPARK_HOME, so that Spark's Python processes
    take PySpark compiled as it is installed; and SPARK_SUBMIT_OPTS, so that Java uses the archive of classes that ``orderedmq spark
    prepare`` has made. What the user has set stays, in the environment and in the builder.

    Call it with the builder's other settings in place and before the first SparkSession. It sets nothing after that, under
    spark-submit, and for a Spark Connect server; the logger ``orderedmq`` says why, at level INFO. Raises JavaError MISSING or
    TOO_OLD.
    """
    options: dict[str, Any] = getattr(builder, "_options", {})
    reason = _too_late(options)
    if reason is not None:
        log.info("Spark starts as it would without orderedmq.tuned: %s", reason)
        return builder
    place = prepare(options)
    if place.home is not None:
        _use_archive(place.java, place.home, options)
    return builder


def prepare(options: dict[str, Any]) -> Installation:
    """Set up Java, Python and SPARK_HOME for a session with these options, and return what it will have.

    Raises JavaError MISSING or TOO_OLD.
    """
    java = find_java()
    set_interpreter()
    if "SPARK_HOME" in os.environ:
        return Installation(java, Path(os.environ["SPARK_HOME"]))
    spark = installed_spark()
    if spark is None:
        log.info("SPARK_HOME stays unset: PySpark is not installed with a Spark of its own")
        return Installation(java, None)
    reason = _needs_zip(spark, options)
    try:
        home = spark if reason else compiled_home(spark)
    except OSError as error:
        home, reason = spark, str(error)
    if reason:
        log.info("SPARK_HOME stays unset, so Spark's Python processes compile PySpark: %s", reason)
    else:
        os.environ["SPARK_HOME"] = str(home)
    return Installation(java, home)


def _too_late(options: dict[str, Any]) -> str | None:
    """Return why nothing that is set now has an effect, or None."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "spark-submit has started the JVM"
    context = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    if getattr(context, "_gateway", None) is not None:
        return "this process has started its JVM before"
    remote = options.get("spark.remote") or os.environ.get("SPARK_REMOTE") or ""
    if remote and not str(remote).startswith("local"):
        return f"the session is at the server {remote}"
    return None


def _needs_zip(spark: Path, options: dict[str, Any]) -> str | None:
    """Return why Spark's Python processes may need PySpark from its zip file, or None if they surely do not."""
    master = options.get("spark.master") or options.get("spark.remote")
    if master is None:
        conf = Path(os.environ.get("SPARK_CONF_DIR", spark / "conf")) / "spark-defaults.conf"
        if os.environ.get("MASTER") or os.environ.get("PYSPARK_SUBMIT_ARGS") or conf.exists():
            return "the builder names no master, so another place may"
    elif not str(master).startswith(("local", "spark://")):
        # YARN ships the zip file to its executors.
        return f"the master is {master}"
    pythons = {os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
    if pythons != {sys.executable} or any(name in options for name in _PYTHONS):
        return "they run another interpreter than this one"
    if not importable_by_workers(spark):
        return f"{spark.parent} is not where this interpreter looks for packages"
    return None


def _use_archive(java: Java, home: Path, options: dict[str, Any]) -> None:
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    named = (given, *(str(options.get(f"spark.driver.{kind}JavaOptions", "")) for kind in ("default", "extra")))
    if any(word in text for word in _SHARING for text in named):
        return
    found = archive_options(java, home)
    if found is None:
        log.info("there is no archive of Spark's classes for this Java and this Spark: `orderedmq spark prepare` makes one")
    else:
        os.environ["SPARK_SUBMIT_OPTS"] = f"{given} {found}".strip()
