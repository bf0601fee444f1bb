"""Stops queries between two micro-batches, so that a rollout interrupts no batch and the next owner gets the queues immediately.

A plain ``query.stop()`` interrupts a running micro-batch. The queues then stay locked for other queries for 20 s (over RocketMQ up to 60
s), because a task may still run. The query's next run repeats the batch, or another owner reads the messages of the batch again.
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

#: Seconds between two checks of a query.
_LOOK: Final = 0.1
#: How many seconds a source may take to give its queues back after its query was stopped between two micro-batches.
_GIVE_BACK: Final = 10.0
#: The exit code that a shell reports for a program ended by SIGTERM.
_TERMINATED: Final = 128 + signal.SIGTERM
#: The priority of our hook among Hadoop's shutdown hooks. Higher priorities run first; Spark's hook has 40 and ends all queries.
_BEFORE_SPARK: Final = 100


def stop_at_boundary(query: StreamingQuery, timeout: float = 60.0) -> bool:
    """Stop a query between two micro-batches. Return whether its queues were given back.

    The running micro-batch finishes, and no further one is planned. The source then commits its group's offsets and gives back all its
    queues, and the query is stopped. Another member of the group, or the next run of this query, gets the queues at its next trigger.

    If the micro-batch takes longer than ``timeout`` seconds, the query is stopped as by ``query.stop()``, and False is returned. The same
    happens if the source runs on another machine than this program (a remote Spark Connect server), or if the query fails first. A query
    that cannot be asked, because the request's file cannot be written, is stopped immediately, with a warning.

    Raises OptionError UNSUPPORTED for a query that reads nothing with the format orderedmq, once it has processed a micro-batch.
    """
    deadline = time.monotonic() + timeout
    requests: dict[str, StopRequest] = {}
    try:
        try:
            while query.isActive and time.monotonic() < deadline:
                # Read the status before the progress, so that the progress of a query between two triggers is that of its last trigger.
                between = not query.status["isTriggerActive"]
                offsets = _offsets(query)
                for owner_id in offsets.keys() - requests.keys():
                    requests[owner_id] = StopRequest(owner_id)
                    requests[owner_id].write()
                    between = False
                if requests and all(request.answered for request in requests.values()):
                    break
                if requests and between:
                    # With a long trigger interval, Spark does not call the source for a long time, so tell the source what Spark has committed.
                    for owner_id, request in requests.items():
                        request.write(offsets[owner_id])
                    deadline = time.monotonic() + _GIVE_BACK
                    break
                time.sleep(_LOOK)
        except OSError as error:
            log.warning(
                "query %s is stopped as by query.stop(), because it cannot be asked to stop between two micro-batches: %s",
                query.name or query.id,
                error,
            )
            deadline = time.monotonic()
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

    Raises OptionError UNSUPPORTED if no source has the format orderedmq.
    """
    progress = query.lastProgress
    if progress is None:
        return {}
    checkpoints = [checkpoint for source in progress["sources"] if (checkpoint := checkpoint_of(source)) is not None]
    if not checkpoints:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "stop_at_boundary needs a query that reads with the format orderedmq, because the source ends the query. Stop this one with "
            "query.stop()",
        )
    return {checkpoint.owner: checkpoint.to_spark() for checkpoint in checkpoints if checkpoint.owner is not None}


def stop_on_sigterm(spark: SparkSession, timeout: float = 60.0) -> None:
    """Install a handler for SIGTERM that stops all queries of a session at the same time by `stop_at_boundary`.

    The program then ends with code 143. The signal may be sent to this program, or to Spark's driver in Java, as ``spark-submit``, YARN
    and Kubernetes do. Call this function in the main thread, after the session was created. The sender of the signal must wait longer
    than ``timeout`` seconds before it kills the program.
    """
    stopping = _Stopping(spark, timeout)
    # With Spark Connect, this program has no access to the session's Java process.
    has_java = hasattr(spark, "_jvm")
    if has_java:
        _call_before_spark_ends(spark, stopping)

    def terminate(signum: int, frame: object) -> None:
        del signum, frame
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The signal interrupts the main thread, which usually waits for Java in query.awaitTermination(). The main thread's connection is
        # in the middle of that call, so another thread, with another connection, stops the queries. The main thread waits here for the
        # other thread. Otherwise awaitTermination() would return when the first query ends, and the program would end before the other
        # queries have stopped.
        stopper = threading.Thread(target=stopping.run, name="orderedmq-sigterm", daemon=True)
        stopper.start()
        stopper.join(timeout + 2 * _GIVE_BACK)
        if has_java:
            _close_connection(spark)
        sys.exit(_TERMINATED)

    signal.signal(signal.SIGTERM, terminate)


def _close_connection(spark: SparkSession) -> None:
    """Close this thread's connection to Java, which is in the middle of a call. The next call would read the answer of that call."""
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    # Only pinned threads, which are Spark's default, keep a connection. Without pinned threads, each call takes a connection that is not
    # in use.
    if hasattr(client, "get_thread_connection") and (connection := client.get_thread_connection()) is not None:
        connection.close()


class _Stopping:
    """Stops all queries of a session once, in the first thread that calls ``run``. Java can call it as a Runnable."""

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
            # The query does not read with the format orderedmq.
            with contextlib.suppress(Exception):
                query.stop()
            return "as by query.stop()"


def _call_before_spark_ends(spark: SparkSession, stopping: _Stopping) -> None:
    """Make the Java process call ``stopping`` when the process has to end, before Spark ends the queries."""
    from pyspark.java_gateway import ensure_callback_server_started

    context = spark.sparkContext
    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]
    java = context._jvm
    assert java is not None
    seconds = java.java.util.concurrent.TimeUnit.SECONDS
    limit = int(stopping._timeout + 2 * _GIVE_BACK)
    # Pass a Thread object, because it has the methods of a Java object that `stopping` lacks.
    hook = java.java.lang.Thread(stopping)
    java.org.apache.hadoop.util.ShutdownHookManager.get().addShutdownHook(hook, _BEFORE_SPARK, limit, seconds)
