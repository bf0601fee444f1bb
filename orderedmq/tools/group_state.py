"""What a consumer group looks like from outside: its queues with offset, lag and owner, its members, how fast it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from orderedmq.broker import Broker, LockInfo
from orderedmq.model import MessageQueue

K = TypeVar("K", bound=Hashable)

#: Seconds over which a rate is taken: micro-batches commit in leaps.
RATE_WINDOW: Final = 10.0


@dataclass(frozen=True)
class GroupQueue:
    """A queue as one group has it. ``offset`` None: nothing was committed. ``lock`` None: nobody owns it."""

    group: str
    queue: MessageQueue
    offset: int | None
    end: int
    lag: int
    lock: LockInfo | None


def group_queues(broker: Broker, group: str) -> list[GroupQueue]:
    """Each queue of which the group has an offset or a lock. Raises GroupError MISSING."""
    offsets = broker.admin.group_offsets(group)
    locks = {lock.queue: lock for lock in broker.admin.locks(group)}
    bounds = broker.log.bounds(sorted(offsets.keys() | locks.keys()))
    found = []
    for queue, at in bounds.items():
        offset, lock = offsets.get(queue), locks.get(queue)
        # What retention has deleted cannot be processed any more.
        following = max(at.min_offset if offset is None else offset, at.min_offset)
        held = lock if lock is not None and lock.held else None
        found.append(GroupQueue(group, queue, offset, at.max_offset, max(0, at.max_offset - following), held))
    return found


class Rates:
    """Messages per second, by the difference of offsets that are seen now and then."""

    def __init__(self, window: float = RATE_WINDOW) -> None:
        self._window = window
        self._seen: dict[Hashable, deque[tuple[float, int]]] = {}

    def see(self, now: float, offsets: Mapping[K, int | None]) -> dict[K, float]:
        """The rate of each that was seen before. One that went back (a seek) begins anew."""
        rates: dict[K, float] = {}
        kept: dict[Hashable, deque[tuple[float, int]]] = {}
        for key, offset in offsets.items():
            if offset is None:
                continue
            seen = self._seen.get(key, deque())
            if seen and offset < seen[-1][1]:
                seen.clear()
            seen.append((now, offset))
            while len(seen) > 2 and seen[1][0] <= now - self._window:
                seen.popleft()
            kept[key] = seen
            if seen[0][0] < now:
                rates[key] = (offset - seen[0][1]) / (now - seen[0][0])
        self._seen = kept
        return rates
