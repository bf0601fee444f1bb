"""Stops queries between two micro-batches, so that a rollout interrupts no batch and the next owner gets the queues immediately.

A plain ``query.stop()`` interrupts a running micro-batch. The queues then stay locked for other queries for 20 s (over RocketMQ up to 60
s), because a task may still run. The query's next run repeats the batch, or another owner reads the messages of the batch again.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.ownership.offsets import Checkpoint

logger = logging.getLogger("orderedmq")

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
            logger.warning(
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
    checkpoints = [
        Checkpoint.from_spark(end) for source in progress["sources"] if _is_checkpoint(end := _parsed(source["endOffset"]))
    ]
    if not checkpoints:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "stop_at_boundary needs a query that reads with the format orderedmq, because the source ends the query. Stop this one with "
            "query.stop()",
        )
    return {checkpoint.owner: checkpoint.to_spark() for checkpoint in checkpoints if checkpoint.owner is not None}


def _is_checkpoint(offset: Any) -> bool:
    """Whether this is the offset of an orderedmq source that has already decided where its queues begin."""
    return isinstance(offset, Mapping) and {"v", "owner", "next"} <= offset.keys()


def _parsed(offset: Any) -> Any:
    """Return an offset of a query's progress as Python objects. A value of another source that cannot be parsed is returned unchanged.

    PySpark shows the JSON text, an object parsed from it, or before 4.2 the text of that object.
    """
    if not isinstance(offset, str):
        return offset
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return parse(offset)
    return offset


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
                    logger.warning("query %s was stopped %s", query.name or query.id, stopped.result())

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


_ANSWER: Final = {"given_back": True}


class StopRequest:
    """The request to stop the query ``owner_id``. The application and the source each have a separate object for it.

    A request is a file in a folder that only this user can write, named after the query's owner id. The application writes the file.
    The source, on the same machine, looks for it at each boundary, gives its queues back, and answers by writing into it. Spark offers
    no other way for an application to reach its source.

    Rules: a source ignores a file that was there before it started, because an application that is killed does not remove its request.
    It compares files, not times, because the clock may be set. A file is replaced in one step, so that no process reads half of it.
    """

    def __init__(self, owner_id: str) -> None:
        # This package creates owner ids, but reads them from a checkpoint or a query's progress, so they cannot be trusted in a path.
        self._name = f"stop-{owner_id.encode().hex()[:128]}.json"
        self._written = False
        self._before = self._file()

    @property
    def _path(self) -> Path:
        return _folder() / self._name

    # -- the application's side

    def write(self, processed: Mapping[str, Any] | None = None) -> None:
        """Ask the source to plan no further micro-batch. ``processed``: the source's offset up to which Spark has committed everything.

        With ``processed``, the source can give its queues back when it is stopped, without another call of ``latestOffset``. An answer to
        this request is kept. An answer to an earlier request, whose application was killed, is overwritten. Raises OSError.
        """
        if not (self._written and self.answered):
            _replace(self._path, {"processed": processed})
        self._written = True

    @property
    def answered(self) -> bool:
        """Whether the source has given its queues back."""
        return self._read() == _ANSWER

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    # -- the source's side

    @property
    def is_made(self) -> bool:
        """Whether the query was asked to stop since this object was created."""
        return self._file() not in (None, self._before)

    @property
    def processed(self) -> Checkpoint | None:
        """The offset up to which Spark has committed everything, if the request says so."""
        offset = (self._read() or {}).get("processed")
        return None if offset is None else Checkpoint.from_spark(offset)

    def answer(self) -> None:
        """Tell the application that the queues are given back. Without an answer, the application waits until its timeout."""
        with contextlib.suppress(OSError):
            _replace(self._path, _ANSWER)

    # -- the file. In a folder of another user there is none, because this application cannot have made a request there.

    def _file(self) -> tuple[int, int] | None:
        """Return what distinguishes the file from those that replace it; None if there is no file."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _read(self) -> dict[str, Any] | None:
        try:
            request: dict[str, Any] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return request


def _folder() -> Path:
    """Return a folder that only this user can write. It is the same in the application and in the processes that Spark starts for it."""
    folder = Path(tempfile.gettempdir()) / f"orderedmq-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write. Remove it, or set TMPDIR")
    return folder


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content))
    os.replace(new, path)
