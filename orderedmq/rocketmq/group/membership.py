"""Being a member of groups, and seeing who else is one.

A member is a TCP connection to a broker (ConsumerManager, ClientChannelInfo): one that ends is no member any more, at once, also after
kill -9; one that is stopped or cut off is forgotten after 120 s. So each client has connections of its own, and says so to every broker of
its topics, each of which keeps a list of its own. All of us ask the same broker for the list, so that all divide the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orderedmq.core.lock import Client as Identity
from orderedmq.core.lock import LockToken
from orderedmq.core.membership import Member, Subscription
from orderedmq.errors import GroupError, OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.group import running_info
from orderedmq.rocketmq.group.lock_rules import is_ours
from orderedmq.rocketmq.group.offsets import soon
from orderedmq.rocketmq.group.running_info import HeldQueue, Info
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.wire import group_requests
from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from orderedmq.rocketmq.wire.request import Request

#: Seconds for a question to one broker about members.
_TIMEOUT: Final = 5.0
#: Seconds for a heartbeat to all brokers, and what one has at least.
_BEAT_TIMEOUT: Final = 3.0
_LEAST_TIMEOUT: Final = 0.5
#: Seconds for which a member's answer about itself holds, and for which none is asked for again.
_INFO_AGE: Final = 5.0
_SILENCE_AGE: Final = 30.0
#: A member that was stopped does not answer, and the broker waits 10 s for it.
_INFO_TIMEOUT: Final = 2.0

#: The locks that a client has in a group, with when they were confirmed (wall clock, seconds).
Held = Callable[[str, str], Sequence[tuple[LockToken, float]]]


@dataclass(frozen=True)
class _Membership:
    member: Member
    topics: list[TopicSubscription]
    brokers: list[str]


class Presence:
    """One client of this process: its connections, and the groups that it is a member of."""

    def __init__(self, cluster: Client, identity: Identity, held: Held) -> None:
        self.identity = identity
        self._held = held
        self._client = cluster.another(on_push=self._asked)
        #: A subscription with a higher one replaces the same of others at the broker.
        self._version = int(time.time() * 1000)
        self._groups: dict[str, _Membership] = {}
        #: Over which connection each broker was told last.
        self._told: dict[str, Connection] = {}

    def in_group(self, group: str) -> Member | None:
        known = self._groups.get(group)
        return known.member if known is not None else None

    def beat(
        self, group: str, subscription: Subscription, room: str | None, directory: Directory, name: str | None = None
    ) -> None:
        """Say to every broker of the topics that this client is a member.

        Raises GroupError DISAGREES, before anything is said, when the group has consumers in another language that read other topics, or
        any at all when this client wants all queues; GroupError MISSING where groups are not made by themselves; RocketMQUnavailableError
        when no broker can be reached.
        """
        deadline = soon(_TIMEOUT)
        names = running_info.topics_of(subscription.topics, self._client.topics(deadline))
        brokers = _masters(self._client, names, deadline)
        before = self._groups.get(group)
        if before is None or before.member.subscription != subscription:
            directory.refuse_strangers(group, subscription, names, brokers)
        now = running_info.now()
        joined = before.member.joined if before is not None else int(time.time() * 1_000_000)
        member = Member(
            self.identity.owner, self.identity.client_id, subscription, joined, now, room, running_info.MEMBER_LIFE, name
        )
        said = group_requests.heartbeat(
            self.identity.client_id,
            group,
            topics := running_info.subscriptions(group, names, subscription),
            version=self._version,
        )
        # Before it is said: others ask at once.
        self._groups[group] = _Membership(member, topics, brokers)
        sent, failed, began = 0, None, time.monotonic()
        for address in brokers:
            try:
                # Brokers that are away share the time: locks are renewed by the same thread.
                self._tell(address, said, max(began + _BEAT_TIMEOUT, soon(_LEAST_TIMEOUT)))
                sent += 1
            except RocketMQUnavailableError as error:
                failed = error
        if failed is not None and not sent:
            if before is None:
                del self._groups[group]
            else:
                self._groups[group] = before
            raise failed
        if before is None and self.identity.client_id not in directory.ids(group, brokers):
            del self._groups[group]
            raise GroupError(
                "MISSING",
                f"the brokers take no members of group {group!r}: it does not exist and they make none by themselves "
                f"(autoCreateSubscriptionGroup=false); create it (mqadmin updateSubGroup -c CLUSTER -g {group}), or use one that exists",
            )

    def also_at(self, group: str, brokers: Sequence[str]) -> None:
        """Say it now to those brokers that have come into the route since the last beat: tasks look there whether this client is a member."""
        known = self._groups.get(group)
        new = [address for address in brokers if address not in known.brokers] if known is not None else []
        if known is None or not new:
            return
        said = group_requests.heartbeat(self.identity.client_id, group, known.topics, version=self._version)
        for address in new:
            self._tell(address, said, soon(_BEAT_TIMEOUT))
        self._groups[group] = replace(known, brokers=[*known.brokers, *new])

    def _tell(self, address: str, said: Request[None], deadline: float) -> None:
        # If this one ends before the answer, what is sent again goes over another: then one heartbeat too many follows.
        self._told[address] = self._client.connection(address, deadline)
        self._client.call_address(address, said, deadline)

    def cut_off(self) -> bool:
        """Whether a broker saw this client's connection end, with which its membership there has ended."""
        brokers = {address for known in list(self._groups.values()) for address in known.brokers}
        return any(connection.closed for address, connection in list(self._told.items()) if address in brokers)

    def brokers(self, group: str) -> list[str]:
        """Where it said that it is a member."""
        known = self._groups.get(group)
        return known.brokers if known is not None else []

    def topics(self, group: str) -> list[str]:
        """What it said that it reads: names, also where its subscription is a pattern."""
        known = self._groups.get(group)
        return [one.topic for one in known.topics if not one.topic.startswith(RETRY_PREFIX)] if known is not None else []

    def leave(self) -> None:
        """Say good-bye where that is possible; the end of the connections says it, too."""
        groups, self._groups = self._groups, {}
        for group, known in groups.items():
            for address in known.brokers:
                with contextlib.suppress(OrderedMQError):
                    self._client.call_address(address, group_requests.unregister(self.identity.client_id, group), soon(3.0))
        self._client.close()

    def _asked(self, command: RemotingCommand) -> RemotingCommand | None:
        """A broker hands on what somebody asks about this member."""
        if command.code != RequestCode.GET_CONSUMER_RUNNING_INFO:
            return None
        group = command.ext.get("consumerGroup", "")
        known = self._groups.get(group)
        if known is None:
            return RemotingCommand(ResponseCode.SYSTEM_ERROR, flag=FLAG_RESPONSE, remark=f"no member of group {group} any more")
        body = running_info.encode(known.member, known.topics, self._held(self.identity.client_id, group), self._version)
        return RemotingCommand(ResponseCode.SUCCESS, flag=FLAG_RESPONSE, body=body)


