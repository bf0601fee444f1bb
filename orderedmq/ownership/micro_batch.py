"""Micro-batches: the one that a Spark task belongs to, and how many a sink remembers. Pure.

The local properties of a task are an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: Present in read and write tasks alike, jobs started inside foreachBatch included (Spark 4.3, classic and Connect).
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
#: The job group of a micro-batch is its run id, new at every start of the query.
RUN: Final = "spark.jobGroup.id"
#: The query's name, if it has one, and then its id (MicroBatchExecution.getBatchDescriptionString). Nothing else tells a task
#: the name.
DESCRIPTION: Final = "spark.job.description"
#: Number of a sink's last batches with which a repeat is compared. An older batch is refused (SinkError BATCH_TOO_OLD).
KEPT_BATCHES: Final = 100


@dataclass(frozen=True)
class SourceRun:
    """One run of one micro-batch: the same query and batch under another ``run_id`` is a replay."""

    query_id: str
    batch_id: int
    run_id: str
    #: Spark's name of the query, if it has one.
    name: str | None = field(default=None, compare=False)


def run_of(local_property: Callable[[str], str | None]) -> SourceRun | None:
    """Return the micro-batch's run, or None in a job that belongs to no micro-batch."""
    query, batch = local_property(QUERY), local_property(BATCH)
    if query is None or batch is None:
        return None
    name, found, _ = (local_property(DESCRIPTION) or "").rpartition(f"\nid = {query}\n")
    return SourceRun(query, int(batch), local_property(RUN) or "", name if found and name else None)
