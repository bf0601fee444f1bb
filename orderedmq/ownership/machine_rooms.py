"""Machine rooms: a broker named room@name is in that room. Any other broker is in no room. Pure.

AllocateMessageQueueByMachineRoom defines this form of the name. The counterpart for producers, SelectMessageQueueByMachineRoom, does
nothing in RocketMQ. Here it chooses among the queues of the given rooms by the key's hash, as SelectMessageQueueByHash would if there
were no other queues.
"""

from __future__ import annotations

from collections.abc import Sequence

from orderedmq.conditions import TopicCondition
from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue


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
