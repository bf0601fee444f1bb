"""Parses the JSON of options about queues: ``{"topic": {"broker": ...}}``. Errors say what is wrong and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn

from orderedmq.errors import TopicError
from orderedmq.model import check_topic
from orderedmq.options.values import invalid, shown


class _Pairs(list[tuple[str, object]]):
    """A JSON object as a list, because a dict would silently drop repeated keys."""


def brokers(text: str, option: str, example: str) -> Iterator[tuple[str, str, object]]:
    """Yield (topic, broker, JSON value of its queues). Raises OptionError INVALID during the iteration."""
    try:
        root: object = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = (
            f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else "bad number or nesting"
        )
        raise invalid(option, f"the value is not JSON ({why}). Write for example {example}") from error
    for topic, inside in members(root, "the whole JSON", "topics", option, example):
        try:
            check_topic(topic, writing=False)
        except TopicError as error:
            raise invalid(option, f"{error.message}. Write for example {example}") from error
        for broker, queues in members(inside, f"topic {shown(topic)}", "brokers", option, example):
            yield topic, broker, queues


def members(value: object, where: str, what: str, option: str, example: str) -> Iterator[tuple[str, object]]:
    """Yield the members of a JSON object. Raises OptionError INVALID if it is empty or repeats a key."""
    if not isinstance(value, _Pairs):
        raise invalid(option, f"{where}: {json_shown(value)} is not an object of {what}. Write for example {example}")
    if not value:
        raise invalid(option, f"{where} names no {what}. Write for example {example}")
    seen: set[str] = set()
    for key, member in value:
        if key in seen:
            raise invalid(option, f"{where}: {shown(key)} is named twice in {what}. Name it once")
        seen.add(key)
        yield key, member


def elements(value: object, where: str, what: str, option: str, example: str) -> list[object]:
    """Return the elements of a JSON array. Raises OptionError INVALID if it is empty."""
    if not isinstance(value, list) or isinstance(value, _Pairs):
        raise invalid(option, f"{where}: {json_shown(value)} is not a list of {what}. Write for example {example}")
    if not value:
        raise invalid(option, f"{where} names no {what}. Write for example {example}")
    return value


def json_shown(value: object) -> str:
    """Return a value as one short line for a message."""
    if isinstance(value, _Pairs):
        return "an object"
    return shown(value) if isinstance(value, list) else shown(json.dumps(value))[1:-1]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
