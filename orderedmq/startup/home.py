"""Makes a SPARK_HOME with which Python processes use the installed, compiled PySpark.

Each Python process that Spark starts imports PySpark from ``python/lib/pyspark.zip`` in SPARK_HOME, if that file exists. Python does not
save compiled modules of a zip file, so each process compiles PySpark again, which takes a second of CPU. If SPARK_HOME lacks the file,
processes import the same PySpark from the interpreter's packages, where it is compiled only once.
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
