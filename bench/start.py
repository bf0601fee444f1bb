"""Measures how soon a query starts in a new program, and the demo's first batch, with ``orderedmq.tuned`` and without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import orderedmq
from bench import data
from bench.figures import ROOT, Figure
from bench.measure import Bench, interleaved
from orderedmq.demo.play import Demo

CASE: Final = "start"
ROWS: Final = 10_000
#: The target: seconds until the demo's first batch is committed.
DEMO_AIM: Final = 10.0
#: The measures of start_program that documents quote, with their labels.
_LABELS: Final = {
    "first query": "a new program, until its first query is done",
    "outside, later query": "a later query, outside the micro-batch",
}
#: Variables of the environment that would change the comparison.
_SETTINGS: Final = ("SPARK_HOME", "SPARK_SUBMIT_OPTS", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")


def figures(bench: Bench) -> list[Figure]:
    """Measure seconds from the start of a program, and of the demo's job. First make the archive of Spark's classes if it is missing."""
    subprocess.run(
        [sys.executable, "-m", "orderedmq", "spark", "prepare"], env=_environment(), check=True, stdout=subprocess.DEVNULL
    )
    folder = bench.fresh("start")
    with orderedmq.connect(folder / "store") as broker:
        data.fill(broker, "in", 4, ROWS)
        broker.admin.create_topic("out", 4)
    rounds = bench.rounds
    found = interleaved(rounds, {start: partial(_program, folder, start) for start in ("tuned", "quick", "plain")})
    out = [_compared(what, found["tuned"][measure], found["plain"][measure]) for measure, what in _LABELS.items()]
    what = f"{_LABELS['first query']}, with Java's quick compiler alone"
    out.append(_compared(what, found["quick"]["first query"], found["plain"]["first query"]))
    shutil.rmtree(folder)
    return out + _demo(bench)


def _compared(what: str, tuned: float, plain: float) -> Figure:
    return Figure(CASE, f"{what}, against the same without", tuned, "s", plain, tuned / plain, low=True)


def _program(folder: Path, start: str) -> Mapping[str, float]:
    command = [sys.executable, "-m", "bench.start_program", str(folder), start, str(time.monotonic())]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the program failed:\n{done.stderr[-3000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _demo(bench: Bench) -> list[Figure]:
    events = 20_000 if bench.quick else None
    found = interleaved(
        1 if bench.quick else 3,
        {start: partial(_first_batch, bench, start, events) for start in ("tuned", "plain")},
        warm=False,
    )
    mine, other = found["tuned"]["seconds"], found["plain"]["seconds"]
    return [
        _compared("the demo's first batch", mine, other),
        Figure(CASE, f"the demo's first batch, against {DEMO_AIM:g} s", mine, "s", DEMO_AIM, mine / DEMO_AIM, 1.0, low=True),
    ]


def _first_batch(bench: Bench, start: str, events: int | None) -> dict[str, float]:
    """Run the demo until its job is killed, and return the seconds until the first batch."""
    folder = bench.fresh("demo")
    try:
        demo = Demo(folder, events, tuned=start == "tuned")
        demo.produce(lambda _done, _all: None)
        return {"seconds": demo.process(lambda _done, _all: None, kill=True).first_batch_after}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SETTINGS} | {"SPARK_LOCAL_IP": "127.0.0.1"}
