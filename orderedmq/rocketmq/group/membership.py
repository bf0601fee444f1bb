"""Membership in groups: heartbeats of this process's clients, and the list of all members.

For a broker, a member is a TCP connection (ConsumerManager, ClientChannelInfo). Membership ends immediately when the connection
ends, also after kill -9. A client that is paused or cut off is forgotten after 120 s. So each client has its own connections
and sends heartbeats to every broker of its topics. Each broker has its own list of members. All queries read the list of the
same broker, so that they divide the queues in the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orderedmq.conditions import GroupCondition, RocketMQCondition, UnavailableCondition
from orderedmq.errors import GroupError, OrderedMQError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import RETRY_PREFIX, MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.rocketmq.group import running_info
from orderedmq.rocketmq.group.lock_rules import is_ours, not_created
from orderedmq.rocketmq.group.running_info import HeldQueue, Info
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.deadline import LEAST_TIMEOUT, Deadline
from orderedmq.rocketmq.wire import group_requests
from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.group_requests import TopicSubscription
from orderedmq.rocketmq.wire.request import Request

#: Seconds for a request about members to one broker.
_TIMEOUT: Final = 5.0
#: Seconds to wait for one broker's list of members before another broker is asked.
LIST_TIMEOUT: Final = 2.5
#: Seconds for a heartbeat to all brokers.
_BEAT_TIMEOUT: Final = 3.0
#: Seconds until a member is asked about itself again: after an answer, and after a request without an answer.
_INFO_AGE: Final = 5.0
_SILENCE_AGE: Final = 30.0
#: Seconds until a consumer in another language is asked again which locks it has. While a Java client of 5.x answers, it sends a request
#: to its broker. The client answers in as many threads as the machine has cores, and needs one of them for the broker's reply. If all
#: threads are busy answering, the client waits for 5 s and drops the connection that makes it a member. So such a client is rarely asked
#: for its locks, and only once for its subscription.
_LOCKS_AGE: Final = 60.0
#: Seconds for a member's answer about itself, because the broker would wait 10 s for a member that was stopped.
_INFO_TIMEOUT: Final = 2.0

#: Takes (client id, group); returns the client's locks in the group with their confirmation times (wall clock, seconds).
Held = Callable[[str, str], Sequence[tuple[LockToken, float]]]


@dataclass(frozen=True)
class _Membership:
    member: Member
    topics: list[TopicSubscription]
    #: The addresses of the brokers that get heartbeats, by broker name.
    brokers: dict[str, str]
    #: When the client joined (monotonic seconds).
    since: float


class MemberClient:
    """One client of this process: its connections and its memberships."""

    def __init__(self, cluster: Client, identity: ClientIdentity, held: Held) -> None:
        self.identity = identity
        self._held = held
        self._client = cluster.another(on_push=self._answer_broker)
        #: At the broker, a subscription with a higher version replaces another member's subscription to the same topic.
        self._version = int(time.time() * 1000)
        self._groups: dict[str, _Membership] = {}
        #: The connection that carried the last heartbeat to each broker, by broker name, because a broker may come back at another address.
        self._heartbeat_connections: dict[str, Connection] = {}
        #: When a heartbeat was last sent over a new connection because the previous one had ended (monotonic seconds).
        self._rejoined = float("-inf")

    def in_group(self, group: str) -> Member | None:
        membership = self._groups.get(group)
        return membership.member if membership is not None else None

    def send_heartbeat(self, group: str, subscription: Subscription, directory: Directory, name: str | None = None) -> None:
        """Send a heartbeat to every broker of the topics.

        Raises GroupError DISAGREES as `Directory.refuse_other_consumers` does, before a heartbeat is sent; GroupError MISSING if the
        group does not exist and brokers do not create groups on demand; RocketMQUnavailableError if no broker can be reached.
        """
        deadline = Deadline.after(_TIMEOUT)
        names = running_info.topics_of(subscription.topics, self._listed(subscription.topics, deadline))
        brokers = _masters(self._client, names, deadline)
        if not brokers:
            why = f"the nameserver knows no broker, so no heartbeat for group {group!r} was sent: the brokers are down or starting"
            raise RocketMQUnavailableError(UnavailableCondition.NO_BROKER, why)
        before = self._groups.get(group)
        if before is None or before.member.subscription != subscription:
            directory.refuse_other_consumers(group, subscription, names, list(brokers.values()))
        now = running_info.now()
        joined = before.member.joined if before is not None else int(time.time() * 1_000_000)
        member = Member(
            self.identity.owner, self.identity.client_id, subscription, joined, now, running_info.CHANNEL_LIFE, name
        )
        request = group_requests.heartbeat(
            self.identity.client_id,
            group,
            topics := running_info.subscriptions(group, names, subscription),
            version=self._version,
        )
        # Set this before the heartbeat is sent, because other members may ask for it immediately afterwards.
        since = before.since if before is not None else time.monotonic()
        self._groups[group] = _Membership(member, topics, brokers, since)
        reached, failed, began = list[str](), None, time.monotonic()
        for broker, address in brokers.items():
            try:
                # Unreachable brokers share one time limit, because the same thread renews locks.
                self._send_heartbeat(broker, address, request, max(began + _BEAT_TIMEOUT, Deadline.after(LEAST_TIMEOUT)))
                reached.append(address)
            except RocketMQUnavailableError as error:
                failed = error
                # The broker may have another address by the next heartbeat.
                for topic in names:
                    self._client.doubt(topic)
        if failed is not None and not reached:
            if before is None:
                del self._groups[group]
            else:
                self._groups[group] = before
            raise failed
        if before is None and self.identity.client_id not in directory.ids(group, reached):
            del self._groups[group]
            raise not_created(group)

    def _listed(self, topics: str, deadline: float) -> Sequence[str]:
        """Return the existing topics. A Proxy cannot list topics, so with a Proxy ``topics`` is always a list of names."""
        return topics.split(",") if self._client.behind_proxy(deadline) else self._client.topics(deadline)

    def send_heartbeat_to_new(self, group: str, brokers: Mapping[str, str]) -> None:
        """Send a heartbeat to brokers that are new since the last one, because tasks check this client's membership there."""
        membership = self._groups.get(group)
        if membership is None:
            return
        new = {name: address for name, address in brokers.items() if address not in membership.brokers.values()}
        if not new:
            return
        request = group_requests.heartbeat(self.identity.client_id, group, membership.topics, version=self._version)
        for name, address in new.items():
            self._send_heartbeat(name, address, request, Deadline.after(_BEAT_TIMEOUT))
        self._groups[group] = replace(membership, brokers=membership.brokers | new)

    def _send_heartbeat(self, name: str, address: str, request: Request[None], deadline: float) -> None:
        # If this connection ends before the answer, the request is sent again on another one. In that case `cut_off` is true, and one
        # extra heartbeat follows.
        connection = self._client.connection(address, deadline)
        if self._heartbeat_connections.get(name, connection) is not connection:
            self._rejoined = time.monotonic()
        self._heartbeat_connections[name] = connection
        self._client.call_address(address, request, deadline)

    def rejoined_within(self, seconds: float) -> bool:
        """Return whether this client rejoined a broker within the last ``seconds`` because the connection to it had ended."""
        return time.monotonic() - self._rejoined < seconds

    def joined_within(self, group: str, seconds: float) -> bool:
        """Return whether this client became a member of the group within the last ``seconds``."""
        membership = self._groups.get(group)
        return membership is not None and time.monotonic() - membership.since < seconds

    def cut_off(self) -> bool:
        """Return whether a connection to a broker has ended, and with it this client's membership at that broker."""
        brokers = {name for membership in list(self._groups.values()) for name in membership.brokers}
        return any(connection.closed for name, connection in list(self._heartbeat_connections.items()) if name in brokers)

    def brokers(self, group: str) -> list[str]:
        """Return the brokers to which this client sends heartbeats for the group."""
        membership = self._groups.get(group)
        return list(membership.brokers.values()) if membership is not None else []

    def topics(self, group: str) -> list[str]:
        """Return the names of the topics in this client's heartbeats, also if its subscription is a pattern."""
        membership = self._groups.get(group)
        topics = membership.topics if membership is not None else ()
        return [each.topic for each in topics if not each.topic.startswith(RETRY_PREFIX)]

    def leave(self) -> None:
        """Leave all groups and close the connections. A broker that cannot be reached notices the end of its connection."""
        groups, self._groups = self._groups, {}
        for group, membership in groups.items():
            for address in membership.brokers.values():
                with contextlib.suppress(OrderedMQError):
                    leaving = group_requests.unregister(self.identity.client_id, group)
                    self._client.call_address(address, leaving, Deadline.after(3.0))
        self._client.close()

    def _answer_broker(self, command: RemotingCommand) -> RemotingCommand | None:
        """Answer a request about this member that a broker forwards."""
        if command.code != RequestCode.GET_CONSUMER_RUNNING_INFO:
            return None
        names = self._client.names
        group = names.bare(command.ext.get("consumerGroup", ""))
        membership = self._groups.get(group)
        if membership is None:
            return RemotingCommand(
                ResponseCode.SYSTEM_ERROR, flag=FLAG_RESPONSE, remark=f"group {group} no longer has this client as a member"
            )
        topics = [replace(subscription, topic=names.spelled(subscription.topic)) for subscription in membership.topics]
        locks = [
            (replace(token, queue=token.queue._replace(topic=names.spelled(token.queue.topic))), at)
            for token, at in self._held(self.identity.client_id, group)
        ]
        body = running_info.encode(membership.member, topics, locks, self._version)
        return RemotingCommand(ResponseCode.SUCCESS, flag=FLAG_RESPONSE, body=body)


