"""``python -m tests.sim``: simulates many seeds, or one seed with a trace of its events."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

from tests.evidence import read_results, write_results
from tests.sim.planted import write_seeds
from tests.sim.runs import Many, Report, command, run, trace
from tests.sim.simulation import STEPS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description="Simulate queries of a consumer group, seed by seed."
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds (default 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="simulate only this seed")
    parser.add_argument("--resizing", action="store_true", help="resize the topic often")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the events")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"number of random steps before the faults end (default {STEPS})"
    )
    parser.add_argument("--keep", action="store_true", help="add the counts to docs/reliability-results.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--planted",
        action="store_true",
        help="for each planted bug, find the first of 2000 seeds that notices it, and store the table",
    )
    asked = parser.parse_args()
    if asked.planted:
        missed = write_seeds(2000)
        print("\n".join(f"no seed notices {name}" for name in missed) or "each planted bug is noticed by a seed")
        return int(bool(missed))
    if asked.seed is not None:
        report = run(asked.seed, asked.steps, resizing=asked.resizing)
        if asked.trace:
            print("\n".join(trace(asked.seed, asked.steps, resizing=asked.resizing)))
        print(report.failures.get(asked.seed, f"seed {asked.seed} is fine"))
        return int(bool(report.failures))
    began = time.monotonic()
    total = Report()
    running = Many(range(asked.first, asked.first + asked.seeds), asked.steps, asked.jobs, resizing=asked.resizing)
    for part in running.reports():
        total.add(part)
        for seed, what in part.failures.items():
            print(f"seed {seed}: {what}\n    {command(seed, resizing=asked.resizing)}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{total.seeds:,} of {asked.seeds:,}", end="", file=sys.stderr, flush=True)
    running.close()
    took = time.monotonic() - began
    print(f"order per key: {total.keys()}")
    print(f"{total}; {took:.0f} s, {total.seeds / took:.0f} seeds/s")
    if asked.keep:
        keep(total, "resizes" if asked.resizing else "no resizes")
    return int(bool(total.failures))


def keep(report: Report, kind: str) -> None:
    """Add the counts of new seeds to those of the same kind and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    results = read_results()
    runs: list[dict[str, Any]] = results["simulations"]
    run = next((run for run in runs if (run["kind"], run["commit"]) == (kind, commit)), None)
    if run is None:
        runs.append(run := {"kind": kind, "commit": commit})
    run["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    for name in ("seeds", "steps", "messages", "grants"):
        run[name] = run.get(name, 0) + getattr(report, name)
    run["failures"] = run.get("failures", 0) + len(report.failures)
    write_results(results)


if __name__ == "__main__":
    sys.exit(main())
