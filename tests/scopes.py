"""The scopes of a parallel run: tests that start the same servers or drivers run in one process, one after the other.

Each folder is a scope. tests/rocketmq is two, each with servers of its own: modules marked ``spark`` are the second. A module that
shares nothing with others is a scope, to fill the time that the others leave: unit tests, and what starts only drivers of its own.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).parents[1]
#: An order that keeps two processes busy to the end. sim comes late: its background processes take CPU that servers with short
#: locks need.
_ORDER: Final = ("rocketmq", "contract", "faults", "rocketmq with Spark", "spark", "sim")
#: Modules of tests/spark that do not use the shared session.
ALONE: Final = ("tests/spark/test_connect.py", "tests/spark/test_demo.py", "tests/spark/test_registration.py")


def scope_of(nodeid: str) -> str:
    """The scope of a test: ``tests/rocketmq/test_sink.py::test_x`` → rocketmq with Spark."""
    module = nodeid.partition("::")[0]
    folder = module.split("/")[1]
    if folder == "unit" or module in ALONE:
        return module
    return f"{folder} with Spark" if folder == "rocketmq" and _is_marked(module) else folder


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
