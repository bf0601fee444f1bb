"""Decides whether a sink's batch is new, a repeat, too old or out of order: one rule for all brokers, with its errors. Pure.

A sink is a query, whose batches are numbered by Spark, or a ``txnAppId``, whose batches are numbered by ``txnVersion``.
"""

from __future__ import annotations

from typing import Final

from orderedmq.conditions import SinkCondition
from orderedmq.errors import NEWEST_CHECKPOINT, SinkError
from orderedmq.ownership.micro_batch import KEPT_BATCHES

#: The largest number of a batch. A broker that keeps offsets only stores the number plus 1, and that is at most 2^63 - 1.
LARGEST_BATCH: Final = 2**63 - 2
_TRANSACTIONS: Final = "txn:"


def sink_of(app_id: str) -> str:
    """Return the id of the sink that a ``txnAppId`` stands for."""
    return _TRANSACTIONS + app_id


def is_repeat(sink: str, batch: int, latest: int | None, published: bool, *, skip: bool, sent: str = "") -> bool:
    """Return whether the batch was published before.

    ``latest``: the sink's newest batch that was published; None for none. ``published``: whether the broker knows that this
    batch was, which it remembers for the last `KEPT_BATCHES` numbers. ``skip``: take a batch for published that nobody
    remembers. ``sent``: what readers can see of a batch that was not published, for the error.

    Raises SinkError OUT_OF_ORDER for a batch that was never published although a later one was, whatever ``skip`` says: to take
    it for published would lose its rows. Raises SinkError BATCH_TOO_OLD unless ``skip``.
    """
    if latest is None or batch > latest:
        return False
    if latest - batch >= KEPT_BATCHES:
        if skip:
            return True
        raise SinkError(
            SinkCondition.BATCH_TOO_OLD,
            f"{_named(sink, batch)} is too old: the latest is {latest}, and there is no record of {latest - KEPT_BATCHES} and below, so the "
            f"broker cannot tell whether this one was published; {_remedy(sink, latest)}; or set onReplayDiffers=skip to treat it as "
            "published",
        )
    if not published and batch < latest:
        raise SinkError(
            SinkCondition.OUT_OF_ORDER,
            f"{_named(sink, batch)} was not written, but {latest}, a later one, was{sent}: {_cause(sink)}; {_remedy(sink, latest)}",
        )
    return published


def replay_differs(sink: str, batch: int, latest: int | None, what: str) -> SinkError:
    """Return the error for a batch that was published and comes again with other rows. ``what`` differs."""
    return SinkError(
        SinkCondition.REPLAY_DIFFERS,
        f"{_named(sink, batch)} was published already, with other content ({what}): the checkpoint is an old copy, or the query is not "
        f"deterministic; {_remedy(sink, latest)}; or set onReplayDiffers=skip to keep what was published",
    )


def _named(sink: str, batch: int) -> str:
    """Return the batch's name in the terms of its writer."""
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
        return "if it is a new write, give it another txnAppId: there is no greater txnVersion"
    return f"if it is a new write, give it a txnVersion above {latest}"


def _app_of(sink: str) -> str | None:
    """Return the user's txnAppId; None for a query."""
    return sink.removeprefix(_TRANSACTIONS) if sink.startswith(_TRANSACTIONS) else None
