"""Measures CPU seconds by kind of process: Spark's JVM, Python, and servers.

PySpark's daemons do not wait for workers that end, so the system does not keep the CPU time of such workers. Therefore a thread
often reads the times of all processes. The time that a process uses between the last reading and its end is missing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Final

import psutil

#: Seconds between two readings.
_STEP: Final = 0.2
JVM: Final = "JVM"
PYTHON: Final = "Python"
TOGETHER: Final = "together"


class ProcessCpu:
    """The CPU time of this process and its descendants, by name. ``servers``: the names of servers among them, by pid.

    Any other Java process is Spark's JVM. All other processes count as Python.
    """

    def __init__(self, servers: Mapping[int, str]) -> None:
        self._servers = servers
        #: Name and seconds of each process that was seen, by its pid and start time, because a pid may be used again.
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._looking = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ProcessCpu:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> dict[str, float]:
        """Return the CPU seconds so far by name."""
        self._look()
        # Subtract the time of the readings themselves.
        out = dict.fromkeys((JVM, PYTHON, *self._servers.values()), 0.0)
        out[PYTHON] = time.process_time() - self._looking
        with self._lock:
            for name, seconds in self._seen.values():
                out[name] += seconds
        return out

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the CPU seconds since ``before``, by name and together."""
        used = {name: seconds - before[name] for name, seconds in self.now().items()}
        return {**used, TOGETHER: sum(used.values())}

    def _run(self) -> None:
        while not self._ended.wait(_STEP):
            self._look()
            self._looking = time.thread_time()

    def _look(self) -> None:
        for process in _below():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                name = self._servers.get(process.pid) or (JVM if process.name() == "java" else PYTHON)
                with self._lock:
                    self._seen[process.pid, process.create_time()] = (name, times.user + times.system)


def _below() -> Iterable[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found
