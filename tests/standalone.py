"""Spark's standalone cluster from the pip-installed package: a master and workers, each in a separate folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil
import pyspark

from orderedmq.java import ensure_java
from tests.live.faults.drivers import children
from tests.quick_spark import jvm_options
from tests.waits import until

_URL: Final = re.compile(r"spark://127\.0\.0\.1:\d+")
_EXECUTOR: Final = "CoarseGrainedExecutorBackend"


class Standalone:
    """A master and two workers with one core each."""

    def __init__(
        self, folder: Path, hosts: Sequence[str] = ("127.0.0.1", "127.0.0.1"), settings: Mapping[str, str] | None = None
    ) -> None:
        """``hosts``: the host name of each worker, as Spark sees it. ``settings``: Spark settings of master and workers."""
        self._folder = folder
        self._java = " ".join([jvm_options(), *(f"-D{name}={value}" for name, value in (settings or {}).items())])
        self._processes: list[subprocess.Popen[bytes]] = []
        # The system chooses the ports, because a port that was free a moment ago may be taken by now.
        self.master = self._start("master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        said = until(
            lambda: _URL.search((folder / "master" / "out.log").read_text()), "the master says where it listens", 180.0
        )
        self.url = said[0]
        self.workers = [
            self._start(
                name, "worker.Worker", "--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0",
                "--work-dir", str(folder / name / "work"), self.url,
            )
            for name, host in zip(("worker-1", "worker-2"), hosts, strict=True)
        ]  # fmt: skip

    def _start(self, name: str, service: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = self._folder / name
        home.mkdir(parents=True)
        # The archive of classes was made with this Spark home.
        spark_home = os.environ.get("SPARK_HOME", str(Path(pyspark.__file__).parent))
        environment = {
            **os.environ,
            "SPARK_HOME": spark_home,
            "JAVA_HOME": str(ensure_java().parents[1]),
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": self._java,
        }
        with (home / "out.log").open("wb") as output:
            command = [f"{spark_home}/bin/spark-class", f"org.apache.spark.deploy.{service}", *arguments]
            self._processes.append(
                subprocess.Popen(command, cwd=home, env=environment, stdout=output, stderr=output, start_new_session=True)
            )
        return self._processes[-1]

    def executors(self) -> list[psutil.Process]:
        """The executors of all workers."""
        return [one for worker in self.workers if worker.poll() is None for one in children(_EXECUTOR, worker.pid)]

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker, its executor and all their descendants with SIGKILL, as if its machine had died."""
        below = psutil.Process(process.pid).children(recursive=True)
        for one in [psutil.Process(process.pid), *below]:
            if one.is_running():
                one.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                self.kill(process)
