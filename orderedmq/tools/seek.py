"""A seek: turns ``--to`` into an offset for each queue, checks for parked messages, and shows or sets the offsets.

A copy is a seek of one group to the offsets of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from orderedmq.broker import Broker, Log, PullSettings
from orderedmq.conditions import OffsetCondition, OptionCondition
from orderedmq.errors import GroupError, OffsetError, OptionError, no_such_offset, no_such_queue
from orderedmq.model import LAST_MS, MessageQueue, check_group
from orderedmq.options.values import EARLIEST, LATEST, OFFSETS_EXAMPLE, invalid, parse_offsets_json, parse_timestamp, shown
from orderedmq.parking import AtSeek, copy_with_parked, is_parking_lot, origin, seek_with_parked
from orderedmq.tools.group_state import own_offsets
from orderedmq.tools.parked import LotReader

#: The latest time that a target may have, in µs since 1970.
_LAST: Final = LAST_MS * 1000 + 999


@dataclass(frozen=True)
class Target:
    """A parsed ``--to``.

    ``timestamp`` (µs since 1970) belongs to the kind ``timestamp``. ``offsets`` belongs to ``json`` and may contain EARLIEST or
    LATEST. ``copied_from``: the group whose offsets these are, None if a user gave them.
    """

    kind: Literal["earliest", "latest", "timestamp", "json"]
    timestamp: int = 0
    offsets: Mapping[MessageQueue, int] | None = None
    copied_from: str | None = None


@dataclass(frozen=True)
class Sought:
    """The offsets that a seek has set, or would set. ``old`` leaves out queues without an offset."""

    old: Mapping[MessageQueue, int]
    new: Mapping[MessageQueue, int]


def seek(
    broker: Broker,
    group: str,
    target: Target,
    topics: Sequence[str],
    *,
    force: bool,
    parked: AtSeek,
    dry_run: bool,
) -> Sought:
    """Set the group's offsets to ``target``. ``dry_run``: change nothing and return what would be set, with the same checks and errors.

    A group that does not exist is created. Raises the errors of `queues_to_seek`, `resolve` and `Admin.seek`.
    """
    queues = queues_to_seek(broker, group, target, topics)
    offsets = resolve(broker.log.reading(PullSettings(group)), target, queues)
    old = broker.groups.offsets(group, queues)
    if not dry_run:
        broker.admin.seek(group, offsets, force=force, parked=parked)
        return Sought(old, offsets)
    if not force:
        broker.admin.require_unused(group)
    if parked is None:
        require_none_parked(broker, group, queues, seek_with_parked)
    return Sought(old, offsets)


def copy_offsets(
    broker: Broker,
    source: str,
    group: str,
    topics: Sequence[str] = (),
    *,
    force: bool = False,
    parked: AtSeek = None,
    leave_parked: bool = False,
    dry_run: bool = False,
) -> Sought:
    """Set the offsets of ``group`` to those that ``source`` has now, in ``topics`` or in all of its topics. ``group`` need not exist.

    ``group`` keeps its offsets in other queues. ``source`` may be in use and is not changed. ``force``, ``parked`` and ``dry_run``
    mean the same as for `seek`. Messages that are parked in ``source`` are below its offsets, so ``group`` does not get them;
    ``leave_parked`` accepts this. Raises OptionError CONFLICT if both are the same group, MISSING if ``source`` has no offsets in
    a topic; GroupError PARKED if ``source`` has parked messages and ``leave_parked`` is false; and the errors of `seek`.
    """
    check_group(group)
    if source == group:
        raise OptionError(OptionCondition.CONFLICT, f"group {group!r} cannot be copied to itself. Name another group")
    of_source = own_offsets(broker, source)
    for name in topics:
        refuse_lot(source, name)
        broker.log.queues(name)
    there = {queue.topic for queue in of_source}
    absent = [f" in topic {name!r}" for name in topics if name not in there] if there else [""]
    if absent:
        raise OptionError(
            OptionCondition.MISSING,
            f"group {source!r} has no offsets{absent[0]} that could be copied. Run orderedmq group describe {source} to see its offsets",
        )
    offsets = {queue: at for queue, at in of_source.items() if not topics or queue.topic in topics}
    if not leave_parked:
        require_none_parked(broker, source, list(offsets), copy_with_parked)
    return seek(
        broker,
        group,
        Target("json", offsets=offsets, copied_from=source),
        (),
        force=force,
        parked=parked,
        dry_run=dry_run,
    )


def parse_target(text: str, option: str) -> Target:
    """Return the parsed target: earliest, latest, JSON, or a time.

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
    """Return the queues that JSON names; else all queues of ``topics``; else all queues of the topics in which the group has offsets.

    The last case leaves out the group's parking lots, and raises GroupError MISSING if the group does not exist. Raises TopicError
    MISSING, NO_SUCH_QUEUE, or RESERVED for a parking lot; OptionError CONFLICT or MISSING.
    """
    if target.offsets is not None:
        if topics:
            raise OptionError(OptionCondition.CONFLICT, "option --to as JSON names its topics itself. Drop --topic")
        for queue in target.offsets:
            refuse_lot(group, queue.topic)
            check_queue(broker.log, queue)
        return sorted(target.offsets)
    names = list(topics) or sorted({queue.topic for queue in own_offsets(broker, group)})
    if not names:
        raise OptionError(
            OptionCondition.MISSING, f"group {group!r} has no offsets yet, so its topics are unknown. Give --topic"
        )
    for name in names:
        refuse_lot(group, name)
    return sorted({queue for name in names for queue in broker.log.queues(name)})


