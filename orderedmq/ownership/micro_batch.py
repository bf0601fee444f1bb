"""Micro-batches: which one a Spark task belongs to, and whether a sink's batch is new, repeated, too old or out of order. Pure.

All brokers use these rules and their errors.

A sink is a query, whose batches are numbered by Spark, or a ``txnAppId``, whose batches are numbered by ``txnVersion``.

The option ``onReplayDiffers=skip`` is for a query that computes other rows from the same input. Where the broker knows the batch's source
ranges and they differ, or are no longer recorded, the option does not apply. The source resumes where the repeat ends: if that is after
the recorded end, the messages between the two ends would be lost, and if it is before, they would be written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from orderedmq.conditions import SinkCondition
from orderedmq.errors import NEWEST_CHECKPOINT, SinkError

#: Local properties that Spark sets in read and write tasks, also for jobs started inside foreachBatch (Spark 4.3, classic and Connect).
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
#: The job group of a micro-batch is the query's run id, which is new at every start of the query.
RUN: Final = "spark.jobGroup.id"
#: The query's name, if it has one, followed by its id (MicroBatchExecution.getBatchDescriptionString). A task finds the name only here.
DESCRIPTION: Final = "spark.job.description"
#: How many of a sink's last batches are remembered to recognise repeats. An older batch is refused (SinkError BATCH_TOO_OLD).
KEPT_BATCHES: Final = 100
#: The largest batch number. A broker that stores only offsets stores the number plus 1, which may be at most 2^63 - 1.
LARGEST_BATCH: Final = 2**63 - 2
_TRANSACTIONS: Final = "txn:"


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
    name, separator, _ = (local_property(DESCRIPTION) or "").rpartition(f"\nid = {query}\n")
    return SourceRun(query, int(batch), local_property(RUN) or "", name if separator and name else None)


def sink_of(app_id: str) -> str:
    """Return the id of the sink that a ``txnAppId`` identifies."""
    return _TRANSACTIONS + app_id


def is_repeat(
    sink: str, batch: int, latest: int | None, published: bool, *, skip: bool, ranges: bool = False, sent: str = ""
) -> bool:
    """Return whether the batch was published before.

    ``latest``: the sink's newest published batch, None if it has none. ``published``: whether the broker remembers that this batch was
    published, which it does for the last `KEPT_BATCHES` numbers. ``skip``: assume that a batch too old to be remembered was published,
    unless it has source ``ranges``. ``sent``: what the error says about messages of an unpublished batch that readers already see.

    Raises SinkError OUT_OF_ORDER for a batch that was never published although a later one was, even with ``skip``, because treating it
    as published would lose its rows. Raises SinkError BATCH_TOO_OLD unless ``skip`` applies.
    """
    if latest is None or batch > latest:
        return False
    if latest - batch >= KEPT_BATCHES:
        if skip and not ranges:
            return True
        raise SinkError(
            SinkCondition.BATCH_TOO_OLD,
            f"{_named(sink, batch)} is too old: the latest is {latest}, and there is no record of {latest - KEPT_BATCHES} and below, so the "
            f"broker cannot tell whether this one was published. {_remedy(sink, latest)}. {_skip(ranges, 'treat it as published')}",
        )
    if not published and batch < latest:
        raise SinkError(
            SinkCondition.OUT_OF_ORDER,
            f"{_named(sink, batch)} was not written, but the later {latest} was{sent}: {_cause(sink)}. {_remedy(sink, latest)}",
        )
    return published


def require_same(
    sink: str, batch: int, latest: int | None, difference: str | None, *, skip: bool, ranges: bool = False
) -> None:
    """Refuse a repeat of a published batch if it has a ``difference``, a text. Raises SinkError REPLAY_DIFFERS unless ``skip`` applies.

    ``ranges``: whether the source ranges differ, and not only the rows.
    """
    if difference is None or (skip and not ranges):
        return
    raise SinkError(
        SinkCondition.REPLAY_DIFFERS,
        f"{_named(sink, batch)} was published already, with other content ({difference}): the checkpoint is an old copy"
        f"{'' if ranges else ', or the query is not deterministic'}. {_remedy(sink, latest)}. {_skip(ranges, 'keep what was published')}",
    )


def _named(sink: str, batch: int) -> str:
    """Return the name by which the batch's writer knows the batch."""
    app = _app_of(sink)
    return f"batch {batch} of this query" if app is None else f"version {batch} of txnAppId {app!r}"


def _cause(sink: str) -> str:
    if _app_of(sink) is None:
        return "the checkpoint is an old copy, or this batch went to another store or cluster"
    return "txnVersion has to grow with each write"


def _remedy(sink: str, latest: int | None) -> str:
    if _app_of(sink) is None:
        return NEWEST_CHECKPOINT
    if latest is not None and latest >= LARGEST_BATCH:
        return "If it is a new write, give it another txnAppId, because there is no greater txnVersion"
    return f"If it is a new write, give it a txnVersion above {latest}"


def _skip(ranges: bool, purpose: str) -> str:
    if ranges:
        return "Here onReplayDiffers=skip does not apply, because messages would be lost or written twice"
    return f"Or, if the batch has the same input as then, set onReplayDiffers=skip to {purpose}"


def _app_of(sink: str) -> str | None:
    """Return the user's txnAppId, or None if the sink is a query."""
    return sink.removeprefix(_TRANSACTIONS) if sink.startswith(_TRANSACTIONS) else None
