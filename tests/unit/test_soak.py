"""The figures that ``make soak`` derives from its samples, and the table in docs/performance.md, which quotes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import soak
from bench.figures import PAGE
from bench.soak_samples import fill_page, keep, read_results, read_samples, summaries, table


def sample(batches: int, rss: float, kind: str = "source", heap: float | None = None) -> dict[str, Any]:
    process = {"rss": rss, "files": 8, "threads": 4}
    made = {"kind": kind, "way": "processes", "batches": batches, "at": 0.0, "runner": process, "workers": process}
    jvm = {} if heap is None else {"jvm": {"rss": 500.0, "heap": heap}}
    return {**made, **jvm, "store": {"file": 1.0, "used": 0.5}, "slots": 3, "readers": 1}


def test_the_page_quotes_the_kept_runs() -> None:
    """``make soak`` writes the page and docs/soak-results.json."""
    text, runs = PAGE.read_text(), read_results()
    assert runs
    assert fill_page(text, runs) == text
    assert fill_page(text, [{**run, "batches": 1} for run in runs]) != text


@pytest.mark.parametrize("run", read_results(), ids=lambda run: f"{run['kind']}-{run['way']}")
def test_what_the_kept_runs_have_shown_is_flat_after_the_warm_up(run: dict[str, Any]) -> None:
    for name in ("runner, MiB", "workers, MiB", "JVM heap, MiB", "files", "threads", "readers"):
        figure = run["figures"].get(name)
        assert figure is None or figure["last"] <= 1.05 * figure["first"], name


def test_a_figure_is_kept_from_the_warm_up_on() -> None:
    run = [sample(1, 10), sample(2000, 85), sample(3000, 90, heap=60), sample(4000, 86)]
    [found] = summaries([*run, sample(1999, 1, "idle"), sample(2100, 1, "idle")])
    assert (found["kind"], found["batches"]) == ("source", 4000)
    assert found["figures"]["runner, MiB"] == {"first": 85, "last": 86, "most": 90}
    assert found["figures"]["files"] == {"first": 16, "last": 16, "most": 16}
    assert found["figures"]["JVM heap, MiB"] == {"first": 60, "last": 60, "most": 60}


def test_of_several_runs_of_a_kind_the_one_that_began_last_counts() -> None:
    old, new = [sample(2000, 85), sample(20000, 85)], [sample(1, 70), sample(2000, 70), sample(5000, 71)]
    [found] = summaries(old + new)
    assert (found["batches"], found["figures"]["runner, MiB"]["last"]) == (5000, 71)


def test_a_kept_run_is_in_the_place_of_an_earlier_one_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    keep([sample(2000, 85), sample(3000, 85), sample(2000, 60, "sink"), sample(3000, 60, "sink")], path)
    keep([sample(2000, 85), sample(20000, 85)], path)
    assert [(run["kind"], run["batches"]) for run in read_results(path)] == [("sink", 3000), ("source", 20000)]


def test_a_cell_has_the_value_after_the_warm_up_and_the_last_and_a_larger_one_between_them() -> None:
    [head, _, row, _, last] = table(summaries([sample(2000, 85), sample(3000, 90), sample(4000, 86)])).splitlines()
    assert head == "| kind | micro-batches | runner, MiB | workers, MiB | files | threads | readers | store, MiB |"
    cell = "85 → 86, at most 90"
    assert row == f"| source, without the JVM | 4,000 | {cell} | {cell} | 16 | 8 | 3 | 0.5 |"
    assert last == "Runs, UTC: 1970-01-01 00:00."


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["source", "sink", "shared"])
def test_queries_run_without_spark_and_are_sampled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "soak.jsonl"
    given = [kind, "--batches", "20", "--every", "10", "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["soak", *given])
    soak.main()
    *_, last = read_samples(out)
    assert (last["kind"], last["batches"]) == (kind, 20)
    assert last["workers"]["processes"] == (2 if kind == "shared" else 1)
    assert last["runner"]["processes"] == {"sink": 0, "shared": 2}.get(kind, 1)
    assert last["workers"]["rss"] > 0
