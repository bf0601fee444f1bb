"""Stops queries between two micro-batches, so that a rollout cuts no batch and the next owner has the queues at once.

A plain ``query.stop()`` interrupts a micro-batch that is running. Then its queues stay locked until the tasks must have ended, and the
batch is run again by the query's next run, or its messages are read again by the next owner.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ordered_source.stop_request import StopRequest
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.ownership.lag import checkpoint_of

log = logging.getLogger("orderedmq")

#: Seconds between two looks at a query.
_LOOK: Final = 0.1
#: Seconds that a source has to give its queues back once its query was stopped between two micro-batches.
_GIVE_BACK: Final = 10.0
#: The exit code of a program that SIGTERM ended, as a shell reports it.
_TERMINATED: Final = 128 + signal.SIGTERM
#: Of Hadoop's shutdown hooks, which run in this order. Spark's own have 40 and end all queries.
_BEFORE_SPARK: Final = 100


def stop_at_boundary(query: StreamingQuery, timeout: float = 60.0) -> bool:
    """Stop a query between two micro-batches. Return whether its queues were given back there.

    The micro-batch that is running is finished, and no further one is planned. The source then commits its group's offsets and gives back all
    its queues, and the query is stopped: another member of the group, or the next run of this query, has the queues at its next trigger.

    If the micro-batch takes longer than ``timeout`` seconds, the query is stopped as by ``query.stop()``, and False is returned. The same
    happens if the source runs on another machine than this program (a remote Spark Connect server), and if the query fails meanwhile.

    Raises OptionError UNSUPPORTED for a query that reads nothing with the format orderedmq.
    """
    deadline = time.monotonic() + timeout
    requests: dict[str, StopRequest] = {}
    try:
        while query.isActive and time.monotonic() < deadline:
            # In this order: if the query is between two triggers, the progress is that of the last one.
            between = not query.status["isTriggerActive"]
            offsets = _offsets(query)
            for owner_id in offsets.keys() - requests.keys():
                requests[owner_id] = StopRequest(owner_id)
                requests[owner_id].write()
                between = False
            if requests and all(request.answered for request in requests.values()):
                break
            if requests and between:
                # With a long trigger interval, the source is not called before the next trigger.
                for owner_id, request in requests.items():
                    request.write(offsets[owner_id])
                deadline = time.monotonic() + _GIVE_BACK
                break
            time.sleep(_LOOK)
        query.stop()
        # The source's process ends after its query.
        while requests and time.monotonic() < deadline and not all(request.answered for request in requests.values()):
            time.sleep(_LOOK)
        return bool(requests) and all(request.answered for request in requests.values())
    finally:
        for request in requests.values():
            request.withdraw()


def _offsets(query: StreamingQuery) -> dict[str, Mapping[str, Any]]:
    """Return the offset up to which each of the query's sources is processed, by owner id; empty before the first micro-batch.

    Raises OptionError UNSUPPORTED if none of the sources is ours.
    """
    progress = query.lastProgress
    if progress is None:
        return {}
    checkpoints = [checkpoint for source in progress["sources"] if (checkpoint := checkpoint_of(source)) is not None]
    if not checkpoints:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "stop_at_boundary needs a query that reads with the format orderedmq, because its source ends the query; stop this one with "
            "query.stop()",
        )
    return {checkpoint.owner: checkpoint.to_spark() for checkpoint in checkpoints if checkpoint.owner is not None}


def stop_on_sigterm(spark: SparkSession, timeout: float = 60.0) -> None:
    """Have SIGTERM stop all queries of a session by `stop_at_boundary`, at the same time, before the program ends with code 143.

    It works if the signal is sent to this program, and if it is sent to Spark's driver in Java, as ``spark-submit``, YARN and Kubernetes do.
    Call it in the main thread, after the session was made. Whoever sends the signal must wait longer than ``timeout`` seconds before a kill.
    """
    stopping = _Stopping(spark, timeout)
    # A session of Spark Connect has no Java in this program's reach.
    has_java = hasattr(spark, "_jvm")
    if has_java:
        _call_before_spark_ends(spark, stopping)

    def terminate(signum: int, frame: object) -> None:
        del signum, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The signal interrupts the main thread, which usually waits for Java in query.awaitTermination(). Its connection is in the middle
        # of that call, so another thread, with another connection, stops the queries. The main thread waits here for that thread:
        # otherwise awaitTermination() would return when the first query ends, and the program would end before the others have stopped.
        stopper = threading.Thread(target=stopping.run, name="orderedmq-sigterm", daemon=True)
        stopper.start()
        stopper.join(timeout + 2 * _GIVE_BACK)
        if has_java:
            _close_connection(spark)
        sys.exit(_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)


def _close_connection(spark: SparkSession) -> None:
    """Close this thread's connection to Java, which is in the middle of a call: the next call would read that call's answer as its own."""
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    # Only pinned threads, Spark's default, keep a connection. Without them, each call takes one that no other call uses.
    if hasattr(client, "get_thread_connection") and (connection := client.get_thread_connection()) is not None:
        connection.close()


class _Stopping:
    """Stops all queries of a session once, in whichever thread comes first. It is a Java Runnable as well."""

    def __init__(self, spark: SparkSession, timeout: float) -> None:
        self._spark, self._timeout = spark, timeout
        self._lock = threading.Lock()

    class Java:
        implements: Sequence[str] = ["java.lang.Runnable"]

    def run(self) -> None:
        with self._lock:
            queries = self._spark.streams.active
            if not queries:
                return
            with ThreadPoolExecutor(len(queries), "orderedmq-stop") as threads:
                for query, stopped in [(query, threads.submit(self._stop, query)) for query in queries]:
                    log.warning("query %s was stopped %s", query.name or query.id, stopped.result())

    def _stop(self, query: StreamingQuery) -> str:
        try:
            return "between two micro-batches" if stop_at_boundary(query, self._timeout) else "in the middle of a micro-batch"
        except OptionError:
            # It reads something else.
            with contextlib.suppress(Exception):
                query.stop()
            return "as by query.stop()"


def _call_before_spark_ends(spark: SparkSession, stopping: _Stopping) -> None:
    """Have Java's process call ``stopping`` when it is told to end, before Spark ends the queries."""
    from pyspark.java_gateway import ensure_callback_server_started

    context = spark.sparkContext
    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]
    java = context._jvm
    assert java is not None
    seconds = java.java.util.concurrent.TimeUnit.SECONDS
    limit = int(stopping._timeout + 2 * _GIVE_BACK)
    # In a thread object, which has the methods of a Java object that `stopping` lacks.
    hook = java.java.lang.Thread(stopping)
    java.org.apache.hadoop.util.ShutdownHookManager.get().addShutdownHook(hook, _BEFORE_SPARK, limit, seconds)