def refuse_lot(group: str, topic: str) -> None:
    """Raise TopicError RESERVED if the topic contains the group's own parking lots."""
    parked_by = origin(topic)
    if parked_by is not None and parked_by[0] == group:
        raise is_parking_lot(topic, group)


def require_none_parked(
    broker: Broker, group: str, queues: Sequence[MessageQueue], error: Callable[[str, int, Sequence[MessageQueue]], GroupError]
) -> None:
    """Raise ``error`` (GroupError PARKED) if messages of the group are parked from these queues."""
    lots = LotReader(broker).look(group)
    parked = {queue: lots[queue].messages for queue in queues if queue in lots}
    if parked:
        raise error(group, sum(parked.values()), list(parked))


def check_queue(log: Log, queue: MessageQueue) -> None:
    """Raise TopicError MISSING or NO_SUCH_QUEUE if a queue does not exist."""
    there = log.queues(queue.topic)
    if queue not in there:
        raise no_such_queue(queue.topic, queue, f"its queues are {there[0]} to {there[-1]}")


def resolve(log: Log, target: Target, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
    """Return each queue's offset for the target. Raises OffsetError for an offset before the queue's first message or after its end."""
    offsets: dict[MessageQueue, int] = {}
    for queue, at in log.bounds(queues).items():
        offset = (target.offsets or {}).get(queue, EARLIEST if target.kind == "earliest" else LATEST)
        if target.kind == "timestamp":
            # Messages that arrived after the bounds were read may have moved the end.
            offset = min(log.offset_at(queue, target.timestamp), at.max_offset)
        elif offset == EARLIEST:
            offset = at.min_offset
        elif offset == LATEST:
            offset = at.max_offset
        if target.copied_from is not None and not at.min_offset <= offset <= at.max_offset:
            raise OffsetError(
                OffsetCondition.INVALID,
                f"group {target.copied_from!r} is at {offset} in queue {queue}, which now begins at {at.min_offset} and ends at "
                f"{at.max_offset}. Seek this group first, or run orderedmq group seek for the other one instead of a copy",
            )
        if offset > at.max_offset:
            raise no_such_offset(queue, at.max_offset, f"offset {offset}. Use {LATEST} for its end")
        if offset < at.min_offset:
            raise OffsetError(
                OffsetCondition.INVALID,
                f"queue {queue} begins at {at.min_offset}: the message at {offset} was deleted by retention. Use {EARLIEST} for its beginning",
            )
        offsets[queue] = offset
    return offsets
