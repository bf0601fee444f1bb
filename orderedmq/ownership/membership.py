"""Members of a consumer group: which clients count as members, and whether their subscriptions agree.

Rules: a client becomes a member by its heartbeat, which has its subscription. It remains a member until its last heartbeat is as old
as a lock's life (its queue locks are also free by then), until it leaves, or until its process is known to be dead. All members
compute the same division of the queues, so they must have the same subscription. A client whose subscription differs from an earlier
member's is refused. (RocketMQ also requires this "subscription consistency", but does not check it.)

Pure: the clock and the liveness of a client are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final

from orderedmq.conditions import GroupCondition
from orderedmq.errors import FORMER_RUN, GroupError
from orderedmq.ownership.lock import LOCK_LIFE, ClientIdentity, Instant
from orderedmq.rows.filters import ALL

#: Seconds that a membership lasts after a heartbeat, if the broker has no other limit. A heartbeat is sent with each renewal of the
#: locks (RENEW_INTERVAL).
MEMBER_LIFE: Final = LOCK_LIFE
#: The format of what members of a group tell each other, and of the division that they compute.
FORMAT: Final = 1


@dataclass(frozen=True)
class Subscription:
    """The settings on which the members of a group must agree.

    ``strategy``: None for an exclusive group, where one member has all queues. ``filter`` is canonical. ``parking_lot``: whether the
    member reads the parking lots of its queues. All members must agree, because a member that does not read a queue's parked messages
    must not get the queue. ``format``: FORMAT of the member's version.
    """

    assignment: str
    topics: str
    strategy: str | None = None
    filter: str = ALL
    filter_type: str = "TAG"
    parking_lot: bool = False
    format: int = FORMAT

    def differences(self, other: Subscription) -> list[str]:
        """Return a text for each difference, with this value before the other's: ``assignment 'shared', not 'exclusive'``."""
        mine, theirs = asdict(self), asdict(other)
        if self.format != other.format:
            # The other fields of a newer format may be unknown.
            return [_difference("format", self.format, other.format)]
        return [_difference(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]


def _difference(name: str, mine: object, theirs: object) -> str:
    if name == "format":
        return f"group format {mine} of its version of orderedmq, not {theirs}"
    if name != "parking_lot":
        return f"{name} {mine!r}, not {theirs!r}"
    # Name the option, because it is what a user knows.
    return f"parkingLot={str(mine).lower()}, not {str(theirs).lower()}"


@dataclass(frozen=True)
class Member:
    """A client in a group. ``joined`` orders members by their first heartbeat. ``name`` is a label for people."""

    owner: str
    client_id: str
    subscription: Subscription
    joined: int
    renewed: Instant
    life: float = MEMBER_LIFE
    name: str | None = None

    def age(self, now: Instant) -> float:
        """Return the seconds since the last heartbeat, infinity if the machine was booted in between."""
        return now.since(self.renewed)

    def expired(self, now: Instant) -> bool:
        return self.age(now) > self.life


def present(members: Iterable[Member], now: Instant, alive: Callable[[str], bool]) -> list[Member]:
    """Return the members that are neither expired nor dead, sorted by client id."""
    return sorted(
        (member for member in members if not member.expired(now) and alive(member.client_id)),
        key=lambda member: member.client_id,
    )


def refuse_second_run(group: str, client: ClientIdentity, members: Iterable[Member]) -> None:
    """Refuse ``client`` while another run of its query is a member. Raises GroupError IN_USE.

    A broker that keeps lineage sees both runs as one owner. A queue that moves from one run to the other keeps its tenure, and the
    runs would resume from different positions of one checkpoint. So the second run must wait until the first has left, is dead, or
    has been silent for the lifetime of a member.
    """
    for other in members:
        if other.owner == client.owner and other.client_id != client.client_id:
            raise GroupError(
                GroupCondition.IN_USE,
                f"another run of this same query is a member of group {group!r} ({other.client_id}): {FORMER_RUN} it has been silent for "
                f"{other.life:.0f} s. Nothing is lost until then",
            )


def refuse(group: str, client: ClientIdentity, members: Iterable[Member]) -> None:
    """Refuse ``client`` if an earlier member has another subscription. Raises GroupError DISAGREES.

    A client that is not a member is not refused. Two exclusive members are not compared, because the queue locks exclude one of
    them if they read the same topics.
    """
    by_client = {member.client_id: member for member in members}
    mine = by_client.get(client.client_id)
    if mine is None:
        return
    for other in sorted(by_client.values(), key=lambda member: member.joined):
        if other.joined >= mine.joined:
            return
        if other.owner == mine.owner:
            # This is an earlier run of the same query, which is about to end.
            continue
        if mine.subscription.assignment == other.subscription.assignment == "exclusive":
            continue
        differences = mine.subscription.differences(other.subscription)
        if differences:
            raise GroupError(
                GroupCondition.DISAGREES,
                f"group {group!r} has a member, query {other.owner} ({other.client_id}), with another subscription: this query has "
                f"{', and '.join(differences)}. All queries of a group must have the same subscription. Stop that query, change this one, "
                "or give this one another consumerGroup",
            )
