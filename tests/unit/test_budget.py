"""A run's modules are compared with their CPU budget, if the machine was quiet enough for a comparison."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import budget
from tests.budget import Machine

#: A program that computes for 0.4 s, prints a line, and waits for input.
BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"


def test_what_was_used_since_the_last_charge_is_charged_to_a_line() -> None:
    readings = iter([1.0, 3.0, 3.5, 7.0])
    meter = budget.Meter(lambda: next(readings))
    for line in ("a", "b", "a"):
        meter.charge(line)
    assert budget.totals(meter.charges) == {"a": 5.5, "b": 0.5}


def test_the_time_of_children_counts_while_they_run_and_after_their_end() -> None:
    tree = budget.Tree()
    begun = tree.seconds()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree.seconds() - begun > 0.35
        child.communicate(b"\n")
    assert tree.seconds() - begun > 0.35


def test_the_time_of_a_process_whose_parent_was_killed_counts_after_its_end() -> None:
    tree = budget.Tree()
    begun = tree.seconds()
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [child] = psutil.Process(parent.pid).children()
        tree.seconds()
        parent.kill()
        parent.wait()
        assert tree.seconds() - begun > 0.35
        assert child.is_running()
    # The child ends because its standard input is closed.
    child.wait()
    assert tree.seconds() - begun > 0.35


def process(parent: int, own: float, waited: float = 0.0) -> budget._Process:
    return budget._Process(parent, 1.0, own, waited)


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_process_that_ends_while_processes_are_read_counts_once(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    me, child = os.getpid(), 0
    running = {me: process(1, 1.0), child: process(me, 5.0)}
    ended = {me: process(1, 1.0, 5.0)}
    # The child ends after one of the two processes was read and before the other was, so its time is in neither reading, or in both.
    torn = {me: process(1, 1.0)} if first == "parent" else {me: process(1, 1.0, 5.0), child: process(me, 5.0)}
    readings = itertools.chain([running, torn], itertools.repeat(ended))
    listings = itertools.chain([{me, child}] * 3, itertools.repeat({me}))
    monkeypatch.setattr(budget, "_processes", lambda: next(readings))
    monkeypatch.setattr(budget, "_pids", lambda: next(listings))
    tree = budget.Tree()
    assert [tree.seconds() for _ in range(3)] == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    ("own", "waited", "grown"),
    [
        pytest.param(4.0, 0.0, 3.0, id="nobody waited for the child: what this process used counts nevertheless"),
        pytest.param(1.0, 50.5, 0.5, id="this process waited for a child that waited for its own"),
        pytest.param(4.0, 50.5, 3.5, id="both"),
    ],
)
def test_what_a_process_used_between_its_last_look_and_its_end(
    own: float, waited: float, grown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, child, grandchild = os.getpid(), 0, -1
    before = {me: process(1, 1.0), child: process(me, 20.0), grandchild: process(child, 30.0)}
    readings = iter([before, {me: process(1, own, waited)}])
    listings = itertools.chain([set(before)] * 2, itertools.repeat({me}))
    monkeypatch.setattr(budget, "_processes", lambda: next(readings))
    monkeypatch.setattr(budget, "_pids", lambda: next(listings))
    tree = budget.Tree()
    assert tree.seconds() == 51.0
    assert tree.seconds() == 51.0 + grown


def test_a_process_with_the_number_of_one_that_has_ended_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    me, child = os.getpid(), 0
    readings = iter(
        [{me: process(1, 1.0), child: process(me, 5.0)}, {me: process(1, 1.0, 5.0), child: budget._Process(me, 2.0, 3.0, 0.0)}]
    )
    monkeypatch.setattr(budget, "_processes", lambda: next(readings))
    monkeypatch.setattr(budget, "_pids", lambda: {me, child})
    tree = budget.Tree()
    assert [tree.seconds() for _ in range(2)] == [6.0, 9.0]


def test_a_module_above_its_budget_and_one_without_are_found() -> None:
    limits = {"small.py": 1.0, "large.py": 100.0, "a.py": 10.0, "fixture cluster": 4.0}
    assert budget.over({"small.py": 1.0 + budget.SLACK, "large.py": 100 * (1 + budget.TOLERANCE)}, limits, 1.0) == []
    assert budget.over({"large.py": 120.0, "a.py": 10.0}, limits, 1.0) == ["large.py"]
    assert budget.over({"new.py": 5.0, "tiny.py": 1.0}, limits, 1.0) == ["new.py"]
    # The cost of a fixture belongs to no module that could be made cheaper or measured again.
    assert budget.over({"fixture cluster": 40.0}, limits, 1.0) == []


def test_a_machine_on_which_most_modules_need_more_is_another_machine() -> None:
    limits = {"a.py": 10.0, "b.py": 20.0, "c.py": 30.0, "d.py": 40.0, "e.py": 50.0, "small.py": 0.1}
    slow = {"a.py": 12.0, "b.py": 30.0, "c.py": 45.0, "d.py": 60.0, "e.py": 75.0, "small.py": 1.0}
    assert budget.usual(slow, limits) == 1.5
    assert budget.over(slow, limits, 1.5) == []
    assert budget.over({**slow, "e.py": 90.0}, limits, 1.5) == ["e.py"]
    # On a faster machine, a module may need as much as on the machine on which the budget was measured.
    assert budget.usual({line: limit / 2 for line, limit in limits.items()}, limits) == 1.0
    assert budget.usual(slow, {}) == 1.0


def test_a_machine_is_busy_if_others_compute() -> None:
    begin = Machine(clock=0.0, busy=1000.0)
    assert budget.disturbance(begin, Machine(100.0, 1160.0), spent=150.0, processors=2) is None
    found = budget.disturbance(begin, Machine(100.0, 1190.0), spent=150.0, processors=2)
    assert found == "other programs used 20% of its processors, more than 10%"


def test_the_table_has_the_expensive_modules_first_and_sums_up_the_small_ones() -> None:
    spent = {"a": 2.0, "b": 30.0, "c": 0.5, "d": 0.25}
    lines = budget.table(spent, {"b": 25.0}, {"a": 4.0, "b": 40.0, "c": 1.0, "d": 1.0})
    assert [" ".join(line.split()) for line in lines] == [
        "CPU budget wall",
        "30.0 25.0 40.0 b",
        "2.0 4.0 a",
        "0.8 2.0 2 modules below 1 s each",
        "32.8 25.0 all",
    ]


def test_a_budget_is_what_the_most_expensive_of_several_runs_needed(tmp_path: Path) -> None:
    file = tmp_path / "budget.json"
    budget.write([{"a": 10.0, "b": 3.0, "none": 0.0}, {"a": 9.0, "b": 4.04}], file)
    assert budget.read(file) == {"a": 10.0, "b": 4.0}
    assert budget.read(tmp_path / "missing.json") == {}
