"""A query that appends to all tables, in a process without Spark (tests/micro_batches.py), so that a storm can kill many of them.

python -m tests.live.faults.once_loop        reads the arguments of `tests.live.faults.queries.start` as JSON from its input
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from ordered_sink.once.targets import append
from tests.live.faults.drivers import ROOT
from tests.live.faults.once_tables import COLUMNS, TableBatch, Tables
from tests.micro_batches import Checkpoint, MicroBatchLoop


class LoopDriver:
    """A process with a query, with the methods of `tests.live.faults.drivers.Driver` that a storm calls."""

    def __init__(self, folder: Path) -> None:
        self._errors = folder.with_suffix(".txt")
        self._begin()

    def start(self, **spec: Any) -> None:
        if self._process.poll() is not None:
            self.close()
            self._begin()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(spec).encode() + b"\n")
        self._process.stdin.flush()

    def state(self) -> dict[str, Any]:
        active = self._process.poll() is None
        return {"active": active, "failure": None if active else self._errors.read_text().strip().splitlines()[-1]}

    def pause(self, *kinds: str) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        self._process.wait(60)

    def kill_all(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _begin(self) -> None:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.live.faults.once_loop"], cwd=ROOT, stdin=subprocess.PIPE, stderr=errors
            )

    def _signal(self, which: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(which)


def run(
    checkpoint: str,
    sink: str,
    source: dict[str, Any],
    target: dict[str, Any],
    path: str = "",
    servers: str = "",
    group: str = "g",
    topic: str = "in",
) -> None:
    """Run a query until it is stopped or fails."""
    tables = Tables(Path(sink.partition(":")[2]), **target)
    writers = tables.writers()

    def append_to_all(rows: pa.Table, batch_id: int) -> None:
        for name, write in writers.items() if rows.num_rows else ():
            append(write.target, TableBatch(rows.to_batches(), tables.columns(name)))

    place = {"namesrvAddr": servers} if servers else {"path": path}
    log = Path(checkpoint).with_suffix(".json")
    known = Checkpoint(**json.loads(log.read_text())) if log.exists() else Checkpoint()
    options = {**place, "topic": topic, "consumerGroup": group, **source}
    query = MicroBatchLoop(options, append_to_all, known, rows=lambda batch: batch.select(COLUMNS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        while True:
            point = query.advance()
            if point in ("logged", "committed"):
                unfinished = log.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(asdict(known)))
                unfinished.rename(log)
            elif point == "idle":
                time.sleep(0.05)
    finally:
        query.stop()


if __name__ == "__main__":
    run(**json.loads(sys.stdin.readline()))
