"""Dead letters: the properties that hold a letter's origin and identity, and how often its message was replayed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orderedmq.model import MAX_PROPERTIES_BYTES, MessageQueue

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
#: Maximum bytes of an error's text. The rest is cut off.
MAX_ERROR_BYTES: Final = 4096
#: Bytes that a broker may add to the properties of a message that it stores.
_SPARE_BYTES: Final = 256
#: Maximum digits of a number of replays. This package does not write longer numbers.
_MAX_DIGITS: Final = 9


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` bytes of a text, in a form that a property can hold.

    The characters 0 to 2 become spaces, because RocketMQ separates properties by 1 and 2. Surrogates are replaced, because UTF-8 has
    none.
    """
    plain = text.translate({0: " ", 1: " ", 2: " "}).encode("utf-8", "replace")
    return plain[: max(limit, 0)].decode("utf-8", "ignore")


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
    room: int = MAX_PROPERTIES_BYTES - _SPARE_BYTES,
) -> dict[str, str]:
    """Return a dead letter's properties: the message's ``properties`` and its origin, under RocketMQ's names where they exist.

    ``room`` is their maximum size in bytes, which is less than the default if the message has keys or tags. The error is shortened
    first. Then properties of the message that do not fit are left out, REPLAYS last. A message that was a dead letter before keeps its
    first message id, as in Java.
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
    # RocketMQ writes a property as name, value and two separators.
    room -= sum(len(f"{name}{value}".encode()) + 2 for name, value in origin.items())
    result = {}
    for name, value in sorted(properties.items(), key=lambda own: own[0] != REPLAYS):
        size = len(f"{name}{value}".encode()) + 2
        if name not in origin and size <= room:
            result[name] = value
            room -= size
    return {**result, **origin, ERROR: clip(error, min(MAX_ERROR_BYTES, room))}


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
