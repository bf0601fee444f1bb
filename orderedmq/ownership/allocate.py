"""How the members of a consumer group divide a topic's queues: RocketMQ's AllocateMessageQueueStrategies. Pure.

Members do not negotiate: each computes the same division from the same queues and members. So each strategy gives exactly what
its Java class gives (client 5.x, package consumer.rebalance), in the same order. While two members see different lists, a queue
may be assigned to both or to neither. The queue locks, not the strategy, prevent it from being consumed twice.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Final

from orderedmq.model import MessageQueue, java_order

STRATEGIES: Final = ("AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH")
#: Java's default number of nodes per client on the ring of CONSISTENT_HASH.
_VIRTUAL_NODES: Final = 10

#: (all queues of the topics, the client ids of the group's members) → the queues that this member should own.
Strategy = Callable[[Sequence[MessageQueue], Collection[str]], Sequence[MessageQueue]]


def allocate(strategy: str, client_id: str, queues: Sequence[MessageQueue], members: Collection[str]) -> Sequence[MessageQueue]:
    """Return the queues of one topic that ``client_id`` should own, in Java's order. A client that is not a member gets none.

    ``queues`` are all queues of the topic, because RocketMQ divides topic by topic. ``members`` are the ids of all clients of the group.
    Both may be in any order. Raises ValueError where Java raises an error: no queues, no members, an empty client id.
    """
    if not queues:
        raise ValueError("there are no queues to allocate")
    if not client_id or not members:
        raise ValueError("the client id is empty" if not client_id else "there are no members to allocate queues to")
    if client_id not in members:
        return []
    ordered = sorted(queues, key=_compare_to)
    clients = sorted(members, key=java_order)
    index = clients.index(client_id)
    match strategy:
        case "AVG":
            return _average(index, ordered, len(clients))
        case "AVG_BY_CIRCLE":
            return ordered[index :: len(clients)]
        case "CONSISTENT_HASH":
            return _consistent_hash(client_id, ordered, clients)
    raise ValueError(f"there is no strategy {strategy!r}")


def _compare_to(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """Return a sort key for the order of Java's MessageQueue.compareTo."""
    return java_order(queue.topic), java_order(queue.broker_name), queue.queue_id


def _average(index: int, queues: Sequence[MessageQueue], n_clients: int) -> Sequence[MessageQueue]:
    """AllocateMessageQueueAveragely: consecutive queues, and one more for the first members if the queues do not divide evenly."""
    size, more = divmod(len(queues), n_clients)
    start = index * size + min(index, more)
    return queues[start : start + size + (index < more)]


def _consistent_hash(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """AllocateMessageQueueConsistentHash: a queue belongs to the first virtual node at or after its hash, around the ring."""
    # If two nodes have the same hash, the later client's node wins, as in Java's map.
    ring = {_md5(f"{client}-{node}"): client for client in clients for node in range(_VIRTUAL_NODES)}
    nodes = sorted(ring)

    def owner(queue: MessageQueue) -> str:
        text = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
        return ring[nodes[bisect_left(nodes, _md5(text)) % len(nodes)]]

    return [queue for queue in queues if owner(queue) == client_id]


def _md5(text: str) -> int:
    """Return the hash of ConsistentHashRouter.MD5Hash: the first four bytes of the MD5 sum, big-endian.

    Java encodes the text in its platform's charset. This function encodes it in UTF-8.
    """
    return int.from_bytes(hashlib.md5(text.encode(errors="replace"), usedforsecurity=False).digest()[:4])


def all_queues(queues: Sequence[MessageQueue], members: Collection[str]) -> Sequence[MessageQueue]:
    """The exclusive strategy: return every queue, without regard to the members."""
    del members
    return queues


def divided(strategy: str, client_id: str) -> Strategy:
    """Return the strategy of a shared group for the member ``client_id``. Like RocketMQ, it divides each topic separately."""

    def division(queues: Sequence[MessageQueue], members: Collection[str]) -> Sequence[MessageQueue]:
        topics: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            topics.setdefault(queue.topic, []).append(queue)
        return [queue for of_topic in topics.values() for queue in allocate(strategy, client_id, of_topic, members)]

    return division
