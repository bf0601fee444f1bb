"""Which tests run in one process, one after the other, when the suite runs in several: those that start the same things.

A folder is a scope. Tests over RocketMQ servers are two, each with servers of its own. Unit tests start nothing: by file they fill what
the others leave over.
"""

from __future__ import annotations

from typing import Final

import pytest

#: Of tests/rocketmq, those that start Spark.
_WITH_SPARK: Final = (
    "test_documents",
    "test_notebook",
    "test_sink",
    "test_source",
    "test_spark",
    "test_spark_faults",
    "test_standalone",
)
#: So that both of two processes are at work to the end. What sim has in the background takes CPU that servers and their short locks need.
_ORDER: Final = ("rocketmq", "contract", "faults", "rocketmq with Spark", "spark", "sim", "unit")


def scope_of(nodeid: str) -> str:
    """``tests/rocketmq/test_sink.py::test_x`` → rocketmq with Spark."""
    module = nodeid.partition("::")[0]
    folder, name = module.split("/")[1], module.rpartition("/")[2].removesuffix(".py")
    if folder == "unit":
        return module
    return f"{folder} with Spark" if folder == "rocketmq" and name in _WITH_SPARK else folder


def turn(item: pytest.Item) -> int:
    """Sorts tests by _ORDER."""
    scope = scope_of(item.nodeid)
    return _ORDER.index(scope) if scope in _ORDER else len(_ORDER)


def mine(item: pytest.Item) -> str:
    """The scope of a test where its process runs single scopes, else one for all."""
    return scope_of(item.nodeid) if hasattr(item.config, "workerinput") else ""
