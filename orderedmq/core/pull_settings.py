"""How a reader pulls: what a query's tasks have to know of its options for that."""

from __future__ import annotations

from dataclasses import dataclass

from orderedmq.core.process_queue import MAX_BYTES, MAX_MESSAGES


@dataclass(frozen=True)
class Reading:
    """``group``: in whose name to read where the account may read in no other; None: nobody's.

    ``max_messages``, ``max_bytes``: of one queue, pulled and not handed over yet (RocketMQ's pullThresholdForQueue and
    pullThresholdSizeForQueue).
    """

    group: str | None = None
    max_messages: int = MAX_MESSAGES
    max_bytes: int = MAX_BYTES


USUAL = Reading()
