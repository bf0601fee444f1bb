"""The program of ``make bench``: runs the cases, prints figures and targets, and keeps the run in docs/bench-results.json.

After each case, it writes the figures of the kept runs into the documents. ``--report`` prints the range of each figure over the kept
runs and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from bench import (
    exporter,
    kafka,
    key_order,
    latency,
    many_tasks,
    owners,
    rocketmq,
    start,
    stores,
    throughput,
    web_page,
    worker_memory,
)
from bench.figures import QUOTED, VERSUS, Figure, Run, keep, read_runs, shown, table, versus, write_documents
from bench.measure import Bench, Skipped

CASES: Final[dict[str, Callable[[Bench], list[Figure]]]] = {
    # Kafka's cases come first, because the session needs Kafka's jars from its start.
    "kafka-read": kafka.read,
    "kafka-write": kafka.write,
    "kafka-copy": kafka.copy,
    "kafka-into": kafka.into,
    "kafka-small-batches": kafka.small_batches,
    "kafka-start": kafka.start,
    "kafka-restart": kafka.restart,
    "many-queues": stores.many_queues,
    "size": stores.size,
    "memory": stores.memory,
    "writers": stores.writers,
    "source": throughput.source,
    "sink": throughput.sink,
    "both": throughput.both,
    "micro-batch": latency.micro_batch,
    "idle": latency.idle,
    "hand-over": owners.leaving,
    "rollout": owners.embedded,
    "order-per-key": key_order.figures,
    "resize": key_order.resize,
    "web-page": web_page.figures,
    "exporter": exporter.figures,
    "start": start.figures,
    "worker-memory": worker_memory.figures,
    "rocketmq-pull": rocketmq.pull,
    "rocketmq-pull-verified": rocketmq.pull_verified,
    "rocketmq-source": rocketmq.source,
    "rocketmq-proxy": rocketmq.proxy,
    "rocketmq-sink": rocketmq.sink,
    "rocketmq-rollout": owners.rocketmq,
    "rocketmq-many-tasks": many_tasks.figures,
    # The last case changes a setting of the brokers.
    "rocketmq-source-raised": rocketmq.source_raised,
}
#: Seconds of measuring how busy the machine is before a run.
_LOOK: Final = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure source, sink and store against their ceilings.")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to check that the bench works; the figures mean little"
    )
    parser.add_argument("--only", action="append", default=[], choices=list(CASES), help="run this case (may be repeated)")
    parser.add_argument("--rocketmq", action="store_true", help="run all cases over RocketMQ")
    parser.add_argument("--kafka", action="store_true", help="run all comparisons with Kafka, which are left out by default")
    parser.add_argument("--report", action="store_true", help="print the ranges over the kept runs and measure nothing")
    asked = parser.parse_args()
    if asked.report:
        runs, beside = read_runs(), [name for name in CASES if name.startswith(VERSUS)]
        print(f"Of the newest {QUOTED} runs of each case:\n\n{table(runs, [name for name in CASES if name not in beside])}")
        print(f"\n{versus(runs, beside)}")
        return
    families = [family for family in ("kafka", "rocketmq") if getattr(asked, family)]
    chosen = [name for name in CASES if name in asked.only or name.partition("-")[0] in families]
    # Without options, Kafka's cases are left out, because the session would have Kafka's jars in the other cases.
    chosen = chosen or [name for name in CASES if not name.startswith(VERSUS)]
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    run = Run(date, round(os.getloadavg()[0], 2), round(psutil.cpu_percent(_LOOK) / 100, 3))
    print(f"{run.date} UTC: load {run.load}, {run.busy:.0%} of the cores in use before the run", flush=True)
    bench = Bench(Path(tempfile.mkdtemp(prefix="orderedmq-bench-")), quick=asked.quick)
    begin = time.perf_counter()
    try:
        for name in chosen:
            _measure(bench, run, name)
    finally:
        bench.close()
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


def _measure(bench: Bench, run: Run, name: str) -> None:
    """Run one case, and keep the figures that the run has so far."""
    begin = time.perf_counter()
    try:
        figures = CASES[name](bench)
    except Skipped as reason:
        print(f"\n{name}: skipped: {reason}", flush=True)
        return
    print(f"\n{name} ({time.perf_counter() - begin:.0f} s)\n{shown(figures)}", flush=True)
    run.cases[name] = figures
    run.software = bench.software
    if not bench.quick:
        keep(run)
        write_documents()


if __name__ == "__main__":
    main()
