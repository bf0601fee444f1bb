"""How the members of a consumer group divide a topic's queues: RocketMQ's AllocateMessageQueueStrategies. Pure.

Members do not negotiate: each computes the same division from the same queues and members. So each strategy gives exactly what
its Java class gives (client 5.x, package consumer.rebalance), in the same order. While two members see different lists, a queue
may be assigned to both or to neither. The queue locks, not the strategy, prevent it from being consumed twice.

A broker named room@name is in that machine room, and any other broker is in none (AllocateMessageQueueByMachineRoom). The counterpart for
producers, SelectMessageQueueByMachineRoom, does nothing in RocketMQ. Here it chooses among the queues of the given rooms by the key's hash,
as SelectMessageQueueByHash would if there were no other queues.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from orderedmq.conditions import OptionCondition, TopicCondition
from orderedmq.errors import OptionError, TopicError
from orderedmq.model import MessageQueue, java_order

#: The strategies that need only the order or names of queues and members. MACHINE_ROOM_NEARBY applies one of them in each room.
INNER_STRATEGIES: Final = ("AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH")
STRATEGIES: Final = (*INNER_STRATEGIES, "CONFIG", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY")
#: Java's default number of nodes per client on the ring of CONSISTENT_HASH.
_VIRTUAL_NODES: Final = 10

#: The members of the group: client id → its machine room (None: it has none).
Members = Mapping[str, str | None]
#: (all queues of the topics, the members) → the queues that this member should own.
Strategy = Callable[[Sequence[MessageQueue], Members], Sequence[MessageQueue]]
NO_MEMBERS: Final[Members] = {}


@dataclass(frozen=True)
class Allocation:
    """How the queues of a topic are divided. Every member of a group must have the same ``name()``.

    ``queues`` (CONFIG) are this member's queues, of all its topics. ``rooms`` (MACHINE_ROOM) are the rooms whose queues the group
    consumes. ``room`` (MACHINE_ROOM_NEARBY) is this member's room. The other members learn it from this member's heartbeat, and
    `allocate` gets it in ``members``.
    """

    strategy: str = "AVG"
    queues: tuple[MessageQueue, ...] = ()
    rooms: tuple[str, ...] = ()
    room: str | None = None
    inner: str = "AVG"

    def name(self) -> str:
        """Return the name that Java's getName() gives."""
        return f"{self.strategy}-{self.inner}" if self.strategy == "MACHINE_ROOM_NEARBY" else self.strategy


def allocate(
    allocation: Allocation, client_id: str, queues: Sequence[MessageQueue], members: Mapping[str, str | None]
) -> list[MessageQueue]:
    """Return the queues of one topic that ``client_id`` should own, in Java's order. A client that is not a member gets none.

    ``queues`` are all queues of the topic, because RocketMQ divides topic by topic. ``members`` are all clients of the group with
    their rooms (None: no room). Both may be in any order. CONFIG gives the configured queues of the topic and, as in Java,
    ignores the client and the members. Raises ValueError where Java raises an error (no queues, no members, an empty client id),
    OptionError MISSING or UNSUPPORTED for a member or a broker without a room in MACHINE_ROOM_NEARBY, and TopicError NO_SUCH_QUEUE
    for a configured queue that does not exist.
    """
    if not queues:
        raise ValueError("there are no queues to allocate")
    if allocation.strategy == "CONFIG":
        return _configured(allocation, queues)
    if not client_id or not members:
        raise ValueError("the client id is empty" if not client_id else "there are no members to allocate queues to")
    if client_id not in members:
        return []
    ordered = sorted(queues, key=_compare_to)
    clients = sorted(members, key=java_order)
    if allocation.strategy == "MACHINE_ROOM":
        return _machine_room(allocation, clients.index(client_id), ordered, len(clients))
    if allocation.strategy == "MACHINE_ROOM_NEARBY":
        return _nearby(allocation, client_id, ordered, {client: members[client] for client in clients})
    return _divide(allocation.strategy, client_id, ordered, clients)


