"""Parses the JSON of options about queues, ``{"topic": {"broker": ...}}``: offsets and sets of queues. Errors say what is wrong and where.

The command also parses offsets with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NoReturn

from orderedmq.errors import TopicError
from orderedmq.model import MAX_QUEUES, MessageQueue, check_topic
from orderedmq.options.values import MAX_LONG, invalid, shown

#: Values that a user may write instead of an offset: the queue's end (LATEST) and its first stored message (EARLIEST).
LATEST: Final = -1
EARLIEST: Final = -2

OFFSETS_EXAMPLE: Final = '{"orders": {"embedded": {"0": 23, "1": -2}}}'
QUEUES_EXAMPLE: Final = '{"orders": {"embedded": [0, 1]}}'


class _Pairs(list[tuple[str, object]]):
    """A JSON object as a list, because a dict would silently drop repeated keys."""


def parse_offsets_json(text: str, option: str) -> dict[MessageQueue, int]:
    """Return the offsets in ``{"topic": {"broker": {"queue id": next offset}}}``; LATEST and EARLIEST are allowed.

    Raises OptionError INVALID.
    """
    offsets: dict[MessageQueue, int] = {}
    for topic, broker, queues in _brokers(text, option, OFFSETS_EXAMPLE):
        where = f"topic {shown(topic)}, broker {shown(broker)}"
        for queue_id, offset in _members(queues, where, "queues", option, OFFSETS_EXAMPLE):
            if not re.fullmatch(r"0|[1-9][0-9]{0,5}", queue_id) or int(queue_id) >= MAX_QUEUES:
                raise invalid(option, f"{where}: {shown(queue_id)} is not a queue id. Write for example 0")
            # bool is a subclass of int in Python, but true is not a number in JSON.
            if not isinstance(offset, int) or isinstance(offset, bool) or not EARLIEST <= offset <= MAX_LONG:
                raise invalid(
                    option,
                    f"{where}, queue {queue_id}: {_json_shown(offset)} is not an offset. Write a whole number, "
                    f"{LATEST} (latest) or {EARLIEST} (earliest)",
                )
            offsets[MessageQueue(topic, broker, int(queue_id))] = offset
    return offsets


def parse_queues_json(text: str, option: str) -> tuple[MessageQueue, ...]:
    """Return the queues in ``{"topic": {"broker": [queue id, ...]}}``. Raises OptionError INVALID."""
    queues: list[MessageQueue] = []
    for topic, broker, ids in _brokers(text, option, QUEUES_EXAMPLE):
        where = f"topic {shown(topic)}, broker {shown(broker)}"
        for queue_id in _elements(ids, where, "queues", option, QUEUES_EXAMPLE):
            # bool is a subclass of int in Python, but true is not a number in JSON.
            if not isinstance(queue_id, int) or isinstance(queue_id, bool) or not 0 <= queue_id < MAX_QUEUES:
                raise invalid(option, f"{where}: {_json_shown(queue_id)} is not a queue id. Write for example 0")
            queue = MessageQueue(topic, broker, queue_id)
            if queue in queues:
                raise invalid(option, f"{where}: queue {queue_id} is named twice. Name it once")
            queues.append(queue)
    return tuple(queues)


def _brokers(text: str, option: str, example: str) -> Iterator[tuple[str, str, object]]:
    """Yield (topic, broker, JSON value of its queues). Raises OptionError INVALID during the iteration."""
    try:
        root: object = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = (
            f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else "bad number or nesting"
        )
        raise invalid(option, f"the value is not JSON ({why}). Write for example {example}") from error
    for topic, inside in _members(root, "the whole JSON", "topics", option, example):
        try:
            check_topic(topic, writing=False)
        except TopicError as error:
            raise invalid(option, f"{error.message}. Write for example {example}") from error
        for broker, queues in _members(inside, f"topic {shown(topic)}", "brokers", option, example):
            yield topic, broker, queues


def _members(value: object, where: str, what: str, option: str, example: str) -> Iterator[tuple[str, object]]:
    """Yield the members of a JSON object. Raises OptionError INVALID if it is empty or repeats a key."""
    if not isinstance(value, _Pairs):
        raise invalid(option, f"{where}: {_json_shown(value)} is not an object of {what}. Write for example {example}")
    if not value:
        raise invalid(option, f"{where} names no {what}. Write for example {example}")
    seen: set[str] = set()
    for key, member in value:
        if key in seen:
            raise invalid(option, f"{where}: {shown(key)} is named twice in {what}. Name it once")
        seen.add(key)
        yield key, member


def _elements(value: object, where: str, what: str, option: str, example: str) -> list[object]:
    """Return the elements of a JSON array. Raises OptionError INVALID if it is empty."""
    if not isinstance(value, list) or isinstance(value, _Pairs):
        raise invalid(option, f"{where}: {_json_shown(value)} is not a list of {what}. Write for example {example}")
    if not value:
        raise invalid(option, f"{where} names no {what}. Write for example {example}")
    return value


def _json_shown(value: object) -> str:
    """Return a value as one short line for a message."""
    if isinstance(value, _Pairs):
        return "an object"
    return shown(value) if isinstance(value, list) else shown(json.dumps(value))[1:-1]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
