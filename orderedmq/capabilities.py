"""What differs by nature between the kinds of brokers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Capabilities:
    """What a kind of broker can promise.

    fenced: the broker itself refuses a mutation under a stale lock epoch, and a lock's tenure outlives a restart (lineage).
    atomic_publish: a batch becomes visible, and its source's group offsets move, in one transaction.
    names_owner: a refused lock says who holds it.
    delays: a message may be delivered later.
    store_time_slack: µs by which a message of a queue may have been stored earlier than one before it. A store does not let its
        clock go back. A RocketMQ broker does, and another machine may take over: a minute is allowed for.
    """

    fenced: bool
    atomic_publish: bool
    names_owner: bool
    delays: bool
    store_time_slack: int


#: The capabilities of each kind. Option checks read them before there is a connection.
EMBEDDED: Final = Capabilities(fenced=True, atomic_publish=True, names_owner=True, delays=False, store_time_slack=0)
ROCKETMQ: Final = Capabilities(fenced=False, atomic_publish=False, names_owner=False, delays=True, store_time_slack=60_000_000)
