"""The state of a consumer group: each queue's offset, lag and owner, and the speed at which its offset grows.

A client id is unique and therefore long: a query's 32 digits, its host, its process and a random number. A table shows a shorter
name (`short_names`). JSON output has the whole id.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from orderedmq.barrier import Barrier
from orderedmq.broker import Broker, LockInfo
from orderedmq.model import MessageQueue
from orderedmq.parking import leader_of

K = TypeVar("K", bound=Hashable)

#: Seconds over which a rate is averaged, because each commit of a micro-batch moves the offset by many messages.
RATE_WINDOW: Final = 10.0


@dataclass(frozen=True)
class GroupQueue:
    """A group's state in one queue. ``offset`` None: the group has not committed. ``lock`` None: nobody holds the queue's lock.

    ``begin``: the offset of the queue's first message. ``gone``: unprocessed messages that retention has deleted. ``progress``: how many of
    the messages that ``lag`` counts the listener of the running micro-batch is done with. ``waits``: which queues hold this one up since its
    topic was resized, None if none do.
    """

    group: str
    queue: MessageQueue
    offset: int | None
    begin: int
    end: int
    lag: int
    lock: LockInfo | None
    progress: int = 0
    waits: str | None = None

    @property
    def owned(self) -> bool:
        """Whether the queue's lock is held, and its owner is not known to be dead."""
        return self.lock is not None and self.lock.alive is not False

    @property
    def gone(self) -> int:
        return 0 if self.offset is None else max(0, self.begin - self.offset)

    @property
    def following(self) -> int:
        """The offset of the first stored message that the group has not processed; the queue's end if there is none."""
        return self.end - self.lag


def group_queues(broker: Broker, group: str, also: Iterable[MessageQueue] = ()) -> list[GroupQueue]:
    """Return the group's state in ``also`` and in each queue where the group has an offset or a lock. Raises GroupError MISSING.

    The group's parking lots are left out, because a lot is shown with the queue whose messages it contains (`tools.parked`).
    """
    offsets = own_offsets(broker, group)
    progress = broker.admin.group_progress(group)
    locks = {lock.queue: lock for lock in broker.admin.locks(group)}
    bounds = broker.log.bounds(sorted(offsets.keys() | locks.keys() | set(also)))
    waits = Barrier(broker, group).waits(sorted({queue.topic for queue in bounds}), {})
    states = []
    for queue, at in bounds.items():
        offset, lock = offsets.get(queue), locks.get(queue)
        # Messages that retention has deleted do not count as lag, because they can no longer be processed.
        following = max(at.min_offset if offset is None else offset, at.min_offset)
        owner_lock = lock if lock is not None and lock.held else None
        lag = max(0, at.max_offset - following)
        done = min(max(0, progress.get(queue, 0) - following), lag)
        wait = waits.get(queue)
        held_up = str(wait) if wait is not None and lag and wait.offset <= following else None
        states.append(GroupQueue(group, queue, offset, at.min_offset, at.max_offset, lag, owner_lock, done, held_up))
    return states


def own_offsets(broker: Broker, group: str) -> dict[MessageQueue, int]:
    """Return the group's offsets, without those of its parking lots. Raises GroupError MISSING."""
    return {queue: at for queue, at in broker.admin.group_offsets(group).items() if leader_of(group, queue) == queue}


class Rates:
    """Computes messages per second from offsets seen at several times."""

    def __init__(self, window: float = RATE_WINDOW) -> None:
        self._window = window
        self._seen: dict[Hashable, deque[tuple[float, int]]] = {}

    def see(self, now: float, offsets: Mapping[K, int | None]) -> dict[K, float]:
        """Return the rate of each key whose offset was seen before. If an offset went back (a seek), its measurement starts again."""
        rates: dict[K, float] = {}
        points_by_key: dict[Hashable, deque[tuple[float, int]]] = {}
        for key, offset in offsets.items():
            if offset is None:
                continue
            points = self._seen.get(key, deque())
            if points and offset < points[-1][1]:
                points.clear()
            points.append((now, offset))
            while len(points) > 2 and points[1][0] <= now - self._window:
                points.popleft()
            points_by_key[key] = points
            if points[0][0] < now:
                rates[key] = (offset - points[0][1]) / (now - points[0][0])
        self._seen = points_by_key
        return rates


#: ``<query>@<host>-<pid>-<random>``; over RocketMQ with the prefix ``orderedmq-``.
_OURS = re.compile(r"(?:orderedmq-)?(?P<query>.+)@(?P<host>[^.]+).*-(?P<pid>\d+)-[0-9a-f]{8}")
_DIGITS = re.compile(r"[0-9a-f]{32}")
_SHORT = 8


def owners_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the client ids in the column owner, with the names of their queries."""
    return {row["owner"]: row.get("query_name") for row in rows if row.get("owner") is not None}


def short_names(clients: Mapping[str, str | None]) -> dict[str, str]:
    """Return how tables show each client: ``<query>@<host>-<pid>``, or the id of a client that is not this package's.

    ``clients``: client ids with their query names, None if a name is unknown.
    """
    return {client: _short(client, name) for client, name in clients.items()}


def _short(client: str, name: str | None) -> str:
    ours = _OURS.fullmatch(client)
    if ours is None:
        return client
    query = name or (ours["query"][:_SHORT] if _DIGITS.fullmatch(ours["query"]) else ours["query"])
    return f"{query}@{ours['host']}-{ours['pid']}"
