"""Ordered message queues with the semantics of RocketMQ's ordered messages, for Spark Structured Streaming.

``spark.readStream.format("orderedmq")`` and ``df.writeStream.format("orderedmq")`` need no import. Here is what is used beside them:
``connect`` for a broker of one's own, ``Producer`` to write messages from Python, ``register`` where Spark cannot find the source by itself,
and the errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orderedmq.errors import OrderedMQError

if TYPE_CHECKING:
    from orderedmq.connections import connect
    from orderedmq.producer import Producer
    from orderedmq.rocketmq.acl import Credentials
    from orderedmq.rocketmq.transport import TlsOptions

__version__ = "0.1.0"
__all__ = ["Credentials", "OrderedMQError", "Producer", "TlsOptions", "connect", "register"]

#: What is loaded when it is first used: pyarrow comes along, which Spark's look-up of data sources should not load.
_HOMES = {
    "connect": "orderedmq.connections",
    "Producer": "orderedmq.producer",
    "Credentials": "orderedmq.rocketmq.acl",
    "TlsOptions": "orderedmq.rocketmq.transport",
}


def register(spark: Any) -> None:
    """Make the format known to a session where Spark cannot find it: shipped as a zip, or as a Spark Connect artifact."""
    import pyspark_orderedmq

    spark.dataSource.register(pyspark_orderedmq.DefaultSource)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orderedmq' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
