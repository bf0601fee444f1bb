"""The program of ``make soak``: measures whether memory, files, threads and the store's log stay flat over many micro-batches.

The processes of a query run without Spark's JVM (`soak_loop`), so a micro-batch takes some milliseconds. Every micro-batch has one
message. Each sample is a line of JSON in the output file, so a run that was stopped early is still useful. ``--keep`` writes the results
to docs/soak-results.json, and their table into docs/reference/measurements.md between the comments ``<!-- soak -->`` and
``<!-- end of soak -->``. The results have for each kind the first sample after the warm-up, the last one, and the largest value of each
figure between these two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import orderedmq
from bench.figures import PAGE, ROOT
from bench.key_order import park
from bench.soak_loop import ORDERS, Query
from ordered_source import OrderPerKey
from orderedmq.broker import Broker
from orderedmq.embedded.store import wal

MIB: Final = 1024 * 1024
RESULTS: Final = ROOT / "docs" / "soak-results.json"
#: The kinds of queries, and the number of queries of each.
KINDS: Final = {"source": 1, "sink": 1, "listener-queue": 1, "listener-key": 1, "shared": 2, "idle": 1}
#: Messages that are parked, due in an hour, while the listener with order per key runs.
PARKED: Final = 3_000
GROUP: Final = "soak"
#: Bytes after which the oldest messages of the topic that the sink writes are deleted.
_KEPT_BYTES: Final = 1024 * 1024
#: Micro-batches after which a figure should be flat.
WARM_UP: Final = 2_000
#: The table's figures: their labels, and their places in a sample.
FIGURES: Final = {
    "runner, MiB": ("runner", "rss"),
    "workers, MiB": ("workers", "rss"),
    "files": ("files",),
    "threads": ("threads",),
    "store, MiB": ("store", "used"),
    "log, MiB": ("store", "log"),
}
_TABLE: Final = re.compile(r"(?<=<!-- soak -->\n).*?(?=<!-- end of soak -->)", re.DOTALL)


# --- the queries


def prepare(broker: Broker, kind: str, messages: int) -> None:
    """Make the topics of a kind, with ``messages`` messages in each queue that is read."""
    if kind == "sink":
        broker.admin.create_topic("out", 1, retention_bytes=_KEPT_BYTES)
        return
    broker.admin.create_topic("t", KINDS[kind])
    count = 1 if kind == "idle" else messages
    keys = [f"key-{number % 100}" for number in range(count)]
    for queue in broker.log.queues("t"):
        broker.log.append({queue: pa.record_batch({"body": pa.array([b"x" * 100] * count, pa.binary()), "sharding_key": keys})})
    if kind == "listener-key":
        # The parked messages belong to a second queue, which has no other messages.
        broker.admin.resize_topic("t", 2)
        park(broker, GROUP, broker.log.queues("t")[1], PARKED)


def options(kind: str, path: Path) -> dict[str, str]:
    """Return the options of the source, or of the sink."""
    if kind == "sink":
        return {"path": str(path), "topic": "out"}
    chosen = {"path": str(path), "topic": "t", "consumerGroup": GROUP, "maxOffsetsPerTrigger": "1"}
    if kind == "shared":
        chosen |= {"assignment": "shared", "lockTimeout": "60s"}
    if kind == "listener-queue":
        chosen["includeLockToken"] = "true"
    if isinstance(ORDERS.get(kind), OrderPerKey):
        chosen |= {"parkingLot": "true", "parkingLotMaxMessages": str(10 * PARKED)}
    return chosen


def _run(kind: str, asked: argparse.Namespace) -> None:
    """Run the queries of a kind, and sample them every ``asked.every`` micro-batches."""
    folder = Path(tempfile.mkdtemp(prefix="orderedmq-soak-", dir=asked.folder))
    with contextlib.ExitStack() as closing, asked.out.open("a") as out:
        closing.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = closing.enter_context(orderedmq.connect(folder / "store"))
        prepare(broker, kind, asked.batches + 1)
        given = options(kind, folder / "store")
        queries = [closing.enter_context(Query(kind, given, folder)) for _ in range(KINDS[kind])]
        for number in range(1, asked.batches + 1):
            for query in queries:
                query.trigger()
            if kind == "idle":
                # A change of the store without messages. Otherwise the query would only read the store's change number.
                broker.admin.seek("other", {broker.log.queues("t")[0]: number % 2})
            if number == 1 or number % asked.every == 0:
                sample = {
                    "kind": kind,
                    "batches": number,
                    "at": round(time.time(), 1),
                    **_sample(queries, broker, folder / "store"),
                }
                out.write(json.dumps(sample) + "\n")
                out.flush()
                print(f"{kind}: {number:,}, runner {sample['runner']['rss']} MiB", file=sys.stderr, flush=True)


# --- samples


def _sample(queries: Sequence[Query], broker: Broker, folder: Path) -> dict[str, Any]:
    runners = [query.runner.pid for query in queries if query.runner is not None]
    workers = [query.tasks.pid for query in queries]
    return {"runner": memory(runners), "workers": memory(workers), **store(broker, folder)}


def memory(pids: Iterable[int]) -> dict[str, Any]:
    """Return totals of processes: resident memory and its anonymous part (without the mapped pages of a store) in MiB, files, threads."""
    totals: dict[str, Any] = {"processes": 0, "rss": 0.0, "anonymous": 0.0, "files": 0, "threads": 0}
    for pid in pids:
        place = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):
            lines = (place / "smaps_rollup").read_text().splitlines()
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
            totals["rss"] += sizes["Rss"] / 1024
            totals["anonymous"] += sizes["Anonymous"] / 1024
            totals["files"] += len(os.listdir(place / "fd"))
            totals["threads"] += len(os.listdir(place / "task"))
            totals["processes"] += 1
    return {name: round(value, 2) for name, value in totals.items()}


def store(broker: Broker, folder: Path) -> dict[str, Any]:
    """Return the sizes in MiB of a store's index, of its used pages, and of its log."""
    opened: Any = broker
    with opened._open(False).inspected() as connection:
        page, pages, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
        )
    return {
        "store": {
            "file": round(page * pages / MIB, 2),
            "used": round(page * (pages - free) / MIB, 2),
            "log": round(wal.size(folder) / MIB, 2),
        },
    }


