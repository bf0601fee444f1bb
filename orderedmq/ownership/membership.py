"""Members of a consumer group: which clients count as members, and whether their subscriptions agree.

Rules: a client becomes a member by its heartbeat, which has its subscription. It counts until its heartbeat is as old as a
lock's life (its queue locks are free by then, too), until it leaves, or until its process is known to be dead. All members
compute the same division of the queues, so they must have the same subscription: a client whose subscription differs from an
earlier member's is refused. (RocketMQ requires this "subscription consistency", too, and does not check it.)

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

#: Seconds for which a member counts after a heartbeat, if its broker has no limit of its own. A heartbeat goes with each
#: renewal of the locks (RENEW_INTERVAL).
MEMBER_LIFE: Final = LOCK_LIFE


@dataclass(frozen=True)
class Subscription:
    """What the members of a group must agree on.

    ``strategy`` None: exclusive, one member has all queues. ``filter`` is canonical. ``failures``: where messages wait that a
    listener could not process, "parkingLot", "retryTopic" or "": a member that does not read them must not get their queue.
    """

    assignment: str
    topics: str
    strategy: str | None = None
    filter: str = ALL
    filter_type: str = "TAG"
    failures: str = ""

    def differences(self, other: Subscription) -> list[str]:
        """Return a text per difference, such as ``assignment 'shared', not 'exclusive'``: this value, then the other's."""
        mine, theirs = asdict(self), asdict(other)
        return [_difference(name, mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]]


def _difference(name: str, mine: str | None, theirs: str | None) -> str:
    if name != "failures":
        return f"{name} {mine!r}, not {theirs!r}"
    # A user knows the options.
    return ", not ".join(f"{one}=true" if one else "parkingLot=false and retryTopic=false" for one in (mine, theirs))


@dataclass(frozen=True)
class Member:
    """A client in a group. ``joined`` orders members by their first heartbeat; ``room`` is its machine room, if it reports one.

    ``name`` is its name for people.
    """

    owner: str
    client_id: str
    subscription: Subscription
    joined: int
    renewed: Instant
    room: str | None = None
    life: float = MEMBER_LIFE
    name: str | None = None

    def age(self, now: Instant) -> float:
        """Return the seconds since the last heartbeat; infinite across a boot."""
        return now.since(self.renewed)

    def expired(self, now: Instant) -> bool:
        return self.age(now) > self.life


def present(members: Iterable[Member], now: Instant, alive: Callable[[str], bool]) -> list[Member]:
    """Return the members that count, sorted by client id."""
    return sorted(
        (member for member in members if not member.expired(now) and alive(member.client_id)),
        key=lambda member: member.client_id,
    )


def refuse_second_run(group: str, client: ClientIdentity, members: Iterable[Member]) -> None:
    """Raise GroupError IN_USE when another run of ``client``'s query is a member.

    A broker that keeps lineage sees both runs as one owner: a queue that moves between them keeps its tenure, and the two runs
    would resume from different positions of one checkpoint. So the second run must wait until the first has left, is dead, or
    has been silent for as long as a member lives.
    """
    for other in members:
        if other.owner == client.owner and other.client_id != client.client_id:
            raise GroupError(
                GroupCondition.IN_USE,
                f"another run of this same query is a member of group {group!r} ({other.client_id}): {FORMER_RUN} it has been silent for "
                f"{other.life:.0f} s; nothing is lost meanwhile",
            )


def refuse(group: str, client: ClientIdentity, members: Iterable[Member]) -> None:
    """Raise GroupError DISAGREES if an earlier member has another subscription than ``client``.

    Nothing is raised if ``client`` is not a member, or between two exclusive members: their locks decide.
    """
    known = {member.client_id: member for member in members}
    mine = known.get(client.client_id)
    if mine is None:
        return
    for other in sorted(known.values(), key=lambda member: member.joined):
        if other.joined >= mine.joined:
            return
        if other.owner == mine.owner:
            # An earlier run of the same query, which is about to end.
            continue
        if mine.subscription.assignment == other.subscription.assignment == "exclusive":
            continue
        differences = mine.subscription.differences(other.subscription)
        if differences:
            raise GroupError(
                GroupCondition.DISAGREES,
                f"group {group!r} has a member, query {other.owner} ({other.client_id}), with another subscription: this query has "
                f"{'; '.join(differences)}. All queries of a group must have the same; stop that query, change this one, or give it a "
                "consumerGroup of its own",
            )
