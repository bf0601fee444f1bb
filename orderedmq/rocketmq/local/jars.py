"""The jars of a RocketMQ release, fetched once by Spark's own resolver: no Maven, no download page.

Rules: where jars come from is the user's Spark configuration (``spark.jars.ivySettings``, ``spark.jars.repositories``) and nothing here.
A folder that has its final name is complete, so it is neither checked nor fetched again.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from orderedmq.errors import OptionError, ServersError
from orderedmq.java import cache, ensure_java

#: Releases that are known to run here; another one may do.
VERSIONS: Final = ("4.9.7", "5.3.3", "5.4.0")
DEFAULT_VERSION: Final = "5.3.3"

#: Servers, the Java client and the admin tools: the same jars but for two, so they share a folder.
_MODULES: Final = ("namesrv", "broker", "client", "tools")
#: A slow line may take long; a connection that says nothing must end some time.
_TIMEOUT: Final = 900.0
#: What Ivy says when it has a jar's description from one place and may not take the jar from another.
_DOWNLOAD_FAILED: Final = "download failed: "


def jars(version: str = DEFAULT_VERSION) -> Path:
    """The folder with the jars of a release, fetched if it is not there.

    Raises OptionError INVALID, JavaError MISSING or TOO_OLD, and ServersError NO_JARS.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise OptionError("INVALID", f"{version!r} is no release of RocketMQ; known to run here: {', '.join(VERSIONS)}")
    folder = cache() / f"rocketmq-{version}"
    if folder.is_dir():
        return folder
    with open(folder.with_suffix(folder.suffix + ".lock"), "w") as lock:
        # Another process may be fetching them: wait for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _fetch(version, folder)
    return folder


def _fetch(version: str, folder: Path) -> None:
    work = folder.with_suffix(folder.suffix + ".part")
    # What an interrupted fetch had copied may be half a jar. Its downloads are whole, and are used again.
    shutil.rmtree(work / "jars", ignore_errors=True)
    work.mkdir(exist_ok=True)
    log = work / "resolver.log"
    done = _resolve(version, work, log, {})
    if not done and _DOWNLOAD_FAILED in log.read_text(errors="replace"):
        # The user's ~/.m2 has descriptions of jars without the jars, as Maven leaves it. This time it is not looked at.
        options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Duser.home={work}".strip()
        shutil.rmtree(work / "cache", ignore_errors=True)
        done = _resolve(version, work, log, {"SPARK_SUBMIT_OPTS": options})
    if not done:
        raise ServersError(
            "NO_JARS",
            f"the jars of RocketMQ {version} cannot be had from Maven Central: {_reason(log)} (more in {log}); behind a mirror, name it "
            "in Spark's configuration with spark.jars.ivySettings or spark.jars.repositories",
        )
    os.replace(work / "jars", folder)
    shutil.rmtree(work, ignore_errors=True)


def _resolve(version: str, work: Path, log: Path, environment: dict[str, str]) -> bool:
    """Let Spark fetch the jars into ``work/jars``; an empty job, because fetching is what it does before it starts one."""
    ensure_java()
    job = work / "nothing.py"
    job.write_text("")
    spark = _spark_home()
    command = [
        str(spark / "bin" / "spark-submit"),
        *("--master", "local[1]", "--deploy-mode", "client"),
        *("--packages", ",".join(f"org.apache.rocketmq:rocketmq-{module}:{version}" for module in _MODULES)),
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
            output.write(f"no end after {_TIMEOUT:.0f} s\n")
            return False
    return code == 0 and all(list((work / "jars").glob(f"*rocketmq-{module}-{version}.jar")) for module in _MODULES)


def _spark_home() -> Path:
    # Found, not imported: the queue needs no Spark.
    spec = importlib.util.find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or (spec is not None and spec.origin and Path(spec.origin).parent)
    if not home or not Path(home, "bin", "spark-submit").is_file():
        raise ServersError("NO_JARS", "Spark fetches the jars of RocketMQ, and there is no spark-submit: pip install pyspark")
    return Path(home)


def _reason(log: Path) -> str:
    """What says most in the resolver's output."""
    text = log.read_text(errors="replace")
    for pattern in (
        r"unresolved dependency: [^,\]\n]+",
        rf"{_DOWNLOAD_FAILED}[^,\]\n]+",
        r"no end after .*",
        r".*(?:[Ee]xception|[Ee]rror).*",
        r".+",
    ):
        found = re.search(pattern, text)
        if found:
            return found[0].strip()
    return "the resolver said nothing"
