"""Settings for pulling messages. A query's tasks get them from the query's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Maximum messages of a queue that are pulled but not yet handed over. Java's ``pullThresholdForQueue`` is 1,000, but a task that reads a
#: closed range needs more messages than a listener, because a pull returns at most 32 messages.
MAX_MESSAGES: Final = 65_536
#: Maximum bytes of a queue that are pulled but not yet handed over (Java: ``pullThresholdSizeForQueue``, 100 MiB).
MAX_BYTES: Final = 100 * 1024 * 1024


@dataclass(frozen=True)
class PullSettings:
    """How a reader pulls.

    ``group``: the group under whose name to read if the account may not read as TOOLS_CONSUMER, None if there is no such group.
    ``max_messages``, ``max_bytes``: limits per queue for messages that are pulled but not yet handed over (pullThresholdForQueue,
    pullThresholdSizeForQueue). ``verify_body_crc``: whether to verify the checksum that a broker stored with each body.
    """

    group: str | None = None
    max_messages: int = MAX_MESSAGES
    max_bytes: int = MAX_BYTES
    verify_body_crc: bool = False


DEFAULT_PULL = PullSettings()
