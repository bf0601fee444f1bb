"""The program of ``make soak``: measures whether memory, files, threads and readers stay flat over many micro-batches.

By default, the processes of a query run without Spark's JVM (`soak_loop`), and a micro-batch takes some milliseconds. With ``--spark``
they run in a Spark application, whose JVM is then also measured. That takes a hundred times as long, and all kinds are parallel queries
of one application. Each sample is a line of JSON in the output file, so a run that was stopped early is still useful. ``--keep`` writes
the results of a run to docs/soak-results.json and docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import orderedmq
from bench import soak_kinds
from bench.soak_loop import Query
from bench.soak_samples import keep, memory, read_samples, store, write_page
from orderedmq.broker import Broker


class _Way(Protocol):
    """A way to run the queries."""

    def start(self, kind: str, path: Path, broker: Broker) -> None: ...
    def trigger(self, kind: str) -> None: ...
    def done(self, kind: str) -> int: ...
    def sample(self, kind: str, *, collect: bool) -> dict[str, Any]: ...
    def close(self) -> None: ...


class _Processes:
    """Queries without Spark's JVM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queries: dict[str, list[Query]] = {}
        self._closing = contextlib.ExitStack()
        self._idle = 0
        self._broker: Broker | None = None

    def start(self, kind: str, path: Path, broker: Broker) -> None:
        options, count = soak_kinds.options(kind, path), soak_kinds.KINDS[kind]
        self._broker = broker
        self._queries[kind] = [self._closing.enter_context(Query(kind, options, self._folder)) for _ in range(count)]

    def trigger(self, kind: str) -> None:
        """Make the next micro-batch of each query."""
        for query in self._queries[kind]:
            read = query.trigger()
            if kind == "idle" and not read:
                self._idle += 1

    def done(self, kind: str) -> int:
        return self._idle if kind == "idle" else min(query.batches for query in self._queries[kind])

    def sample(self, kind: str, *, collect: bool) -> dict[str, Any]:
        del collect
        queries = self._queries[kind]
        runners = [query.runner.pid for query in queries if query.runner is not None]
        return {"way": "processes", "runner": memory(runners), "workers": memory(query.tasks.pid for query in queries)}

    def close(self) -> None:
        self._closing.close()


def _run(kinds: Sequence[str], asked: argparse.Namespace) -> None:
    """Run the queries of these kinds at the same time."""
    folder = Path(tempfile.mkdtemp(prefix="orderedmq-soak-", dir=asked.folder))
    way: _Way
    if asked.spark:
        from bench.soak_spark import Application

        way = Application(folder)
    else:
        way = _Processes(folder)
    with contextlib.ExitStack() as closing, asked.out.open("a") as out:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        brokers: dict[str, Broker] = {}
        for kind in kinds:
            brokers[kind] = closing.enter_context(orderedmq.connect(folder / kind))
            # Prepare more messages than micro-batches, because a sample may be some micro-batches late.
            soak_kinds.prepare(brokers[kind], kind, asked.batches + 2 * asked.every)
        closing.callback(way.close)
        for kind in kinds:
            way.start(kind, folder / kind, brokers[kind])
        _watch(way, folder, brokers, asked, out)


def _watch(way: _Way, folder: Path, brokers: dict[str, Broker], asked: argparse.Namespace, out: Any) -> None:
    """Sample each kind every ``asked.every`` micro-batches, until ``asked.batches`` micro-batches are done."""
    following = dict.fromkeys(brokers, 0)
    begun, number = time.monotonic(), 0
    while following:
        for kind in list(following):
            way.trigger(kind)
            if kind == "idle":
                number += 1
                soak_kinds.disturb(brokers[kind], number)
            done = way.done(kind)
            late = asked.minutes is not None and time.monotonic() - begun > 60 * asked.minutes
            ended = done >= asked.batches or late
            if done < following[kind] and not ended:
                continue
            head = {"kind": kind, "batches": done, "at": round(time.time(), 1)}
            # Do not collect the JVM's garbage at every sample, because that takes part of a second.
            found = way.sample(kind, collect=ended or done % (5 * asked.every) < asked.every)
            line = {**head, **found, **store(brokers[kind], folder / kind)}
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(f"{kind}: {done:,}, runner {line['runner']['rss']} MiB", file=sys.stderr, flush=True)
            following[kind] = (done // asked.every + 1) * asked.every
            if ended:
                del following[kind]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"kinds of queries (default: all of {', '.join(soak_kinds.KINDS)})"
    )
    parser.add_argument("--spark", action="store_true", help="run the queries in a Spark application")
    parser.add_argument("--batches", type=int, default=20_000, help="micro-batches of each query")
    parser.add_argument("--every", type=int, default=100, help="micro-batches between two samples")
    parser.add_argument("--minutes", type=float, help="end after this time, even with fewer micro-batches")
    parser.add_argument("--folder", help="the folder of stores and checkpoints; a folder in memory makes micro-batches shorter")
    parser.add_argument("--out", type=Path, default=Path("build/soak.jsonl"), help="the file that samples are appended to")
    parser.add_argument("--keep", action="store_true", help="write the results and the page from the output file")
    asked = parser.parse_args()
    unknown = set(asked.kinds) - set(soak_kinds.KINDS)
    if unknown:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    kinds = asked.kinds or list(soak_kinds.KINDS)
    for together in [kinds] if asked.spark else [[kind] for kind in kinds]:
        _run(together, asked)
    if asked.keep:
        keep(read_samples(asked.out))
        write_page()


if __name__ == "__main__":
    main()
