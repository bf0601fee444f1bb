"""Entry of ``make bench``: runs the cases, prints figures and targets, keeps them in bench-results.json.

``--markdown`` prints the tables of docs/performance.md from the kept results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.bench import groups, key_order, latency, rocketmq, stores, throughput
from tests.bench.measure import ROOT, Bench, Figure, Skipped

RESULTS: Final = ROOT / "bench-results.json"
CASES: Final[dict[str, Callable[[Bench], list[Figure]]]] = {
    "many-queues": stores.many_queues,
    "size": stores.size,
    "memory": stores.memory,
    "small-batches": stores.small_batches,
    "source": throughput.source,
    "sink": throughput.sink,
    "both": throughput.both,
    "micro-batch": latency.micro_batch,
    "idle": latency.idle,
    "shared": groups.shared,
    "hand-over": groups.hand_over,
    "listener": groups.listener,
    "order-per-key": key_order.figures,
    "rocketmq-pull": rocketmq.pull,
    "rocketmq-source": rocketmq.source,
    "rocketmq-sink": rocketmq.sink,
    "rocketmq-micro-batch": rocketmq.micro_batch,
    "rocketmq-queues": rocketmq.many_queues,
    "rocketmq-memory": rocketmq.memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure source, sink and store against their ceilings.")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, the figures mean little")
    parser.add_argument("--only", action="append", choices=list(CASES), help="run this case (may be repeated)")
    parser.add_argument("--markdown", action="store_true", help="print the kept results as a Markdown table, measure nothing")
    asked = parser.parse_args()
    if asked.markdown:
        print(_markdown([Figure(**figure) for figures in _kept().values() for figure in figures]))
        return
    kept = {} if asked.quick else _kept()
    bench = Bench(Path(tempfile.mkdtemp(prefix="orderedmq-bench-")), quick=asked.quick)
    try:
        for name in asked.only or CASES:
            begin = time.perf_counter()
            try:
                figures = CASES[name](bench)
            except Skipped as reason:
                print(f"\n{name}: skipped: {reason}", flush=True)
                continue
            print(f"\n{name} ({time.perf_counter() - begin:.0f} s)\n{_table(figures)}", flush=True)
            kept[name] = [asdict(figure) for figure in figures]
            if not asked.quick:
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    finally:
        bench.close()


def _kept() -> dict[str, list[dict[str, Any]]]:
    if not RESULTS.exists():
        return {}
    found: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())
    return {name: found[name] for name in CASES if name in found}


def _cells(figure: Figure) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"

    sign = "≤" if figure.low else "≥"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    return (
        figure.case, figure.what, number(figure.ours), number(figure.peer), figure.unit,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        "" if figure.target is None else f"{sign} {figure.target}", met,
    )  # fmt: skip


HEAD: Final = ("case", "what", "ours", "peer", "unit", "ratio", "target", "met")


def _table(figures: Sequence[Figure]) -> str:
    lines = [HEAD, *(_cells(figure) for figure in figures)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _markdown(figures: Sequence[Figure]) -> str:
    """Only what has a peer or a target; the rest explains."""
    rows = [_cells(figure) for figure in figures if figure.ratio is not None]
    return "\n".join("| " + " | ".join(line) + " |" for line in (HEAD, ("---",) * len(HEAD), *rows))


if __name__ == "__main__":
    main()
