"""The parking lot of a queue: where parked messages are stored, what their tickets contain, and who may change them. Pure.

Queue Q of a topic, read by group G, has the parking lot P(Q): the queue with the same broker and number in the topic
``%PARKED%<G>%<topic>``. Only the owner of Q parks messages in P and commits offsets of P, under Q's lock (`queue_token`). No other
state exists: a key is parked if P contains a message of this key between the group's offset in P and P's end.

A parked message has the columns of the original message and a Ticket in reserved properties. To park a message, the broker copies
it from Q, or from P if it is parked again. The place (queue and offset) of the original identifies the copy. A message is never parked
twice from the same place, so a batch that runs again parks no message twice. A place below the group's offset in its queue is settled: no
message is parked from there any more.

Operators do not change P directly, because only the owner of Q may do so. They append a command (`Command`): a message without a body that
tells the owner to try, drop or hold a key. The owner carries it out when it next reads P.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from orderedmq.conditions import DataLossCondition, GroupCondition, TopicCondition
from orderedmq.errors import DataLossError, GroupError, TopicError
from orderedmq.model import (
    MAX_NAME_LENGTH,
    PARKED_ALONE,
    PARKED_ATTEMPTS,
    PARKED_BORN,
    PARKED_COMMAND,
    PARKED_COUNT,
    PARKED_DUE,
    PARKED_ERROR,
    PARKED_ID,
    PARKED_OFFSET,
    PARKED_PREFIX,
    PARKED_STORED,
    MessageQueue,
    is_parked,
)
from orderedmq.ownership.lock import LockToken
from orderedmq.rows.dead_letters import MAX_ERROR_BYTES, clip

#: The due time of a message that is due as soon as no older message of its key is parked.
AT_ONCE: Final = 0
#: The due time of a message that is held until an operator releases it.
HELD: Final = -1
#: The due time of a message that an operator has dropped.
DROPPED: Final = -2
#: The delays in seconds of RocketMQ's delay levels 1 to 18 (broker option messageDelayLevel).
DELAY_LEVELS: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
#: The level of the first retry of RocketMQ's concurrent consumer (ConsumeMessageConcurrentlyService: 3 + reconsumeTimes).
FIRST_LEVEL: Final = 3

CommandAction = Literal["retry", "drop", "hold"]
#: What a seek of a queue does with its parked messages. "keep": they come back when they are due. "drop": they are skipped. None: the
#: seek is refused if the queue has parked messages (GroupError PARKED).
AtSeek = Literal["keep", "drop"] | None


def parked_topic(group: str, topic: str) -> str:
    """Return the topic of the group's parking lots for ``topic``.

    Raises GroupError BAD_NAME if that name is too long for a topic, or if the group's name contains "%", which separates group and topic.
    """
    if "%" in group:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"consumer group {group!r} cannot have parking lots, whose names separate group and topic by '%'. Choose a group name "
            "without '%', or OrderPerQueue",
        )
    name = lot_name(group, topic)
    if len(name) > MAX_NAME_LENGTH:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"the parking lot of consumer group {group!r} for topic {topic!r} would be named {name!r}, which has {len(name)} characters, "
            f"but a topic's name may have {MAX_NAME_LENGTH}. Choose a shorter group name, or OrderPerQueue",
        )
    return name


def lot_name(group: str, topic: str) -> str:
    """Return what `parked_topic` returns, but do not check the name."""
    return f"{PARKED_PREFIX}{group}%{topic}"


def origin(name: str) -> tuple[str, str] | None:
    """Return the group and the topic of a topic of parking lots, or None for other topics. This is the inverse of `parked_topic`."""
    if not name.startswith(PARKED_PREFIX):
        return None
    group, _, topic = name[len(PARKED_PREFIX) :].partition("%")
    return (group, topic) if group and topic else None


def parked_queue(group: str, queue: MessageQueue) -> MessageQueue:
    """Return P(Q), the parking lot of ``queue``. Raises GroupError BAD_NAME."""
    return queue._replace(topic=parked_topic(group, queue.topic))


def leader_of(group: str, queue: MessageQueue) -> MessageQueue:
    """Return the queue whose parking lot in ``group`` is ``queue``, or ``queue`` itself if it is not a parking lot of the group."""
    parked_by = origin(queue.topic)
    return queue._replace(topic=parked_by[1]) if parked_by is not None and parked_by[0] == group else queue


def queue_token(token: LockToken) -> LockToken:
    """Return ``token`` or, if its queue is a parking lot, the token of the queue that the lot belongs to, whose lock protects the lot."""
    leader = leader_of(token.group, token.queue)
    return token if leader == token.queue else replace(token, queue=leader)


def lot_token(token: LockToken) -> LockToken:
    """Return the token for the parking lot of the token's queue. This is the inverse of `queue_token`."""
    return replace(token, queue=parked_queue(token.group, token.queue))


