"""Fetches the jars of a RocketMQ release once, with Spark's resolver, so that neither Maven nor a manual download is needed.

Rules: only the user's Spark configuration (``spark.jars.ivySettings``, ``spark.jars.repositories``) decides where jars come
from. A folder gets its final name when it is complete, so later calls neither check nor fetch it again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from orderedmq.conditions import OptionCondition, ServersCondition
from orderedmq.errors import OptionError, ServersError
from orderedmq.java import cache_folder, ensure_java

#: Releases that are known to run here. Other releases may also run.
VERSIONS: Final = ("4.9.7", "5.3.3", "5.4.0", "5.5.0")
DEFAULT_VERSION: Final = "5.3.3"

#: Servers, the Java client and the admin tools. They share a folder, because all but two of their jars are the same.
_MODULES: Final = ("namesrv", "broker", "client", "tools")
#: The Proxy needs gRPC, so its jars have a separate folder.
PROXY_MODULES: Final = ("proxy",)
#: Seconds for a fetch. A slow network may take long, but a connection that hangs must end.
_TIMEOUT: Final = 900.0
#: Ivy's message if a repository has a jar's description but lacks the jar. Ivy does not look for the jar in other repositories.
_DOWNLOAD_FAILED: Final = "download failed: "


def fetch_jars(version: str = DEFAULT_VERSION, modules: Sequence[str] = _MODULES) -> Path:
    """Return the folder with the jars of a release. The jars are fetched if the folder is missing.

    Raises OptionError INVALID, JavaError MISSING or TOO_OLD, and ServersError NO_JARS.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise OptionError(
            OptionCondition.INVALID,
            f"{version!r} is not a release of RocketMQ. Choose one that runs here: {', '.join(VERSIONS)}",
        )
    suffix = "" if modules == _MODULES else "-" + "-".join(modules)
    packages = [f"org.apache.rocketmq:rocketmq-{module}:{version}" for module in modules]
    return fetch_packages(f"RocketMQ {version}", packages, f"rocketmq-{version}{suffix}")


def fetch_packages(what: str, packages: Sequence[str], name: str) -> Path:
    """Return the folder ``name`` of the cache with the jars of packages ("group:artifact:version") and of their dependencies.

    The jars are fetched if the folder is missing. ``what`` names them in an error. Raises JavaError MISSING or TOO_OLD, ServersError
    NO_JARS.
    """
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    with open(folder.with_suffix(folder.suffix + ".lock"), "w") as lock:
        # Wait for another process that may be fetching the jars.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _fetch(what, packages, folder)
    return folder


def _fetch(what: str, packages: Sequence[str], folder: Path) -> None:
    work = folder.with_suffix(folder.suffix + ".part")
    # An interrupted fetch may have copied half of a jar to this folder. The files that it has downloaded are complete and are used again.
    shutil.rmtree(work / "jars", ignore_errors=True)
    work.mkdir(exist_ok=True)
    log = work / "resolver.log"
    process = _resolve(packages, work, log, {})
    if not process and _DOWNLOAD_FAILED in log.read_text(errors="replace"):
        # The user's ~/.m2 contains descriptions of jars without the jars, which Maven sometimes leaves there. Try again without ~/.m2.
        options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Duser.home={work}".strip()
        shutil.rmtree(work / "cache", ignore_errors=True)
        process = _resolve(packages, work, log, {"SPARK_SUBMIT_OPTS": options})
    if not process:
        raise ServersError(
            ServersCondition.NO_JARS,
            f"the jars of {what} cannot be fetched from Maven Central: {_reason(log)} (more in {log}). To use a mirror, name it "
            "in Spark's configuration with spark.jars.ivySettings or spark.jars.repositories",
        )
    os.replace(work / "jars", folder)
    shutil.rmtree(work, ignore_errors=True)


def _resolve(packages: Sequence[str], work: Path, log: Path, environment: dict[str, str]) -> bool:
    """Run an empty Spark job, because Spark fetches jars before it starts a job. Return whether all jars are in ``work/jars``."""
    ensure_java()
    job = work / "nothing.py"
    job.write_text("")
    spark = _spark_home()
    command = [
        str(spark / "bin" / "spark-submit"),
        *("--master", "local[1]", "--deploy-mode", "client"),
        *("--packages", ",".join(packages)),
        *("--conf", f"spark.jars.ivy={work}"),
        str(job),
    ]
    own = {"SPARK_HOME": str(spark), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with open(log, "w") as output:
        try:
            code = subprocess.run(
                command,
                env={"SPARK_LOCAL_IP": "127.0.0.1", **os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
            ).returncode
        except subprocess.TimeoutExpired:
            output.write(f"the resolver did not end within {_TIMEOUT:.0f} s\n")
            return False
    # Ivy names a jar group_artifact-version.jar.
    names = ("{}_{}-{}.jar".format(*package.split(":")) for package in packages)
    return code == 0 and all((work / "jars" / name).is_file() for name in names)


def _spark_home() -> Path:
    # Find pyspark without importing it, because this package never imports pyspark.
    spec = importlib.util.find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or (spec is not None and spec.origin and Path(spec.origin).parent)
    if not home or not Path(home, "bin", "spark-submit").is_file():
        raise ServersError(
            ServersCondition.NO_JARS,
            "spark-submit, which fetches the jars of RocketMQ, is missing. Run pip install 'orderedmq[spark]'",
        )
    return Path(home)


def _reason(log: Path) -> str:
    """Return the part of the resolver's output that explains the failure best."""
    text = log.read_text(errors="replace")
    for pattern in (
        r"unresolved dependency: [^,\]\n]+",
        rf"{_DOWNLOAD_FAILED}[^,\]\n]+",
        r"the resolver did not end within .*",
        r".*(?:[Ee]xception|[Ee]rror).*",
        r".+",
    ):
        match = re.search(pattern, text)
        if match:
            return match[0].strip()
    return "the resolver printed nothing"
