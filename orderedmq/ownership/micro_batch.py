"""Micro-batches: which one a Spark task belongs to, and how many a sink remembers. Pure.

A task's local properties are passed as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: Local properties that Spark sets in read and write tasks, also for jobs started inside foreachBatch (Spark 4.3, classic and Connect).
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
#: The job group of a micro-batch is the query's run id, which is new at every start of the query.
RUN: Final = "spark.jobGroup.id"
#: The query's name, if it has one, followed by its id (MicroBatchExecution.getBatchDescriptionString). A task finds the name only here.
DESCRIPTION: Final = "spark.job.description"
#: How many of a sink's last batches are remembered to recognise repeats. An older batch is refused (SinkError BATCH_TOO_OLD).
KEPT_BATCHES: Final = 100


@dataclass(frozen=True)
class SourceRun:
    """One run of one micro-batch. The same query and batch with another ``run_id`` is a replay."""

    query_id: str
    batch_id: int
    run_id: str
    #: Spark's name of the query, if it has one.
    name: str | None = field(default=None, compare=False)


def run_of(local_property: Callable[[str], str | None]) -> SourceRun | None:
    """Return the run of the task's micro-batch, or None for a task that belongs to no micro-batch."""
    query, batch = local_property(QUERY), local_property(BATCH)
    if query is None or batch is None:
        return None
    name, found, _ = (local_property(DESCRIPTION) or "").rpartition(f"\nid = {query}\n")
    return SourceRun(query, int(batch), local_property(RUN) or "", name if found and name else None)
