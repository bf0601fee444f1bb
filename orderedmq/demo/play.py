"""Runs the steps of the demo: produce, process, kill, resume, audit. The command shows the results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, ClassVar

from orderedmq.broker import Broker
from orderedmq.conditions import DemoCondition
from orderedmq.connections import reach
from orderedmq.demo import IN, OUT, flights
from orderedmq.endpoint import Endpoint
from orderedmq.errors import ErrorOf, TopicError
from orderedmq.java import ensure_java
from orderedmq.spark_support import newest_java, require_pyspark
from orderedmq.tools.audit import Audit, audit, require_duckdb
from orderedmq.tools.audit_sides import TopicSide
from orderedmq.tools.producer import Producer

#: A callback with (number of finished events, number of all events).
Progress = Callable[[int, int], None]

_PRODUCE_AT_ONCE = 32768
_LOOK_EVERY = 0.05
#: Seconds until all threads of a process have stopped after SIGSTOP.
_STILL = 0.05
#: Maximum seconds to wait until a killed process has ended.
_GONE = 30.0


class DemoError(ErrorOf[DemoCondition]):
    """The demo could not run."""

    family: ClassVar[str] = "ORDEREDMQ_DEMO"
    conditions = DemoCondition


@dataclass(frozen=True)
class Produced:
    events: int
    aircraft: int
    seconds: float


@dataclass(frozen=True)
class Ran:
    """One run of the job. ``killed_in``: the batch that was in flight when the job was killed, None if the job ended by itself."""

    seconds: float
    first_batch_after: float
    killed_in: int | None
    committed: int
    events: int


@dataclass
class Demo:
    """One demo in its own folder, where the store, the checkpoint and Spark's log stay.

    ``cluster``: use this cluster instead of a store. ``variables``: environment variables that give the job's process the account and TLS
    options of the cluster. ``tuned``: whether the job starts with ``orderedmq.tuned``.
    """

    folder: Path
    limit: int | None = None
    queues: int = 8
    batches: int = 10
    cluster: Endpoint | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    tuned: bool = True
    events: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Check all requirements before the first step. Raises DemoError FOLDER_IN_USE, OptionError MISSING, JavaError."""
        self.folder = self.folder.absolute()
        require_pyspark("the demo")
        require_duckdb("the demo", "demo")
        flights.data_folder()
        ensure_java(newest_java())
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            used = any(self.folder.iterdir())
        except OSError as error:
            raise DemoError(
                DemoCondition.FOLDER_IN_USE,
                f"{self.folder} cannot be the folder of the demo: {error.strerror}. Give the demo another --path",
            ) from error
        if used:
            raise DemoError(
                DemoCondition.FOLDER_IN_USE, f"{self.folder} is not empty. Remove it, or give the demo another --path"
            )

    @property
    def endpoint(self) -> Endpoint:
        return self.cluster or Endpoint(str(self.folder / "store"))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def log(self) -> Path:
        return self.folder / "spark.log"

    def produce(self, progress: Progress) -> Produced:
        """Write all events to the first topic, in the order in which they happened."""
        began = time.monotonic()
        rows = flights.events(self.limit)
        self.events = rows.num_rows
        with reach(self.endpoint) as broker:
            broker.admin.create_topic(IN, self.queues)
            producer = Producer(broker.log, IN)
            for begin in range(0, rows.num_rows, _PRODUCE_AT_ONCE):
                producer.send(rows.slice(begin, _PRODUCE_AT_ONCE))
                progress(min(begin + _PRODUCE_AT_ONCE, self.events), self.events)
        return Produced(self.events, len(rows.column("sharding_key").unique()), time.monotonic() - began)

    def process(self, progress: Progress, *, kill: bool) -> Ran:
        """Run the job from its checkpoint to the end. With ``kill``, kill it about half-way, in the middle of a batch.

        Raises DemoError JOB_FAILED.
        """
        began = time.monotonic()
        before = len(self._logged("commits"))
        victim = max(1, self.batches // 2) if kill else None
        first = float("nan")
        with reach(self.endpoint) as broker, _Job(self) as job:
            # The time at which this process saw each batch's commit. A batch's duration says when the next batch should be half done.
            seen: dict[int, float] = {}
            while job.running:
                committed = self._logged("commits")
                for batch in committed - seen.keys():
                    seen[batch] = time.monotonic()
                if len(seen) > before and first != first:
                    first = time.monotonic() - began
                progress(_arrived(broker), self.events)
                if victim is not None and victim in self._logged("offsets"):
                    if victim in committed or not self._in_flight(victim, seen, job):
                        victim += 1
                    elif job.kill(partial(self._uncommitted, victim)):
                        break
                time.sleep(_LOOK_EVERY)
            done = _arrived(broker)
            progress(done, self.events)
        committed, logged = self._logged("commits"), self._logged("offsets")
        killed_in = max(logged) if job.killed else None
        return Ran(time.monotonic() - began, first, killed_in, len(committed), done)

    def audit(self, progress: Progress) -> Audit:
        """Compare the events of the first topic with the output of the job."""
        with reach(self.endpoint) as broker:
            read = 0
            expected, actual = TopicSide(broker.log, IN, "id"), TopicSide(broker.log, OUT, "id")

            def count(rows: int) -> None:
                nonlocal read
                read += rows
                progress(read, expected.messages + actual.messages)

            return audit(expected, actual, progress=count)

    def tidy(self) -> None:
        """Remove Spark's own files. The store, the checkpoint and the log stay."""
        shutil.rmtree(self.folder / "spark", ignore_errors=True)

    def _logged(self, what: str) -> set[int]:
        """Return the batches in a log of the checkpoint. A batch that is in ``offsets`` and not in ``commits`` is in flight."""
        try:
            return {int(entry.name) for entry in (self.checkpoint / what).iterdir() if entry.name.isdigit()}
        except FileNotFoundError:
            return set()

    def _in_flight(self, batch: int, seen: dict[int, float], job: _Job) -> bool:
        """Wait until the batch should be half done. Return False if it was committed before that."""
        times = [seen[number] for number in sorted(seen)]
        until = time.monotonic() + (0.4 * (times[-1] - times[-2]) if len(times) > 1 else 0.2)
        while time.monotonic() < until and job.running:
            if not self._uncommitted(batch):
                return False
            time.sleep(0.01)
        return self._uncommitted(batch)

    def _uncommitted(self, batch: int) -> bool:
        return batch not in self._logged("commits")


def _arrived(broker: Broker) -> int:
    """Return the number of messages that have been published to the second topic."""
    try:
        return sum(at.max_offset for at in broker.log.bounds(broker.log.queues(OUT)).values())
    except TopicError:
        return 0


class _Job:
    """The Spark job: its driver in Python and the driver's Java process. Both are ended at the end of the ``with`` block."""

    def __init__(self, demo: Demo) -> None:
        self._log = demo.log
        self._jvm: int | None = None
        self.killed = False
        scratch = demo.folder / "spark"
        scratch.mkdir(exist_ok=True)
        paths = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        environment = (
            os.environ
            | demo.variables
            | {
                "TMPDIR": str(scratch),
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONUNBUFFERED": "1",
            }
        )
        start = "tuned" if demo.tuned else "plain"
        arguments = (demo.endpoint, demo.checkpoint, demo.queues, -(-demo.events // demo.batches), start)
        with open(demo.log, "ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "orderedmq.demo.job", *map(str, arguments)],
                cwd=demo.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # A new session, so that Ctrl-C in the terminal reaches only this process, which then ends the job.
                start_new_session=True,
            )
        assert self._driver.stdout is not None
        self._reader = threading.Thread(target=self._listen, args=(self._driver.stdout,), daemon=True)
        self._reader.start()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver.poll() is None:
            self._end()
        # The pipe ends when all processes that have it open have ended, including the Java process.
        self._reader.join(_GONE)
        if self._driver.stdout is not None and not self._reader.is_alive():
            self._driver.stdout.close()

    @property
    def running(self) -> bool:
        """Whether the job is running. Raises DemoError JOB_FAILED if the job has failed."""
        code = self._driver.poll()
        if code:
            lines = self._log.read_text(errors="replace").strip().splitlines() or [""]
            named = [line.strip() for line in lines if "[ORDEREDMQ_" in line]
            raise DemoError(
                DemoCondition.JOB_FAILED,
                f"the Spark job ended with exit code {code} (log: {self._log}): {(named or lines)[-1][:300]}",
            )
        return code is None

    def kill(self, wanted: Callable[[], bool]) -> bool:
        """Pause Java, and then kill it and the driver if ``wanted()`` is still true. Return whether they were killed.

        Also return False if the id of the Java process is not known yet.
        """
        if self._jvm is None:
            return False
        try:
            os.kill(self._jvm, signal.SIGSTOP)
        except ProcessLookupError:
            return False
        # After this time, a commit that was just being written is in its file, so that `wanted` sees it.
        time.sleep(_STILL)
        if not wanted():
            os.kill(self._jvm, signal.SIGCONT)
            return False
        self._end()
        self.killed = True
        return True

    def _end(self) -> None:
        # Kill only processes of this job. The id of the Java process is not reused yet, because its parent was alive a moment ago.
        for process in (self._jvm, self._driver.pid):
            if process is not None:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self._driver.wait()

    def _listen(self, pipe: IO[bytes]) -> None:
        with open(self._log, "ab") as log:
            for line in pipe:
                if self._jvm is None and line.startswith(b'{"jvm"'):
                    self._jvm = json.loads(line)["jvm"]
                else:
                    log.write(line)
