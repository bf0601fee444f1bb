"""Ordered message queues with the semantics of RocketMQ's ordered messages, for Spark Structured Streaming.

``spark.readStream.format("orderedmq")`` and ``df.writeStream.format("orderedmq")`` need no import. Here is what is used beside them:
``connect`` for a broker of one's own, ``Producer`` to write messages from Python, ``prepare_spark`` before a session
where nothing is set up for Spark, ``register`` where Spark cannot find the source by itself, and the errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orderedmq.errors import OrderedMQError

if TYPE_CHECKING:
    from orderedmq.connections import connect
    from orderedmq.java import prepare_spark
    from orderedmq.rocketmq.net.transport import TlsOptions
    from orderedmq.rocketmq.wire.acl import Credentials
    from orderedmq.tools.producer import Producer

__version__ = "0.1.0"
__all__ = ["Credentials", "OrderedMQError", "Producer", "TlsOptions", "connect", "prepare_spark", "register"]

#: What is loaded when it is first used: pyarrow comes along, which Spark's look-up of data sources should not load.
_HOMES = {
    "connect": "orderedmq.connections",
    "Producer": "orderedmq.tools.producer",
    "prepare_spark": "orderedmq.java",
    "Credentials": "orderedmq.rocketmq.wire.acl",
    "TlsOptions": "orderedmq.rocketmq.net.transport",
}


def register(spark: Any) -> None:
    """Make the format known where Spark says DATA_SOURCE_NOT_FOUND.

    That is in a session that cannot find it (code shipped as a zip, a Spark Connect artifact), and in each thread that your code starts:
    Spark looks for Python's formats in the thread's active session, and such a thread has none. It is given this one.
    """
    import pyspark_orderedmq

    spark.dataSource.register(pyspark_orderedmq.DefaultSource)
    # Not in Spark Connect, where threads of the server look.
    if hasattr(type(spark), "_get_j_spark_session_class"):
        sessions = spark._get_j_spark_session_class(spark._jvm)
        if not sessions.getActiveSession().isDefined():
            sessions.setActiveSession(spark._jsparkSession)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orderedmq' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
