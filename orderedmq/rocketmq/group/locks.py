"""Queue locks: those of this process's clients with the offsets that are committed under them, and those that an administrator takes.

A client of this process trusts its locks for some time after their brokers have confirmed them (lock_rules.py). The offsets of its queues
and parking lots are committed again if a killed broker has forgotten them.

An administrator locks a group's queues so that no query starts to read them while the group is changed. A broker does not report who holds
a lock. Only a lock request shows whether a queue is locked, and only the members' reports (running_info.py) show which client holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orderedmq.broker import PROGRESS_INTERVAL, Progress
from orderedmq.errors import LockError, OrderedMQError, TopicError, in_use
from orderedmq.model import MessageQueue, is_parked
from orderedmq.ownership.lock import HOLDER_TRUST, LOCK_LIFE, LockToken
from orderedmq.parking import queue_token
from orderedmq.rocketmq.group import lock_rules
from orderedmq.rocketmq.group.lock_rules import lock_name
from orderedmq.rocketmq.group.membership import Directory
from orderedmq.rocketmq.group.offsets import GROUP_TIMEOUT, GroupOffsets
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.fan_out import ask_queues, lock_queues
from orderedmq.rocketmq.wire import group_requests


@dataclass
class HeldLock:
    """A lock of a client of this process. ``confirmed``: when its last successful request was sent (monotonic seconds)."""

    token: LockToken
    confirmed: float
    #: The group's offsets in the queue and its parking lot, as last committed, reset or read under this lock.
    committed: dict[MessageQueue, int] = field(default_factory=dict)
    #: When a group's offset was last moved under this lock (monotonic seconds).
    moved: float = field(default_factory=time.monotonic)
    #: When the queue's fence was last found below the token's epoch (monotonic seconds).
    fence_read: float = float("-inf")

    def trusted(self, now: float, trust: float = HOLDER_TRUST) -> bool:
        """Return whether the broker cannot have granted the queue to another client since ``confirmed`` (ProcessQueue.isLockExpired)."""
        return now - self.confirmed <= trust

    @property
    def name(self) -> str:
        """The client id under which the broker knows the lock."""
        return lock_name(self.token.client_id, only_run=self.token.only_run)


class HeldLocks:
    """All `HeldLock` objects of this process. Thread-safe.

    Two clients of a process may both believe that they hold a queue, and only the broker knows which of them does. So a queue can
    have one `HeldLock` per client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_queue: dict[tuple[str, MessageQueue], dict[str, HeldLock]] = {}
        #: Held, by broker name, while locks are renewed or given back: a broker grants a free queue to a renewal that arrives after the
        #: unlock. There is one for each broker, so that a broker that is away delays only its own locks.
        self.requests: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def put(self, lock: HeldLock) -> None:
        token = lock.token
        with self._lock:
            self._by_queue.setdefault((token.group, token.queue), {})[token.client_id] = lock

    def get(self, group: str, queue: MessageQueue, client_id: str) -> HeldLock | None:
        with self._lock:
            return self._by_queue.get((group, queue), {}).get(client_id)

    def replace(self, tokens: Mapping[LockToken, LockToken]) -> None:
        """Replace tokens of locks that are held and stay held, each by a token of the same client."""
        for former, token in tokens.items():
            lock = self.own(former)
            if lock is not None:
                self.put(HeldLock(token, lock.confirmed, lock.committed))

    def own(self, token: LockToken) -> HeldLock | None:
        """Return a token's lock; None if the lock was given back or lost, or belongs to another process."""
        lock = self.get(token.group, token.queue, token.client_id)
        return lock if lock is not None and lock.token.epoch == token.epoch else None

    def must_read_fence(self, token: LockToken, now: float, max_age: float) -> bool:
        """Return whether the token's fence must be read because it was not read within the last ``max_age`` seconds."""
        lock = self.own(token)
        return lock is None or now - lock.fence_read >= max_age

    def record_fences_read(self, tokens: Iterable[LockToken], fenced: Iterable[LockToken], now: float) -> None:
        """Record that these tokens' fences were read at ``now``. Fences of tokens in ``fenced`` will be read again at each check."""
        stale = set(fenced)
        for token in tokens:
            lock = self.own(token)
            if lock is not None:
                lock.fence_read = float("-inf") if token in stale else now

    def forget(self, token: LockToken) -> None:
        with self._lock:
            by_client = self._by_queue.get((token.group, token.queue), {})
            if token.client_id in by_client and by_client[token.client_id].token.epoch == token.epoch:
                del by_client[token.client_id]
            if not by_client:
                self._by_queue.pop((token.group, token.queue), None)

    def forget_offsets(self, group: str) -> None:
        """Forget the last committed offsets of a group, because somebody else has changed the offsets at the broker."""
        with self._lock:
            for (name, _), by_client in self._by_queue.items():
                for lock in by_client.values() if name == group else ():
                    lock.committed.clear()

    def of_client(self, client_id: str) -> list[HeldLock]:
        with self._lock:
            return [by_client[client_id] for by_client in self._by_queue.values() if client_id in by_client]

    def queues(self, group: str) -> set[MessageQueue]:
        with self._lock:
            return {queue for name, queue in self._by_queue if name == group}

    def of_queue(self, group: str, queue: MessageQueue) -> list[HeldLock]:
        with self._lock:
            return list(self._by_queue.get((group, queue), {}).values())

    def clients(self, group: str) -> set[str]:
        """Return the ids of this process's clients that hold locks in the group, whether they are members or not."""
        with self._lock:
            return {client_id for (name, _), by_client in self._by_queue.items() if name == group for client_id in by_client}


