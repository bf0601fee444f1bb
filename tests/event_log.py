"""Events that several processes write down as JSON lines, and that a test reads while they run or after it has killed them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def write(folder: Path, **facts: Any) -> None:
    """Append an event with these facts to the file of this process in ``folder``; the time and the pid are added.

    Each process has a file of its own, because a process that is killed during the write leaves half a line at the end of its file.
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

    A last line without an end is left out. Either its process is writing it (a reader sees a line that crosses a page of the file system
    in two pieces), or its process was killed.
    """
    events: list[dict[str, Any]] = []
    for file in folder.glob("*.jsonl"):
        *lines, _ = file.read_text().split("\n")
        events += map(json.loads, lines)
    return sorted(events, key=lambda event: event["at"])
