"""What a broker's answer to a lock request means for a token: rules over RocketMQ's lock table, which knows less than ours. Pure.

The table (RebalanceLockManager) has a client id and a time for each (group, queue), and nothing else: no epoch, no lineage, no way to
renew without asking for a free queue. So on our side:

- *Trust*: a success more than HOLDER_TRUST (30 s) after the last one is a new grant, whoever had the queue in between: to ``lock`` it
  is a new epoch, to ``renew`` a loss. Time counts from before the request, and HOLDER_TRUST is half of what a lock lives.
- *Epoch*: microseconds since 1970 when the lock was granted, made to grow; above the queue's *fence*.
- *Fence*: a number kept beside the group's offset of the queue (offsets.py). Tokens up to it are stale. Each grant, each unlock, a
  seek and a forced release raise it. Java consumers do not, and a broker that is killed forgets the last 5 s: a help, no proof.
- *Tenure*: always the token's own epoch. The broker keeps no lineage, so a checkpoint never finds the tenure that it logged: a restarted
  query enters each queue at the group's offset, and repeats nothing of a logged batch (Owner.unbroken).
- *Name*: a lock has no connection to who is a member, so its client id is any text. It is the query's as long as no other run of the
  same query is a member, so that a restart is granted its own locks at once; else the run's own client id, and the runs exclude each
  other as strangers do. An epoch is even in the first case, odd in the second, so that every task knows under which name to ask.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Final

from orderedmq.core.lock import Client, LockToken
from orderedmq.errors import GroupError, LockError
from orderedmq.model import check_group

#: Client ids of ours begin so, and end with what tells one run from another: ``orderedmq-<query>@<host>-<pid>-<random>``.
PREFIX: Final = "orderedmq-"
#: Characters of a group's name: that of its retry topic has seven more, of 127.
MAX_GROUP: Final = 120
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_HOST = re.compile(r"[^A-Za-z0-9.-]")


def check_name(group: str) -> None:
    """Raises GroupError BAD_NAME. A broker of 5.x makes no group with a longer name (Validators.checkGroup, TopicValidator)."""
    check_group(group)
    if len(group) > MAX_GROUP:
        raise GroupError(
            "BAD_NAME", f"consumer group {group!r} has {len(group)} characters, RocketMQ allows {MAX_GROUP} at most"
        )


def query_name(owner: str) -> str:
    """The name of a query's locks: the same on each machine and after each restart. A text that may be anything is hashed."""
    plain = (
        owner
        if _PLAIN.fullmatch(owner)
        else hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )
    return PREFIX + plain


def new_client(owner: str) -> Client:
    """One run of a query."""
    host = _NO_HOST.sub("-", socket.gethostname())[:64]
    return Client(owner, f"{query_name(owner)}@{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def is_ours(client_id: str) -> bool:
    """Whether a member is a query of this package; others are consumers in Java and other languages."""
    return client_id.startswith(PREFIX) and "@" in client_id


def query_of(client_id: str) -> str:
    """The `query_name` that a client id begins with; of a stranger, all of it."""
    return client_id.partition("@")[0] if is_ours(client_id) else client_id


def alone(client_id: str, members: Iterable[str]) -> bool:
    """Whether no other run of the same query is among the members."""
    return all(other == client_id or query_of(other) != query_of(client_id) for other in members)


def lock_name(client_id: str, epoch: int) -> str:
    """The client id under which a token's lock is known to the broker."""
    return client_id if epoch % 2 else query_of(client_id)


def lock_names(client_id: str) -> tuple[str, ...]:
    """Every name under which a member may have locks."""
    return tuple(dict.fromkeys((query_of(client_id), client_id)))


class Epochs:
    """Numbers that grow, in one process by all means, between processes as their clocks agree. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self, fence: int, *, alone: bool) -> int:
        """Above ``fence`` and all that were drawn here; even when ``alone``, see `lock_name`."""
        with self._lock:
            least = max(self._last, fence, time.time_ns() // 1000) + 1
            self._last = next(number for number in itertools.count(least) if (number % 2 == 0) == alone)
            return self._last


def lost(token: LockToken, doing: str, life: float) -> LockError:
    """``life``: seconds for which a lock is trusted."""
    return LockError(
        "LOST",
        f"group {token.group!r} lost queue {token.queue} (epoch {token.epoch}) before {doing}: this query was paused or cut off for longer "
        f"than it may trust a lock ({life:.0f} s), gave the queue back, or it was released or the group reset; restart it, it goes on at the "
        "group's offset",
    )
