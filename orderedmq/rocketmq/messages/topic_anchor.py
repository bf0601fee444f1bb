"""Detects a topic that was deleted and created again, by the position of one of its messages in the broker's commit log.

A broker does not record when a topic was created, but uses each position in its commit log only once. If the message at an offset
of a queue has the same position as before, the topic is the same. If it has another position, or the queue ends before the offset,
the topic was created again (or the broker lost messages, which is treated alike). A message that was deleted by age proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.codec.stored_message import StoredMessage, foreign, parse_stored
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus

_TEXT = re.compile(r"(.+)/([0-9]{1,6})/([0-9]{1,19})@([0-9a-f]{1,16})")
#: The position of a message whose offset is after the queue's end.
BEYOND: Final = -1


class Anchor(NamedTuple):
    """A message: its queue and offset, and its position in the broker's commit log."""

    broker_name: str
    queue_id: int
    offset: int
    position: int

    def __str__(self) -> str:
        return f"{self.broker_name}/{self.queue_id}/{self.offset}@{self.position:x}"


def parse_anchor(text: str) -> Anchor | None:
    """Return the anchor that ``text`` describes; None if it does not describe one."""
    match = _TEXT.fullmatch(text)
    return Anchor(match[1], int(match[2]), int(match[3]), int(match[4], 16)) if match else None


def find_anchor(client: Client, group: str, offsets: Mapping[MessageQueue, int]) -> Anchor | None:
    """Return the message directly before the highest of a topic's offsets, or before a lower one if that message is not stored.

    Prefers the highest offset, because its message is probably the last to be deleted. Returns None if no such message is stored.
    """
    for queue, offset in sorted(offsets.items(), key=lambda item: (-item[1], item[0])):
        position = position_of(client, group, queue, offset - 1) if offset > 0 else None
        if position is not None and position != BEYOND:
            return Anchor(queue.broker_name, queue.queue_id, offset - 1, position)
    return None


def is_same_topic(client: Client, group: str, topic: str, anchor: Anchor) -> bool | None:
    """Return whether the topic still has the anchor's message; None if the message was deleted by age, which proves nothing."""
    position = position_of(client, group, MessageQueue(topic, anchor.broker_name, anchor.queue_id), anchor.offset)
    return None if position is None else position == anchor.position


def position_of(client: Client, group: str, queue: MessageQueue, offset: int) -> int | None:
    """Return a message's position in the commit log; BEYOND if the queue ends before it, None if it was deleted or cannot be read.

    A deleted message may be above the queue's minimum: a broker corrects the minimum only later, and before 5.0 it never does so if
    all messages of an idle queue were deleted (ConsumeQueue.correctMinOffset).
    """
    request = message_requests.pull(queue, group, offset, 1)
    result = client.call(request, Deadline.after(REQUEST_TIMEOUT), topic=queue.topic, broker_name=queue.broker_name)
    message = message_at(client, queue, offset, result)
    if message is not None:
        return message.physical_offset
    return None if offset < result.max_offset else BEYOND


def message_at(client: Client, queue: MessageQueue, offset: int, result: PullResult) -> StoredMessage | None:
    """Return the message at ``offset`` from the answer to a pull of it; None if the answer has no messages or only later ones.

    Raises ProtocolError for a message of another queue or before ``offset``.
    """
    message = first_message(client, queue, offset, result)
    return message if message is not None and message.queue_offset == offset else None


def first_message(client: Client, queue: MessageQueue, offset: int, result: PullResult) -> StoredMessage | None:
    """Return the first message in the answer to a pull at ``offset``; None if the answer has no messages.

    It is a later message if the broker skipped deleted ones. Raises ProtocolError for a message of another queue or before ``offset``.
    """
    if result.status is not PullStatus.FOUND:
        return None
    message, _ = parse_stored(bytes(result.body), 0)
    stored_in = client.names.spelled_queue(queue)
    if (message.queue_id, message.topic) != (stored_in.queue_id, stored_in.topic.encode()):
        raise foreign(message, stored_in)
    if message.queue_offset < offset:
        raise ProtocolError(
            ProtocolCondition.PROTOCOL,
            f"a pull at offset {offset} of queue {queue} returned message {message.queue_offset} first",
        )
    return message
