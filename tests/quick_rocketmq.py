"""Lets RocketMQ's servers start with an archive of the classes that a broker loads: they take two thirds of the CPU then.

The archive of a release is made once for a machine, in the background of a run of tests, and kept in the folder of the jars. Until
it is there servers start without. A JVM that an archive does not fit runs without it, too.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Final

from orderedmq.java import cache_folder, ensure_java
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, fetch_jars
from orderedmq.rocketmq.local.servers import Cluster
from tests.quick_spark import QUICK_JVM

#: RocketMQ's servers generate a certificate at each start, which takes 2 of about 4 s of CPU.
_QUICK: Final = (*QUICK_JVM, "-Dtls.server.mode=disabled")
_SILENT: Final = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def quick_server(version: str = DEFAULT_VERSION) -> tuple[str, ...]:
    """Options for the JVMs of servers of a release, whose jars are there."""
    archive = _archive(version)
    if archive.exists():
        return (*_QUICK, f"-XX:SharedArchiveFile={archive}", *_SILENT)
    _begin(version)
    return _QUICK


@cache
def _begin(version: str) -> None:
    """Make the archive in a process that nobody waits for."""
    command = [sys.executable, "-m", "tests.quick_rocketmq", version]
    # It outlives an interrupted run by seconds.
    subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _archive(version: str) -> Path:
    """The archive of a release, for this Java and these jars."""
    java, jars = ensure_java().resolve(), fetch_jars(version)
    made_for = zlib.crc32(f"{java} {java.stat().st_mtime_ns} {jars} {jars.stat().st_mtime_ns}".encode())
    return cache_folder() / f"rocketmq-{version}-{made_for:08x}.jsa"


def make_once(version: str) -> None:
    """Make the archive unless it is there. If several processes ask at once, one does it."""
    archive = _archive(version)
    with archive.with_suffix(".jsa.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        made = archive.with_suffix(".jsa.new")
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(Path(folder), version, jvm=_QUICK)
            cluster.broker._jvm = (*_QUICK, f"-XX:ArchiveClassesAtExit={made}", *_SILENT)
            try:
                cluster.start()
                # The JVM writes the archive at the end.
                cluster.shut_down()
            finally:
                cluster.stop()
        made.replace(archive)


if __name__ == "__main__":
    make_once(sys.argv[1])
