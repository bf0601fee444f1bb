"""The sink: Spark's writers for a broker. ``writer`` runs in executors, ``commit`` on the driver; the logic below them is in orderedmq.

``once`` appends to tables of other systems. `route` is loaded on first use, because Spark's workers import this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orderedmq.spark_support import require_pyspark

if TYPE_CHECKING:
    from ordered_sink import once
    from ordered_sink.routing import route

__all__ = ["once", "route"]


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__


def __getattr__(name: str) -> Any:
    if name != "route":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_pyspark("ordered_sink.route")
    from ordered_sink.routing import route

    return route