class Directory:
    """The members of groups as listed by brokers, and the members' reports about themselves. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        #: Held while a consumer in another language is asked; see _LOCKS_AGE.
        self._asking = threading.Lock()
        #: (group, client id) → when the member was asked, and its answer.
        self._reports: dict[tuple[str, str], tuple[float, Info | None]] = {}

    def masters(self) -> list[str]:
        return list(_masters(self._client, (), Deadline.after(_TIMEOUT)).values())

    def ids(self, group: str, brokers: Sequence[str]) -> list[str]:
        """Return the sorted client ids of a group's members, as listed by the first of the brokers that can be reached.

        Waits for each broker for up to LIST_TIMEOUT. Raises RocketMQUnavailableError if none can be reached.
        """
        failed = None
        for address in brokers:
            try:
                ids = self._client.call_address(address, group_requests.consumer_list(group), Deadline.after(LIST_TIMEOUT))
                return sorted(set(ids))
            except RocketMQUnavailableError as error:
                failed = error
        if failed is not None:
            raise failed
        return []

    def ids_everywhere(self, group: str) -> list[str]:
        """Like `ids`, but return the members at all brokers, for callers that do not know the group's topics."""
        ids: set[str] = set()
        for address in self.masters():
            with contextlib.suppress(RocketMQUnavailableError):
                request = group_requests.consumer_list(group)
                members_there = self._client.call_address(address, request, Deadline.after(LIST_TIMEOUT))
                ids.update(members_there)
        return sorted(ids)

    def info(
        self,
        group: str,
        client_id: str,
        brokers: Sequence[str],
        *,
        fresh: bool = False,
        strict: bool = False,
        others: float = _LOCKS_AGE,
    ) -> Info | None:
        """Return a member's report about itself; None if it has never given a readable answer.

        An answer is reused for some seconds, or for ``others`` seconds if the member is a consumer in another language. ``fresh``: do
        not reuse an answer. ``strict``: raise RocketMQError NO_PERMISSION if the account may not ask.
        """
        begun = time.monotonic()
        ours = is_ours(client_id)

        def reusable() -> bool:
            known = self._reports.get((group, client_id))
            age = _SILENCE_AGE if known is None or known[1] is None else _INFO_AGE if ours else others
            return known is not None and time.monotonic() - known[0] < age and not (fresh and known[0] < begun)

        if reusable():
            return self._reports[group, client_id][1]
        # The renewing thread and a boundary may ask at the same time.
        with contextlib.nullcontext() if ours else self._asking:
            return self._reports[group, client_id][1] if reusable() else self._ask(group, client_id, brokers, strict=strict)

    def _ask(self, group: str, client_id: str, brokers: Sequence[str], *, strict: bool) -> Info | None:
        last = self._reports.get((group, client_id))
        info = None
        for address in brokers:
            try:
                body = self._client.call_address(
                    address, group_requests.running_info(group, client_id), Deadline.after(_INFO_TIMEOUT)
                )
                if body is not None:
                    info = running_info.rename(running_info.decode(client_id, body), self._client.names.bare)
                    break
            except RocketMQError as error:
                if strict and error.sub == RocketMQCondition.NO_PERMISSION:
                    raise
                # The member is away or stopped, the account has no permission, or the answer cannot be read. The member still counts.
                continue
        if info is None and last is not None:
            info = last[1]
        with self._lock:
            self._reports[group, client_id] = (time.monotonic(), info)
            if len(self._reports) > 10_000:
                self._reports.clear()
        return info

    def members(
        self, group: str, ids: Sequence[str], brokers: Sequence[str], like: Subscription | None, topics: Sequence[str] = ()
    ) -> list[Member]:
        """Return the members with these client ids.

        A member that does not answer is assumed to have the subscription ``like``, which selects the ``topics`` now.
        """
        members = []
        for client_id in ids:
            info = self.info(group, client_id, brokers, others=float("inf"))
            members.append(info.member if info is not None else running_info.silent_member(client_id, like))
        return [running_info.with_like_texts(member, like, topics) for member in members]

    def holder(
        self, group: str, queue: MessageQueue, ids: Sequence[str], brokers: Sequence[str]
    ) -> tuple[Member, HeldQueue] | None:
        """Return the member that reports holding the queue's lock, and that lock; None if no member does."""
        for client_id in ids:
            info = self.info(group, client_id, brokers)
            for lock in info.held if info is not None else ():
                if info is not None and lock.queue == queue:
                    return info.member, lock
        return None

    def refuse_other_consumers(self, group: str, mine: Subscription, topics: Sequence[str], brokers: Sequence[str]) -> None:
        """Raise GroupError DISAGREES if the group has consumers in another language with which this client cannot share it.

        These are consumers that read other topics or have another filter, or any consumer if this client wants all queues. A heartbeat
        replaces the subscription of the whole *group*, so these consumers would no longer get messages.
        """
        strangers = [client_id for client_id in self.ids(group, brokers) if not is_ours(client_id)]
        if not strangers:
            return
        names = ", ".join(strangers[:5])
        if mine.assignment != "shared":
            raise GroupError(
                GroupCondition.DISAGREES,
                f"group {group!r} has other consumers, {names}, but this query wants all queues for itself (assignment=exclusive). Stop "
                "these consumers, share the queues with them (assignment=shared), or give this query another consumerGroup",
            )
        read: dict[str, TopicSubscription] = {}
        for address in brokers:
            with contextlib.suppress(RocketMQError):
                reply = self._client.call_address(address, group_requests.subscriptions(group), Deadline.after(_TIMEOUT))
                read.update(reply)
        theirs = {topic: subscription for topic, subscription in read.items() if not topic.startswith(RETRY_PREFIX)}
        for their in theirs.values():
            own = TopicSubscription(their.topic, mine.filter, mine.filter_type)
            if not their.same_as(own):
                raise GroupError(
                    GroupCondition.DISAGREES,
                    f"group {group!r} has other consumers, {names}, which filter {their.topic} by {their.expression_type} "
                    f"{their.expression!r}, but this query filters by {own.expression_type} {own.expression!r}. "
                    "All consumers of a group must have the same filter. Change this query's tags or filterSql, or give it another "
                    "consumerGroup",
                )
        if theirs and theirs.keys() != set(topics):
            raise GroupError(
                GroupCondition.DISAGREES,
                f"group {group!r} has other consumers, {names}, which read {', '.join(sorted(theirs))}, but this query reads "
                f"{', '.join(topics)}. All consumers of a group must read the same topics. Change this query's topics, or give it another "
                "consumerGroup",
            )


def _masters(client: Client, topics: Sequence[str], deadline: float) -> dict[str, str]:
    """Return the addresses of the topics' masters by broker name, or of all masters of the cluster if the topics have none."""
    masters: dict[str, str] = {}
    for topic in topics:
        with contextlib.suppress(TopicError):
            masters.update(
                (name, broker.master) for name, broker in client.route(topic, deadline).brokers.items() if broker.master
            )
    if not masters:
        masters = {name: broker.master for name, broker in client.whole_cluster(deadline).brokers.items() if broker.master}
    # Through a Proxy, all brokers have the same address. The first name stands for all of them.
    first = {masters[name]: name for name in sorted(masters, reverse=True)}
    return {name: masters[name] for name in sorted(first.values())}
