"""Spark drivers in their own processes, and signals to exactly the processes that a test started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from orderedmq.testing.kill import kill_all
from tests.waits import until

ROOT = Path(__file__).resolve().parents[2]
RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
WORKER = "pyspark.daemon"
JVM = "org.apache.spark.deploy.SparkSubmit"


def send(process: psutil.Process, kind: str, which: int) -> None:
    """Signal a process of the test, after a check that it is still of the expected kind. Raises NoSuchProcess if it has ended."""
    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    if not words:
        # It waits for its parent to notice its end.
        raise psutil.NoSuchProcess(process.pid)
    assert kind in words, f"process {process.pid} is not a {kind} but {words!r}"
    assert process.is_running(), f"process {process.pid} is another one by now"
    os.kill(process.pid, which)


def kill_below(pid: int, kind: str, ancestor: int | None = None) -> None:
    """SIGKILL a process that this process, or ``ancestor``, started."""
    process = psutil.Process(pid)
    assert (ancestor or os.getpid()) in [parent.pid for parent in process.parents()], f"process {pid} is not ours"
    send(process, kind, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _of_kind(kind: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        # A process may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(kind in word for word in process.cmdline()):
                found.append(process)
    return found


def children(kind: str, of: int | None = None) -> list[psutil.Process]:
    """The processes of a kind below ``of`` (default: this process)."""
    return _of_kind(kind, psutil.Process(of).children(recursive=True))


class Refused(Exception):
    """A query was refused at its start."""


class Driver:
    """One ``tests.faults.job``: a Python driver, its JVM, its source runners and its workers."""

    def __init__(
        self, folder: Path, master: str = "local[2]", settings: Mapping[str, str] | None = None, *, run_by: Sequence[str] = ()
    ) -> None:
        """``settings``: Spark's. ``run_by``: a command that starts the driver, such as one that gives it another user."""
        folder.mkdir(parents=True, exist_ok=True)
        self.errors = folder / "stderr.txt"
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*run_by, sys.executable, "-m", "tests.faults.job", master, *(f"{a}={b}" for a, b in (settings or {}).items())],
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
        self._answer(90.0)

    @property
    def code(self) -> int | None:
        """The driver's exit code, once it has ended."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether the driver was not killed."""
        return self._process.poll() is None

    # -- commands to it -----------------------------------------------------------------------------------------------------

    def start(self, query: str = "q", **spec: Any) -> None:
        """Start a query: see tests.faults.faulty.start. Raises Refused if it is refused, as by what it reads from."""
        refused = self._tell({"do": "start", "query": query, **spec}).get("refused")
        if refused is not None:
            raise Refused(refused)

    def failure(self, query: str = "q", timeout: float = 60.0) -> str:
        """Wait until a query fails. Return the error's text."""
        state = until(lambda: (state := self.state(query)) and not state["active"] and state, f"query {query} ends", timeout)
        assert state["failure"], f"query {query} ended without a failure"
        text: str = state["failure"]
        return text

    def state(self, query: str = "q") -> dict[str, Any]:
        return self._tell({"do": "state", "query": query})

    def stop(self, query: str = "q") -> dict[str, Any]:
        return self._tell({"do": "stop", "query": query})

    def wait_for_its_query(self, query: str = "q") -> None:
        """Have the driver's main thread wait in `awaitTermination`. It takes no further command."""
        self._tell({"do": "await", "query": query})

    def stop_on_sigterm(self) -> None:
        """Have SIGTERM stop the queries at a boundary."""
        self._tell({"do": "stop on sigterm"})

    def go_on(self, done: Callable[[], bool], what: str, **spec: Any) -> int:
        """Wait until ``done``. Start the query again whenever it has failed, as its users do, and return how often that was."""
        failed = 0

        def there() -> bool:
            nonlocal failed
            if not self.state()["active"]:
                self.start(**spec)
                failed += 1
            return done()

        until(there, what, 300)
        return failed

    # -- signals to its processes -------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """The living processes below this driver, itself included; known ones stay listed after they lose their parent."""
        if self._process.poll() is None:
            own = psutil.Process(self._process.pid)
            self._known |= {process.pid: process for process in [own, *own.children(recursive=True)]}
        self._known = {pid: process for pid, process in self._known.items() if process.is_running() and not gone(pid)}
        return list(self._known.values())

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return _of_kind(kind, self.processes())

    def workers(self) -> list[psutil.Process]:
        """The workers of this driver, without the daemons that fork them."""
        processes = self.of_kind(WORKER)
        known, found = {process.pid for process in processes}, []
        for process in processes:
            # A process may end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() in known:
                    found.append(process)
        return found

    def kill_jvm(self) -> None:
        """kill -9 the Python driver and the JVM; source runners and workers have to notice it themselves."""
        self.processes()
        for kind in ("tests.faults.job", JVM):
            for process in self.of_kind(kind):
                send(process, kind, signal.SIGKILL)
        self._process.wait()

    def kill_all(self) -> None:
        """kill -9 every process, all at once, so that no source runner can unlock its queues."""
        # `close` finds those that are no descendants any more.
        self.processes()
        kill_all(self._process)

    def pause(self, *kinds: str) -> None:
        """SIGSTOP the processes of these kinds."""
        for kind in kinds:
            for process in self.of_kind(kind):
                # A process may end meanwhile.
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                    if not gone(process.pid):
                        send(process, kind, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT all stopped processes."""
        for process in self.processes():
            if process.status() == psutil.STATUS_STOPPED:
                send(process, _kind(process), signal.SIGCONT)

    def close(self) -> None:
        """Kill all processes that are left, and close the pipes."""
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

    # -- inside -------------------------------------------------------------------------------------------------------------

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
    return next((kind for kind in ("tests.faults.job", RUNNER, WORKER, JVM, "java") if kind in words), words)
