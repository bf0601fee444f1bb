"""Machine rooms: a broker whose name is room@name stands in a room, any other in none. Pure.

The form is that of AllocateMessageQueueByMachineRoom. SelectMessageQueueByMachineRoom, its counterpart for producers, is empty in RocketMQ:
here it sends a key to one of the queues of the rooms that are asked for, as SelectMessageQueueByHash would if there were no others.
"""

from __future__ import annotations

from collections.abc import Sequence

from orderedmq.errors import TopicError
from orderedmq.model import MessageQueue


def has_room(broker_name: str, rooms: Sequence[str]) -> bool:
    """Whether this is ``room@name`` of one of the rooms. Java's split drops what is empty at the end, so ``room@name@`` is, too."""
    parts = broker_name.rstrip("@").split("@")
    return len(parts) == 2 and parts[0] in rooms


def queues_in(topic: str, queues: Sequence[MessageQueue], rooms: Sequence[str]) -> list[MessageQueue]:
    """Those of a topic's queues that are in the rooms, in their order. Raises TopicError NO_SUCH_QUEUE for a room without any."""
    for room in rooms:
        if not any(has_room(queue.broker_name, (room,)) for queue in queues):
            brokers = ", ".join(sorted({queue.broker_name for queue in queues})) or "none"
            raise TopicError(
                "NO_SUCH_QUEUE",
                f"option machineRooms: topic {topic!r} has no queue in room {room!r}, that is, at a broker {room}@...; its brokers are "
                f"{brokers}; drop the room, or make the topic at a broker there",
            )
    return [queue for queue in queues if has_room(queue.broker_name, rooms)]
