"""A group member's report about itself: encoding and decoding. No I/O, but it reads the wall clock.

A heartbeat cannot contain this report, because the subscriptions in it belong to the *group*, and each heartbeat replaces them. But a
broker forwards GET_CONSUMER_RUNNING_INFO (the request of ``mqadmin consumerStatus``) to a member's connection, and each client answers
for itself. A query of this package answers with a Java consumer's body and adds its Subscription and locks as a property. A Java
consumer's answer has its topics, strategy, queues and locks. Source: ConsumerRunningInfo, ProcessQueueInfo, MixAll.object2Properties.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.model import RESERVED_PREFIXES, RETRY_PREFIX, MessageQueue
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.membership import FORMAT, Member, Subscription
from orderedmq.rocketmq.group.lock_rules import is_ours, query_of
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import Bytes
from orderedmq.rocketmq.wire.group_requests import TopicSubscription, topic_subscription
from orderedmq.rows.filters import ALL, canonical

#: The property in which a query of this package reports values for which RocketMQ has no field.
OURS: Final = "orderedmq"
#: The ``boot_id`` of an Instant in wall-clock seconds since 1970, which has the same meaning on every machine.
WALL: Final = "wall clock"
#: Seconds after which a broker forgets a member without heartbeats (ClientHousekeepingService, CHANNEL_EXPIRED_TIMEOUT).
#: `ownership.membership.MEMBER_LIFE` is the embedded broker's limit.
CHANNEL_LIFE: Final = 120.0

_JAVA_STRATEGIES: Final = {
    "AllocateMessageQueueAveragely": "AVG",
    "AllocateMessageQueueAveragelyByCircle": "AVG_BY_CIRCLE",
    "AllocateMessageQueueConsistentHash": "CONSISTENT_HASH",
}
_CLASS_NAME = re.compile(r"(?:[\w$]+\.)*([\w$]+)(?:@[0-9a-f]+)?")


def now() -> Instant:
    """Return the wall-clock time, to the millisecond, in a form that other machines can use."""
    return Instant(WALL, round(time.time(), 3))


@dataclass(frozen=True)
class HeldQueue:
    """A queue whose lock a member reports. ``renewed``: wall-clock seconds. ``epoch`` and ``tenure`` are 0 if not reported."""

    queue: MessageQueue
    renewed: float
    epoch: int = 0
    tenure: int = 0


@dataclass(frozen=True)
class Info:
    member: Member
    held: tuple[HeldQueue, ...] = ()


def encode(member: Member, topics: Sequence[TopicSubscription], held: Iterable[tuple[LockToken, float]], version: int) -> bytes:
    """Return a member's ConsumerRunningInfo.

    ``held``: locks with the wall-clock times of their confirmations. ``version``: see `heartbeat`.
    """
    locks = list(held)
    own = {
        **asdict(member),
        "renewed": member.renewed.seconds,
        "locks": [[*token.queue, token.epoch, token.tenure, at] for token, at in locks],
    }
    body = {
        "properties": {
            "PROP_CLIENT_VERSION": "orderedmq",
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CONSUMEORDERLY": "true",
            "PROP_THREADPOOL_CORE_SIZE": "0",
            "PROP_NAMESERVER_ADDR": "",
            "PROP_CONSUMER_START_TIMESTAMP": str(member.joined // 1000),
            "messageModel": "CLUSTERING",
            OURS: json.dumps(own),
        },
        "subscriptionSet": [topic.data(version) for topic in topics],
        "mqPopTable": {},
        "statusTable": {},
    }
    # fastjson writes objects as keys of a map. This is not valid JSON, but Java's tools expect it.
    table = ",".join(
        f"{json.dumps({'brokerName': token.queue.broker_name, 'queueId': token.queue.queue_id, 'topic': token.queue.topic})}:"
        + json.dumps({"locked": True, "droped": False, "lastLockTimestamp": int(at * 1000)})
        for token, at in locks
    )
    return f'{json.dumps(body)[:-1]},"mqTable":{{{table}}}}}'.encode()


def decode(client_id: str, body: Bytes) -> Info:
    """Read the answer of a member, which may be a query of this package or another client. Raises ProtocolError PROTOCOL."""
    fields = loads_object(body)
    properties = field(fields, "properties", dict, {})
    if is_ours(client_id) and isinstance(properties.get(OURS), str):
        return _ours(client_id, loads_object(properties[OURS]))
    started = properties.get("PROP_CONSUMER_START_TIMESTAMP", "0")
    joined = int(started) * 1000 if isinstance(started, str) and started.isdigit() else 0
    topics = [
        topic_subscription(field(data, "topic", str, ""), data)
        for data in field(fields, "subscriptionSet", list, [])
        if isinstance(data, dict)
    ]
    shown = _CLASS_NAME.fullmatch(str(properties.get("allocateMessageQueueStrategy", "")))
    # A concurrent consumer shares no group with a query: it takes no locks, and the messages that it sends back to the group's retry topic
    # come to any member, but a query does not read them.
    concurrent = properties.get("PROP_CONSUMEORDERLY") == "false"
    broadcasting = properties.get("messageModel") == "BROADCASTING"
    assignment = "broadcasting" if broadcasting else "concurrent" if concurrent else "shared"
    subscription = subscription_of(topics, _JAVA_STRATEGIES.get(shown[1], shown[1]) if shown else None, assignment)
    member = Member(client_id, client_id, subscription, joined, now(), life=CHANNEL_LIFE)
    # A concurrent consumer holds no locks, but reports all its queues as locked (RebalanceImpl, pq.setLocked).
    return Info(member, () if concurrent else tuple(_java_locks(field(fields, "mqTable", dict, {}))))


def subscription_of(topics: Iterable[TopicSubscription], strategy: str | None, assignment: str = "shared") -> Subscription:
    """Return the topics and filters of a consumer in another language as a Subscription, without its retry topic."""
    read = [subscription for subscription in topics if subscription.topic and not subscription.topic.startswith(RETRY_PREFIX)]
    texts = {(each.expression_type, canonical(each.expression, each.expression_type)) for each in read}
    filters = sorted(texts) or [("TAG", ALL)]
    names = ",".join(sorted(subscription.topic for subscription in read))
    return Subscription(assignment, names, strategy, "; ".join(text for _, text in filters), filters[0][0])


def silent_member(client_id: str, like: Subscription | None) -> Member:
    """Return the member to assume for a client that does not answer.

    The client counts as a member with the subscription ``like``, because RocketMQ does not compare subscriptions either.
    """
    return Member(query_of(client_id), client_id, like or Subscription("shared", ""), 0, now(), life=CHANNEL_LIFE)


def with_like_texts(member: Member, like: Subscription | None, topics: Iterable[str]) -> Member:
    """Return ``member``, with the texts of ``like`` in its subscription wherever both subscriptions mean the same.

    Only consumers in other languages are changed. Such a consumer reports topic names, but ``like`` may have a pattern, which matches
    ``topics`` at present. It may report no strategy, and RocketMQ does not compare strategies. Members of this package are compared by
    their texts, because one of them may have listed a new topic before another.
    """
    theirs = member.subscription
    if like is None or is_ours(member.client_id) or theirs.assignment != "shared":
        return member
    if theirs.topics == ",".join(sorted(topics)):
        theirs = replace(theirs, topics=like.topics)
    return replace(member, subscription=replace(theirs, strategy=theirs.strategy or like.strategy))


def _ours(client_id: str, own: dict[str, Any]) -> Info:
    try:
        texts = own["subscription"]
        if texts.get("format", FORMAT) > FORMAT:
            # Only this number and the time of joining are certain to mean the same in a newer format.
            newer = Subscription("", "", format=int(texts["format"]))
            return Info(Member(client_id, client_id, newer, int(own["joined"]), now(), life=CHANNEL_LIFE))
        subscription = Subscription(**texts)
        member = Member(
            str(own["owner"]),
            client_id,
            subscription,
            int(own["joined"]),
            Instant(WALL, float(own["renewed"])),
            CHANNEL_LIFE,
            None if own.get("name") is None else str(own["name"]),
        )
        locks = tuple(
            HeldQueue(MessageQueue(str(topic), str(broker), int(queue)), float(at), int(epoch), int(tenure))
            for topic, broker, queue, epoch, tenure, at in own["locks"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            ProtocolCondition.PROTOCOL, f"the report of member {client_id!r} about itself cannot be read: {error!r}"
        ) from None
    return Info(member, locks)


def _java_locks(table: Mapping[str, Any]) -> Iterable[HeldQueue]:
    for key, queue in table.items():
        if isinstance(queue, dict) and queue.get("locked") is True and not queue.get("droped"):
            name = loads_object(key)
            yield HeldQueue(
                MessageQueue(field(name, "topic", str), field(name, "brokerName", str), field(name, "queueId", int)),
                field(queue, "lastLockTimestamp", int, 0) / 1000,
            )


def rename(info: Info, bare: Callable[[str], str]) -> Info:
    """Return the report with each topic's name replaced by ``bare(name)``."""
    topics = ",".join(map(bare, info.member.subscription.topics.split(",")))
    member = replace(info.member, subscription=replace(info.member.subscription, topics=topics))
    return Info(member, tuple(replace(lock, queue=lock.queue._replace(topic=bare(lock.queue.topic))) for lock in info.held))


def topics_of(text: str, existing: Iterable[str]) -> list[str]:
    """Return the existing topics that a Subscription's text selects.

    The text is a list of names, separated by commas, if all these topics exist. Otherwise it is a pattern. If the pattern matches no
    topic, the text is read as names after all, and those that exist are returned.
    """
    there = set(existing)
    names = set(text.split(","))
    if not names <= there:
        try:
            pattern = re.compile(text)
        except re.error:
            return sorted(names & there)
        names = {name for name in there if not name.startswith(RESERVED_PREFIXES) and pattern.fullmatch(name)} or names & there
    return sorted(names)


def subscriptions(group: str, topics: Iterable[str], wanted: Subscription) -> list[TopicSubscription]:
    """Return the subscriptions of a heartbeat.

    They include the group's retry topic, because the group's Java consumers could not pull their retries otherwise.
    """
    read = [TopicSubscription(topic, wanted.filter, wanted.filter_type) for topic in topics]
    return [*read, TopicSubscription(RETRY_PREFIX + group)]
