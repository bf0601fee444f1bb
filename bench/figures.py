"""The figures of the bench, the runs that are kept, and the tables of these runs in docs/reference/measurements.md.

``docs/bench-results.json`` has the newest runs: the date of each, how busy the machine was before it, and its figures. The page has a
table between the comments ``<!-- bench: CASE ... -->`` and ``<!-- end of bench -->``; the table of Kafka's cases says which
side is ahead. A figure of several runs is quoted as the range of their medians. This module needs neither Spark nor brokers,
because tests use it to compare documents with the runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "bench-results.json"
PAGE: Final = ROOT / "docs" / "reference" / "measurements.md"
#: Documents quote this many runs of a case, the newest ones. A run that no document quotes any more is not kept.
QUOTED: Final = 3

_TABLE: Final = re.compile(r"(?<=<!-- bench: )([^\n]*)( -->\n).*?(?=<!-- end of bench -->)", re.DOTALL)
#: The prefix of cases that compare with another product, with default settings and tuned.
VERSUS: Final = "kafka-"
#: The text that replaces a table while there is no run.
_NO_RUN: Final = "No run is kept yet."


@dataclass(frozen=True)
class Figure:
    """One line of the table. ``ratio`` has to be at least ``target`` or, if ``low``, at most ``target``. Without a target, it is
    only shown.

    ``ours_default`` and ``peer_default`` are measured with default settings. If they are given, ``ours`` and ``peer`` are
    measured with tuned settings, and ``ratio`` compares the better value of each side.
    """

    case: str
    what: str
    ours: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    target: float | None = None
    low: bool = False
    ours_default: float | None = None
    peer_default: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return self.ratio <= self.target if self.low else self.ratio >= self.target


@dataclass
class Run:
    """One run: its date (UTC, to the minute), the load average and the share of the cores in use before it, and its figures by case.

    ``software`` names the releases of other products that were measured for comparison. A value that was not measured is None.
    """

    date: str
    load: float | None = None
    busy: float | None = None
    cases: dict[str, list[Figure]] = field(default_factory=dict)
    software: str | None = None

    @property
    def note(self) -> str:
        return self.date if self.busy is None else f"{self.date} ({self.busy:.0%} busy)"


def read_runs(path: Path = RESULTS) -> list[Run]:
    """Return the kept runs, the oldest first."""
    if not path.exists():
        return []
    return [_run(**given) for given in json.loads(path.read_text())["runs"]]


def _run(cases: Mapping[str, Iterable[Mapping[str, Any]]], **rest: Any) -> Run:
    return Run(**rest, cases={name: [Figure(**figure) for figure in figures] for name, figures in cases.items()})


def keep(run: Run, path: Path = RESULTS) -> None:
    """Add a run, which replaces a run of the same date, and drop the runs that are not quoted any more."""
    runs = [*(one for one in read_runs(path) if one.date != run.date), run]
    cases = {case for one in runs for case in one.cases}
    used = {one.date for case in cases for one in quoted(runs, case)}
    path.write_text(json.dumps({"runs": [asdict(one) for one in runs if one.date in used]}, indent=1) + "\n")


# --- ranges


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def spread(values: Sequence[float | None], text: Callable[[float], str] = _number) -> str:
    """Return the lowest and the highest value, "1.2 to 1.4", or the only value; an empty text if a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return ""
    low, high = text(min(known)), text(max(known))
    return low if low == high else f"{low} to {high}"


