"""Named points in Spark's processes at which a test stops, fails or kills them, and a history of the events that they report.

A test and the processes share a folder. The test arms a point. The first process that reaches the point takes it by renaming a
file, which only one process can do. It then writes its pid and acts. The production code has no points; tests/live/faults/faulty.py
adds them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal

from tests import event_log
from tests.waits import until

Action = Literal["hold", "fail"]
#: Seconds after which a held process fails if no test releases it: longer than a module's tests take on a busy machine.
PATIENCE = 900.0


class ToldToFail(Exception):
    """Raised at a point that was armed with ``fail``."""


class Points:
    """The points of one world. A point is taken once each time it is armed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._history = folder / "history"

    # -- for the test -------------------------------------------------------------------------------------------------------

    def arm(self, name: str, action: Action = "hold", *, after: int = 0) -> None:
        """Make the next process that reaches ``name`` do ``action``. Where rows are counted, act only after at least ``after`` rows."""
        for state in ("taken", "reached", "go"):
            self._file(name, state).unlink(missing_ok=True)
        self._write(name, "armed", {"action": action, "after": after})

    def wait(self, name: str, timeout: float = 60.0) -> int:
        """Wait until a process has taken the point, and return its pid."""
        until(self._file(name, "reached").exists, f"point {name} is reached", timeout)
        pid: int = json.loads(self._file(name, "reached").read_text())["pid"]
        return pid

    def release(self, name: str) -> None:
        """Let the process that is held at the point continue."""
        self._write(name, "go", {})

    def release_all(self) -> None:
        for path in self.folder.glob("*.armed"):
            path.unlink(missing_ok=True)
        for path in [*self.folder.glob("*.taken"), *self.folder.glob("*.reached")]:
            self.release(path.name.partition(".")[0])

    def history(self) -> list[dict[str, Any]]:
        """The events that the processes reported, in order of time."""
        return event_log.read(self._history)

    # -- for Spark's processes ----------------------------------------------------------------------------------------------

    def reach(self, name: str, count: int = 0) -> None:
        """Pass the point ``name``: if it is armed, take it and do its action."""
        try:
            armed = json.loads(self._file(name, "armed").read_text())
            if count < armed["after"]:
                return
            self._file(name, "armed").rename(self._file(name, "taken"))
        except FileNotFoundError:
            return
        # Like a stuck worker, a held process must not notice the end of its Spark.
        if armed["action"] == "hold" and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._write(name, "reached", {"pid": os.getpid()})
        if armed["action"] == "fail":
            raise ToldToFail(f"the test asked for a failure at {name}")
        until(self._file(name, "go").exists, f"point {name} is released", PATIENCE)

    def tell(self, event: str, **facts: Any) -> None:
        """Add an event to the history."""
        event_log.write(self._history, event=event, **facts)

    def _file(self, name: str, state: str) -> Path:
        return self.folder / f"{name}.{state}"

    def _write(self, name: str, state: str, value: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_text(json.dumps(value))
        unfinished.rename(self._file(name, state))
