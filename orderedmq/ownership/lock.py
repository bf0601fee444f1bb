"""Queue locks: which client owns a queue, for how long, and which owner had it before. Pure.

Rules (RocketMQ's RebalanceLockManager, org.apache.rocketmq.broker.client.rebalance), for a client that asks for a lock: a free lock
is granted, the client's own lock is renewed, another client's lock is refused until it expires, and an expired lock is taken over.
The constants are RocketMQ's: a lock lives 60 s at the broker, is renewed every 20 s, and its holder trusts it for 30 s. In addition:

- ``renew`` never grants a free queue: an owner that lost a queue must enter it again, at the group's offset.
- Every grant has an epoch, unique in the broker. A change under another epoch than the lock's is refused (``is_current``).
- Age is measured by a monotonic clock that all processes of a machine share. A lock from an earlier boot is expired.
- An owner that is known to be dead holds no lock. If an owner stops while a task may still be running, its lock *lingers*: it
  outlives the owner.
- Lineage: a lock that was given back remembers its last owner and the epoch at which that owner's unbroken tenure began. A reset of
  the group's offset in the queue (a seek, an explicit start, an accepted loss of the queue's end) ends the tenure.
- If a queue is deleted while it is owned, its lock is *orphaned*: its owner can still end the batch in flight, which no other owner has
  read, until the owner gives the queue back. For everyone else, the queue is free.

The clock, the liveness of a client and the next epoch are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from orderedmq.model import MessageQueue

#: In seconds. RocketMQ's names of the constants, in this order: rebalance.lockMaxLiveTime at the broker, lockInterval and
#: lockMaxLiveTime at the client, and unlockDelayTimeMills.
LOCK_LIFE: Final = 60.0
RENEW_INTERVAL: Final = 20.0
HOLDER_TRUST: Final = 30.0
UNLOCK_DELAY: Final = 20.0


@dataclass(frozen=True)
class Instant:
    """A moment on one machine's monotonic clock, in seconds. The clock begins again at each boot."""

    boot_id: str
    seconds: float

    def since(self, earlier: Instant) -> float:
        """Return the seconds from ``earlier`` to this moment, infinity if the machine was booted in between."""
        return self.seconds - earlier.seconds if self.boot_id == earlier.boot_id else float("inf")


@dataclass(frozen=True)
class ClientIdentity:
    """The identity of a client of a broker.

    ``owner`` identifies the query and stays the same across restarts. ``client_id`` identifies this process. ``name`` is a label for
    people.
    """

    owner: str
    client_id: str
    name: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LockToken:
    """The proof of a granted lock, passed with every change. ``tenure``: the epoch at which the owner's unbroken tenure began.

    The other fields are for RocketMQ's brokers, which keep no lineage (rocketmq/group/lock_rules.py). ``only_run``: whether the broker
    has the lock under the query's name, not the client's. ``reset``: the epoch of the queue's last reset, which no earlier grant
    exceeds; 0 before the first reset.
    """

    group: str
    queue: MessageQueue
    owner: str
    client_id: str
    epoch: int
    tenure: int
    only_run: bool = False
    reset: int = 0


@dataclass(frozen=True)
class Refusal:
    """The reason why a lock was not granted. ``alive``: whether the holder is alive, None if the broker cannot tell.

    ``remaining``: seconds until the holder's lock expires. ``owner`` is empty if no client reports that it holds the queue. In that case
    ``client_id`` names the group's other members, if there are any. ``unsure``: the queue may be free, but the broker would not know
    its holder for some seconds. So it is worth asking again, however long this client has waited.
    """

    queue: MessageQueue
    owner: str
    client_id: str
    alive: bool | None
    lingering: bool
    remaining: float
    unsure: bool = False

    @property
    def holder(self) -> str:
        """The name of the queue's holder, for error messages."""
        if self.owner:
            return f"query {self.owner} ({self.client_id})"
        if self.client_id:
            return f"an unidentified client: another member of the group ({self.client_id}), or a client that has exited"
        return "a client that is not a member of the group, because it has exited without giving its locks back"


