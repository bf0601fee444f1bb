"""Runs a query in a separate process, and kills it with its JVM and all other descendants, as if its machine failed."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from orderedmq.conditions import QueryTestCondition
from orderedmq.testing.queries import QueryTestError, batches_in
from orderedmq.testing.session import modules_for_workers

#: The point of a micro-batch at which a query is killed: its offsets are logged (planned), a task has ended (task), or all rows are
#: written but Spark has not logged the commit (written).
After = Literal["planned", "task", "written"]

#: Maximum seconds to wait until killed processes have ended, and seconds between two checks.
_GONE: Final = 30.0
_LOOK_EVERY: Final = 0.01


@dataclass(frozen=True)
class Spec:
    """The input of the process that is killed. ``query``: the pickled query. ``batch``: number of the micro-batch in the checkpoint."""

    query: bytes
    name: str
    options: dict[str, str]
    checkpoint: Path
    config: dict[str, str]
    batch: int
    after: After


def run_and_kill(spec: Spec, folder: Path, timeout: float) -> None:
    """Run the query from its checkpoint, and kill all its processes when it reaches the point in ``spec``.

    ``folder``: where to write the log of the process. Raises QueryTestError NOT_KILLED if the query ends before that point, FAILED if
    it fails before, and TIMED_OUT after ``timeout`` seconds.
    """
    file, log = folder / "killed.spec", folder / "killed.log"
    file.write_bytes(pickle.dumps(spec))
    read, write = os.pipe()
    try:
        with modules_for_workers(), log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "orderedmq.testing.killed_run", str(file), str(write)],
                pass_fds=(write,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A new session, so that Ctrl-C in the terminal reaches only this process, which then kills the new one.
                start_new_session=True,
            )
        os.close(write)
        try:
            answered = select.select([read], [], [], timeout)[0]
            answer = os.read(read, 4096) if answered else b""
            reached = answer == b"."
            if answered and not reached:
                # If nothing was written, the pipe was closed by the end of the process.
                _explain(spec, answer.decode(errors="replace"), 0 if answer else process.wait(), log)
        finally:
            kill_all(process)
    finally:
        os.close(read)
    if not reached:
        raise QueryTestError(
            QueryTestCondition.TIMED_OUT,
            f"the query {spec.name} had not reached micro-batch {spec.batch} after {timeout:g} s and was killed. Pass a longer timeout, or "
            f"see {log}",
        )
    if spec.batch not in batches_in(spec.checkpoint, "offsets") - batches_in(spec.checkpoint, "commits"):
        raise AssertionError(f"the query {spec.name} was killed outside of micro-batch {spec.batch}")


def _explain(spec: Spec, said: str, code: int, log: Path) -> None:
    """Raise the error for a process that ended before it was killed. ``said``: the text that it wrote to the pipe."""
    if said or code:
        why = said or f"its process ended with exit code {code}"
        raise QueryTestError(
            QueryTestCondition.FAILED,
            f"the query {spec.name} failed before it could be killed in micro-batch {spec.batch}: {why}. See {log}",
        )
    raise QueryTestError(
        QueryTestCondition.NOT_KILLED,
        f"the query {spec.name} ended before micro-batch {spec.batch}, so it was not killed. Produce messages that are not processed yet, or "
        "set maxOffsetsPerTrigger so that they take several micro-batches",
    )


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its descendants. All are stopped before the first is killed, so that none reacts to the end of another."""
    stopped: set[int] = set()
    if process.poll() is None:
        # This loop ends, because a stopped process starts no other processes.
        while fresh := _family(process.pid) - stopped:
            for pid in fresh:
                _signal(pid, signal.SIGSTOP)
            stopped |= fresh
    for pid in stopped:
        _signal(pid, signal.SIGKILL)
    process.wait()
    # A killed process releases its file locks only when it is next scheduled, so wait until all have ended.
    until = time.monotonic() + _GONE
    while stopped & _processes().keys() and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)


def _signal(pid: int, which: signal.Signals) -> None:
    # The process may have ended since it was listed.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)


def _family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = _processes()
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family & parents.keys()


def _processes() -> dict[int, int]:
    """Return the parent of each process of this machine. Leaves out zombies, which have ended."""
    if Path("/proc/self/stat").exists():
        parents = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    # The name of the program is in parentheses, and may contain spaces and parentheses.
                    state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                    if state not in "ZX":
                        parents[int(entry.name)] = int(parent)
        return parents
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in listed.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}
