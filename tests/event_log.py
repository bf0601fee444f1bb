"""Events that several processes write as JSON lines. A test reads them while the processes run or after it has killed them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def write(folder: Path, **facts: Any) -> None:
    """Append an event with these facts, the time and the pid to this process's file in ``folder``.

    Each process has a separate file, because a process that is killed while it writes leaves half a line at the end of its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"at": time.monotonic_ns(), "pid": os.getpid(), **facts}) + "\n"
    file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(folder: Path) -> list[dict[str, Any]]:
    """All events in ``folder``, in the order of their times.

    A last line without a line end is left out. Either its process is still writing it (a reader may see a line that crosses a
    page of the file system in two pieces), or its process was killed.
    """
    events: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        *lines, _ = file.read_text().split("\n")
        events += map(json.loads, lines)
    return sorted(events, key=lambda event: event["at"])
