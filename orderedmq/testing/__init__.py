"""Helpers to test pipelines: a temporary store, queries that run to their end or are killed in a micro-batch, calls that fail once,
and a judge of histories.

pytest users get a `TemporaryStore` from the fixture ``orderedmq_store`` and a Spark session from ``orderedmq_spark``
(pytest_orderedmq.py). The guide is docs/guides/testing.md. No other part of the package imports this one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orderedmq.testing.failures import FailedOnce
    from orderedmq.testing.history import Anomaly, judge
    from orderedmq.testing.queries import QueryTestError
    from orderedmq.testing.store import TemporaryStore

__all__ = ["Anomaly", "FailedOnce", "QueryTestError", "TemporaryStore", "judge"]

_HOMES = {
    "Anomaly": "orderedmq.testing.history",
    "FailedOnce": "orderedmq.testing.failures",
    "QueryTestError": "orderedmq.testing.queries",
    "TemporaryStore": "orderedmq.testing.store",
    "judge": "orderedmq.testing.history",
}


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
