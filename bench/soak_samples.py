"""The samples that `soak` takes of processes and stores, the results that are kept, and their table in docs/performance.md.

docs/soak-results.json has for each kind the first sample after the warm-up, the last one, and the largest value of each figure
between these two. The page has the table between the comments ``<!-- soak -->`` and ``<!-- end of soak -->``. This module does
not need Spark.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.figures import PAGE, ROOT
from orderedmq.broker import Broker

MIB: Final = 1024 * 1024
RESULTS: Final = ROOT / "docs" / "soak-results.json"
#: Micro-batches after which a figure should be flat.
WARM_UP: Final = 2_000
#: The table's figures: their labels, and their places in a sample.
FIGURES: Final = {
    "runner, MiB": ("runner", "rss"),
    "workers, MiB": ("workers", "rss"),
    "JVM heap, MiB": ("jvm", "heap"),
    "files": ("files",),
    "threads": ("threads",),
    "readers": ("slots",),
    "store, MiB": ("store", "used"),
}
_WAYS: Final = {"processes": "without the JVM", "Spark": "in Spark"}
_TABLE: Final = re.compile(r"(?<=<!-- soak -->\n).*?(?=<!-- end of soak -->)", re.DOTALL)


def memory(pids: Iterable[int]) -> dict[str, Any]:
    """Return totals of processes: resident memory and its anonymous part (without the mapped pages of a store) in MiB, files, threads."""
    found: dict[str, Any] = {"processes": 0, "rss": 0.0, "anonymous": 0.0, "files": 0, "threads": 0}
    for pid in pids:
        place = Path("/proc") / str(pid)
        with contextlib.suppress(OSError):
            lines = (place / "smaps_rollup").read_text().splitlines()
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
            found["rss"] += sizes["Rss"] / 1024
            found["anonymous"] += sizes["Anonymous"] / 1024
            found["files"] += len(os.listdir(place / "fd"))
            found["threads"] += len(os.listdir(place / "task"))
            found["processes"] += 1
    return {name: round(value, 2) for name, value in found.items()}


def store(broker: Broker, folder: Path) -> dict[str, Any]:
    """Return the size of a store's file and of its used pages, both in MiB, and the number of its readers."""
    opened: Any = broker
    environment = opened._open(False)
    env, handles = environment._environment()
    with env.begin() as txn:
        trees = [env.stat(), *(txn.stat(handle) for handle in handles.values())]
    used = sum(one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"] for one in trees)
    # After a head line, there is a line per reader with its process, thread and transaction.
    readers = [line.split() for line in env.readers().splitlines()[1:]]
    return {
        "store": {
            "file": round((folder / "data.mdb").stat().st_size / MIB, 2),
            "used": round(used * env.stat()["psize"] / MIB, 2),
        },
        "readers": len(readers),
        "slots": env.info()["num_readers"],
    }


# --- what is kept


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file, without a line that was cut off."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def summaries(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of each kind that ran longer than the warm-up. If a kind ran several times, the last run counts."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in samples:
        of_kind = runs.setdefault((sample["way"], sample["kind"]), [])
        if of_kind and of_kind[-1]["batches"] > sample["batches"]:
            of_kind.clear()
        of_kind.append(sample)
    out = []
    for (way, kind), run in runs.items():
        warm = [sample for sample in run if sample["batches"] >= WARM_UP]
        if len(warm) < 2:
            continue
        # An expensive figure is only in some samples.
        values = {name: [value for one in warm if (value := _value(one, place)) is not None] for name, place in FIGURES.items()}
        out.append(
            {
                "kind": kind,
                "way": way,
                "date": datetime.fromtimestamp(run[-1]["at"], UTC).strftime("%Y-%m-%d %H:%M"),
                "batches": run[-1]["batches"],
                "figures": {
                    name: {"first": found[0], "last": found[-1], "most": max(found)} for name, found in values.items() if found
                },
            }
        )
    return out


def _value(sample: Mapping[str, Any], place: Sequence[str]) -> float | None:
    if place[0] in ("files", "threads"):
        return sum(sample[name][place[0]] for name in ("runner", "workers"))
    found: Any = sample
    for name in place:
        found = found.get(name) if found is not None else None
    return found or None


def keep(samples: Sequence[Mapping[str, Any]], path: Path = RESULTS) -> None:
    """Keep these runs. They replace earlier runs of the same kinds."""
    new = summaries(samples)
    done = {(one["kind"], one["way"]) for one in new}
    old = [one for one in read_results(path) if (one["kind"], one["way"]) not in done]
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
        lines.append(f"| {run['kind']}, {_WAYS[run['way']]} | {run['batches']:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Runs, UTC: {', '.join(sorted({run['date'] for run in runs}))}."])


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    text = f"{figure['first']:g}" if figure["first"] == figure["last"] else f"{figure['first']:g} → {figure['last']:g}"
    return text if figure["most"] <= max(figure["first"], figure["last"]) else f"{text}, at most {figure['most']:g}"


def fill_page(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with the table of these runs."""
    return _TABLE.sub(lambda _: f"\n{table(runs)}\n\n", text)


def write_page() -> None:
    """Write the kept runs into docs/performance.md."""
    PAGE.write_text(fill_page(PAGE.read_text(), read_results()))
