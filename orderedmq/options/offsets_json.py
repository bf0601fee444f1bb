"""Parses offsets that users write in options and in the command: JSON with topics, brokers and queues."""

from __future__ import annotations

import re
from typing import Final

from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.options.queue_json import brokers, json_shown, members
from orderedmq.options.values import MAX_LONG, invalid, shown

#: Values that a user may write instead of an offset: the queue's end (LATEST) and its first stored message (EARLIEST).
LATEST: Final = -1
EARLIEST: Final = -2

OFFSETS_EXAMPLE: Final = '{"orders": {"embedded": {"0": 23, "1": -2}}}'


def parse_offsets_json(text: str, option: str) -> dict[MessageQueue, int]:
    """Return the offsets in ``{"topic": {"broker": {"queue id": next offset}}}``; LATEST and EARLIEST are allowed.

    Raises OptionError INVALID.
    """
    offsets: dict[MessageQueue, int] = {}
    for topic, broker, queues in brokers(text, option, OFFSETS_EXAMPLE):
        where = f"topic {shown(topic)}, broker {shown(broker)}"
        for queue_id, offset in members(queues, where, "queues", option, OFFSETS_EXAMPLE):
            if not re.fullmatch(r"0|[1-9][0-9]{0,5}", queue_id) or int(queue_id) >= MAX_QUEUES:
                raise invalid(option, f"{where}: {shown(queue_id)} is not a queue id. Write for example 0")
            # bool is a subclass of int in Python, but true is not a number in JSON.
            if not isinstance(offset, int) or isinstance(offset, bool) or not EARLIEST <= offset <= MAX_LONG:
                raise invalid(
                    option,
                    f"{where}, queue {queue_id}: {json_shown(offset)} is not an offset. Write a whole number, "
                    f"{LATEST} (latest) or {EARLIEST} (earliest)",
                )
            offsets[MessageQueue(topic, broker, int(queue_id))] = offset
    return offsets
