"""Detects messages that were lost before they were read, and fails or warns. Streams, batch reads and tasks all use this rule."""

from __future__ import annotations

import logging

from orderedmq.broker import QueueBounds
from orderedmq.errors import DataLossError, aged_out, beyond_end
from orderedmq.model import MessageQueue

log = logging.getLogger("orderedmq")


def check_position(
    queue: MessageQueue, position: int, at: QueueBounds, reader: str, cause: str, *, end: int | None = None
) -> tuple[int, DataLossError | None]:
    """Return the offset from which a reader at ``position`` can continue, and the error if messages were lost, otherwise None.

    ``reader``: the reader's name in the error ("this query"). ``cause``: why a queue of this broker can end too early
    (`Log.tail_loss`). ``end``: the end of the requested range (exclusive). Messages from there on do not count as lost.
    """
    least = at.min_offset if end is None else min(at.min_offset, end)
    if position < least:
        return least, aged_out(queue, position, least)
    if position > at.max_offset:
        return at.max_offset, beyond_end(queue, at.max_offset, f"{reader} has read up to {position}", cause)
    return position, None


def queue_ended(queue: MessageQueue, at: int, planned: int, cause: str) -> DataLossError:
    """Return the error for a queue that now ends at ``at``, although its batch was planned up to the greater offset ``planned``."""
    return beyond_end(queue, at, f"the batch was planned up to {planned}", cause)


def fail_or_warn(error: DataLossError, *, fail: bool) -> None:
    """Raise the error, or log it as a warning if the user accepts losses (``fail`` is failOnDataLoss)."""
    if fail:
        raise error
    log.warning("failOnDataLoss=false accepts a loss: %s", error)
