"""Processes that work on a store and report to the test. They are forked from a server that has imported the test's module."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orderedmq.embedded.broker import EmbeddedBroker

PROCESSES = mp.get_context("forkserver")


def preload(module: str) -> None:
    """Import a test's module in the server. Also pandas, because pyarrow imports it when it creates its first array."""
    PROCESSES.set_forkserver_preload(["pandas", "orderedmq.embedded.broker", module])


class Child:
    """A process that runs ``work(broker, pipe, *arguments)`` on the store."""

    def __init__(self, path: Path, work: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_run, args=(path, theirs, work, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def messages(self, most: int | None = None) -> Iterator[Any]:
        """Yield the objects that the process sends, until it ends."""
        for _ in itertools.count() if most is None else range(most):
            try:
                yield self.pipe.recv()
            except EOFError:
                return

    def send(self, which: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)

    def kill(self) -> list[Any]:
        """Kill the process. Return the objects that it had sent and that were not received yet."""
        self.send(signal.SIGKILL)
        self.process.join()
        return list(self.messages())

    def end(self) -> list[Any]:
        """Wait until the process ends. Return the objects that it had sent and that were not received yet."""
        messages = list(self.messages())
        self.process.join()
        assert self.process.exitcode == 0
        return messages


def _run(path: Path, pipe: Connection, work: Callable[..., None], *arguments: object) -> None:
    with EmbeddedBroker(path) as broker:
        work(broker, pipe, *arguments)