def _compare_to(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """Return a sort key for the order of Java's MessageQueue.compareTo."""
    return java_order(queue.topic), java_order(queue.broker_name), queue.queue_id


def _divide(strategy: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    index = clients.index(client_id)
    match strategy:
        case "AVG":
            return _average(index, queues, len(clients))
        case "AVG_BY_CIRCLE":
            return list(queues[index :: len(clients)])
        case "CONSISTENT_HASH":
            return _consistent_hash(client_id, queues, clients)
    raise ValueError(f"there is no strategy {strategy!r}")


def _average(index: int, queues: Sequence[MessageQueue], n_clients: int) -> list[MessageQueue]:
    """AllocateMessageQueueAveragely: consecutive queues, and one more for the first members if the queues do not divide evenly."""
    size, more = divmod(len(queues), n_clients)
    start = index * size + min(index, more)
    return list(queues[start : start + size + (index < more)])


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


def _configured(allocation: Allocation, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """AllocateMessageQueueByConfig: the configured queues of this topic. Unlike in Java, the list may name several topics."""
    existing = set(queues)
    topics = {queue.topic for queue in queues}
    mine = [queue for queue in allocation.queues if queue.topic in topics]
    for queue in mine:
        if queue not in existing:
            # Java would return the queue, and each lock and pull of it would fail.
            raise TopicError(
                TopicCondition.NO_SUCH_QUEUE,
                f"option allocateQueues names queue {queue}, which the topic does not have. Correct the option, or over RocketMQ wait for the "
                "broker that is away",
            )
    return mine


def _machine_room(allocation: Allocation, index: int, queues: Sequence[MessageQueue], n_clients: int) -> list[MessageQueue]:
    """AllocateMessageQueueByMachineRoom: equal blocks of the rooms' queues. The first members get one remaining queue each."""
    near = [queue for queue in queues if has_room(queue.broker_name, allocation.rooms)]
    size = len(near) // n_clients
    start, rest = index * size, index + n_clients * size
    return near[start : start + size] + near[rest : rest + 1]


def _nearby(
    allocation: Allocation, client_id: str, queues: Sequence[MessageQueue], members: Mapping[str, str | None]
) -> list[MessageQueue]:
    """AllocateMachineRoomNearby: a room's queues are divided among its members, or among all members if the room has none.

    In Java, the user's code determines a broker's room. Here it is the part of the broker's name before ``@``, or the whole name.
    """
    queues_in: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        room = queue.broker_name.partition("@")[0]
        if not room:
            what = f"the name of broker {queue.broker_name!r} has no room before the @"
            raise OptionError(
                OptionCondition.UNSUPPORTED, f"option allocateMessageQueueStrategy={allocation.strategy}: {what}. Use AVG"
            )
        queues_in.setdefault(room, []).append(queue)
    rooms = {client: room for client, room in members.items() if room}
    if len(rooms) < len(members):
        client = next(client for client in members if client not in rooms)
        raise OptionError(
            OptionCondition.MISSING,
            f"member {client!r} of the group reports no room. Set machineRoom in every query of the group",
        )
    clients_in: dict[str, list[str]] = {}
    for client, room in rooms.items():
        clients_in.setdefault(room, []).append(client)
    here = rooms[client_id]
    mine = _divide(allocation.inner, client_id, queues_in.get(here, []), clients_in[here])
    for room in sorted(queues_in, key=java_order):
        if room not in clients_in:
            mine += _divide(allocation.inner, client_id, queues_in[room], list(members))
    return mine


def all_queues(queues: Sequence[MessageQueue], members: Members) -> Sequence[MessageQueue]:
    """The exclusive strategy: return every queue, without regard to the members."""
    del members
    return queues


def divided(allocation: Allocation, client_id: str) -> Strategy:
    """Return the strategy of a shared group for the member ``client_id``. Like RocketMQ, it divides each topic separately."""

    def strategy(queues: Sequence[MessageQueue], members: Members) -> Sequence[MessageQueue]:
        topics: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            topics.setdefault(queue.topic, []).append(queue)
        return [queue for of_topic in topics.values() for queue in allocate(allocation, client_id, of_topic, members)]

    return strategy


def has_room(broker_name: str, rooms: Sequence[str]) -> bool:
    """Whether the name is ``room@name`` with one of the rooms. ``room@name@`` also counts, because Java's split drops empty ends."""
    parts = broker_name.rstrip("@").split("@")
    return len(parts) == 2 and parts[0] in rooms


def queues_in(topic: str, queues: Sequence[MessageQueue], rooms: Sequence[str]) -> list[MessageQueue]:
    """Return the topic's queues in the rooms, in the given order. Raises TopicError NO_SUCH_QUEUE for a room without queues."""
    for room in rooms:
        if not any(has_room(queue.broker_name, (room,)) for queue in queues):
            brokers = ", ".join(sorted({queue.broker_name for queue in queues})) or "none"
            raise TopicError(
                TopicCondition.NO_SUCH_QUEUE,
                f"option machineRooms: topic {topic!r} has no queue in room {room!r}, that is, at a broker {room}@...: its brokers are "
                f"{brokers}. Drop the room, create the topic at a broker in that room, or wait for the broker that is away",
            )
    return [queue for queue in queues if has_room(queue.broker_name, rooms)]