def _ratio(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def quoted(runs: Sequence[Run], case: str) -> list[Run]:
    """Return the newest runs of a case, the oldest first."""
    return [run for run in runs if case in run.cases][-QUOTED:]


def by_line(runs: Sequence[Run], case: str) -> list[list[Figure]]:
    """Return the figures of a case's quoted runs, by line; only the lines of the newest run are included."""
    found = quoted(runs, case)
    if not found:
        return []
    return [[figure for run in found for figure in run.cases[case] if figure.what == one.what] for one in found[-1].cases[case]]


def table(runs: Sequence[Run], cases: Collection[str], title: Callable[[str], str] = str) -> str:
    """Return a Markdown table with the range of each figure that has a ratio, and the dates of the runs; or say that there is no run."""
    if not any(quoted(runs, case) for case in cases):
        return _NO_RUN
    lines = ["| case | ours / peer | ratio | aim |", "|---|---|---|---|"]
    used: dict[str, None] = {}
    for case in cases:
        for figures in by_line(runs, case):
            last = figures[-1]
            if last.ratio is None:
                continue
            both = " / ".join(filter(None, (spread([one.ours for one in figures]), spread([one.peer for one in figures]))))
            aim = "" if last.target is None else f"{last.target:g}{' at most' if last.low else ''}"
            ratio = spread([one.ratio for one in figures], _ratio)
            lines.append(f"| {title(last.case)}: {last.what} | {both} {last.unit} | {ratio} | {aim} |")
        used.update(dict.fromkeys(run.note for run in quoted(runs, case)))
    return "\n".join([*lines, "", f"Runs, UTC: {', '.join(sorted(used))}."])


def versus(runs: Sequence[Run], cases: Iterable[str]) -> str:
    """Return a Markdown table of cases that compare with another product: ranges, the side that is ahead, and the runs' dates."""
    lines = [
        "| case | Kafka, default | Kafka, tuned | orderedmq, default | orderedmq, tuned | ahead |",
        "|---|---|---|---|---|---|",
    ]
    without, used, software = [], dict[str, None](), dict[str, None]()
    for case in cases:
        for figures in by_line(runs, case):
            last = figures[-1]
            if last.peer is None:
                without.append(f"{last.what}: {spread([one.ours for one in figures])} {last.unit}")
                continue
            cells = [f"{last.case}: {last.what}, {last.unit}"]
            for tuned, default in (("peer", "peer_default"), ("ours", "ours_default")):
                values = [spread([getattr(one, name) for one in figures]) for name in (default, tuned)]
                # Equal values mean that there was nothing to tune.
                cells += values if values[0] != values[1] else [values[0], ""]
            lines.append(f"| {' | '.join([*cells, _ahead(figures)])} |")
        used.update(dict.fromkeys(run.note for run in quoted(runs, case)))
        software.update(dict.fromkeys(run.software for run in quoted(runs, case) if run.software))
    if not used:
        return _NO_RUN
    notes = [
        *(f"{one[0].upper()}{one[1:]}." for one in without),
        f"{'; '.join(software)}. Runs, UTC: {', '.join(sorted(used))}.",
    ]
    return "\n".join([*(lines if len(lines) > 2 else []), "", " ".join(notes)]).lstrip()


def _ahead(figures: Sequence[Figure]) -> str:
    """Return which side is better in all of the runs and by how much, "orderedmq 1.8 to 1.9 times", or "neither"."""
    if any(one.ratio is None for one in figures):
        return ""
    gains = [1 / one.ratio if one.low else one.ratio for one in figures if one.ratio]
    if min(gains) < 1 < max(gains):
        return "neither"
    name, gains = ("orderedmq", gains) if min(gains) >= 1 else ("Kafka", [1 / gain for gain in gains])
    return f"{name} {spread(gains, _ratio)} times"


# --- documents


def fill_page(text: str, runs: Sequence[Run]) -> str:
    """Return a page with its tables replaced by current ones."""

    def fill(found: re.Match[str]) -> str:
        cases = found[1].split()
        if cases[0].startswith(VERSUS):
            rows = versus(runs, cases)
        else:
            rows = table(runs, cases, lambda case: case.removeprefix("RocketMQ: "))
        return f"{found[1]}{found[2]}\n{rows}\n\n"

    return _TABLE.sub(fill, text)


def write_documents() -> None:
    """Write the kept runs' figures into the documents."""
    runs = read_runs()
    PAGE.write_text(fill_page(PAGE.read_text(), runs))


HEAD: Final = ("case", "what", "ours", "peer", "unit", "ratio", "target", "met")


def _both(tuned: float | None, default: float | None) -> str:
    """Return a value, followed by the value with default settings in brackets."""
    return " ".join(filter(None, ("" if tuned is None else _number(tuned), "" if default is None else f"({_number(default)})")))


def _cells(figure: Figure) -> tuple[str, ...]:
    sign = "≤" if figure.low else "≥"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    return (
        figure.case, figure.what, _both(figure.ours, figure.ours_default), _both(figure.peer, figure.peer_default), figure.unit,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        "" if figure.target is None else f"{sign} {figure.target}", met,
    )  # fmt: skip


def shown(figures: Sequence[Figure]) -> str:
    """Return the figures of one case as a table for a terminal."""
    lines = [HEAD, *(_cells(figure) for figure in figures)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