class Directory:
    """Who is a member of a group, as a broker tells, and what members tell about themselves. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        #: (group, client id) → when that was asked, and the answer.
        self._known: dict[tuple[str, str], tuple[float, Info | None]] = {}

    def masters(self) -> list[str]:
        return _masters(self._client, (), soon(_TIMEOUT))

    def ids(self, group: str, brokers: Sequence[str]) -> list[str]:
        """The client ids of a group's members, sorted, as the first of the brokers tells that can be reached.

        Raises RocketMQUnavailableError when none can.
        """
        failed = None
        for address in brokers:
            try:
                found = self._client.call_address(address, group_requests.consumer_list(group), soon(_TIMEOUT / 2))
                return sorted(set(found))
            except RocketMQUnavailableError as error:
                failed = error
        if failed is not None:
            raise failed
        return []

    def everywhere(self, group: str) -> list[str]:
        """As `ids`, of all brokers together: for who does not know the group's topics."""
        found: set[str] = set()
        for address in self.masters():
            with contextlib.suppress(RocketMQUnavailableError):
                members_there = self._client.call_address(address, group_requests.consumer_list(group), soon(_TIMEOUT / 2))
                found.update(members_there)
        return sorted(found)

    def info(
        self, group: str, client_id: str, brokers: Sequence[str], *, fresh: bool = False, strict: bool = False
    ) -> Info | None:
        """What a member says; None when it says nothing that can be read. ``strict``: raises NO_PERMISSION where the account may not ask."""
        at = time.monotonic()
        known = self._known.get((group, client_id))
        if known is not None and not fresh and at - known[0] < (_INFO_AGE if known[1] is not None else _SILENCE_AGE):
            return known[1]
        found = None
        for address in brokers:
            try:
                body = self._client.call_address(address, group_requests.running_info(group, client_id), soon(_INFO_TIMEOUT))
                if body is not None:
                    found = running_info.decode(client_id, body)
                    break
            except RocketMQError as error:
                if strict and error.sub == "NO_PERMISSION":
                    raise
                # Away, stopped, without permission, or it speaks another dialect: it is a member all the same.
                continue
        if found is None and known is not None:
            found = known[1]
        with self._lock:
            self._known[group, client_id] = (time.monotonic(), found)
            if len(self._known) > 10_000:
                self._known.clear()
        return found

    def members(
        self, group: str, ids: Sequence[str], brokers: Sequence[str], like: Subscription | None, topics: Sequence[str] = ()
    ) -> list[Member]:
        """The members of these client ids. Who does not answer is taken to have the subscription ``like``, which means ``topics`` now."""
        found = []
        for client_id in ids:
            info = self.info(group, client_id, brokers)
            found.append(info.member if info is not None else running_info.unknown(client_id, like))
        return [running_info.agreeing(member, like, topics) for member in found]

    def holder(
        self, group: str, queue: MessageQueue, ids: Sequence[str], brokers: Sequence[str]
    ) -> tuple[Member, HeldQueue] | None:
        """Which of the members says that it has the queue."""
        for client_id in ids:
            info = self.info(group, client_id, brokers)
            for held in info.held if info is not None else ():
                if info is not None and held.queue == queue:
                    return info.member, held
        return None

    def refuse_strangers(self, group: str, mine: Subscription, topics: Sequence[str], brokers: Sequence[str]) -> None:
        """Raises GroupError DISAGREES. A heartbeat replaces what the *group* reads: consumers beside us would get nothing any more."""
        strangers = [client_id for client_id in self.ids(group, brokers) if not is_ours(client_id)]
        if not strangers:
            return
        names = ", ".join(strangers[:5])
        if mine.assignment != "shared":
            raise GroupError(
                "DISAGREES",
                f"group {group!r} has other consumers, {names}, and this query wants all queues for itself (assignment=exclusive): stop them, "
                "share the queues with them (assignment=shared), or give this query a consumerGroup of its own",
            )
        read: dict[str, TopicSubscription] = {}
        for address in brokers:
            with contextlib.suppress(RocketMQError):
                read.update(
                    self._client.call_address(address, group_requests.consumer_connections(group), soon(_TIMEOUT)).subscriptions
                )
        theirs = {topic: one for topic, one in read.items() if not topic.startswith(RETRY_PREFIX)}
        for one in theirs.values():
            wanted = TopicSubscription(one.topic, mine.filter, mine.filter_type)
            if not one.same_as(wanted):
                raise GroupError(
                    "DISAGREES",
                    f"group {group!r} has other consumers, {names}, which read {one.topic} by {one.expression_type} {one.expression!r}, and "
                    f"this query by {wanted.expression_type} {wanted.expression!r}: all consumers of a group must filter alike; change this "
                    "query's tags or filterSql, or give it a consumerGroup of its own",
                )
        if theirs and theirs.keys() != set(topics):
            raise GroupError(
                "DISAGREES",
                f"group {group!r} has other consumers, {names}, which read {', '.join(sorted(theirs))}, and this query reads "
                f"{', '.join(topics)}: all consumers of a group must read the same; change this query, or give it a consumerGroup of its own",
            )


def _masters(client: Client, topics: Sequence[str], deadline: float) -> list[str]:
    """The brokers of topics, by name; without any, those of the cluster."""
    found: dict[str, str] = {}
    for topic in topics:
        with contextlib.suppress(TopicError):
            found.update(
                (name, broker.master) for name, broker in client.route(topic, deadline).brokers.items() if broker.master
            )
    if not found:
        found = {name: broker.master for name, broker in client.cluster(deadline).brokers.items() if broker.master}
    return [found[name] for name in sorted(found)]
