"""Spark drivers in separate processes, and signals that reach only processes that a test started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from orderedmq.testing.kill import kill_all
from tests.waits import until

ROOT = Path(__file__).resolve().parents[3]
RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
WORKER = "pyspark.daemon"
JVM = "org.apache.spark.deploy.SparkSubmit"


def send(process: psutil.Process, kind: str, which: int) -> None:
    """Send a signal to a process of the test after checking that its id still belongs to a process of the expected kind.

    Raises NoSuchProcess if the process has ended.
    """
    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    if not words:
        # The process is a zombie: it has ended, and its parent has not reaped it yet.
        raise psutil.NoSuchProcess(process.pid)
    assert kind in words, f"process {process.pid} is not a {kind}; its command line is {words!r}"
    assert process.is_running(), f"the id {process.pid} now belongs to another process"
    os.kill(process.pid, which)


def kill_below(pid: int, kind: str, ancestor: int | None = None) -> None:
    """SIGKILL a process that is a descendant of ``ancestor`` (default: this process)."""
    process = psutil.Process(pid)
    assert (ancestor or os.getpid()) in [parent.pid for parent in process.parents()], f"process {pid} is not a descendant"
    send(process, kind, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether a process has ended. Zombies count as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _of_kind(kind: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    matching = []
    for process in processes:
        # The process may have ended since it was listed.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(kind in word for word in process.cmdline()):
                matching.append(process)
    return matching


def children(kind: str, of: int | None = None) -> list[psutil.Process]:
    """The descendants of ``of`` (default: this process) whose command line contains ``kind``."""
    return _of_kind(kind, psutil.Process(of).children(recursive=True))


class Refused(Exception):
    """The start of a query was refused."""


class Driver:
    """A process that runs ``tests.live.faults.job``: a Python driver with its JVM, source runners and workers."""

    def __init__(self, folder: Path, master: str = "local[2]", settings: Mapping[str, str] | None = None) -> None:
        """``settings``: Spark's settings."""
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "stderr.txt"
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.live.faults.job", master, *(f"{a}={b}" for a, b in (settings or {}).items())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._known: dict[int, psutil.Process] = {}
        assert self._process.stdout is not None
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._process.stdout, selectors.EVENT_READ)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._read = b""
        # A driver starts in 8 s, but in more than a minute beside others that start and are killed.
        self._answer(300.0)

    @property
    def code(self) -> int | None:
        """The driver's exit code, or None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the driver process still runs."""
        return self._process.poll() is None

    # -- commands to the driver ---------------------------------------------------------------------------------------------

    def start(self, query: str = "q", **spec: Any) -> None:
        """Start a query, with the arguments of `tests.live.faults.queries.start`. Raises Refused if the query does not start."""
        refused = self._tell({"do": "start", "query": query, **spec}).get("refused")
        if refused is not None:
            raise Refused(refused)

    def failure(self, query: str = "q", timeout: float = 60.0) -> str:
        """Wait until a query fails, and return the text of its error."""
        state = until(lambda: (state := self.state(query)) and not state["active"] and state, f"query {query} ends", timeout)
        assert state["failure"], f"query {query} ended without a failure"
        text: str = state["failure"]
        return text

    def state(self, query: str = "q") -> dict[str, Any]:
        return self._tell({"do": "state", "query": query})

    def stop(self, query: str = "q") -> dict[str, Any]:
        return self._tell({"do": "stop", "query": query})

    def wait_for_its_query(self, query: str = "q") -> None:
        """Make the driver's main thread wait in `awaitTermination`. After that the driver takes no commands."""
        self._tell({"do": "await", "query": query})

    def stop_on_sigterm(self) -> None:
        """Make SIGTERM stop the queries at a boundary."""
        self._tell({"do": "stop on sigterm"})

    # -- signals to the driver's processes ----------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """The driver and its living descendants, including descendants that were seen earlier and whose parent has died."""
        if self._process.poll() is None:
            own = psutil.Process(self._process.pid)
            self._known |= {process.pid: process for process in [own, *own.children(recursive=True)]}
        self._known = {pid: process for pid, process in self._known.items() if process.is_running() and not gone(pid)}
        return list(self._known.values())

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return _of_kind(kind, self.processes())

    def kill_jvm(self) -> None:
        """kill -9 the Python driver and its JVM. Source runners and workers have to notice that themselves."""
        self.processes()
        for kind in ("tests.live.faults.job", JVM):
            for process in self.of_kind(kind):
                send(process, kind, signal.SIGKILL)
        self._process.wait()

    def kill_all(self) -> None:
        """kill -9 all processes at the same time, so that no source runner can unlock its queues."""
        # Remember them, so that `close` also finds processes that are orphaned by the kill.
        self.processes()
        kill_all(self._process)

    def pause(self, *kinds: str) -> None:
        """SIGSTOP the processes of these kinds."""
        for kind in kinds:
            for process in self.of_kind(kind):
                # The process may have ended since it was listed.
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                    if not gone(process.pid):
                        send(process, kind, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT all stopped processes."""
        for process in self.processes():
            if process.status() == psutil.STATUS_STOPPED:
                send(process, _kind(process), signal.SIGCONT)

    def close(self) -> None:
        """Kill all remaining processes, and close the pipes."""
        for process in self.processes():
            try:
                send(process, _kind(process), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
                continue
        self._process.wait()
        self._ready.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    # -- internals ----------------------------------------------------------------------------------------------------------

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(120.0)

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if newline:
                self._read = rest
                if line.startswith(b"@"):
                    answer: dict[str, Any] = json.loads(line[1:])
                    return answer
                continue
            assert self._ready.select(max(0.0, deadline - time.monotonic())), f"no answer: {self.errors.read_text()[-3000:]}"
            new = self._process.stdout.read(65536)
            assert new != b"", f"the driver died: {self.errors.read_text()[-3000:]}"
            self._read += new or b""


def _kind(process: psutil.Process) -> str:
    """The part of a process's command line by which `send` recognises it."""
    words = " ".join(process.cmdline())
    return next((kind for kind in ("tests.live.faults.job", RUNNER, WORKER, JVM, "java") if kind in words), words)
