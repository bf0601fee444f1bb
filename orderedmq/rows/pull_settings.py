"""Settings with which a reader pulls. A query's tasks get them from its options."""

from __future__ import annotations

from dataclasses import dataclass

from orderedmq.ownership.process_queue import MAX_BYTES, MAX_MESSAGES


@dataclass(frozen=True)
class PullSettings:
    """How a reader pulls.

    ``group``: the group to read as if the account may not read as TOOLS_CONSUMER; None: there is no other. ``max_messages``,
    ``max_bytes``: bounds of what is pulled and not handed over yet, per queue (pullThresholdForQueue,
    pullThresholdSizeForQueue). ``verify_body_crc``: whether to verify the checksum that a broker stored with each body.
    """

    group: str | None = None
    max_messages: int = MAX_MESSAGES
    max_bytes: int = MAX_BYTES
    verify_body_crc: bool = False


DEFAULT_PULL = PullSettings()
