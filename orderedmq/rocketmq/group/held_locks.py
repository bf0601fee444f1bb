"""The locks that clients of this process have, as far as the brokers confirmed it. Pure but for a mutex."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from orderedmq.core.lock import HOLDER_TRUST, LockToken
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.group.lock_rules import lock_name


@dataclass
class Holding:
    """A lock that a client of this process has. ``confirmed``: when it was last asked for with success (monotonic seconds)."""

    token: LockToken
    confirmed: float
    #: The highest offset that was committed under it; None before the first.
    committed: int | None = None
    #: When the queue's fence was last seen below the token (monotonic seconds).
    looked: float = float("-inf")

    def trusted(self, now: float, trust: float = HOLDER_TRUST) -> bool:
        """Whether nobody else can have been granted the queue since (ProcessQueue.isLockExpired)."""
        return now - self.confirmed <= trust

    @property
    def name(self) -> str:
        """The client id under which the broker knows the lock."""
        return lock_name(self.token.client_id, self.token.epoch)


class Holdings:
    """By group and queue, and then by client: two clients of a process can both believe to have a queue, the broker knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, MessageQueue], dict[str, Holding]] = {}

    def put(self, holding: Holding) -> None:
        token = holding.token
        with self._lock:
            self._found.setdefault((token.group, token.queue), {})[token.client_id] = holding

    def get(self, group: str, queue: MessageQueue, client_id: str) -> Holding | None:
        with self._lock:
            return self._found.get((group, queue), {}).get(client_id)

    def own(self, token: LockToken) -> Holding | None:
        """The holding of a token; None if it was given back or lost, or is of another process."""
        holding = self.get(token.group, token.queue, token.client_id)
        return holding if holding is not None and holding.token.epoch == token.epoch else None

    def doubtful(self, token: LockToken, now: float, believed: float) -> bool:
        """Whether the brokers are to be asked for the token's fence: it was not looked at for ``believed`` seconds."""
        held = self.own(token)
        return held is None or now - held.looked >= believed

    def looked(self, tokens: Iterable[LockToken], fenced: Iterable[LockToken], now: float) -> None:
        """The fences of these tokens were asked for at ``now``. Those that are fenced off are asked for again until they are forgotten."""
        behind = set(fenced)
        for token in tokens:
            held = self.own(token)
            if held is not None:
                held.looked = float("-inf") if token in behind else now

    def forget(self, token: LockToken) -> None:
        with self._lock:
            held = self._found.get((token.group, token.queue), {})
            if token.client_id in held and held[token.client_id].token.epoch == token.epoch:
                del held[token.client_id]
            if not held:
                self._found.pop((token.group, token.queue), None)

    def of_client(self, client_id: str) -> list[Holding]:
        with self._lock:
            return [held[client_id] for held in self._found.values() if client_id in held]

    def queues(self, group: str) -> set[MessageQueue]:
        with self._lock:
            return {queue for name, queue in self._found if name == group}

    def of_queue(self, group: str, queue: MessageQueue) -> list[Holding]:
        with self._lock:
            return list(self._found.get((group, queue), {}).values())

    def clients(self, group: str) -> set[str]:
        """Who has locks in the group, member or not."""
        with self._lock:
            return {client_id for (name, _), held in self._found.items() if name == group for client_id in held}


def by_group(tokens: Iterable[LockToken]) -> dict[str, list[LockToken]]:
    out: dict[str, list[LockToken]] = {}
    for token in tokens:
        out.setdefault(token.group, []).append(token)
    return out


def by_broker(tokens: Iterable[LockToken]) -> list[list[LockToken]]:
    """Tokens that one broker decides on, in one group: another broker that is away holds up none of them."""
    out: dict[tuple[str, str], list[LockToken]] = {}
    for token in tokens:
        out.setdefault((token.group, token.queue.broker_name), []).append(token)
    return list(out.values())
