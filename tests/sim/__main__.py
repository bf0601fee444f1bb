"""``python -m tests.sim``: simulates many seeds, or one seed with a trace of its events."""

from __future__ import annotations

import argparse
import os
import sys
import time

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
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