def delay(parkings: int) -> int:
    """Return the delay in seconds of a message that was put into the lot ``parkings`` times before: 10 s, 30 s, 1 min … 2 h."""
    return DELAY_LEVELS[min(FIRST_LEVEL - 1 + parkings, len(DELAY_LEVELS) - 1)]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The state of a parked message, which it contains in its properties.

    ``offset``: its offset in its queue. ``attempts``: the total of failed calls. ``parkings``: how often it was parked because it failed.
    ``due``: a time in ms since 1970, or AT_ONCE, HELD or DROPPED. ``alone``: whether a listener without order parked it, so that newer
    messages of its key do not wait for it. ``message_id``, ``born`` and ``stored`` (µs since 1970) are those of the original message. The
    broker that parks the message fills them in.
    """

    offset: int
    attempts: int
    parkings: int
    due: int
    error: str = ""
    message_id: str = ""
    born: int = 0
    stored: int = 0
    alone: bool = False

    def is_due(self, now: int) -> bool:
        """Whether the key whose first message has this ticket is due at ``now``, in ms since 1970."""
        return self.due == DROPPED or (self.due != HELD and self.due <= now)

    def to_properties(self) -> dict[str, str]:
        """Return the reserved properties of the parked message, except PARKED_FROM."""
        return {
            PARKED_OFFSET: str(self.offset),
            PARKED_ATTEMPTS: str(self.attempts),
            PARKED_COUNT: str(self.parkings),
            PARKED_DUE: str(self.due),
            PARKED_ERROR: clip(self.error, MAX_ERROR_BYTES),
            PARKED_ID: self.message_id,
            PARKED_BORN: str(self.born),
            PARKED_STORED: str(self.stored),
            **({PARKED_ALONE: "true"} if self.alone else {}),
        }

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> Ticket:
        """Return the inverse of ``to_properties``. Raises KeyError or ValueError for a message that was not parked."""
        return cls(
            int(properties[PARKED_OFFSET]),
            int(properties[PARKED_ATTEMPTS]),
            int(properties[PARKED_COUNT]),
            int(properties[PARKED_DUE]),
            properties.get(PARKED_ERROR, ""),
            properties.get(PARKED_ID, ""),
            int(properties.get(PARKED_BORN, 0)),
            int(properties.get(PARKED_STORED, 0)),
            PARKED_ALONE in properties,
        )


@dataclass(frozen=True, slots=True)
class Parking:
    """A message to be parked: its ticket, and the place from which it is copied, which is an offset in Q or P(Q)."""

    source: MessageQueue
    at: int
    ticket: Ticket

    @property
    def place(self) -> str:
        """The place as text, as in the parked message's property PARKED_FROM: ``Q:17`` or ``P:4``."""
        return f"{'P' if is_parked(self.source) else 'Q'}:{self.at}"


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's command for a parked key: try it now, drop its messages, or hold it.

    If ``key`` is None, the command is for the message at ``offset`` of the queue, which has no key or was parked alone. A command is a
    message of the lot itself, and applies to the messages before it.
    """

    action: CommandAction
    key: str | None
    offset: int = -1

    def to_properties(self) -> dict[str, str]:
        return {PARKED_COMMAND: self.action, PARKED_OFFSET: str(self.offset)}


# -- errors that protect parked messages and their order ---------------------------------------------------------------------


def has_parked(group: str, parked: Mapping[str, int]) -> GroupError:
    """Return the error for a query without parking lots: it would process newer messages of parked keys. ``parked``: counts by topic."""
    of = ", ".join(f"{count:,} of topic {topic!r}" for topic, count in sorted(parked.items()))
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has parked messages, {of}: a query without a parking lot would process newer messages of their keys first. Set "
        f"parkingLot=true and use consume_orderly(..., OrderPerKey()), or drop them (orderedmq group seek {group}, with --parked drop)",
    )


def seek_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a seek that does not say what to do with the messages that are parked from the queues."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which a seek keeps or drops. Kept messages come back when "
        'they are due, and dropped messages are never processed. Pass parked="keep" or parked="drop" (--parked keep, --parked drop)',
    )


def copy_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a copy of the group's offsets that would leave out parked messages although the caller has not allowed this."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which are below its offsets: a group at the same offsets "
        "does not get them, and they stay parked in this group. Let a query of the group process them, or pass leave_parked=True "
        "(--leave-parked)",
    )


def change_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for a query that was in ``group``, parked messages there, and is now in another group."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r}, to which this query's checkpoint belongs, has {messages:,} parked messages of {_queues(queues)}. In another group "
        f"the query would process newer messages of their keys first. Set consumerGroup={group} until they are processed, or drop them "
        "(orderedmq parked drop)",
    )


def delete_with_parked(group: str, messages: int, queues: Sequence[object]) -> GroupError:
    """Return the error for deleting a group with parked messages without force, because the messages would be lost."""
    return GroupError(
        GroupCondition.PARKED,
        f"group {group!r} has {messages:,} parked messages of {_queues(queues)}, which are lost if the group is deleted. Let a query of "
        "the group process them, or pass force=True (--force)",
    )


def lot_deleted(lot: MessageQueue, position: int) -> DataLossError:
    """Return the error for a parking lot that was deleted alone, by a tool of RocketMQ, while a query was running."""
    return DataLossError(
        DataLossCondition.QUEUE_DELETED,
        f"parking lot {lot} was deleted, but this query has read it up to {position}. Messages that were still parked in it are lost. Restart "
        "the query to continue with a new lot",
    )


def lots_left(topic: str, lots: Sequence[str], why: str) -> str:
    """Return an error's message after a topic was deleted, but its parking lots were not. ``why``: another error's message."""
    return f"topic {topic!r} is deleted, but not its parking lots ({', '.join(lots)}): {why}. Then delete the lots (orderedmq topic delete)"


def lots_kept(group: str, lots: Sequence[str], why: str) -> str:
    """Return an error's message after a group's settings were deleted, but its parking lots were not. ``why``: another error's message."""
    return (
        f"the parking lots of group {group!r} ({', '.join(lots)}) are not deleted, and its offsets are kept: {why}. Then delete the group "
        "again (orderedmq group delete)"
    )


def is_parking_lot(topic: str, group: str) -> TopicError:
    """Return the error for changing or deleting a topic of parking lots or its offsets, which only its group's queries may change."""
    return TopicError(
        TopicCondition.RESERVED,
        f"topic {topic!r} has the parked messages of consumer group {group!r}: it has no settings, grows and is deleted with the topic that "
        "the group reads, or is deleted with the group. Its messages are deleted when the group has processed them. Set the group's offsets of "
        "the topic that it reads",
    )


def read_as_a_stream(name: str, group: str, topic: str) -> TopicError:
    """Return the error for a stream of a topic of parking lots: it would lose messages in the lots' group, and miss some in another."""
    return TopicError(
        TopicCondition.RESERVED,
        f"option topic: topic {name!r} has the parked messages of consumer group {group!r}, and the group's query moves and deletes them. "
        f"Read topic {topic!r} with parkingLot=true to process them, or list them (orderedmq parked list {group}, or spark.read)",
    )


def _queues(queues: Sequence[object]) -> str:
    shown = ", ".join(str(queue) for queue in queues[:3])
    return f"queue {shown}" if len(queues) == 1 else f"queues {shown}{' and others' if len(queues) > 3 else ''}"
