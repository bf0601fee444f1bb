"""Whether messages are still there that a reader is about to read, and what follows if not: one rule for streams, batches and tasks."""

from __future__ import annotations

import logging

from orderedmq.broker import QueueBounds
from orderedmq.errors import DataLossError, aged_out, beyond_end
from orderedmq.model import MessageQueue

log = logging.getLogger("orderedmq")


def judged(
    queue: MessageQueue, position: int, at: QueueBounds, reader: str, cause: str, *, end: int | None = None
) -> tuple[int, DataLossError | None]:
    """Where ``reader`` ("this query") goes on, which has read the queue up to ``position``, and what is lost before that.

    ``cause``: why queues of this broker end too early (`Log.tail_loss`). ``end``: nothing from there on was asked for. Pure.
    """
    least = at.min_offset if end is None else min(at.min_offset, end)
    if position < least:
        return least, aged_out(queue, position, least)
    if position > at.max_offset:
        return at.max_offset, beyond_end(queue, at.max_offset, f"{reader} has read up to {position}", cause)
    return position, None


def ended(queue: MessageQueue, at: int, planned: int, cause: str) -> DataLossError:
    """A queue ends at ``at`` though messages below ``planned`` were there when the batch was planned."""
    return beyond_end(queue, at, f"the batch was planned up to {planned}", cause)


def lose(error: DataLossError, *, fail: bool) -> None:
    """Raises the loss, or warns of it if the user accepts losses (``fail`` is failOnDataLoss)."""
    if fail:
        raise error
    log.warning("%s", error)
