"""The reader's options that assign a group's queues to one query or divide them among several.

Rules: as in declared.py. An option that the chosen assignment or strategy does not use is refused instead of ignored, because a
user who sets it expects an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.options.declared import Given
from orderedmq.options.queue_json import brokers, elements, json_shown
from orderedmq.options.values import choice, conflict, invalid, no_rooms, parse_room, parse_rooms, shown
from orderedmq.ownership.allocate import INNER_STRATEGIES, STRATEGIES, Allocation

Assignment = Literal["exclusive", "shared"]

_ASSIGNMENTS: Final[Mapping[str, Assignment]] = {"exclusive": "exclusive", "shared": "shared"}
_STRATEGY: Final = "allocateMessageQueueStrategy"
#: Options that only one strategy uses: option → (strategy, meaning of the option, or None if the strategy does not require it).
_PARTS: Final = {
    "allocateQueues": ("CONFIG", "the queues of this query"),
    "machineRooms": ("MACHINE_ROOM", "the rooms whose queues the group consumes"),
    "machineRoom": ("MACHINE_ROOM_NEARBY", "the room of this query"),
    "allocateInner": ("MACHINE_ROOM_NEARBY", None),
}
_EXAMPLE: Final = '{"orders": {"embedded": [0, 1]}}'


def parse_assignment(given: Given, model: str, streaming: bool | None) -> Assignment:
    """Return the option assignment. Raises OptionError, also if shared is given for broadcasting or a batch (``streaming`` False)."""
    assignment = given.value("assignment", choice(_ASSIGNMENTS))
    if assignment == "shared" and model == "broadcasting":
        raise conflict(
            "option assignment=shared has no meaning with messageModel=broadcasting, where every query sees everything. "
            "Drop it, or use messageModel=clustering"
        )
    if assignment == "shared" and streaming is False:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option assignment=shared is not supported in a batch, which owns no queue. Drop it, or use spark.readStream",
        )
    return assignment


def parse_allocation(given: Given, assignment: Assignment, *, embedded: bool) -> Allocation:
    """Return how the queries of a shared group divide its queues. Raises OptionError.

    If the strategy is CONFIG, `SourceOptions.parse` later checks that the given queues belong to the topics that are read.
    """
    if assignment != "shared":
        for name in (_STRATEGY, *_PARTS):
            if given.has(name):
                raise conflict(f"option {name} needs assignment=shared, not {assignment}. Set it, or drop {name}")
        return Allocation()
    strategy = given.value(_STRATEGY, choice({name: name for name in STRATEGIES}))
    for name, (needed, what) in _PARTS.items():
        if given.has(name) and strategy != needed:
            raise conflict(f"option {name} needs {_STRATEGY}={needed}, not {strategy}. Set it, or drop {name}")
        if what and strategy == needed and not given.has(name):
            raise OptionError(OptionCondition.MISSING, f"option {_STRATEGY}={strategy} needs {what}. Set {name}")
    allocation = Allocation(
        strategy=strategy,
        queues=given.optional("allocateQueues", _queues) or (),
        rooms=given.optional("machineRooms", parse_rooms) or (),
        room=given.optional("machineRoom", parse_room),
        inner=given.value("allocateInner", choice({name: name for name in INNER_STRATEGIES})),
    )
    if strategy == "MACHINE_ROOM" and embedded:
        effect = "would leave all queues without an owner"
        raise no_rooms(f"{_STRATEGY}={strategy}", effect, "Use AVG, or MACHINE_ROOM_NEARBY with machineRoom")
    return allocation


def _queues(text: str, option: str) -> tuple[MessageQueue, ...]:
    queues: list[MessageQueue] = []
    for topic, broker, ids in brokers(text, option, _EXAMPLE):
        where = f"topic {shown(topic)}, broker {shown(broker)}"
        for queue_id in elements(ids, where, "queues", option, _EXAMPLE):
            # bool is a subclass of int in Python, but true is not a number in JSON.
            if not isinstance(queue_id, int) or isinstance(queue_id, bool) or not 0 <= queue_id < MAX_QUEUES:
                raise invalid(option, f"{where}: {json_shown(queue_id)} is not a queue id. Write for example 0")
            queue = MessageQueue(topic, broker, queue_id)
            if queue in queues:
                raise invalid(option, f"{where}: queue {queue_id} is named twice. Name it once")
            queues.append(queue)
    return tuple(queues)
