"""Documents quote the stored runs of the benchmarks. A figure from several runs is shown as a range."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import kafka, process_cpu
from bench.figures import (
    AGAINST_KAFKA,
    PAGE,
    QUOTED,
    README,
    VERSUS,
    Figure,
    Run,
    fill_page,
    fill_readme,
    keep,
    quoted,
    read_runs,
    spread,
    table,
    versus,
)
from bench.kafka_server import KafkaServer, connector_releases
from bench.process_cpu import ProcessCpu
from bench.run import CASES

FIGURE = Figure("RocketMQ: pull", "12 columns", 732.0, "k rows/s", 1295.0, 0.565, 0.6)


def run(day: int, *figures: Figure, case: str = "rocketmq-pull") -> Run:
    return Run(f"2026-01-{day:02} 10:00", 0.25, 0.031, {case: list(figures)})


def test_the_page_of_performance_quotes_the_kept_runs() -> None:
    """``make bench-rocketmq`` writes the page and docs/bench-results.json. Only figures in that file are quoted."""
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
        "Runs, UTC: 2026-01-01 10:00 (3% busy), 2026-01-02 10:00 (3% busy), 2026-01-03 10:00 (3% busy).",
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
    assert table(runs, ["unknown"]).startswith("No run is kept yet.")


def test_a_figure_without_a_peer_is_kept_and_not_quoted() -> None:
    assert "MB/s" not in table([run(1, Figure("file → sink", "disk", 258.0, "MB/s"))], ["rocketmq-pull"])


def test_runs_are_kept_in_their_order_while_a_case_of_theirs_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert read_runs(path) == []
    rare = run(1, FIGURE, case="start")
    keep(rare, path)
    for day in range(2, QUOTED + 4):
        keep(run(day), path)
        # A run is stored again after each of its cases.
        keep(run(day, FIGURE), path)
    assert read_runs(path) == [rare, *(run(day, FIGURE) for day in range(4, QUOTED + 4))]


# --- against Kafka

READ = Figure("read", "whole query", 1.5, "M rows/s", 1.2, 1.25, ours_default=1.1, peer_default=1.0)


def versus_run(day: int, *figures: Figure) -> Run:
    made = run(day, *figures, case="kafka-read")
    made.software = "Kafka 9.9"
    return made


def test_the_page_against_kafka_quotes_the_kept_runs_and_says_where_there_is_none() -> None:
    """``make bench-kafka`` writes the quoted runs."""
    text = AGAINST_KAFKA.read_text()
    named = [name for names in re.findall(r"<!-- bench: (.*) -->", text) for name in names.split()]
    assert sorted(named) == sorted(name for name in CASES if name.startswith(VERSUS))
    assert fill_page(text, read_runs()) == text
    assert "orderedmq 1.25 times" in fill_page(text, [versus_run(1, READ)])
    assert "No run is kept yet." in fill_page(text, [])


def test_a_comparison_has_both_sides_with_default_settings_and_tuned_and_says_who_is_ahead() -> None:
    cpu = Figure("read", "CPU of all processes", 2.0, "µs/row", 1.0, 2.0, low=True, ours_default=3.0)
    alone = Figure("read", "CPU of Python", 2.0, "µs/row", 1.0, ours_default=2.0)
    disk = Figure("read", "the disk", 258.0, "MB/s")
    runs = [versus_run(1, READ, cpu, alone, disk), versus_run(2, replace(READ, ours=1.7, ratio=1.4), cpu, alone, disk)]
    assert versus(runs, ["kafka-read"]).splitlines()[2:] == [
        "| read: whole query, M rows/s | 1 | 1.2 | 1.1 | 1.5 to 1.7 | orderedmq 1.25 to 1.40 times |",
        # Lower is better for this figure.
        "| read: CPU of all processes, µs/row |  | 1 | 3 | 2 | Kafka 2.00 times |",
        # There was nothing to tune, so nothing is compared.
        "| read: CPU of Python, µs/row |  | 1 | 2 |  |  |",
        "",
        "The disk: 258 MB/s. Kafka 9.9. Runs, UTC: 2026-01-01 10:00 (3% busy), 2026-01-02 10:00 (3% busy).",
    ]


def test_nobody_is_ahead_where_the_runs_disagree() -> None:
    runs = [versus_run(1, replace(READ, ratio=0.95)), versus_run(2, replace(READ, ratio=1.05))]
    assert versus(runs, ["kafka-read"]).splitlines()[2].endswith("| neither |")


def test_the_better_settings_of_each_side_are_compared() -> None:
    found = {"ours": {"speed": 2.0}, "ours tuned": {"speed": 1.0}, "Kafka": {"speed": 3.0}, "Kafka tuned": {"speed": 4.0}}
    [fast] = kafka.figures("read", found, [("speed", "speed", "rows/s", False)])
    assert (fast.ours, fast.peer, fast.ours_default, fast.peer_default, fast.ratio) == (1.0, 4.0, 2.0, 3.0, 0.5)
    [slow] = kafka.figures("read", found, [("speed", "time", "ms", True)])
    assert slow.ratio == 1 / 3
    [other] = kafka.figures("read", found, [("speed", "speed", "rows/s", False)], peer="Kafka", plain=False)
    assert (other.ratio, other.ours_default, other.peer_default) == (1 / 3, None, None)


def test_the_server_listens_on_loopback_alone_and_acknowledges_as_kafka_does(tmp_path: Path) -> None:
    told = KafkaServer(tmp_path).properties()
    places = f"{told['listeners']},{told['advertised.listeners']}".split(",")
    assert {re.sub(r":\d+$", "", place) for place in places} == {"PLAINTEXT://127.0.0.1", "CONTROLLER://127.0.0.1"}
    assert told["log.dirs"] == tmp_path / "data"
    assert not [name for name in told if "flush" in name]


def test_the_connector_is_that_of_spark_or_else_of_a_release_before() -> None:
    assert connector_releases("4.9.0", ("4.2.0",)) == ["4.9.0", "4.2.0"]
    assert connector_releases("4.2.0", ("4.2.0",)) == ["4.2.0"]


WORKERS = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    while time.process_time() < 0.6:
        pass
    os._exit(0)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("ended", flush=True)
sys.stdin.read()
"""


def test_the_cpu_of_a_worker_that_nobody_waited_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark's daemons do not wait for workers that have ended."""
    # An earlier test of this process may have left Spark's JVM running, which uses a little time while it is idle.
    below = process_cpu._below
    monkeypatch.setattr(process_cpu, "_below", lambda: [one for one in below() if one.name() != "java"])
    with ProcessCpu({}) as cpu:
        before = cpu.now()
        with subprocess.Popen([sys.executable, "-c", WORKERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ended\n"
            used = cpu.since(before)
            process.kill()
        later = cpu.since(before)
    assert 0.3 < used["Python"] <= later["Python"] == later["together"]
    assert used["JVM"] == 0
