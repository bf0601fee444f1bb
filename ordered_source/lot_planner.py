"""Plans which parking lots of a streaming query's queues a micro-batch reads.

A micro-batch reads a queue's parking lot when the lot's first key is due or when the lot contains an operator's command. It then reads
the whole lot, and messages that are not due are moved to the lot's end. A lot has to wait while it contains a message at or after the
queue's position: a former owner parked that message and died, so this query processes the message's range again, and older messages of
the key in that range have to come first.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orderedmq import pulls
from orderedmq.broker import Broker, Log
from orderedmq.errors import GroupError
from orderedmq.model import MessageQueue, is_parked
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.offsets import Checkpoint, OffsetMap
from orderedmq.ownership.owned_queue import Owned
from orderedmq.ownership.owner import Owner
from orderedmq.parking import Lot, change_with_parked, has_parked, parked_queue

logger = logging.getLogger("orderedmq")


@dataclass(frozen=True)
class BatchLots:
    """What the next batch does with the parking lots of the owned queues.

    ``counts``: messages to read from each lot. ``full``: queues from which no messages are read, because their lots are full.
    ``next_due``: when the first of the other lots is due, in ms since 1970, or None if no lot becomes due before the broker reports a
    change.
    """

    counts: Mapping[MessageQueue, int]
    full: frozenset[MessageQueue]
    next_due: int | None


NO_LOTS = BatchLots({}, frozenset(), None)


class LotPlanner:
    """Plans the parking lots of a query's queues. It reads each parked message only once."""

    def __init__(self, log: Log, capacity: int) -> None:
        self._log = log
        self._capacity = capacity
        self._lots: dict[MessageQueue, Lot] = {}
        self._warned: set[MessageQueue] = set()

    def plan(self, owner: Owner, ends: OffsetMap, now: int) -> BatchLots:
        """Return what the next batch does with the lots. ``ends``: the ends of the lots. ``now``: ms since 1970."""
        self._lots = {queue: lot for queue, lot in self._lots.items() if queue in owner.owned}
        counts: dict[MessageQueue, int] = {}
        full: set[MessageQueue] = set()
        waiting: list[int] = []
        for queue, owned in owner.owned.items():
            if owned.leader is None or owned.position is None:
                continue
            end = ends.get(queue, owned.position)
            if end <= owned.position:
                self._lots.pop(queue, None)
                continue
            lot = self._read(queue, owned, end)
            leader = owner.owned[owned.leader]
            begun = leader.position is not None and lot.max_offset < leader.position
            due = lot.next_due()
            if begun and due is not None and due <= now:
                counts[queue] = end - owned.position
            elif begun and due is not None:
                waiting.append(due)
            if begun and lot.messages >= self._capacity:
                full.add(leader.queue)
        self._warn(full)
        return BatchLots(counts, frozenset(full), min(waiting, default=None))

    def summary(self) -> dict[str, int | None]:
        """Return counts of the messages that were parked when the last batch was planned, for the query's progress.

        oldest: when the first of them was stored, in ms since the epoch, None if nothing is parked. retries: the number of failed
        listener calls for the next message of each key.
        """
        lots = self._lots.values()
        oldest = min((lot.oldest for lot in lots if lot.oldest is not None), default=None)
        return {
            "messages": sum(lot.messages for lot in lots),
            "keys": sum(len(lot.keys) for lot in lots),
            "oldest": None if oldest is None else oldest // 1000,
            "retries": sum(lot.retries for lot in lots),
        }

    def _read(self, queue: MessageQueue, owned: Owned, end: int) -> Lot:
        assert owned.position is not None
        return pulls.read_lot_from(self._log, self._lots, queue, owned.position, end)

    def _warn(self, full: set[MessageQueue]) -> None:
        for queue in sorted(full - self._warned):
            logger.warning(
                "the parking lot of queue %s has %d messages or more, so the queue is not read further until some of them are settled. "
                "Fix the cause, drop messages that cannot be processed (orderedmq parked drop), or raise parkingLotMaxMessages",
                queue, self._capacity,
            )  # fmt: skip
        self._warned = full


def require_none(broker: Broker, options: SourceOptions, queues: Iterable[MessageQueue]) -> None:
    """Raise GroupError PARKED if messages of the queues are parked and the query does not read parking lots."""
    group = options.consumer_group
    if group is None or options.parking_lot:
        return
    parked: Counter[str] = Counter()
    for queue, messages in _parked(broker, group, queues).items():
        parked[queue.topic] += messages
    if parked:
        raise has_parked(group, parked)


def require_none_left(broker: Broker, start: Checkpoint, group: str | None) -> None:
    """Raise GroupError PARKED if messages are parked in the group of the checkpoint ``start`` and the query is now in another one."""
    if start.group is None or not start.of_another_group(group):
        return
    parked = _parked(broker, start.group, without_lots(start.next))
    if parked:
        raise change_with_parked(start.group, parked.total(), sorted(parked))


def _parked(broker: Broker, group: str, queues: Iterable[MessageQueue]) -> Counter[MessageQueue]:
    """Return how many messages of each queue are parked in the group. Queues without parked messages are left out."""
    leaders: dict[MessageQueue, MessageQueue] = {}
    for queue in queues:
        # An error means that the name of the lot would be too long, so no such lot exists.
        with contextlib.suppress(GroupError):
            leaders[parked_queue(group, queue)] = queue
    bounds = broker.log.bounds(list(leaders)) if leaders else {}
    offsets = broker.groups.offsets(group, list(bounds)) if bounds else {}
    return +Counter({leaders[lot]: at.max_offset - offsets.get(lot, at.min_offset) for lot, at in bounds.items()})


def without_lots(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    return [queue for queue in queues if not is_parked(queue)]
