"""An archive of the classes that Spark's driver loads (class data sharing), so that Java need not read and verify them again.

An archive is valid for one build of Java and one SPARK_HOME, and is named after both. Java also compares the archive with the jars, and
ignores it if they have changed. But Java 17 crashes if an archive is truncated, so the name also has the size of the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from orderedmq.conditions import JavaCondition
from orderedmq.errors import JavaError
from orderedmq.java import Java, cache_folder, cached

#: Options for a JVM that runs only for seconds: compile quickly, without much optimisation, and collect garbage in one thread.
BRIEF: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def archive_options(java: Java, home: Path) -> str | None:
    """Return Java's options for the archive of this Java and SPARK_HOME, or None if there is no archive."""
    archive = _find(java, home)
    return None if archive is None else f"{_option('SharedArchiveFile', archive)} {silent(java)}"


def silent(java: Java) -> str:
    """Return options that turn off Java's warnings about an unsuitable archive, because Java writes them to the program's output."""
    # Java 24 renamed one of the two log tags.
    return "-Xlog:cds=off -Xlog:cds+dynamic=off" if java.version < 24 else "-Xlog:cds=off -Xlog:aot=off"


def fitting_archive(java: Java, home: Path) -> Path | None:
    """Return the archive if it exists and Java accepts it for the current jars, else None."""
    archive = _find(java, home)
    if archive is None:
        return None
    strict = [str(java.path), "-Xshare:on", f"-XX:SharedArchiveFile={archive}", "-cp", _class_path(java, home), "-version"]
    return archive if subprocess.run(strict, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0 else None


def _class_path(java: Java, home: Path) -> str:
    """Return the class path of a driver from Spark's own launcher, or "" if the launcher does not run."""
    launcher = [str(java.path), *BRIEF.split(), "-cp", f"{home / 'jars'}/*", "org.apache.spark.launcher.Main"]
    process = subprocess.run(
        [*launcher, "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"],
        env=os.environ | {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="surrogateescape",
    )  # fmt: skip
    words = process.stdout.split("\0")
    return words[words.index("-cp") + 1] if "-cp" in words else ""


def make_archive(java: Java, home: Path) -> Path:
    """Run a driver that loads the classes of a query, so that Java writes them to an archive. Return the path of the archive.

    Takes about half a minute. If several processes call this at the same time, one makes the archive and the others wait. Raises
    JavaError NO_ARCHIVE.
    """
    folder = cache_folder()
    if folder != cached("."):
        raise _none(
            java,
            "the user's cache is not writable, or other users can write it. Set XDG_CACHE_HOME to a folder that only you can write",
        )
    try:
        return _make(java, home, folder)
    except OSError as error:
        raise _none(java, f"{error}. Check whether the disk of {folder} is full") from error


def _make(java: Java, home: Path, folder: Path) -> Path:
    with (folder / "archive.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder, prefix=".archive-") as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have made the archive during the wait for the lock. A second one would replace a file that programs use.
        fitting = fitting_archive(java, home)
        if fitting is not None:
            return fitting
        archive_file = Path(scratch, "classes.jsa")
        options = f"{_base(java, folder)} {BRIEF} {_option('ArchiveClassesAtExit', archive_file)}"
        process = subprocess.run(
            [sys.executable, "-m", "orderedmq.startup.training", scratch],
            env=os.environ | {"SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        if process.returncode or not archive_file.exists():
            errors = [
                line for line in f"{process.stdout}\n{process.stderr}".splitlines() if re.search("Error|Exception|error", line)
            ]
            why = errors[-1][:300] if errors else "it gave no reason"
            raise _none(java, f"{why}. Check whether a Spark session starts here, and whether the disk of {folder} is full")
        with archive_file.open("rb") as written:
            os.fsync(written.fileno())
        archive = folder / archive_name(java, home, archive_file.stat().st_size)
        for older in folder.glob(archive_name(java, home, "*")):
            older.unlink()
        os.replace(archive_file, archive)
    return archive


def _none(java: Java, why: str) -> JavaError:
    return JavaError(JavaCondition.NO_ARCHIVE, f"{java.path} made no archive of Spark's classes: {why}")


def _option(name: str, path: Path) -> str:
    """Return a Java option in the form that Spark parses. A path with spaces is quoted, so that it stays one word."""
    quote = '"' if re.search(r"\s", str(path)) else ""
    return f"{quote}-XX:{name}={path}{quote}"


def archive_name(java: Java, home: Path, size: int | str) -> str:
    """Return the file name of the archive for this Java and SPARK_HOME. ``size``: its size in bytes, or "*"."""
    parts = (str(java.path), java.build, str(home), version("pyspark"))
    return f"classes-{hashlib.sha256(chr(0).join(parts).encode(errors='surrogateescape')).hexdigest()[:16]}-{size}.jsa"


def _find(java: Java, home: Path) -> Path | None:
    folder = cached(".")
    archives = [] if folder is None else folder.glob(archive_name(java, home, "*"))
    try:
        return next((path for path in archives if path.name == archive_name(java, home, path.stat().st_size)), None)
    except FileNotFoundError:  # another process is replacing it
        return None


def _base(java: Java, folder: Path) -> str:
    """Return the option for the archive of Java's own classes, which Spark's archive extends. Make that archive if Java came without it."""
    version = subprocess.run([java.path, "-Xshare:on", "-version"], stdin=subprocess.DEVNULL, capture_output=True)
    if version.returncode == 0:
        return ""
    own = hashlib.sha256(f"{java.path}\0{java.build}".encode(errors="surrogateescape")).hexdigest()[:16]
    base = folder / f"java-classes-{own}.jsa"
    subprocess.run([java.path, "-Xshare:dump", f"-XX:SharedArchiveFile={base}"], stdin=subprocess.DEVNULL, capture_output=True)
    return _option("SharedArchiveFile", base)