def by_group(tokens: Iterable[LockToken]) -> dict[str, list[LockToken]]:
    out: dict[str, list[LockToken]] = {}
    for token in tokens:
        out.setdefault(token.group, []).append(token)
    return out


def by_broker(tokens: Iterable[LockToken]) -> list[list[LockToken]]:
    """Group tokens by consumer group and broker, so that an unreachable broker delays only its own tokens."""
    out: dict[tuple[str, str], list[LockToken]] = {}
    for token in tokens:
        out.setdefault((token.group, token.queue.broker_name), []).append(token)
    return list(out.values())


class Commits:
    """Moves group offsets of queues whose locks are held. Thread-safe.

    The offsets that were last committed under a lock are kept in `HeldLock.committed`.
    """

    def __init__(self, offsets: GroupOffsets, held_locks: HeldLocks) -> None:
        self._offsets = offsets
        self._held_locks = held_locks
        # Held while offsets are written: queries and renewals both write them, and an older offset must not arrive after a newer one.
        self._committing = threading.Lock()

    def move(self, offsets: Mapping[LockToken, int]) -> None:
        """Move offsets forward; lower offsets are ignored. Raises LockError LOST if RocketMQ's own tools reset the group."""
        with self._committing:
            for group, of_group in by_group(offsets).items():
                self._move(group, {token: offsets[token] for token in of_group})

    def _move(self, group: str, offsets: Mapping[LockToken, int]) -> None:
        locks = {token: self._held_locks.own(queue_token(token)) for token in offsets}
        last = {token: lock.committed.get(token.queue) if lock is not None else None for token, lock in locks.items()}
        unknown = [token.queue for token, at in last.items() if at is None]
        at_broker = self._offsets.read(group, unknown) if unknown else {}
        moves = {}
        for token, lock in locks.items():
            at = last[token]
            if at is None:
                at = at_broker.get(token.queue)
            if at is None or offsets[token] > at:
                moves[token.queue] = offsets[token]
            elif lock is not None:
                lock.committed[token.queue] = at
        self._write(group, moves)
        for token, lock in locks.items():
            if lock is not None and token.queue in moves:
                lock.committed[token.queue] = moves[token.queue]
        self._forget_progress(group, [lock for lock in locks.values() if lock is not None])

    def _forget_progress(self, group: str, locks: Sequence[HeldLock]) -> None:
        """Forget progress that the group's offsets have passed, after micro-batches that were long enough for a task to record some."""
        now = time.monotonic()
        passed: dict[MessageQueue, Progress] = {}
        for lock in locks:
            if now - lock.moved >= PROGRESS_INTERVAL:
                of_lots = [at for queue, at in lock.committed.items() if is_parked(queue)]
                passed[lock.token.queue] = Progress(lock.committed.get(lock.token.queue, 0), *of_lots)
            lock.moved = now
        if passed:
            # What cannot be forgotten now is forgotten after the next such micro-batch.
            with contextlib.suppress(OrderedMQError):
                self._offsets.forget_progress(group, passed)

    def _write(self, group: str, moves: Mapping[MessageQueue, int], seconds: float = GROUP_TIMEOUT) -> None:
        """Write the offsets of parking lots before those of queues.

        A broker cannot set two offsets in one request. If this process is killed in between, the queue's next owner repeats the range
        of the queue. In the other order, the next owner would repeat parked messages although later messages of their keys were
        processed.
        """
        lots = {queue: at for queue, at in moves.items() if is_parked(queue)}
        for part in (lots, {queue: at for queue, at in moves.items() if queue not in lots}):
            if part:
                try:
                    self._offsets.move(group, part, self._held_locks.queues(group), seconds)
                except LockError:
                    # RocketMQ's own tools have reset the group. The offsets that were committed before must not be written again.
                    self._held_locks.forget_offsets(group)
                    raise

    def reset(self, group: str, offsets: Mapping[LockToken, int]) -> None:
        """Set offsets of one group in any direction. Raises the errors of `move`."""
        with self._committing:
            self._offsets.move(group, {token.queue: at for token, at in offsets.items()}, self._held_locks.queues(group))
            for token, at in offsets.items():
                lock = self._held_locks.own(queue_token(token))
                if lock is not None:
                    lock.committed[token.queue] = at

    def repeat(
        self,
        locks: Sequence[HeldLock],
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
        forgotten: dict[MessageQueue, int] = {}
        committed: dict[MessageQueue, tuple[int, LockToken]] = {}
        try:
            committed = {queue: (at, lock.token) for lock in locks for queue, at in lock.committed.items()}
            if committed:
                group = locks[0].token.group
                at_broker = self._offsets.read(group, list(committed), seconds)
                suspects = {lock.token for lock in doubtful}
                overtaken = [
                    token for queue, (at, token) in committed.items() if token in suspects and at_broker.get(queue, -1) > at
                ]
                forgotten = {queue: at for queue, (at, _) in committed.items() if at > at_broker.get(queue, -1)}
                # A lot without an offset may be a new lot of the same name, in which the committed offset would hide parked messages.
                forgotten = {queue: at for queue, at in forgotten.items() if at_broker.get(queue) or not is_parked(queue)}
                # Skip deleted topics, because locks at other brokers must be renewed. The next boundary finds out which messages are lost.
                # Parking lots come first, as in `_write`.
                for topic in dict.fromkeys(queue.topic for queue in sorted(forgotten, key=is_parked, reverse=True)):
                    with contextlib.suppress(TopicError):
                        self._write(group, {queue: at for queue, at in forgotten.items() if queue.topic == topic}, seconds)
        except LockError:
            return list(dict.fromkeys([*overtaken, *(committed[queue][1] for queue in forgotten)]))
        finally:
            self._committing.release()
        return list(dict.fromkeys(overtaken))


class TakenLocks:
    """Takes locks under unique names. Thread-safe."""

    def __init__(self, client: Client, directory: Directory) -> None:
        self._client = client
        self._directory = directory

    def free(self, group: str, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that are not locked."""
        name = _new_name()
        granted = self._lock(group, name, queues)
        self._unlock(group, name, granted)
        return granted

    @contextlib.contextmanager
    def hold(self, group: str, queues: Sequence[MessageQueue], force: bool) -> Iterator[list[MessageQueue]]:
        """Hold the queues' locks during the ``with`` block and yield the queues that were granted.

        Raises GroupError IN_USE if the group has a member or one of the queues is locked. With ``force``, takes the locks
        from the members instead, and does not raise even if some locks are not granted.
        """
        ids = self._directory.ids_everywhere(group)
        if not force and ids:
            raise in_use(group, self.user(group, ids, ()))
        for name in {name for client_id in ids for name in lock_rules.lock_names(client_id)}:
            self._unlock(group, name, queues)
        name = _new_name()
        granted = self._lock(group, name, queues)
        try:
            if not force and len(granted) < len(set(queues)):
                raise in_use(group, self.user(group, (), [queue for queue in queues if queue not in granted]))
            yield granted
        finally:
            self._unlock(group, name, granted)

    def _lock(self, group: str, name: str, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        granted = lock_queues(self._client, group, dict.fromkeys(queues, name), GROUP_TIMEOUT)
        return [queue for queue in dict.fromkeys(queues) if queue in granted]

    def _unlock(self, group: str, name: str, queues: Sequence[MessageQueue]) -> None:
        requests = [(of_broker[0], group_requests.unlock(group, name, of_broker)) for of_broker in _by_broker(queues)]
        ask_queues(self._client, requests, Deadline.after(GROUP_TIMEOUT))

    def user(self, group: str, ids: Sequence[str], queues: Sequence[MessageQueue]) -> str:
        """Return a text for an error that says who uses the group: the owner of one of its queues, or else a member."""
        brokers = self._directory.masters()
        for client_id in ids:
            info = self._directory.info(group, client_id, brokers, fresh=True)
            for lock in info.held if info is not None else ():
                if not queues or lock.queue in queues:
                    return f"{client_id} owns queue {lock.queue}"
        if ids:
            return f"{ids[0]} is a member"
        return (
            f"a client that is not a member owns queue {queues[0]}, and keeps it for at most {LOCK_LIFE:.0f} s if it has ended"
        )


def _new_name() -> str:
    return f"orderedmq-admin-{uuid.uuid4().hex}"


def _by_broker(queues: Sequence[MessageQueue]) -> list[list[MessageQueue]]:
    out: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        out.setdefault(queue.broker_name, []).append(queue)
    return list(out.values())
