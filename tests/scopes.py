"""The scopes of a parallel run: tests that start the same servers or drivers run in one process, one after the other.

Each folder is a scope. tests/rocketmq is two, each with servers of its own: modules marked ``spark`` are the second. tests/contract is
two: its tests on the embedded broker need no servers. A module that
shares nothing with others is a scope, to fill the time that the others leave: unit tests, and what starts only drivers of its own.

Two processes run any scope. While their tests wait for servers and locks, a third computes, in the CPU time that they leave. What looks at
the clock is not for that one: it may stand still for longer than a test allows.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).parents[1]
_EMBEDDED: Final = "contract on the embedded broker"
#: An order that keeps two processes busy to the end. sim comes late: its seeds have run beside the others by then.
_ORDER: Final = ("rocketmq", "contract", "faults", "rocketmq with Spark", "spark", _EMBEDDED, "sim")
#: Modules of tests/spark that do not use the shared session.
ALONE: Final = (
    "tests/spark/test_against_kafka.py",
    "tests/spark/test_demo.py",
    "tests/spark/test_registration.py",
    "tests/spark/test_startup.py",
)
#: Modules that start a Spark Connect server, which has one port.
CONNECT: Final = ("tests/spark/test_connect.py", "tests/spark/test_pipeline.py")

#: What a unit test imports that depends on when something happens: the clock, threads, servers of its own.
_CLOCKS: Final = frozenset(("time", "threading", "socket", "tests.waits", "tests.ui_site", "tests.unit.rocketmq_peer"))

#: Processes that run any scope; those above give way to them.
_FULL: Final = 2
#: Of a process that gives way. It gets a tenth of a core where a machine has no time to spare, so no test of it runs into its timeout.
NICENESS: Final = 10


def gives_way(worker: str) -> bool:
    """Whether a process of pytest-xdist ("gw2") gives way to the others, and runs only what computes."""
    return int(worker.removeprefix("gw")) >= _FULL


def computes(scope: str) -> bool:
    """Whether the tests of a scope compute: they start neither servers nor Spark, and none fails because it runs slowly."""
    return scope in ("sim", _EMBEDDED) or (scope.startswith("tests/unit/") and not _looks_at_clocks(scope))


def scope_of(nodeid: str) -> str:
    """The scope of a test: ``tests/rocketmq/test_sink.py::test_x`` → rocketmq with Spark."""
    module = nodeid.partition("::")[0]
    folder = module.split("/")[1]
    if folder == "unit" or module in ALONE:
        return module
    if module in CONNECT:
        return "Spark Connect"
    if folder == "contract" and re.search(r"\[embedded\b", nodeid):
        return _EMBEDDED
    return f"{folder} with Spark" if folder == "rocketmq" and _is_marked(module) else folder


@cache
def _looks_at_clocks(module: str) -> bool:
    """Whether a module imports what depends on when something happens, in any of its functions."""
    names: set[str] = set()
    for part in ast.walk(ast.parse((_ROOT / module).read_text())):
        if isinstance(part, ast.Import):
            names |= {name.name for name in part.names}
        elif isinstance(part, ast.ImportFrom):
            names |= {str(part.module), *(f"{part.module}.{name.name}" for name in part.names)}
    return not names.isdisjoint(_CLOCKS)


@cache
def _is_marked(module: str) -> bool:
    """Whether a module's ``pytestmark`` has the marker ``spark``. Read from its text: the process that distributes tests knows only names."""
    marks = [
        statement.value
        for statement in ast.parse((_ROOT / module).read_text()).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
    ]
    return any(ast.unparse(part) == "pytest.mark.spark" for value in marks for part in ast.walk(value))


def starts_spark(item: pytest.Item) -> bool:
    """Whether a test starts a driver or uses the shared session."""
    return item.get_closest_marker("spark") is not None


def turn(item: pytest.Item) -> int:
    """The test's place in _ORDER, a sort key."""
    scope = scope_of(item.nodeid)
    return _ORDER.index(scope) if scope in _ORDER else len(_ORDER)


def mine(item: pytest.Item) -> str:
    """The scope of a test if its process runs single scopes (pytest-xdist), else one scope for all tests."""
    return scope_of(item.nodeid) if hasattr(item.config, "workerinput") else ""
