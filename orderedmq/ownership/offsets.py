"""Offsets: the checkpoints that Spark logs, the ranges between two checkpoints, and how many messages a batch may take.

A Spark offset is a Checkpoint. ``next`` has the next offset to process for every queue that was owned. ``entered`` has the queues
whose range does not begin where the previous checkpoint ended (first batch, new queue, queue taken over or sought), with the offsets
where these ranges begin.

    start.next   0:100           1:40
    end.next     0:130           1:40          2:7
    end.entered                                2:5
    ranges       0:[100,130)     1: nothing    2:[5,7)

An offset is that of the next message to process, so ranges are half-open. The JSON form is canonical, because Spark compares offsets
as text. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orderedmq.conditions import OffsetCondition
from orderedmq.errors import OffsetError
from orderedmq.model import MessageQueue, OffsetRange

FORMAT: Final = 1
OffsetMap = Mapping[MessageQueue, int]


def offsets_to_json(offsets: OffsetMap) -> dict[str, dict[str, dict[str, int]]]:
    """Return offsets as JSON, such as ``{"orders": {"broker-a": {"0": 23}}}``: sorted by topic, broker and queue number."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets):
        out.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offsets[queue]
    return out


def offsets_from_json(value: Any, where: str) -> dict[MessageQueue, int]:
    """Return the offsets of a value made by ``offsets_to_json``.

    Raises OffsetError INVALID, which names ``where`` (what the value is) and the bad entry.
    """

    def fail(what: str) -> OffsetError:
        return OffsetError(OffsetCondition.INVALID, f'{where}: {what}. The form is {{"topic": {{"broker": {{"0": 23}}}}}}')

    if not isinstance(value, dict):
        raise fail(f"{value!r} is not an object")
    out: dict[MessageQueue, int] = {}
    for topic, brokers in value.items():
        if not isinstance(brokers, dict):
            raise fail(f"topic {topic!r} has {brokers!r} instead of an object of brokers")
        for broker, queues in brokers.items():
            if not isinstance(queues, dict):
                raise fail(f"broker {broker!r} of topic {topic!r} has {queues!r} instead of an object of queues")
            for queue_id, offset in queues.items():
                if not (isinstance(queue_id, str) and queue_id.isascii() and queue_id.isdigit()):
                    raise fail(f"{queue_id!r} of topic {topic!r} is not a queue id")
                if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                    raise fail(f"queue {topic}/{broker}/{queue_id} has {offset!r}, which is not an offset")
                out[MessageQueue(topic, broker, int(queue_id))] = offset
    return out


@dataclass(frozen=True)
class Checkpoint:
    """The offset that Spark logs for the start or the end of a micro-batch.

    owner: the query's id, chosen once and stored in the checkpoint. None in the initial offset, which is the same for all queries.
    gen: the epoch at which the owner's tenure of each queue began. A replay compares it with the lock's tenure.
    topics: each topic's `Log.anchor`. group: the consumer group to which the tenures belong, None without one.
    """

    owner: str | None = None
    next: OffsetMap = field(default_factory=dict)
    entered: OffsetMap = field(default_factory=dict)
    gen: OffsetMap = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None

    @property
    def fresh(self) -> bool:
        """Whether nothing has been decided yet."""
        return self.owner is None

    def of_another_group(self, group: str | None) -> bool:
        """Whether this is the checkpoint of a query that was not in ``group``, or had a group if ``group`` is None."""
        return not self.fresh and self.group != group

    def to_spark(self) -> dict[str, Any]:
        """Return the JSON that Spark stores and compares as text: ``{}`` for a fresh checkpoint."""
        if self.owner is None:
            return {}
        return {
            "v": FORMAT,
            "owner": self.owner,
            "next": offsets_to_json(self.next),
            "entered": offsets_to_json(self.entered),
            "gen": offsets_to_json(self.gen),
            "topics": {name: self.topics[name] for name in sorted(self.topics)},
            "group": self.group,
        }

    @classmethod
    def from_spark(cls, value: Any) -> Checkpoint:
        """Return the checkpoint of a value made by ``to_spark``. Raises OffsetError INVALID, or NEWER_FORMAT for one of a newer version."""
        if value == {}:
            return cls()
        version = value.get("v") if isinstance(value, Mapping) else None
        if isinstance(version, int) and version > FORMAT:
            raise OffsetError(
                OffsetCondition.NEWER_FORMAT,
                f"the checkpoint has offsets of format {version}, but this version of orderedmq reads formats up to {FORMAT}. Upgrade "
                "orderedmq on the driver",
            )
        if not _well_formed(value):
            raise OffsetError(
                OffsetCondition.INVALID,
                f"the checkpoint's offset {value!r} was not written by this source. Use another checkpointLocation",
            )
        return cls(
            owner=value["owner"],
            next=offsets_from_json(value.get("next", {}), "the checkpoint's next offsets"),
            entered=offsets_from_json(value.get("entered", {}), "the checkpoint's entered offsets"),
            gen=offsets_from_json(value.get("gen", {}), "the checkpoint's tenures"),
            topics=dict(value.get("topics", {})),
            group=value.get("group"),
        )


