"""What a member of a group tells about itself, and how others read it. Pure.

A heartbeat has no room for it: its subscriptions are the *group's*, replaced by whoever comes last. But a broker hands a question on to a
member's connection (GET_CONSUMER_RUNNING_INFO, what ``mqadmin consumerStatus`` asks), and each client answers for itself. A query of
ours answers with the same body as a Java consumer, and its Subscription, room and locks among the properties; of a Java consumer the
answer has the topics, the strategy, the queues and their locks. Source: ConsumerRunningInfo, ProcessQueueInfo, MixAll.object2Properties.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from orderedmq.core.filters import ALL, canonical
from orderedmq.core.lock import Instant, LockToken
from orderedmq.core.membership import Member, Subscription
from orderedmq.errors import ProtocolError
from orderedmq.model import RESERVED_PREFIXES, RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.group.lock_rules import is_ours, query_of
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import Bytes
from orderedmq.rocketmq.wire.group_requests import TopicSubscription, topic_subscription

#: The property in which a query of ours has what RocketMQ has no name for.
OURS: Final = "orderedmq"
#: The "boot" of an Instant that a member's machine tells by its wall clock, in seconds since 1970.
WALL: Final = "wall clock"
#: Seconds after which a broker forgets a member without heartbeats (ClientHousekeepingService, CHANNEL_EXPIRED_TIMEOUT).
MEMBER_LIFE: Final = 120.0

_JAVA_STRATEGIES: Final = {
    "AllocateMessageQueueAveragely": "AVG",
    "AllocateMessageQueueAveragelyByCircle": "AVG_BY_CIRCLE",
    "AllocateMessageQueueConsistentHash": "CONSISTENT_HASH",
    "AllocateMessageQueueByMachineRoom": "MACHINE_ROOM",
    "AllocateMessageQueueByConfig": "CONFIG",
}
_CLASS_NAME = re.compile(r"(?:[\w$]+\.)*([\w$]+)(?:@[0-9a-f]+)?")


def now() -> Instant:
    """The moment, as another machine can read it; to the millisecond."""
    return Instant(WALL, round(time.time(), 3))


@dataclass(frozen=True)
class HeldQueue:
    """A queue that a member says it has the lock of. ``renewed``: wall clock, seconds; epoch and tenure 0 if it has none to tell."""

    queue: MessageQueue
    renewed: float
    epoch: int = 0
    tenure: int = 0


@dataclass(frozen=True)
class Info:
    """A member's answer."""

    member: Member
    held: tuple[HeldQueue, ...] = ()


def encode(member: Member, topics: Sequence[TopicSubscription], held: Iterable[tuple[LockToken, float]], version: int) -> bytes:
    """A member's ConsumerRunningInfo. ``held``: locks with when they were confirmed, by the wall clock. ``version``: see `heartbeat`."""
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
    # fastjson's maps have objects as keys, and Java's tools expect just that.
    table = ",".join(
        f"{json.dumps({'brokerName': token.queue.broker_name, 'queueId': token.queue.queue_id, 'topic': token.queue.topic})}:"
        + json.dumps({"locked": True, "droped": False, "lastLockTimestamp": int(at * 1000)})
        for token, at in locks
    )
    return f'{json.dumps(body)[:-1]},"mqTable":{{{table}}}}}'.encode()


def decode(client_id: str, body: Bytes) -> Info:
    """A member's answer, one of ours or another client's. Raises ProtocolError PROTOCOL."""
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
    assignment = "broadcasting" if properties.get("messageModel") == "BROADCASTING" else "shared"
    subscription = subscription_of(topics, _JAVA_STRATEGIES.get(shown[1], shown[1]) if shown else None, assignment)
    member = Member(client_id, client_id, subscription, joined, now(), life=MEMBER_LIFE)
    return Info(member, tuple(_java_locks(field(fields, "mqTable", dict, {}))))


def subscription_of(topics: Iterable[TopicSubscription], strategy: str | None, assignment: str = "shared") -> Subscription:
    """What a stranger reads as a Subscription. Its retries are its own affair."""
    read = [one for one in topics if one.topic and not one.topic.startswith(RETRY_PREFIX)]
    filters = sorted({(one.expression_type, canonical(one.expression, one.expression_type)) for one in read}) or [("TAG", ALL)]
    names = ",".join(sorted(one.topic for one in read))
    return Subscription(assignment, names, strategy, "; ".join(text for _, text in filters), filters[0][0])


def unknown(client_id: str, like: Subscription | None) -> Member:
    """A member that does not answer. It counts, as in RocketMQ, which looks at nobody's subscription: it is taken to agree."""
    return Member(query_of(client_id), client_id, like or Subscription("shared", ""), 0, now(), life=MEMBER_LIFE)


def agreeing(member: Member, like: Subscription | None, topics: Iterable[str]) -> Member:
    """A consumer in another language as one with our subscription ``like``, as far as it reads the same; ``topics`` is what that means now.

    It names topics, where ours may have a pattern, and may not say by which strategy it takes its queues: RocketMQ looks at neither. Of
    ours, texts are compared: one may have listed a new topic before the other.
    """
    theirs = member.subscription
    if like is None or is_ours(member.client_id) or theirs.assignment != "shared":
        return member
    if theirs.topics == ",".join(sorted(topics)):
        theirs = replace(theirs, topics=like.topics)
    return replace(member, subscription=replace(theirs, strategy=theirs.strategy or like.strategy))


def with_client_id(member: Member, client_id: str) -> Member:
    """What a broker calls the member is what counts."""
    return replace(member, client_id=client_id)


def _ours(client_id: str, own: dict[str, Any]) -> Info:
    try:
        subscription = Subscription(**own["subscription"])
        member = Member(
            str(own["owner"]),
            client_id,
            subscription,
            int(own["joined"]),
            Instant(WALL, float(own["renewed"])),
            own["room"],
            MEMBER_LIFE,
            None if own.get("name") is None else str(own["name"]),
        )
        held = tuple(
            HeldQueue(MessageQueue(str(topic), str(broker), int(queue)), float(at), int(epoch), int(tenure))
            for topic, broker, queue, epoch, tenure, at in own["locks"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("PROTOCOL", f"member {client_id!r} tells about itself what cannot be read: {error!r}") from None
    return Info(member, held)


def _java_locks(table: Mapping[str, Any]) -> Iterable[HeldQueue]:
    for key, queue in table.items():
        if isinstance(queue, dict) and queue.get("locked") is True and not queue.get("droped"):
            name = loads_object(key)
            yield HeldQueue(
                MessageQueue(field(name, "topic", str), field(name, "brokerName", str), field(name, "queueId", int)),
                field(queue, "lastLockTimestamp", int, 0) / 1000,
            )


def topics_of(text: str, existing: Iterable[str]) -> list[str]:
    """The topics that a Subscription means: names with commas between them, if all are there, else a pattern that names are matched with."""
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
    """What a heartbeat says. The group's retries belong to it, or a Java consumer beside us could not pull its own any more."""
    read = [TopicSubscription(topic, wanted.filter, wanted.filter_type) for topic in topics]
    return [*read, TopicSubscription(RETRY_PREFIX + group)]
