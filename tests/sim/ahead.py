"""Runs the seeds of a test run from its beginning on, in CPU time that the tests leave. ``python -m tests.sim.ahead`` is their process.

The first process of a test run that asks starts them; each one can read their reports from a folder.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from tests.scopes import NICENESS
from tests.sim.runs import Many, Report
from tests.weights import weigh

_ROOT: Final = Path(__file__).parents[2]
#: Processes that run on: they end by themselves, or with their owner.
_started: Final[list[subprocess.Popen[bytes]]] = []


class Seeds:
    """``count`` seeds that a process of this test run started, and their reports in a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count

    def begin(self, owner: int) -> None:
        """Start the seeds unless a process of this test run has done so. They end with the process ``owner``."""
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            return
        command = [sys.executable, "-m", "tests.sim.ahead", str(self.folder), str(self.count), str(owner)]
        with (self.folder / "log").open("wb") as log:
            _started.append(
                subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def reports(self) -> Iterator[Report]:
        """Yield the report of each part of the seeds. A test waits for them now, so they give way no more than a process of tests."""
        pid = self._pid()
        weigh(pid, NICENESS)
        seen = 0
        while True:
            # In this order: what was written before the end is read.
            ended = self._done.exists() or _is_gone(pid)
            while (part := self.folder / f"{seen}.report").exists():
                yield pickle.loads(part.read_bytes())
                seen += 1
            if ended:
                break
            time.sleep(0.1)
        if not self._done.exists():
            raise RuntimeError(f"the seeds ended early: {(self.folder / 'log').read_text()[-2000:]}")

    @property
    def _done(self) -> Path:
        return self.folder / "done"

    def _pid(self) -> int:
        file = self.folder / "pid"
        limit = time.monotonic() + 120
        while not file.exists():
            if time.monotonic() > limit:
                raise RuntimeError(f"the seeds do not begin: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        return int(file.read_text())


def _is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _write(file: Path, content: bytes) -> None:
    made = file.with_suffix(".new")
    made.write_bytes(content)
    made.replace(file)


def _end_with(owner: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(owner).wait()
    os._exit(1)


def main(folder: Path, count: int, owner: int) -> None:
    weigh(os.getpid(), 19)
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    _write(folder / "pid", str(os.getpid()).encode())
    many = Many(range(count), background=True)
    for number, report in enumerate(many.reports()):
        _write(folder / f"{number}.report", pickle.dumps(report))
    many.close()
    (folder / "done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
