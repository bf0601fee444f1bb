"""The target of a seek: turns ``--to`` into an offset for each queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from orderedmq.broker import Broker, Log
from orderedmq.conditions import OffsetCondition, OptionCondition
from orderedmq.errors import OffsetError, OptionError, no_such_offset, no_such_queue
from orderedmq.model import LAST_MS, MessageQueue
from orderedmq.options.offsets_json import EARLIEST, LATEST, OFFSETS_EXAMPLE, parse_offsets_json
from orderedmq.options.values import invalid, parse_timestamp, shown
from orderedmq.tools.group_state import own_offsets

#: In µs.
_LAST: Final = LAST_MS * 1000 + 999


@dataclass(frozen=True)
class Target:
    """A parsed ``--to``.

    Kind ``timestamp`` has ``timestamp`` (µs since 1970), ``json`` has ``offsets`` (or EARLIEST or LATEST).
    """

    kind: Literal["earliest", "latest", "timestamp", "json"]
    timestamp: int = 0
    offsets: Mapping[MessageQueue, int] | None = None


def parse_target(text: str, option: str) -> Target:
    """Return the target in a text: earliest, latest, JSON, or a time.

    A time is ISO-8601, ms since 1970 (as in the options) or, with 16 digits or more, µs. Raises OptionError INVALID.
    """
    text = text.strip()
    if text.lower() == "earliest":
        return Target("earliest")
    if text.lower() == "latest":
        return Target("latest")
    if text.startswith(("{", "[")):
        return Target("json", offsets=parse_offsets_json(text, option))
    if re.fullmatch(r"[0-9]{16,18}", text) and int(text) <= _LAST:
        return Target("timestamp", timestamp=int(text))
    try:
        return Target("timestamp", timestamp=parse_timestamp(text, option))
    except OptionError as error:
        if "may be a date" in error.message:
            raise
        raise invalid(
            option,
            f"{shown(text)} is not earliest, latest, a time such as 2026-03-01T12:00:00Z, or JSON such as {OFFSETS_EXAMPLE}",
        ) from error


def queues_to_seek(broker: Broker, group: str, target: Target, topics: Sequence[str]) -> list[MessageQueue]:
    """Return the queues that JSON names, else all queues of ``topics``, else of the topics in which the group has offsets.

    Raises GroupError MISSING, TopicError MISSING or NO_SUCH_QUEUE, OptionError CONFLICT or MISSING.
    """
    known = own_offsets(broker, group)
    if target.offsets is not None:
        if topics:
            raise OptionError(OptionCondition.CONFLICT, "option --to as JSON names its topics itself; drop --topic")
        for queue in target.offsets:
            check_queue(broker.log, queue)
        return sorted(target.offsets)
    names = list(topics) or sorted({queue.topic for queue in known})
    if not names:
        raise OptionError(
            OptionCondition.MISSING, f"group {group!r} has no offsets yet that would tell its topics; give --topic"
        )
    return sorted({queue for name in names for queue in broker.log.queues(name)})


def check_queue(log: Log, queue: MessageQueue) -> None:
    """Check that a queue exists. Raises TopicError MISSING or NO_SUCH_QUEUE."""
    there = log.queues(queue.topic)
    if queue not in there:
        raise no_such_queue(queue.topic, queue, f"its queues are {there[0]} to {there[-1]}")


def resolve(log: Log, target: Target, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
    """Return the offset of each queue. Raises OffsetError for one that is not between the queue's first message and its end."""
    offsets: dict[MessageQueue, int] = {}
    for queue, at in log.bounds(queues).items():
        offset = (target.offsets or {}).get(queue, EARLIEST if target.kind == "earliest" else LATEST)
        if target.kind == "timestamp":
            offset = log.offset_at(queue, target.timestamp)
        elif offset == EARLIEST:
            offset = at.min_offset
        elif offset == LATEST:
            offset = at.max_offset
        if offset > at.max_offset:
            raise no_such_offset(queue, at.max_offset, f"offset {offset}; {LATEST} is its end")
        if offset < at.min_offset:
            raise OffsetError(
                OffsetCondition.INVALID,
                f"queue {queue} begins at {at.min_offset}, the message at {offset} was deleted by retention; {EARLIEST} is its beginning",
            )
        offsets[queue] = offset
    return offsets
