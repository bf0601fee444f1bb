"""The members of groups as this process counts them, also while a restarted broker does not know all of them.

A broker that was restarted has forgotten members and locks, and may have another address. It knows a member again after the member's
next heartbeat, which goes to the old address for as long as the member does not know the new one. Until then the broker would grant
the member's queues to others, although the member trusts its locks for ``trust`` seconds. So for ``trust`` seconds after a client of
this process had to rejoin, the members that were listed before still count, and locks that one of them may hold are not requested.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.rocketmq.group.lock_rules import is_ours, query_of
from orderedmq.rocketmq.group.membership import Directory, MemberClient

#: Seconds between two heartbeats of a client that waits for a broker.
_POLL: Final = 0.5


class Roster:
    """This process's clients by client id, and the members of their groups. Thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self.clients: dict[str, MemberClient] = {}
        self._directory = directory
        #: The members of each group by client id, with the time of the first list without the member; infinity if it is listed.
        self._listed: dict[str, dict[str, float]] = {}
        #: When a broker last listed a group without one of this process's clients that is a member of it.
        self._unlisted: dict[str, float] = {}

    def send_heartbeat(
        self, client: MemberClient, group: str, subscription: Subscription, name: str | None, deadline: float
    ) -> None:
        """Send a heartbeat; retry until the deadline if no broker can be reached. Raises the errors of `MemberClient.send_heartbeat`."""
        while True:
            try:
                return client.send_heartbeat(group, subscription, self._directory, name)
            except RocketMQUnavailableError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL)

    def members(self, group: str, trust: float, patience: float) -> list[Member]:
        """Return the group's members, sorted by client id. Waits up to ``patience`` seconds for brokers that are away."""
        deadline = time.monotonic() + patience
        while True:
            own: dict[str, Member] = {}
            brokers: list[str] = []
            topics: list[str] = []
            for client_id, client in list(self.clients.items()):
                member = client.in_group(group)
                if member is not None:
                    own[client_id] = member
                    brokers, topics = client.brokers(group), client.topics(group)
            try:
                ids = self.ids(group, brokers, trust) if brokers else self._directory.ids_everywhere(group)
                break
            except RocketMQUnavailableError:
                # Take the brokers from the clients again, because the thread that sends heartbeats may find one at another address.
                if time.monotonic() >= deadline:
                    raise
        brokers = brokers or self._directory.masters()
        like = next(iter(own.values())).subscription if own else None
        others = self._directory.members(group, [member_id for member_id in ids if member_id not in own], brokers, like, topics)
        members = {member.client_id: member for member in others} | {
            member_id: own[member_id] for member_id in ids if member_id in own
        }
        return [members[client_id] for client_id in sorted(members)]

    def ids(self, group: str, brokers: Sequence[str], trust: float) -> list[str]:
        """Return the client ids of a group's members, including members that a broker may have forgotten.

        A member that is no longer listed counts for ``trust`` more seconds, unless another run of its query is listed. Raises the errors
        of `Directory.ids`.
        """
        ids = self._directory.ids(group, brokers)
        now = time.monotonic()
        listed = dict.fromkeys(ids, float("inf"))
        if any(
            client_id not in listed and client.in_group(group) is not None for client_id, client in list(self.clients.items())
        ):
            self._unlisted[group] = now
        if self._rejoins(group, trust):
            queries = {query_of(member_id) for member_id in ids}
            for member_id, missed in self._listed.get(group, {}).items():
                # The time counts from the first list without the member, even if a broker restarts again, because the member does not
                # trust its locks for longer.
                if query_of(member_id) not in queries and now - (since := min(missed, now)) < trust:
                    listed[member_id] = since
        self._listed[group] = listed
        return sorted(listed)

    def may_lack_members(self, group: str, mine: str, trust: float) -> bool:
        """Return whether owners of queues may be missing in `ids` because a broker has forgotten them.

        For ``trust`` seconds after the client ``mine`` joined, it may not know members that a restarted broker had before.
        """
        client = self.clients.get(mine)
        return (client is not None and client.joined_within(group, trust)) or self._rejoins(group, trust)

    def forgotten_locks(
        self, group: str, queues: Sequence[MessageQueue], mine: str, ids: Sequence[str], brokers: Sequence[str], trust: float
    ) -> set[MessageQueue]:
        """Return which of ``queues`` other members report as theirs, if a broker may have forgotten their locks.

        A member that does not answer may hold any of them.
        """
        if not self._rejoins(group, trust):
            return set()
        locked: set[MessageQueue] = set()
        for other in (lock for lock in ids if query_of(lock) != query_of(mine)):
            info = self._directory.info(group, other, brokers, fresh=is_ours(other))
            if info is None:
                return set(queues)
            locked.update(lock.queue for lock in info.held)
        return locked.intersection(queues)

    def _rejoins(self, group: str, trust: float) -> bool:
        """Return whether a broker lost a client of this process in the last ``trust`` seconds, and may thus have forgotten all members."""
        return time.monotonic() - self._unlisted.get(group, float("-inf")) < trust or any(
            client.in_group(group) is not None and client.rejoined_within(trust) for client in list(self.clients.values())
        )
