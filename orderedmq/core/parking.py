"""The parking lot of a queue: where parked messages lie, and what they say of themselves. Pure.

Queue Q of a topic, read by group G, has the parked queue P(Q): topic ``%PARKED%<G>%<topic>``, same broker, same number. Only the
owner of Q reads, moves and writes P, under Q's lock, whose token fences P, too. No other state exists: a key is parked if P has
a message of it from the group's offset in P to P's end.

A parked message is the message with its own columns, and with reserved properties that say where it comes from, how often it
failed, how often it was put into the lot, why, and when it is due. It is identified by its group, origin and number of puts:
to put the same again changes nothing. Attempts would not do in place of puts. A message that is moved behind because it is not
due keeps its attempts, and the move would count as the message that it moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orderedmq.conditions import GroupCondition
from orderedmq.core.listener import MAX_ERROR_BYTES, clip
from orderedmq.errors import GroupError
from orderedmq.model import MAX_NAME_LENGTH, MessageQueue

PARKED_PREFIX: Final = "%PARKED%"
#: A parked message's properties.
PARKED_OFFSET: Final = "OMQ_PARKED_OFFSET"
PARKED_ATTEMPTS: Final = "OMQ_PARKED_ATTEMPTS"
PARKED_PUTS: Final = "OMQ_PARKED_PUTS"
PARKED_DUE: Final = "OMQ_PARKED_DUE"
PARKED_ERROR: Final = "OMQ_PARKED_ERROR"
#: The due time, in ms since 1970, of a message that waits behind another of its key and has no time of its own.
BEHIND: Final = 0
#: The due time of a message that is held until somebody releases it.
HELD: Final = -1
#: Seconds of RocketMQ's delay levels 1 to 18 (broker option messageDelayLevel).
DELAY_LEVELS: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
#: The level of the first retry of RocketMQ's concurrent consumer (ConsumeMessageConcurrentlyService: 3 + reconsumeTimes).
FIRST_LEVEL: Final = 3


def parked_topic(group: str, topic: str) -> str:
    """Return the topic of the group's parking lots for ``topic``.

    Raises GroupError BAD_NAME if that name is longer than a topic's may be.
    """
    name = f"{PARKED_PREFIX}{group}%{topic}"
    if len(name) > MAX_NAME_LENGTH:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"the parking lot of consumer group {group!r} for topic {topic!r} would be named {name!r}, which has {len(name)} characters; "
            f'a topic\'s name may have {MAX_NAME_LENGTH}: choose a shorter group name, or order="queue"',
        )
    return name


def parked_queue(group: str, queue: MessageQueue) -> MessageQueue:
    """Return P(Q), the parked queue of ``queue``. Raises GroupError BAD_NAME."""
    return queue._replace(topic=parked_topic(group, queue.topic))


def delay(puts: int) -> int:
    """Return the seconds until a message is due that was put into the lot ``puts`` times before: 10 s, 30 s, 1 min … 2 h."""
    return DELAY_LEVELS[min(FIRST_LEVEL - 1 + puts, len(DELAY_LEVELS) - 1)]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a parked message says of itself. ``due``: ms since 1970 by the broker's clock, BEHIND, or HELD."""

    offset: int
    attempts: int
    puts: int
    due: int
    error: str = ""

    def is_due(self, now: int) -> bool:
        """Whether the time of a key whose head this is has come; ``now`` in ms since 1970 by the broker's clock."""
        return self.due != HELD and self.due <= now

    def identity(self, group: str, queue: MessageQueue) -> str:
        """Return what identifies this put: a message that is put again under it is not stored twice."""
        return f"{group}/{queue}/{self.offset}/{self.puts}"

    def to_properties(self) -> dict[str, str]:
        """Return the reserved properties of the parked message."""
        return {
            PARKED_OFFSET: str(self.offset),
            PARKED_ATTEMPTS: str(self.attempts),
            PARKED_PUTS: str(self.puts),
            PARKED_DUE: str(self.due),
            PARKED_ERROR: clip(self.error, MAX_ERROR_BYTES),
        }

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> Ticket:
        """Return the inverse of ``to_properties``. Raises KeyError or ValueError for a message that was not parked."""
        return cls(
            int(properties[PARKED_OFFSET]),
            int(properties[PARKED_ATTEMPTS]),
            int(properties[PARKED_PUTS]),
            int(properties[PARKED_DUE]),
            properties.get(PARKED_ERROR, ""),
        )