# --- what is kept


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file, without a line that was cut off."""
    samples = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            samples.append(json.loads(line))
    return samples


def summaries(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of each kind that ran longer than the warm-up. If a kind ran several times, the last run counts."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        of_kind = runs.setdefault(sample["kind"], [])
        if of_kind and of_kind[-1]["batches"] > sample["batches"]:
            of_kind.clear()
        of_kind.append(sample)
    results = []
    for kind, run in runs.items():
        warm = [sample for sample in run if sample["batches"] >= WARM_UP]
        if len(warm) < 2:
            continue
        values = {
            name: [value for sample in warm if (value := _value(sample, place)) is not None] for name, place in FIGURES.items()
        }
        results.append(
            {
                "kind": kind,
                "date": datetime.fromtimestamp(run[-1]["at"], UTC).strftime("%Y-%m-%d %H:%M"),
                "batches": run[-1]["batches"],
                "figures": {
                    name: {"first": of_name[0], "last": of_name[-1], "most": max(of_name)}
                    for name, of_name in values.items()
                    if of_name
                },
            }
        )
    return results


def _value(sample: Mapping[str, Any], place: Sequence[str]) -> float | None:
    if place[0] in ("files", "threads"):
        return sum(sample[name][place[0]] for name in ("runner", "workers"))
    value: Any = sample
    for name in place:
        value = value.get(name) if value is not None else None
    return value or None


def keep(samples: Sequence[Mapping[str, Any]], path: Path = RESULTS) -> None:
    """Keep these runs. They replace earlier runs of the same kinds."""
    new = summaries(samples)
    kinds = {run["kind"] for run in new}
    old = [run for run in read_results(path) if run["kind"] not in kinds]
    path.write_text(json.dumps({"runs": [*old, *new]}, indent=1) + "\n")


def read_results(path: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the kept runs."""
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


# --- the page


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the kept runs as a Markdown table with their dates. A cell has the value after the warm-up and the last value."""
    names = [name for name in FIGURES if any(name in run["figures"] for run in runs)]
    lines = [f"| kind | micro-batches | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for run in runs:
        cells = [_cell(run["figures"].get(name)) for name in names]
        lines.append(f"| {run['kind']} | {run['batches']:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Runs, UTC: {', '.join(sorted({run['date'] for run in runs}))}."])


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    text = f"{figure['first']:g}" if figure["first"] == figure["last"] else f"{figure['first']:g} → {figure['last']:g}"
    return text if figure["most"] <= max(figure["first"], figure["last"]) else f"{text}, at most {figure['most']:g}"


def fill_page(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with the table of these runs."""
    return _TABLE.sub(lambda _: f"\n{table(runs)}\n\n", text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"kinds of queries (default: all of {', '.join(KINDS)})")
    parser.add_argument("--batches", type=int, default=20_000, help="micro-batches of each query")
    parser.add_argument("--every", type=int, default=100, help="micro-batches between two samples")
    parser.add_argument("--folder", help="the folder of stores and checkpoints; a folder in memory makes micro-batches shorter")
    parser.add_argument("--out", type=Path, default=Path("build/soak.jsonl"), help="the file that samples are appended to")
    parser.add_argument("--keep", action="store_true", help="write the results and the page from the output file")
    asked = parser.parse_args()
    unknown = set(asked.kinds) - set(KINDS)
    if unknown:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for kind in asked.kinds or KINDS:
        _run(kind, asked)
    if asked.keep:
        keep(read_samples(asked.out))
        PAGE.write_text(fill_page(PAGE.read_text(), read_results()))


if __name__ == "__main__":
    main()
