"""The knowledge about a queue from earlier pulls, the limits of a pull, and a part of its result. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orderedmq.rocketmq.wire.codes import MASTER_ID


@dataclass
class Known:
    """Facts about a queue that earlier pulls have shown."""

    #: Messages that the broker returns per pull, and when that was measured.
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
    """The limits of one pull. Bytes are approximate.

    ``max_messages``, ``max_bytes``: the messages to return, and the bytes of their bodies. ``hold_messages``, ``hold_bytes``: the
    messages and total bytes to hold in memory.
    """

    max_messages: int
    max_bytes: int
    hold_messages: int
    hold_bytes: int


class Answers(NamedTuple):
    """Answers in the order of their messages, and the offset after the last message."""

    parts: list[memoryview]
    end: int
