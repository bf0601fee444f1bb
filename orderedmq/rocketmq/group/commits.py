"""Commits the offsets of a group's queues and parking lots, and commits them again if a killed broker has forgotten them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping, Sequence

from orderedmq.errors import LockError, TopicError
from orderedmq.model import MessageQueue, is_parked
from orderedmq.ownership.lock import LockToken
from orderedmq.parking.rules import guarding
from orderedmq.rocketmq.group.held_locks import HeldLock, HeldLocks, by_group
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets


class Commits:
    """Moves group offsets of queues whose locks are held. Thread-safe.

    The offsets that were last committed under a lock are kept in `HeldLock.committed`.
    """

    def __init__(self, offsets: GroupOffsets) -> None:
        self._offsets = offsets
        # Held while offsets are written: queries and renewals both write them, and an older offset must not arrive after a newer one.
        self._committing = threading.Lock()

    def move(self, offsets: Mapping[LockToken, int], held_locks: HeldLocks) -> None:
        """Move offsets forward; lower offsets are ignored. Raises LockError LOST if RocketMQ's own tools reset the group."""
        with self._committing:
            for group, of_group in by_group(offsets).items():
                self._move(group, {token: offsets[token] for token in of_group}, held_locks)

    def _move(self, group: str, offsets: Mapping[LockToken, int], held_locks: HeldLocks) -> None:
        locks = {token: held_locks.own(guarding(token)) for token in offsets}
        last = {token: held.committed.get(token.queue) if held is not None else None for token, held in locks.items()}
        unknown = [token.queue for token, at in last.items() if at is None]
        known = self._offsets.read(group, unknown) if unknown else {}
        moves = {}
        for token, held in locks.items():
            at = last[token]
            if at is None:
                at = known.get(token.queue)
            if at is None or offsets[token] > at:
                moves[token.queue] = offsets[token]
            elif held is not None:
                held.committed[token.queue] = at
        self._write(group, moves, held_locks)
        for token, held in locks.items():
            if held is not None and token.queue in moves:
                held.committed[token.queue] = moves[token.queue]

    def _write(
        self, group: str, moves: Mapping[MessageQueue, int], held_locks: HeldLocks, seconds: float = GROUP_TIMEOUT
    ) -> None:
        """Write the offsets of parking lots before those of queues.

        A broker cannot set two offsets in one request. If this process is killed in between, the queue's next owner repeats the range
        of the queue. In the other order, the next owner would repeat parked messages although later messages of their keys were
        processed.
        """
        lots = {queue: at for queue, at in moves.items() if is_parked(queue)}
        for part in (lots, {queue: at for queue, at in moves.items() if queue not in lots}):
            if part:
                try:
                    self._offsets.move(group, part, held_locks.queues(group), seconds)
                except LockError:
                    # RocketMQ's own tools have reset the group. The offsets that were committed before must not be written again.
                    held_locks.forget_offsets(group)
                    raise

    def reset(self, group: str, offsets: Mapping[LockToken, int], held_locks: HeldLocks) -> None:
        """Set offsets of one group in any direction. Raises the errors of `move`."""
        with self._committing:
            self._offsets.move(group, {token.queue: at for token, at in offsets.items()}, held_locks.queues(group))
            for token, at in offsets.items():
                held = held_locks.own(guarding(token))
                if held is not None:
                    held.committed[token.queue] = at

    def repeat(
        self,
        locks: Sequence[HeldLock],
        held_locks: HeldLocks,
        seconds: float,
        doubtful: Collection[HeldLock] = (),
        *,
        wait: float = 0.0,
    ) -> list[LockToken]:
        """Restore offsets of the last 5 s that a killed broker has forgotten. Return the tokens of locks that turn out to be lost.

        All ``locks`` are of the same group. A ``doubtful`` lock is lost if the group's offset is above the last committed one, because
        only another owner, such as a Java consumer, can have moved it there. ``wait``: seconds to wait for a commit in progress.
        """
        # A renewal does not wait for a commit in progress: it has no time, and that commit writes the newest offsets.
        if not self._committing.acquire(timeout=wait):
            return []
        overtaken: list[LockToken] = []
        behind: dict[MessageQueue, int] = {}
        done: dict[MessageQueue, tuple[int, LockToken]] = {}
        try:
            done = {queue: (at, lock.token) for lock in locks for queue, at in lock.committed.items()}
            if done:
                group = locks[0].token.group
                known = self._offsets.read(group, list(done), seconds)
                suspects = {lock.token for lock in doubtful}
                overtaken = [token for queue, (at, token) in done.items() if token in suspects and known.get(queue, -1) > at]
                behind = {queue: at for queue, (at, _) in done.items() if at > known.get(queue, -1)}
                # A lot without an offset may be a new lot of the same name, in which the committed offset would hide parked messages.
                behind = {queue: at for queue, at in behind.items() if known.get(queue) or not is_parked(queue)}
                # Skip deleted topics, because locks at other brokers must be renewed. The next boundary finds out which messages are lost.
                # Parking lots come first, as in `_write`.
                for topic in dict.fromkeys(queue.topic for queue in sorted(behind, key=is_parked, reverse=True)):
                    with contextlib.suppress(TopicError):
                        self._write(
                            group, {queue: at for queue, at in behind.items() if queue.topic == topic}, held_locks, seconds
                        )
        except LockError:
            return list(dict.fromkeys([*overtaken, *(done[queue][1] for queue in behind)]))
        finally:
            self._committing.release()
        return list(dict.fromkeys(overtaken))
