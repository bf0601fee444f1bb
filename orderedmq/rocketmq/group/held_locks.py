"""The queue locks of this process's clients, and when their brokers last confirmed them. Pure apart from a mutex."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import HOLDER_TRUST, LockToken
from orderedmq.rocketmq.group.lock_rules import lock_name


@dataclass
class HeldLock:
    """A lock of a client of this process. ``confirmed``: when its last successful request was sent (monotonic seconds)."""

    token: LockToken
    confirmed: float
    #: The group's offsets in the queue and its parking lot, as last committed, reset or read under this lock.
    committed: dict[MessageQueue, int] = field(default_factory=dict)
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
        self._found: dict[tuple[str, MessageQueue], dict[str, HeldLock]] = {}
        #: Held, by broker name, while locks are renewed or given back: a broker grants a free queue to a renewal that arrives after the
        #: unlock. There is one for each broker, so that a broker that is away delays only its own locks.
        self.requests: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def put(self, lock: HeldLock) -> None:
        token = lock.token
        with self._lock:
            self._found.setdefault((token.group, token.queue), {})[token.client_id] = lock

    def get(self, group: str, queue: MessageQueue, client_id: str) -> HeldLock | None:
        with self._lock:
            return self._found.get((group, queue), {}).get(client_id)

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
        held = self.own(token)
        return held is None or now - held.fence_read >= max_age

    def record_fences_read(self, tokens: Iterable[LockToken], fenced: Iterable[LockToken], now: float) -> None:
        """Record that these tokens' fences were read at ``now``. Fences of tokens in ``fenced`` will be read again at each check."""
        behind = set(fenced)
        for token in tokens:
            held = self.own(token)
            if held is not None:
                held.fence_read = float("-inf") if token in behind else now

    def forget(self, token: LockToken) -> None:
        with self._lock:
            held = self._found.get((token.group, token.queue), {})
            if token.client_id in held and held[token.client_id].token.epoch == token.epoch:
                del held[token.client_id]
            if not held:
                self._found.pop((token.group, token.queue), None)

    def forget_offsets(self, group: str) -> None:
        """Forget the last committed offsets of a group, because somebody else has changed the offsets at the broker."""
        with self._lock:
            for (name, _), by_client in self._found.items():
                for lock in by_client.values() if name == group else ():
                    lock.committed.clear()

    def of_client(self, client_id: str) -> list[HeldLock]:
        with self._lock:
            return [held[client_id] for held in self._found.values() if client_id in held]

    def queues(self, group: str) -> set[MessageQueue]:
        with self._lock:
            return {queue for name, queue in self._found if name == group}

    def of_queue(self, group: str, queue: MessageQueue) -> list[HeldLock]:
        with self._lock:
            return list(self._found.get((group, queue), {}).values())

    def clients(self, group: str) -> set[str]:
        """Return the ids of this process's clients that hold locks in the group, whether they are members or not."""
        with self._lock:
            return {client_id for (name, _), held in self._found.items() if name == group for client_id in held}


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
