"""What is known of a queue from earlier pulls, the limits of a pull, and a part of its result. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orderedmq.rocketmq.wire.codes import MASTER_ID


@dataclass
class Known:
    """What earlier pulls of a queue have shown."""

    #: Messages that the broker returns per pull, and when that was learned.
    step: int = 32
    learned: float = float("-inf")
    end: int = 0
    #: The replica that the broker suggested to read from (PullMessageResponseHeader.suggestWhichBrokerId).
    replica: int = MASTER_ID
    #: Until when only the master is used, because a replica failed.
    only_master: float = float("-inf")
    #: Approximate bytes of a body, and when that was measured.
    body_bytes: float | None = None
    measured: float = float("-inf")
    #: Bytes of the last answer.
    answer: int = 0


class PullLimits(NamedTuple):
    """Of one pull: messages and bytes of their bodies to return, messages and bytes in all to hold. Bytes are approximate."""

    max_messages: int
    max_bytes: int
    hold_messages: int
    hold_bytes: int


class Answers(NamedTuple):
    """Answers in the order of their messages, and the offset after these."""

    parts: list[memoryview]
    end: int
