"""Kills of drivers, workers and brokers during long micro-batches of listeners of each kind. Counts the calls that are made again.

One driver runs a query of each kind over the same queue, each in its own group.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from tests import event_log
from tests.live.faults.drivers import WORKER, Driver, send
from tests.live.faults.key_storm import StormWorld
from tests.live.faults.progress_listener import CALLS, GO, INTERVAL, KINDS, PER_SECOND
from tests.waits import first_good, until

KEYS: Final = 1000


class Storm:
    """``interval``: seconds between two records of progress."""

    def __init__(
        self, world: StormWorld, folder: Path, monkeypatch: pytest.MonkeyPatch, *, calls_per_second: float, interval: float
    ) -> None:
        folder.mkdir()
        for name, value in ((CALLS, folder), (PER_SECOND, calls_per_second), (INTERVAL, interval)):
            monkeypatch.setenv(name, str(value))
        self.world, self.folder, self.interval = world, folder, interval
        self.messages = 0
        #: For each kill: its time in ns, and the progress of each listener that was recorded before it.
        self.kills: list[tuple[int, dict[str, int]]] = []

    def produce(self, messages: int) -> None:
        """Append messages with random keys to the world's queue."""
        self.messages += messages
        rows = {"body": [b"x"] * messages, "sharding_key": [f"key-{number * 7919 % KEYS}" for number in range(messages)]}
        self.world.broker.log.append({self.world.queues[0]: pa.record_batch(rows)})

    def start(self, driver: Driver) -> None:
        for kind in KINDS:
            source = {KINDS[kind].option: "true", "lockTimeout": "90s"}
            spec = self.world.spec(f"ck-{kind}", sink="noop", source=source, kind=kind)
            now = time.monotonic_ns()
            driver.start(kind, **{**spec, "group": self.group(kind)})
            # Wait for each query before starting the next: Spark gives a Python process 10 s to start.
            until(partial(self.begun, kind, now), f"listener {kind} begins")
        (self.folder / GO).touch()

    def begun(self, kind: str, since: int) -> bool:
        return bool(self.calls(kind, "begins", since)) or self.ended(kind)

    def ended(self, kind: str) -> bool:
        """Whether the listener's group is at the end of the queue."""
        [queue] = self.world.queues[:1]
        return self.world.broker.groups.offsets(self.group(kind), [queue]).get(queue) == self.messages

    def group(self, kind: str) -> str:
        return f"{self.world.group}-{kind}"

    def progress(self) -> dict[str, int]:
        """The recorded progress of each listener."""
        groups, broker = {kind: self.group(kind) for kind in KINDS}, self.world.broker
        recorded = {
            kind: broker.admin.group_progress(group) for kind, group in groups.items() if group in broker.admin.groups()
        }
        return {kind: recorded.get(kind, {}).get(self.world.queues[0], 0) for kind in KINDS}

    def wait_for_progress(self, least: int) -> None:
        first_good(self.progress, lambda progress: min(progress.values()) >= least)

    def wait_for_seconds(self, seconds: float) -> None:
        """Wait until each listener has worked for so long since the last kill."""
        since = self.kills[-1][0] if self.kills else 0

        def begun() -> bool:
            first = {kind: min((call["at"] for call in self.calls(kind, "begins", since)), default=None) for kind in KINDS}
            return all(at is not None and time.monotonic_ns() - at > seconds * 1e9 for at in first.values())

        until(begun, f"each listener works for {seconds} s", 60 + 2 * seconds)

    def kill(self, what: Callable[[], None], *, forgets: bool = False) -> None:
        """``forgets``: whether the broker is killed too, so that it forgets its last seconds."""
        progress = self.progress()
        what()
        self.kills.append((time.monotonic_ns(), self.progress() if forgets else progress))

    def kill_workers(self, driver: Driver) -> None:
        for process in driver.of_kind(WORKER):
            send(process, WORKER, signal.SIGKILL)

    def wait_for_end(self) -> None:
        """Wait until each listener has got each message."""
        for kind in KINDS:
            until(partial(self.ended, kind), f"listener {kind} has got each message", 600)
            assert self.offsets(kind, "ends") == set(range(self.messages))

    def wait_for_news(self) -> None:
        """Wait until each listener gets a message that it had not got before the last kill."""
        [*_, (last, _)] = self.kills

        def is_new(kind: str) -> bool:
            return bool(self.offsets(kind, "begins", since=last) - self.offsets(kind, "begins", before=last))

        for kind in KINDS:
            until(partial(is_new, kind), f"listener {kind} gets a new message", 900)

    # -- the log ---------------------------------------------------------------------------------------------------------------

    def calls(self, kind: str, what: str, since: int = 0, before: int = 1 << 62) -> list[dict[str, Any]]:
        events = event_log.read(self.folder)
        return [one for one in events if one["kind"] == kind and one["what"] == what and since < one["at"] <= before]

    def offsets(self, kind: str, what: str, since: int = 0, before: int = 1 << 62) -> set[int]:
        return {offset for call in self.calls(kind, what, since, before) for offset in call["offsets"]}

    def judge(self) -> list[dict[str, tuple[int, int]]]:
        """Assert that no listener got a message again that was below its progress.

        Return for each kill and listener how many of the calls that had ended were made again, and how many had ended.
        """
        out = []
        for time_of_kill, progress in self.kills:
            of_kill = {}
            for kind in KINDS:
                again = self.offsets(kind, "begins", since=time_of_kill)
                below = sorted(offset for offset in again if offset < progress[kind])
                assert not below, f"listener {kind} got {below[:5]} again, although its progress was {progress[kind]}"
                ended = self.offsets(kind, "ends", before=time_of_kill)
                of_kill[kind] = len(ended & again), len(ended)
            out.append(of_kill)
        return out


def shown(counts: Sequence[dict[str, tuple[int, int]]]) -> str:
    """Return counts of `Storm.judge` as lines of text."""
    return "\n".join(
        ", ".join(f"{kind}: {again:,} of {ended:,} finished calls again" for kind, (again, ended) in of_kill.items())
        for of_kill in counts
    )
