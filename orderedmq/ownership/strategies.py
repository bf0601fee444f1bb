"""Strategies: which queues of a group's topics a member should own. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import Allocation, allocate

#: The members of the group: client id → its machine room (None: it has none).
Members = Mapping[str, str | None]
#: (all queues of the topics, the members) → the queues that this member should own.
Strategy = Callable[[Sequence[MessageQueue], Members], Sequence[MessageQueue]]
NO_MEMBERS: Final[Members] = {}


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
