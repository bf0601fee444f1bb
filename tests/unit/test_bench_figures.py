"""Documents quote the kept runs of the bench, and a figure of several runs is a range."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.figures import (
    KEPT,
    PAGE,
    README,
    Figure,
    Run,
    fill_page,
    fill_readme,
    keep,
    quoted,
    read_runs,
    spread,
    table,
)

FIGURE = Figure("RocketMQ: pull", "12 columns", 732.0, "k rows/s", 1295.0, 0.565, 0.6)


def run(day: int, *figures: Figure, case: str = "rocketmq-pull") -> Run:
    return Run(f"2026-01-{day:02} 10:00", 0.25, 0.031, {case: list(figures)})


def test_the_page_of_performance_quotes_the_kept_runs() -> None:
    """``make bench-rocketmq`` writes both files. Figures of a run that is not in the repository are not quoted."""
    text = PAGE.read_text()
    assert "<!-- bench: rocketmq-pull " in text
    assert fill_page(text, read_runs()) == text
    other = [
        replace(one, cases={name: [replace(f, ours=1.0) for f in fs] for name, fs in one.cases.items()}) for one in read_runs()
    ]
    assert fill_page(text, other) != text


def test_the_readme_quotes_the_kept_runs() -> None:
    text = README.read_text()
    assert fill_readme(text, read_runs()) == text
    assert fill_readme(text, [run(1, FIGURE, case="rocketmq-source")]) != text


def test_a_figure_of_several_runs_is_the_range_of_their_medians() -> None:
    runs = [run(1, FIGURE), run(2, replace(FIGURE, ours=701.4, ratio=0.6123)), run(3, replace(FIGURE, peer=1250.0))]
    assert table(runs, ["rocketmq-pull"]).splitlines()[2:] == [
        "| RocketMQ: pull: 12 columns | 701 to 732 / 1,250 to 1,295 k rows/s | 0.56 to 0.61 | 0.6 |",
        "",
        "Runs, UTC: 2026-01-01 10:00 (3% of the cores in use before), 2026-01-02 10:00 (3% of the cores in use before), "
        "2026-01-03 10:00 (3% of the cores in use before).",
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0], "1"),
        ([1.301, 1.302], "1.3"),
        ([25.61, 9.0], "9 to 25.6"),
        ([1295.2, 70.0], "70 to 1,295"),
        ([None], ""),
        ([], ""),
    ],
)
def test_a_range_names_its_ends(values: list[float | None], text: str) -> None:
    assert spread(values) == text


def test_the_newest_three_runs_of_a_case_are_quoted_with_the_lines_of_the_newest() -> None:
    new = replace(FIGURE, what="5 columns", ours=9.0, peer=3.0, ratio=3.0, target=2.0, low=True)
    runs = [
        run(1, replace(FIGURE, ours=1.0)),
        run(2, FIGURE),
        run(3, case="rocketmq-sink"),
        run(4, FIGURE),
        run(5, FIGURE, new),
    ]
    assert [one.date[:10] for one in quoted(runs, "rocketmq-pull")] == ["2026-01-02", "2026-01-04", "2026-01-05"]
    lines = table(runs, ["rocketmq-pull"]).splitlines()
    assert lines[2].startswith("| RocketMQ: pull: 12 columns | 732 / 1,295 k rows/s | ")
    assert lines[3] == "| RocketMQ: pull: 5 columns | 9 / 3 k rows/s | 3.00 | 2 at most |"
    assert table(runs, ["unknown"]).count("\n") == 3


def test_a_figure_without_a_peer_is_kept_and_not_quoted() -> None:
    assert "MB/s" not in table([run(1, Figure("file → sink", "disk", 258.0, "MB/s"))], ["rocketmq-pull"])


def test_runs_are_kept_in_their_order_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_runs(path) == []
    for day in range(1, KEPT + 3):
        keep(run(day), path)
        # A run is kept after each of its cases.
        keep(run(day, FIGURE), path)
    assert read_runs(path) == [run(day, FIGURE) for day in range(3, KEPT + 3)]
