"""Parses JSON as RocketMQ's servers write it: fastjson writes map keys that are not strings. Pure.

``{0:"10.0.0.1:10911"}`` (brokerAddrs of GET_BROKER_CLUSTER_INFO, and of a route for an old client version) and
``{{"brokerName":"a","queueId":1}:{}}`` (offsetTable) are not valid JSON. The parser turns every key into a string: an integer's
digits, or an object's text, which `loads` parses in turn. Servers that write standard JSON write the same keys as strings, so
the results agree.

Rules: the depth is bounded, the time is linear in the length of the text, and a text in neither form of JSON raises ProtocolError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError

#: The maximum number of levels of nested objects and arrays. A route has four.
MAX_DEPTH: Final = 32

_T = TypeVar("_T")

_SPACE = re.compile(r"[ \t\n\r]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
#: The string scanner of `json`: text, position after the opening quote, strict → string, position after the closing quote.
_string: Callable[[str, int, bool], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class _NotJson(Exception):
    def __init__(self, at: int, why: str) -> None:
        self.at = at
        self.why = why


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Return the value of a standard or fastjson JSON text; bytes are UTF-8. Raises ProtocolError PROTOCOL if it is not JSON."""
    try:
        text = text if isinstance(text, str) else str(text, "utf-8")
        try:
            return _standard(text)
        except ValueError:
            value, at = _value(text, _skip(text, 0), 0)
            at = _skip(text, at)
            if at != len(text):
                raise _NotJson(at, "there is more text after the value") from None
            return value
    except _NotJson as error:
        raise _malformed(f"at character {error.at}: {error.why}") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError as error:
        raise _malformed(str(error)) from None


def loads_object(text: bytes | bytearray | memoryview | str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ProtocolError PROTOCOL if the text is not JSON, or not an object."""
    value = loads(text)
    if not isinstance(value, dict):
        raise _malformed(f"it is not an object but of type {type(value).__name__}")
    return value


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(ProtocolCondition.PROTOCOL, f"a server's answer is not JSON: {why}")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_standard = json.JSONDecoder(parse_constant=_refuse).decode


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at ``at``, and the position after it."""
    first = text[at : at + 1]
    if first == '"':
        return _string(text, at + 1, True)
    if first in ("{", "["):
        if depth == MAX_DEPTH:
            raise _NotJson(at, f"there are more than {MAX_DEPTH} levels")
        return _object(text, at + 1, depth + 1) if first == "{" else _array(text, at + 1, depth + 1)
    for name, constant in _CONSTANTS.items():
        if text.startswith(name, at):
            return constant, at + len(name)
    number = _NUMBER.match(text, at)
    if number is None:
        raise _NotJson(at, "no value begins here")
    whole, fraction, exponent = number.groups()
    return (float(number[0]) if fraction or exponent else int(whole)), number.end()


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _skip(text, at)
    if text[at : at + 1] == "]":
        return values, at + 1
    while True:
        value, at = _value(text, at, depth)
        values.append(value)
        at = _skip(text, at)
        mark = text[at : at + 1]
        at = _skip(text, at + 1)
        if mark == "]":
            return values, at
        if mark != ",":
            raise _NotJson(at, "',' or ']' expected")


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    fields: dict[str, Any] = {}
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        return fields, at + 1
    while True:
        key, at = _key(text, at, depth)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise _NotJson(at, "':' expected")
        fields[key], at = _value(text, _skip(text, at + 1), depth)
        at = _skip(text, at)
        mark = text[at : at + 1]
        at = _skip(text, at + 1)
        if mark == "}":
            return fields, at
        if mark != ",":
            raise _NotJson(at, "',' or '}' expected")


def _key(text: str, at: int, depth: int) -> tuple[str, int]:
    first = text[at : at + 1]
    if first == '"':
        return _string(text, at + 1, True)
    if first == "{":
        _, end = _value(text, at, depth)
        # Keep the text unchanged, because encoding it again would double the escapes of nested keys at each level.
        return text[at:end], end
    integer = _INTEGER.match(text, at)
    if integer is None:
        raise _NotJson(at, "a key is expected")
    return integer[0], integer.end()


def field(fields: dict[str, Any], name: str, kind: type[_T], missing: _T | None = None) -> _T:
    """Return the field ``name``, or ``missing`` if the field is absent or null.

    Raises ProtocolError PROTOCOL if the value is not of type ``kind``.
    """
    value = fields.get(name)
    if value is None:
        value = missing
    # A bool is an int in Python, but not in the protocol.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(
            ProtocolCondition.PROTOCOL,
            f"field {name!r} of a server's answer is {str(value)[:100]!r}, not of type {kind.__name__}",
        )
    return value
