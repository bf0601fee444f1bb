"""Rules that give RocketMQ's queue locks trust, epochs and fences. Sends no requests.

The broker's lock table (RebalanceLockManager) stores a client id and a time for each (group, queue). It stores no epoch and no earlier
owners, and a renewal also grants a queue that is free. So these additional rules apply:

- *Trust*: a lock is trusted for HOLDER_TRUST (30 s, half of its life) from when its last successful request was sent. After that,
  another client may have held the queue, so nothing is done under the lock until it is renewed. It is lost, although the broker grants it
  again, if its fence was raised, or if the group's offset is above the last one that its holder committed (a Java consumer's doing).
- *Epoch*: the time of the grant in milliseconds since 1970, raised above all earlier epochs of this process and of the queue, and then 19
  bits that identify the query and one that is 0. Clocks differ and are corrected, so the queue's *fence* counts and not the time.
- *Fence*: a number stored next to the group's offset in the queue (offsets.py). A token whose epoch is not above the fence is stale.
  Grants set the fence to their epoch minus 1, so it is odd while the queue is owned. Unlocks, seeks and forced releases raise it to that
  epoch or another even number. Java consumers do not raise it. A killed broker forgets changes of its last 5 s, which the next renewal
  makes again.
- *Restart of a broker*: it forgets locks and members. So for HOLDER_TRUST after a client had to rejoin, or has joined, it does not ask for
  a queue that another query owns according to the fence, nor for one that a member reports (roster.py). A living owner has returned by then.
- *Tenure*: the broker stores no earlier owners, so each grant stores the epoch at which the owner's tenure began next to the fence. A
  restarted query continues its tenure if this number is the one in its checkpoint. Java consumers do not change it, so the group's offset
  must not be above the checkpoint's either (Owner.unbroken).
- *Reset*: another number stored next to the offset is the epoch of the queue's last reset. A checkpoint whose tenure began before it is
  older. It is also part of the identity of a dead letter.
- *Name*: the client id of a lock may be any text, not only a member's id. A run uses its query's name while no other run of the
  query is a member, so a restarted query is granted its own locks immediately. Otherwise it uses its own client id, and the runs
  exclude each other like different queries. The token says which of the two names its lock has.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Final

from orderedmq.conditions import GroupCondition
from orderedmq.errors import GroupError, LockError, lost
from orderedmq.model import check_group
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.rocketmq.wire.registers import OWNER_BITS

#: Prefix of this package's client ids. The last part is unique to a run: ``orderedmq-<query>@<host>-<pid>-<random>``.
PREFIX: Final = "orderedmq-"
#: Maximum characters of a group's name. The name of its retry topic has seven more (%RETRY%), and a topic's name has at most 127.
MAX_GROUP: Final = 120
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_HOST = re.compile(r"[^A-Za-z0-9.-]")


def check_name(group: str) -> None:
    """Check a group's name. Raises GroupError BAD_NAME, also if the name is longer than 5.x accepts (Validators.checkGroup)."""
    check_group(group)
    if len(group) > MAX_GROUP:
        raise GroupError(
            GroupCondition.BAD_NAME,
            f"consumer group {group!r} has {len(group)} characters, but RocketMQ allows {MAX_GROUP} at most",
        )


def query_name(owner: str) -> str:
    """Return the name of a query's locks, which is the same on every machine and after each restart. An unusual ``owner`` is hashed."""
    plain = (
        owner
        if _PLAIN.fullmatch(owner)
        else hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
    return PREFIX + plain


def new_client(owner: str) -> ClientIdentity:
    """Return a client for one run of a query, with a unique client id."""
    host = _NO_HOST.sub("-", socket.gethostname())[:64]
    return ClientIdentity(owner, f"{query_name(owner)}@{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def is_ours(client_id: str) -> bool:
    """Return whether a client id belongs to a query of this package. Other clients are consumers in Java and other languages."""
    return client_id.startswith(PREFIX) and "@" in client_id


def query_of(client_id: str) -> str:
    """Return the `query_name` with which a client id begins. The id of a client in another language is returned unchanged."""
    return client_id.partition("@")[0] if is_ours(client_id) else client_id


def is_only_run(client_id: str, members: Iterable[str]) -> bool:
    """Return whether no other run of the same query is among the members."""
    return all(other == client_id or query_of(other) != query_of(client_id) for other in members)


def lock_name(client_id: str, *, only_run: bool) -> str:
    """Return the name under which the broker stores a client's lock. ``only_run``: see `is_only_run`."""
    return query_of(client_id) if only_run else client_id


def lock_names(client_id: str) -> tuple[str, ...]:
    """Return every name under which a member may hold locks."""
    return tuple(dict.fromkeys((query_of(client_id), client_id)))


def _owner_bits(client_id: str) -> int:
    """Return an even number that identifies the client's query, and is the same on every machine."""
    digest = hashlib.blake2b(query_of(client_id).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % (1 << OWNER_BITS) & ~1


def _time_above(number: int) -> int:
    """Return the time in milliseconds since 1970, or more if that is needed for an epoch above ``number``."""
    return max((number >> OWNER_BITS) + 1, time.time_ns() // 1_000_000)


def fence_of(epoch: int) -> int:
    """Return the fence of a queue that is owned under this epoch."""
    return epoch - 1


def lingering(epoch: int) -> int:
    """Return the fence of a queue that is given back when its lock expires: tasks may still work under this epoch."""
    return epoch - 2


def last_epoch(fence: int) -> int:
    """Return the epoch of the last grant that this fence shows, also if the lock was given back; a little less while it lingers."""
    return fence + (fence & 1)


def is_owned_by_other(fence: int, client_id: str) -> bool:
    """Return whether the last grant went to another query than the client's, and was not given back."""
    return fence & 1 == 1 and last_epoch(fence) % (1 << OWNER_BITS) != _owner_bits(client_id)


def freed(fence: int) -> int:
    """Return a fence that makes all tokens so far stale, also if the broker has forgotten the fence of the newest grant."""
    return _time_above(last_epoch(fence)) << OWNER_BITS


class Epochs:
    """Numbers that always grow within a process, and across processes as far as their clocks agree. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self, fence: int, client_id: str) -> int:
        """Return an epoch for a grant to the client. It is above every earlier one, also above that of the grant that set ``fence``."""
        with self._lock:
            self._last = _time_above(max(self._last, last_epoch(fence))) << OWNER_BITS | _owner_bits(client_id)
            return self._last


def lost_lock(token: LockToken, doing: str, life: float) -> LockError:
    """Return the error for a lost lock.

    ``doing``: the action that came too late, in the past tense ("3 of its messages were parked"). ``life``: seconds for which a lock
    is trusted.
    """
    trusted = f"a lock is trusted ({life:.0f} s)"
    return lost(token.group, token.queue, token.epoch, f"before {doing}", trusted, "at the group's offset")


def not_created(group: str) -> GroupError:
    """Return the error for a group that does not exist at brokers that do not create groups on demand."""
    return GroupError(
        GroupCondition.MISSING,
        f"consumer group {group!r} does not exist, and the brokers do not create it on demand (autoCreateSubscriptionGroup=false). Create "
        f"it (mqadmin updateSubGroup -c CLUSTER -g {group}), or use a group that exists",
    )
