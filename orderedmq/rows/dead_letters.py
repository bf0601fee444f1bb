"""Dead letters: the properties that hold a letter's origin and identity, and how often its message was replayed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orderedmq.conditions import GroupCondition
from orderedmq.errors import GroupError
from orderedmq.model import DEAD_LETTER_PREFIX, MAX_NAME_LENGTH, MAX_PROPERTIES_BYTES, MessageQueue, is_reserved
from orderedmq.text import MAX_ERROR_BYTES, clip

#: Properties that name a dead letter's origin, under RocketMQ's names (MessageConst), or under this package's where RocketMQ has none.
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE: Final = "REAL_QID"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
ORIGIN_BROKER: Final = "ORDEREDMQ_BROKER"
ORIGIN_OFFSET: Final = "ORDEREDMQ_OFFSET"
ERROR: Final = "ORDEREDMQ_ERROR"
#: How often each group's replays have sent the message, such as "billing=2,shipping=1". Unlike the other properties, this one belongs to
#: the message itself: a replay sends it with the message, and a later dead letter of that message has it again.
REPLAYS: Final = "ORDEREDMQ_REPLAYS"
#: Bytes that are added to a letter's properties later: a RocketMQ broker's share (256), UNIQ_KEY (42), and the names and values of
#: RETRY_TOPIC, DLQ_ORIGIN_TOPIC and DLQ_ORIGIN_MESSAGE_ID without the message's id (308).
_SPARE_BYTES: Final = 606
#: The longest name, with two separators, of the property that holds tags, keys or a sharding key (__SHARDINGKEY).
_LONGEST_NAME: Final = 15
#: Maximum bytes of the text that names the properties that were left out.
_NOTE_BYTES: Final = 512
#: Maximum digits of a number of replays. This package does not write longer numbers.
_MAX_DIGITS: Final = 9


def dead_letter_topic(group: str) -> str:
    """Return the name of the group's dead-letter topic.

    Raises GroupError BAD_NAME if that name is too long for a topic, even though the group's name is valid by itself.
    """
    longest = MAX_NAME_LENGTH - len(DEAD_LETTER_PREFIX)
    if len(group) > longest:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"the name of consumer group {group!r} has {len(group)} characters, but a group with dead letters may have at most {longest}, "
            f"because the name of its topic {DEAD_LETTER_PREFIX}<group> may have only {MAX_NAME_LENGTH}. Choose a shorter name",
        )
    return DEAD_LETTER_PREFIX + group


def dead_letter_id(group: str, queue: MessageQueue, offset: int) -> str:
    """Return the identity of a dead letter. It is the same if a repeated micro-batch gives the message up again."""
    return f"{group}/{queue}/{offset}"


def dead_letter_properties(
    queue: MessageQueue,
    offset: int,
    *,
    message_id: str,
    reconsume_times: int,
    error: str,
    properties: Mapping[str, str],
    texts: Sequence[str] = (),
) -> dict[str, str]:
    """Return a dead letter's properties: the message's ``properties`` and its origin, under RocketMQ's names where they exist.

    ``texts``: the letter's tags, keys and sharding key, which are properties over RocketMQ. All properties together must fit into a
    message. So the error is shortened first. Then properties of the message that do not fit are left out, REPLAYS last, and the error
    begins with their names. A message that was a dead letter before keeps its first message id, as in Java.
    """
    origin = {
        REAL_TOPIC: queue.topic,
        REAL_QUEUE: str(queue.queue_id),
        ORIGIN_MESSAGE_ID: properties.get(ORIGIN_MESSAGE_ID) or message_id,
        RECONSUME_TIME: str(reconsume_times),
        ORIGIN_BROKER: queue.broker_name,
        ORIGIN_OFFSET: str(offset),
        ERROR: "",
    }
    own = {name: value for name, value in properties.items() if name not in origin and not is_reserved(name)}
    room = MAX_PROPERTIES_BYTES - _SPARE_BYTES - _size(origin) - len(origin[ORIGIN_MESSAGE_ID].encode())
    room -= sum(_LONGEST_NAME + len(text.encode()) for text in texts if text)
    fitting = own if _size(own) <= room else _fitting(own, room - _NOTE_BYTES)
    names = ", ".join(left_out(own, fitting))
    note = clip(f"there was no room for the properties {names}", _NOTE_BYTES - 2) + ": " if names else ""
    text = clip(note + error, min(MAX_ERROR_BYTES, room - _size(fitting)))
    del origin[ERROR]
    # RocketMQ has no properties without a value.
    return {**fitting, **origin, **({ERROR: text} if text else {})}


def left_out(properties: Mapping[str, str], letter: Mapping[str, str]) -> list[str]:
    """Return the names of a message's ``properties`` for which its letter had no room. ``letter``: the letter's properties."""
    return [name for name in properties if name not in letter and not is_reserved(name)]


def _size(properties: Mapping[str, str]) -> int:
    """Return the bytes of properties. RocketMQ writes a property as name, value and two separators."""
    return sum(len(f"{name}{value}".encode()) + 2 for name, value in properties.items())


def _fitting(properties: Mapping[str, str], room: int) -> dict[str, str]:
    """Return the properties, REPLAYS first, that fit into ``room`` bytes."""
    fitting: dict[str, str] = {}
    for name, value in sorted(properties.items(), key=lambda own: own[0] != REPLAYS):
        size = _size({name: value})
        if size <= room:
            fitting[name] = value
            room -= size
    return fitting


def replays(properties: Mapping[str, str], group: str) -> int:
    """Return how often replays of the group's dead letters have sent the message with these properties."""
    return _replays(properties).get(group, 0)


def replayed_once_more(properties: Mapping[str, str], group: str) -> dict[str, str]:
    """Return the properties with which a replay of the group's dead letters sends a message."""
    counts = _replays(properties)
    counts[group] = counts.get(group, 0) + 1
    return {**properties, REPLAYS: ",".join(f"{name}={count}" for name, count in counts.items())}


def _replays(properties: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of replays by group, from REPLAYS. Malformed parts are ignored, because any producer may set the property."""
    parts = [part.rpartition("=") for part in properties.get(REPLAYS, "").split(",")]
    return {
        name: int(count)
        for name, _, count in parts
        if name and count.isascii() and count.isdigit() and len(count) <= _MAX_DIGITS
    }
