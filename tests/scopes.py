"""The scopes of a parallel run: tests that start the same servers or drivers run in one process, one after the other.

Each folder is a scope. tests/rocketmq is two, each with servers of its own. Unit tests start no servers: each file is a scope,
to fill the time that the others leave.
"""

from __future__ import annotations

from typing import Final

import pytest

#: The modules of tests/rocketmq that start Spark.
_WITH_SPARK: Final = (
    "test_documents",
    "test_notebook",
    "test_sink",
    "test_source",
    "test_spark",
    "test_spark_faults",
    "test_standalone",
)
#: An order that keeps two processes busy to the end. sim comes late: its background processes take CPU that servers with short
#: locks need.
_ORDER: Final = ("rocketmq", "contract", "faults", "rocketmq with Spark", "spark", "sim", "unit")


def scope_of(nodeid: str) -> str:
    """The scope of a test: ``tests/rocketmq/test_sink.py::test_x`` → rocketmq with Spark."""
    module = nodeid.partition("::")[0]
    folder, name = module.split("/")[1], module.rpartition("/")[2].removesuffix(".py")
    if folder == "unit":
        return module
    return f"{folder} with Spark" if folder == "rocketmq" and name in _WITH_SPARK else folder


def starts_spark(item: pytest.Item) -> bool:
    """Whether a test starts a driver or uses the shared session."""
    scope = scope_of(item.nodeid)
    return scope in ("spark", "faults") or scope.endswith(" with Spark") or "spark" in getattr(item, "fixturenames", ())


def turn(item: pytest.Item) -> int:
    """The test's place in _ORDER, a sort key."""
    scope = scope_of(item.nodeid)
    return _ORDER.index(scope) if scope in _ORDER else len(_ORDER)


def mine(item: pytest.Item) -> str:
    """The scope of a test if its process runs single scopes (pytest-xdist), else one scope for all tests."""
    return scope_of(item.nodeid) if hasattr(item.config, "workerinput") else ""
