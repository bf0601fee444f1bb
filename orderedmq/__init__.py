"""Ordered message queues with the semantics of RocketMQ's ordered messages, for Spark Structured Streaming.

``spark.readStream.format("orderedmq")`` and ``df.writeStream.format("orderedmq")`` need no import. This module has the rest:

- ``connect`` opens a connection to a broker, whose methods take ``MessageQueue``.
- ``read`` reads messages without Spark, as ``Messages``. ``Producer`` writes them, and ``replay_dead_letters`` sends dead letters again.
- ``repair_parked`` retries or holds a parked key, or decides what becomes of one of its messages.
- ``copy_offsets`` lets a group begin at the offsets of another group.
- ``snapshot`` copies the embedded broker's store while it is in use.
- ``prepare_spark`` sets up Java and Python for Spark. ``tuned`` does the same and makes a session start sooner.
- ``register`` makes the format known where Spark cannot find it.
- ``OrderedMQError`` is the base of all errors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orderedmq.errors import OrderedMQError

if TYPE_CHECKING:
    from orderedmq.connections import connect
    from orderedmq.embedded.snapshot import snapshot
    from orderedmq.endpoint import Credentials, CredentialsFile, TlsOptions
    from orderedmq.java import prepare_spark
    from orderedmq.model import MessageQueue
    from orderedmq.startup.tuning import tuned
    from orderedmq.tools.dead_letters import LetterFilter
    from orderedmq.tools.parked import repair_parked
    from orderedmq.tools.producer import Producer
    from orderedmq.tools.reader import Messages, read
    from orderedmq.tools.replay import replay_dead_letters
    from orderedmq.tools.seek import copy_offsets

__version__ = "0.1.0"
__all__ = [
    "Credentials",
    "CredentialsFile",
    "LetterFilter",
    "MessageQueue",
    "Messages",
    "OrderedMQError",
    "Producer",
    "TlsOptions",
    "connect",
    "copy_offsets",
    "prepare_spark",
    "read",
    "register",
    "repair_parked",
    "replay_dead_letters",
    "snapshot",
    "tuned",
]  # fmt: skip

#: The modules of names that are loaded on first use, because they import pyarrow, which Spark's search for data sources should not load.
_HOMES = {
    "connect": "orderedmq.connections",
    "MessageQueue": "orderedmq.model",
    "Producer": "orderedmq.tools.producer",
    "Messages": "orderedmq.tools.reader",
    "read": "orderedmq.tools.reader",
    "prepare_spark": "orderedmq.java",
    "snapshot": "orderedmq.embedded.snapshot",
    "tuned": "orderedmq.startup.tuning",
    "LetterFilter": "orderedmq.tools.dead_letters",
    "copy_offsets": "orderedmq.tools.seek",
    "repair_parked": "orderedmq.tools.parked",
    "replay_dead_letters": "orderedmq.tools.replay",
    "Credentials": "orderedmq.endpoint",
    "CredentialsFile": "orderedmq.endpoint",
    "TlsOptions": "orderedmq.endpoint",
}


def register(spark: Any) -> None:
    """Make the format known to the session ``spark`` where Spark raises DATA_SOURCE_NOT_FOUND.

    This is needed in two cases. A session cannot find the format if the package was added as a zip or as a Spark Connect artifact.
    A thread that your code starts has no active session, which is where Spark looks for formats written in Python. Call
    ``register`` in that thread: ``spark`` becomes the thread's active session. Raises OptionError UNSUPPORTED if PySpark is too old.
    """
    import pyspark_orderedmq
    from orderedmq.spark_support import require_release

    require_release()
    spark.dataSource.register(pyspark_orderedmq.DefaultSource)
    # Spark Connect needs no active session here, because threads of its server look for formats.
    if hasattr(type(spark), "_get_j_spark_session_class"):
        sessions = spark._get_j_spark_session_class(spark._jvm)
        if not sessions.getActiveSession().isDefined():
            sessions.setActiveSession(spark._jsparkSession)


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orderedmq' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
