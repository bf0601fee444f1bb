"""Spark is prepared once, and only if a test is marked ``spark``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, quick_spark, scopes


class Item:
    """A collected test, as the hooks of the suite see it."""

    def __init__(self, *fixtures: str) -> None:
        self.fixturenames = fixtures
        self.marks: list[str] = []
        conftest.pytest_itemcollected(self)  # type: ignore[arg-type]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


@pytest.mark.parametrize(
    ("items", "prepared"),
    [
        ([Item("tmp_path"), Item()], False),
        ([Item("tmp_path"), Item("tmp_path", "spark")], True),
        ([], False),
    ],
)
@pytest.mark.parametrize("collect_only", [False, True])
def test_spark_is_prepared_only_if_a_test_starts_it(
    items: Sequence[Item], prepared: bool, collect_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[None] = []
    monkeypatch.setattr(quick_spark, "begin", lambda: begun.append(None))
    option = SimpleNamespace(collectonly=collect_only)
    session: Any = SimpleNamespace(items=items, config=SimpleNamespace(option=option, stash={}))
    conftest.pytest_collection_finish(session)
    assert len(begun) == (prepared and not collect_only)


@pytest.mark.parametrize(
    ("module", "scope"),
    [
        ("tests/spark/test_sink.py", "spark"),
        # Starts only drivers of its own.
        ("tests/spark/test_demo.py", "tests/spark/test_demo.py"),
        # Their servers have the same port.
        ("tests/spark/test_connect.py", "Spark Connect"),
        ("tests/spark/test_pipeline.py", "Spark Connect"),
        ("tests/faults/test_stop.py", "faults"),
        # It says so: pytestmark = pytest.mark.spark.
        ("tests/rocketmq/test_standalone.py", "rocketmq with Spark"),
        # Single tests use the session.
        ("tests/rocketmq/test_access.py", "rocketmq"),
        # Has a pytestmark, with another marker.
        ("tests/rocketmq/test_locks.py", "rocketmq"),
        ("tests/unit/test_lock.py", "tests/unit/test_lock.py"),
    ],
)
def test_tests_that_share_servers_or_a_driver_are_one_scope(module: str, scope: str) -> None:
    assert scopes.scope_of(f"{module}::test_x[a]") == scope


def test_the_contract_on_the_embedded_broker_needs_no_servers() -> None:
    of = {kind: scopes.scope_of(f"tests/contract/test_log.py::test_x[{kind}]") for kind in ("embedded-1", "rocketmq-4.9.7-1")}
    assert of["rocketmq-4.9.7-1"] == scopes.scope_of("tests/contract/test_log.py::test_x") == "contract"
    assert scopes.computes(of["embedded-1"])
    assert not scopes.computes("contract")


@pytest.mark.parametrize(
    ("module", "computes"),
    [
        ("tests/unit/test_lock.py", True),
        # It moves a clock of its own.
        ("tests/unit/test_rocketmq_broker_queue.py", True),
        ("tests/unit/test_rocketmq_client.py", False),
        ("tests/unit/test_ui.py", False),
        ("tests/unit/test_embedded_store.py", False),
    ],
)
def test_a_unit_test_that_looks_at_the_clock_is_not_for_the_process_that_gives_way(module: str, computes: bool) -> None:
    assert scopes.computes(module) is computes


class Node:
    """A process of pytest-xdist, as its scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def shutdown(self) -> None:
        self.shutting_down = True

    def send_runtest_some(self, indexes: Sequence[int]) -> None:
        self.given += indexes


def scheduled(*tests: str) -> list[Node]:
    """Three processes, among which these tests were distributed."""
    option = SimpleNamespace(tx=["popen"] * 3, loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: option.tx, hook=None)
    made, nodes = conftest.Scopes(config, None), [Node(f"gw{number}") for number in range(3)]
    for node in nodes:
        made.add_node(node)
        made.add_node_collection(node, tests)
    made.schedule()
    return nodes


def test_a_third_process_computes_and_leaves_what_starts_servers_to_the_others() -> None:
    folders = ["rocketmq/test_log.py", "contract/test_log.py", "faults/test_stop.py", "spark/test_sink.py"]
    tests = [f"tests/{module}::test_x" for module in (*folders, "sim/test_liveness.py", "unit/test_lock.py")]
    first, second, third = scheduled(*tests)
    assert third.given == [4, 5]
    assert sorted(first.given + second.given) == [0, 1, 2, 3]
    first, second, third = scheduled(*tests[:4])
    assert third.given == []
    assert third.shutting_down
    assert sorted(first.given + second.given) == [0, 1, 2, 3]
    # Of fewer scopes than processes, any process has them.
    assert [node.given for node in scheduled(tests[0]) if node.given] == [[0]]


def test_it_is_prepared_unless_that_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Sequence[str]] = []
    monkeypatch.setattr(quick_spark, "find_java", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: begun.append(command))
    for name in ("SPARK_HOME", "SPARK_SUBMIT_OPTS"):
        # Set first, so that what the code under test sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: None)
    quick_spark.begin()
    assert [command[-2:] for command in begun] == [["spark", "prepare"]]
    assert quick_spark.jvm_options() == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    assert "SPARK_HOME" not in os.environ
    monkeypatch.setattr(quick_spark, "archive_options", lambda java, home: "-XX:SharedArchiveFile=made")
    quick_spark.begin()
    assert len(begun) == 1
    assert os.environ["SPARK_SUBMIT_OPTS"] == quick_spark.jvm_options()
    assert quick_spark.jvm_options().endswith("made")
    assert (Path(os.environ["SPARK_HOME"]) / "jars").is_dir()
