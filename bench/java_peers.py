"""Measures RocketMQ's Java client for comparison, with a small Java program (java/Peers.java) that is run from its source.

That needs a JDK.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bench.measure import Skipped
from orderedmq.java import ensure_java
from orderedmq.rocketmq.local.jars import fetch_jars

SOURCE: Final = Path(__file__).parent / "java" / "Peers.java"


class JavaPeers:
    """A context manager with a JVM that stays warm from one measurement to the next."""

    def __init__(self, namesrv: str, home: Path) -> None:
        java = str(ensure_java())
        modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True).stdout
        self._process: subprocess.Popen[str] | None = None
        if "jdk.compiler" not in modules:
            return
        # The program logs to its home. It ends when its standard input is closed, however this process ends.
        command = [java, "-Xmx1g", f"-Duser.home={home}", "-cp", f"{fetch_jars()}/*", str(SOURCE), namesrv]
        with open(home / "peers.log", "w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def speed(self, way: str, topic: str, count: int, batch: int = 32) -> dict[str, float]:
        """Return the speed in thousand messages a second. ``pull`` and ``push`` read the first ``count`` messages, ``batch`` and
        ``ordered`` send them.

        The argument ``batch`` is the number of messages in one pull, and in one call of a listener. Raises Skipped without a compiler.
        """
        if self._process is None:
            raise Skipped("this Java has no compiler, so Java's clients cannot be measured")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{way} {topic} {count} {batch}\n")
        self._process.stdin.flush()
        # The client itself may print other lines.
        for line in self._process.stdout:
            try:
                return {"speed": count / float(line) / 1000}
            except ValueError:
                continue
        raise RuntimeError(f"the Java program ended with {self._process.wait()}: see its peers.log")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
