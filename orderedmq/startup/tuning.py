"""``tuned``: sets environment variables of this process with which a Spark session starts sooner.

Rules: the user's settings in the builder and in the environment are kept. A setting that might do harm is left out, and the log says
why.

Each Python process that Spark starts imports PySpark from ``python/lib/pyspark.zip`` in SPARK_HOME, if that file exists. Python does not
save compiled modules of a zip file, so each process compiles PySpark again, which takes a second of CPU. Without the file, processes
import the same PySpark from the interpreter's packages, where it is compiled only once. So `compiled_home` makes a SPARK_HOME without it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from orderedmq.java import Java, cache_folder, cached, find_java, set_interpreter
from orderedmq.spark_support import newest_java, require_release
from orderedmq.startup.archive import archive_options

logger = logging.getLogger("orderedmq")

Builder = TypeVar("Builder")

#: Settings with which a user chooses another Python.
_PYTHONS: Final = ("spark.pyspark.python", "spark.pyspark.driver.python")
#: Parts of Java options with which a user configures class data sharing.
_SHARING: Final = ("-Xshare", "SharedArchiveFile", "ArchiveClassesAtExit")


class Installation(NamedTuple):
    """The Java and the SPARK_HOME of the future session. ``home`` is None if it is unknown."""

    java: Java
    home: Path | None


def tuned(builder: Builder) -> Builder:
    """Make the session of a SparkSession builder, and its first queries, start sooner. Return the same builder.

    Does what ``prepare_spark`` does, and sets two environment variables of this process: SPARK_HOME, so that Spark's Python processes use
    the installed, compiled PySpark, and SPARK_SUBMIT_OPTS, so that Java uses the archive of classes that ``orderedmq spark prepare`` has
    made. The user's settings in the environment and in the builder are kept.

    Call it after all other settings of the builder and before the first SparkSession. It has no effect after the first session, under
    spark-submit, or for a Spark Connect server. In these cases the logger ``orderedmq`` says why, at level INFO. Raises the
    errors of ``prepare_spark``.
    """
    require_release()
    options: dict[str, Any] = getattr(builder, "_options", {})
    reason = _too_late(options)
    if reason is not None:
        logger.info("orderedmq.tuned has no effect: %s", reason)
        return builder
    place = prepare(options)
    if place.home is not None:
        _use_archive(place.java, place.home, options)
    return builder


def prepare(options: dict[str, Any]) -> Installation:
    """Set up Java, Python and SPARK_HOME for a session with these options. Return the Java and the SPARK_HOME.

    Raises JavaError MISSING, TOO_OLD or TOO_NEW, and OptionError UNSUPPORTED if PySpark is too old.
    """
    require_release()
    java = find_java(newest_java())
    set_interpreter()
    if "SPARK_HOME" in os.environ:
        return Installation(java, Path(os.environ["SPARK_HOME"]))
    spark = installed_spark()
    if spark is None:
        logger.info("SPARK_HOME stays unset: no installed PySpark contains Spark itself")
        return Installation(java, None)
    reason = _needs_zip(spark, options)
    try:
        home = spark if reason else compiled_home(spark)
    except OSError as error:
        home, reason = spark, str(error)
    if reason:
        logger.info("SPARK_HOME stays unset, so Spark's Python processes compile PySpark: %s", reason)
    else:
        os.environ["SPARK_HOME"] = str(home)
    return Installation(java, home)


def _too_late(options: dict[str, Any]) -> str | None:
    """Return why settings would have no effect now, or None if they would have an effect."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return "spark-submit has started the JVM"
    context = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    if getattr(context, "_gateway", None) is not None:
        return "this process has already started its JVM"
    remote = options.get("spark.remote") or os.environ.get("SPARK_REMOTE") or ""
    if remote and not str(remote).startswith("local"):
        return f"the session runs on the server {remote}"
    return None


def _needs_zip(spark: Path, options: dict[str, Any]) -> str | None:
    """Return why Spark's Python processes may need the zip file of PySpark, or None if they certainly do not need it."""
    master = options.get("spark.master") or options.get("spark.remote")
    if master is None:
        conf = Path(os.environ.get("SPARK_CONF_DIR", spark / "conf")) / "spark-defaults.conf"
        if os.environ.get("MASTER") or os.environ.get("PYSPARK_SUBMIT_ARGS") or conf.exists():
            return "the builder names no master, but another configuration may"
    elif not str(master).startswith(("local", "spark://")):
        # YARN ships the zip file to its executors.
        return f"the master is {master}"
    pythons = {os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
    if pythons != {sys.executable} or any(name in options for name in _PYTHONS):
        return "they run a different interpreter from this process"
    if not importable_by_workers(spark):
        return f"{spark.parent} is not where this interpreter looks for packages"
    return None


def _use_archive(java: Java, home: Path, options: dict[str, Any]) -> None:
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    named = (given, *(str(options.get(f"spark.driver.{kind}JavaOptions", "")) for kind in ("default", "extra")))
    if any(word in text for word in _SHARING for text in named):
        return
    java_options = archive_options(java, home)
    if java_options is None:
        logger.info(
            "there is no archive of Spark's classes for this Java and this Spark. Run orderedmq spark prepare to make one"
        )
    else:
        os.environ["SPARK_SUBMIT_OPTS"] = f"{given} {java_options}".strip()


#: Folders that are not linked. ``python`` is left out because it has the zip files.
_LEFT_OUT: Final = ("python", "__pycache__")


def installed_spark() -> Path | None:
    """Return the folder of the installed PySpark if it is a complete SPARK_HOME, else None. Does not import PySpark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).absolute().parent
    return folder if (folder / "bin" / "spark-submit").is_file() and (folder / "jars").is_dir() else None


def compiled_home(spark: Path) -> Path:
    """Return a SPARK_HOME with links to all parts of ``spark`` except the zip files of Python modules.

    It is in the user's cache and is named after ``spark``. Folders that Spark's servers make in it, such as ``logs``, are kept.
    Raises OSError if the folder cannot be made.
    """
    entries = {entry.name: entry for entry in spark.iterdir() if entry.name not in _LEFT_OUT and _of_home(entry)}
    name = f"spark-{hashlib.sha256(os.fsencode(spark)).hexdigest()[:16]}"
    made = cached(name)
    if made is not None and _links(made) == entries.keys():
        return made
    home = cache_folder() / name
    home.mkdir(mode=0o700, exist_ok=True)
    for gone in _links(home) - entries.keys():
        (home / gone).unlink(missing_ok=True)
    for part, entry in entries.items():
        try:
            (home / part).symlink_to(entry)
        except FileExistsError:  # made by an earlier call, or by another process a moment ago
            pass
    return home


def _links(home: Path) -> set[str]:
    return {entry.name for entry in home.iterdir() if entry.is_symlink()}


def _of_home(entry: Path) -> bool:
    """Return whether an entry in the folder of PySpark is part of the SPARK_HOME and not of the Python package."""
    return entry.is_dir() and not (entry / "__init__.py").exists()


def importable_by_workers(spark: Path) -> bool:
    """Return whether a new process of this interpreter, with the same environment, would import the PySpark in ``spark``.

    The answer is False if this program found that PySpark only because the program changed its own ``sys.path``.
    """
    return spark.parent in set(_places())


def _places() -> Iterable[Path]:
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry:
            yield Path(entry).absolute()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    # Do not resolve links, because `installed_spark` does not resolve them either.
    for folder in (*site.getsitepackages([sys.prefix, sys.exec_prefix]), *user):
        yield Path(folder).absolute()
