"""Ordered message queues with the semantics of RocketMQ's ordered messages, for Spark Structured Streaming.

``spark.readStream.format("orderedmq")`` and ``df.writeStream.format("orderedmq")`` need no import. Here is what is used beside them:
``connect`` for a broker of one's own, ``register`` where Spark cannot find the source by itself, and the errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orderedmq.errors import OrderedMQError

if TYPE_CHECKING:
    from orderedmq.connections import connect

__version__ = "0.1.0"
__all__ = ["OrderedMQError", "connect", "register"]


def register(spark: Any) -> None:
    """Make the format known to a session where Spark cannot find it: shipped as a zip, or as a Spark Connect artifact."""
    import pyspark_orderedmq

    spark.dataSource.register(pyspark_orderedmq.DefaultSource)


def __getattr__(name: str) -> Any:
    # connect brings pyarrow along, which Spark's look-up of data sources should not load.
    if name == "connect":
        from orderedmq.connections import connect

        return connect
    raise AttributeError(f"module 'orderedmq' has no attribute {name!r}")