@dataclass(frozen=True)
class QueueLock:
    """The lock of one (group, queue) at the broker.

    ``owner`` is kept when the lock is given back (lineage). A seek clears it. ``orphaned``: the queue was deleted while the lock was held.
    """

    owner: str
    client_id: str
    epoch: int
    tenure: int
    held: bool
    renewed: Instant
    life: float = LOCK_LIFE
    lingering: bool = False
    orphaned: bool = False

    def age(self, now: Instant) -> float:
        """Return the seconds since the last grant or renewal, infinity if the machine was booted in between."""
        return now.since(self.renewed)

    def expired(self, now: Instant) -> bool:
        return self.age(now) > self.life

    def remaining(self, now: Instant) -> float:
        return max(0.0, self.life - self.age(now)) if self.held else 0.0


def grant(
    lock: QueueLock | None,
    client: ClientIdentity,
    now: Instant,
    *,
    next_epoch: int,
    alive: Callable[[str], bool],
    life: float = LOCK_LIFE,
) -> QueueLock | None:
    """Return the lock granted to ``client``, or None if it is refused.

    ``alive(client_id)`` says whether that process is alive. It is called only if the result depends on it.
    """
    if lock is not None and lock.orphaned:
        lock = None
    if lock is not None and lock.held and not lock.expired(now):
        if lock.client_id == client.client_id and not lock.lingering:
            return replace(lock, renewed=now, life=life)
        # A lingering lock outlives its process, but does not stop its own query: the new epoch fences off that query's old tasks.
        freed_by_death = not lock.lingering or lock.owner == client.owner
        if not freed_by_death or alive(lock.client_id):
            return None
    unbroken = lock is not None and lock.owner == client.owner
    return QueueLock(
        owner=client.owner,
        client_id=client.client_id,
        epoch=next_epoch,
        tenure=lock.tenure if lock is not None and unbroken else next_epoch,
        held=True,
        renewed=now,
        life=life,
    )


def refusal(lock: QueueLock, queue: MessageQueue, now: Instant, alive: bool | None) -> Refusal:
    return Refusal(queue, lock.owner, lock.client_id, alive, lock.lingering, lock.remaining(now))


def token_of(lock: QueueLock, group: str, queue: MessageQueue) -> LockToken:
    return LockToken(group, queue, lock.owner, lock.client_id, lock.epoch, lock.tenure)


def is_current(lock: QueueLock | None, token: LockToken) -> bool:
    """Whether the lock still has the token's epoch (the fence).

    After an unlock, the lock keeps its epoch until the next grant, seek or release.
    """
    return lock is not None and lock.epoch == token.epoch


def is_held(lock: QueueLock | None, token: LockToken) -> bool:
    """Whether the queue is still held under this token."""
    return lock is not None and lock.held and lock.epoch == token.epoch


def renew(lock: QueueLock | None, token: LockToken, now: Instant) -> QueueLock | None:
    """Return the renewed lock, or None if it is lost.

    An expired lock that no other client took still belongs to its holder, as the unchanged epoch proves.
    """
    if lock is None or not is_held(lock, token) or lock.lingering:
        return None
    return replace(lock, renewed=now)


def unlock(lock: QueueLock | None, token: LockToken, now: Instant, linger: float = 0.0) -> QueueLock | None:
    """Return the lock after it is given back. With ``linger``, it is still held, for at most that many seconds.

    Return None if the token does not hold the lock.
    """
    if lock is None or not is_held(lock, token):
        return None
    if linger > 0:
        return replace(lock, renewed=now, life=min(lock.remaining(now), linger), lingering=True)
    return replace(lock, held=False, lingering=False)


def sought(next_epoch: int, now: Instant) -> QueueLock:
    """Return the lock after a seek set the group's offset. It is free and has no lineage, and all earlier tokens are stale."""
    return QueueLock("", "", next_epoch, next_epoch, held=False, renewed=now)


def restarted(lock: QueueLock, next_epoch: int) -> QueueLock:
    """Return the lock after its owner reset the group's offset. A new tenure begins, and all earlier tokens are stale."""
    return replace(lock, epoch=next_epoch, tenure=next_epoch)


def released(lock: QueueLock, next_epoch: int) -> QueueLock:
    """Return the lock after an operator released it. It is free, and its former holder's token is stale.

    The lineage is kept, because no other owner had the queue.
    """
    return replace(lock, epoch=next_epoch, held=False, lingering=False)
