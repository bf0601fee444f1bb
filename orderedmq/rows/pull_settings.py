"""Settings with which a reader pulls. A query's tasks get them from its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Messages of a queue that are pulled and not handed over, at most. Java's ``pullThresholdForQueue`` is 1,000; a task that reads a closed
#: range needs more in flight than a listener, since a pull brings 32 messages at most.
MAX_MESSAGES: Final = 65_536
#: The same in bytes (Java: ``pullThresholdSizeForQueue``, 100 MiB).
MAX_BYTES: Final = 100 * 1024 * 1024


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
