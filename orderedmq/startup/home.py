"""A SPARK_HOME from which Python processes take the compiled PySpark that is installed.

Each Python process that Spark starts looks first into ``python/lib/pyspark.zip`` of SPARK_HOME. Python keeps no compiled modules of
a zip file, so each process compiles PySpark again: a second of CPU. A SPARK_HOME without that file leads to the same PySpark
in the interpreter's packages, where it is compiled once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import site
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from orderedmq.java import cache_folder, cached

#: What holds the zip files.
_LEFT_OUT: Final = ("python", "__pycache__")


def installed_spark() -> Path | None:
    """Return the folder of the installed PySpark if it is a SPARK_HOME; it is not imported."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).absolute().parent
    return folder if (folder / "bin" / "spark-submit").is_file() and (folder / "jars").is_dir() else None


def compiled_home(spark: Path) -> Path:
    """Return a SPARK_HOME of links to all that ``spark`` has for one, but its zip files of Python modules.

    It is in the user's cache, named after ``spark``. What Spark's own servers make there, such as ``logs`` and ``work``, stays. Raises
    OSError if it cannot be made.
    """
    wanted = {entry.name: entry for entry in spark.iterdir() if entry.name not in _LEFT_OUT and _of_home(entry)}
    name = f"spark-{hashlib.sha256(os.fsencode(spark)).hexdigest()[:16]}"
    made = cached(name)
    if made is not None and _links(made) == wanted.keys():
        return made
    home = cache_folder() / name
    home.mkdir(mode=0o700, exist_ok=True)
    for gone in _links(home) - wanted.keys():
        (home / gone).unlink(missing_ok=True)
    for part, entry in wanted.items():
        try:
            (home / part).symlink_to(entry)
        except FileExistsError:  # from an earlier call, or from another process a moment ago
            pass
    return home


def _links(home: Path) -> set[str]:
    return {entry.name for entry in home.iterdir() if entry.is_symlink()}


def _of_home(entry: Path) -> bool:
    """Whether something in the folder of PySpark is part of a SPARK_HOME and not of the package."""
    return entry.is_dir() and not (entry / "__init__.py").exists()


def importable_by_workers(spark: Path) -> bool:
    """Return whether another process of this interpreter, with this environment, imports the PySpark in ``spark``.

    It does not if this program has changed its own ``sys.path``.
    """
    return spark.parent in set(_places())


def _places() -> Iterable[Path]:
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry:
            yield Path(entry).absolute()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    # The interpreter's path is not resolved: a virtual environment is where it is.
    for folder in (*site.getsitepackages([sys.prefix, sys.exec_prefix]), *user):
        yield Path(folder).absolute()
