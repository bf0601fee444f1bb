"""Runs a query in this separate process, which reports when the query reaches a point of a micro-batch, and then waits to be killed.

    python -m orderedmq.testing.killed_run SPEC PIPE

SPEC is a file with a pickled `kill.Spec`. PIPE is a file descriptor. The process writes a dot to the pipe when the query reaches the
point, or the error if the query fails before. It writes nothing if the query ends before the point.

Spark's stream thread takes a lock before it logs a batch's offsets, and again before it logs the batch's commit. This process holds the
lock whenever it reads the offset log, and releases the lock only while the batch is not in that log. So the batch can run up to its
commit, but cannot log the commit. The lock is fair, so the stream thread cannot take it twice between two reads.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark import cloudpickle

from orderedmq.testing import queries, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from orderedmq.testing.kill import Spec

_LOOK_EVERY: Final = 0.002


def come_to(spark: SparkSession, query: StreamingQuery, spec: Spec) -> bool:
    """Wait until the query has reached the point, and keep the stream thread's lock. Return False if the query ends before that."""
    jvm: Any = query
    progress = jvm._jsq.streamingQuery().awaitProgressLock()
    while True:
        progress.lock()
        if spec.batch in queries.batches_in(spec.checkpoint, "offsets"):
            break
        active = query.isActive
        time.sleep(_LOOK_EVERY)
        progress.unlock()
        if not active:
            return False
    if spec.batch in queries.batches_in(spec.checkpoint, "commits"):
        progress.unlock()
        return False
    while not _there(spark, query, spec.after, progress):
        if not query.isActive:
            progress.unlock()
            return False
        time.sleep(_LOOK_EVERY)
    return True


def _there(spark: SparkSession, query: StreamingQuery, after: str, progress: Any) -> bool:
    # If the stream thread waits for the lock, the batch is finished except for its commit.
    if after == "planned" or progress.hasQueuedThreads():
        return True
    if after == "written":
        return False
    tracker = spark.sparkContext.statusTracker()
    for job in set(tracker.getActiveJobsIds()) & set(tracker.getJobIdsForGroup(str(query.runId))):
        stages = map(tracker.getStageInfo, getattr(tracker.getJobInfo(job), "stageIds", ()))
        if any(stage is not None and stage.numCompletedTasks for stage in stages):
            return True
    return False


def run(file: str, pipe: int) -> None:
    """Run the query until it reaches the point, then wait to be killed. Return if the query ends before. Raises the query's errors."""
    spec: Spec = pickle.loads(Path(file).read_bytes())
    spark = session.start(spec.config)
    query = queries.start(queries.writer_of(cloudpickle.loads(spec.query), spark, spec.options), spec.checkpoint)
    if come_to(spark, query, spec):
        os.write(pipe, b".")
        while True:
            signal.pause()
    query.awaitTermination()
    spark.stop()


def main(file: str, pipe: str) -> None:
    try:
        run(file, int(pipe))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        named = [line for line in lines if line.startswith("[ORDEREDMQ_")]
        os.write(int(pipe), f"{type(error).__name__}: {(named or lines)[0][:300]}".encode())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