def _well_formed(value: Any) -> bool:
    """Whether this is a checkpoint of this format. Its offsets are not checked."""
    if not isinstance(value, Mapping) or type(value.get("v")) is not int or value["v"] != FORMAT:
        return False
    topics = value.get("topics", {})
    named = isinstance(topics, Mapping) and all(isinstance(text, str) for text in topics.values())
    return isinstance(value.get("owner"), str) and named and isinstance(value.get("group"), str | None)


def ranges(start: Checkpoint, end: Checkpoint) -> dict[MessageQueue, OffsetRange]:
    """Return the range of every queue of ``end``, in queue order, including empty ranges.

    A queue in ``start`` but not in ``end`` was given up. Raises OffsetError BEGIN_AFTER_END, or INCOMPLETE if neither checkpoint says
    where a queue begins, because a range is never guessed or silently skipped.
    """
    out: dict[MessageQueue, OffsetRange] = {}
    for queue in sorted(end.next):
        begin = end.entered.get(queue, start.next.get(queue))
        stop = end.next[queue]
        if begin is None:
            raise OffsetError(
                OffsetCondition.INCOMPLETE, f"queue {queue} ends at {stop}, but neither offset says where it begins"
            )
        if begin > stop:
            raise OffsetError(
                OffsetCondition.BEGIN_AFTER_END,
                f"queue {queue} would be read from {begin} to {stop}: the checkpoint and the offset log disagree. Restore both from "
                "one copy, or start with a new checkpointLocation",
            )
        out[queue] = OffsetRange(begin, stop)
    return out


def admit(backlog: Mapping[MessageQueue, int], limit: int, turn: int) -> dict[MessageQueue, int]:
    """Return each queue's share of ``limit`` messages, in proportion to the backlogs. The shares sum to min(limit, total).

    The shares begin with the ``turn``-th waiting queue, and the remainder is distributed round-robin in this order. So no queue starves
    if there are more queues than ``limit``, or if the caller takes only the first share.
    """
    waiting = [queue for queue in sorted(backlog) if backlog[queue] > 0]
    if not waiting:
        return {}
    begin = turn % len(waiting)
    waiting = waiting[begin:] + waiting[:begin]
    total = sum(backlog[queue] for queue in waiting)
    if total <= limit:
        return {queue: backlog[queue] for queue in waiting}
    shares = {queue: limit * backlog[queue] // total for queue in waiting}
    remaining = limit - sum(shares.values())
    # floor(limit * b / total) < b, so each queue has at least one more message.
    for queue in waiting[:remaining]:
        shares[queue] += 1
    return {queue: n for queue, n in shares.items() if n}


def hold_back(total: int, least: int | None, waited: float, longest: float) -> bool:
    """Whether a trigger should wait for more messages.

    True while there are fewer than ``least`` messages, and ``waited``, the seconds since the last batch, is less than ``longest``.
    """
    return least is not None and total < least and waited < longest
