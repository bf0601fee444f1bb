"""Parses JSON as RocketMQ's servers write it: fastjson writes map keys that are not strings. Pure.

``{0:"10.0.0.1:10911"}`` (brokerAddrs of GET_BROKER_CLUSTER_INFO, and of a route for an old client version) and
``{{"brokerName":"a","queueId":1}:{}}`` (mqTable, offsetTable) are not valid JSON. These keys, integers and objects without objects in them,
are put into quotes before `json` parses the text, so that every key becomes a string. `loads` parses it in turn. Servers that write standard
JSON write the same keys as strings, so the results agree.

The time is linear in the length of the text, and a text in neither form of JSON raises ProtocolError.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeVar

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError

_T = TypeVar("_T")

#: A string, or the rest of the text if the string has no end, so that nothing is searched twice; or "{" or "," and a key that is an integer
#: or an object.
_TOKEN: Final = re.compile(
    r"""
    "(?:[^"\\]|\\.?)*"?
    | ([{,]\s*) ( -?(?:0|[1-9][0-9]*) | \{ (?: "(?:[^"\\]|\\.)*" | [^{}"] )* \} ) (?=\s*:)
    """,
    re.DOTALL | re.VERBOSE,
)


def loads(text: bytes | bytearray | memoryview | str) -> Any:
    """Return the value of a standard or fastjson JSON text; bytes are UTF-8. Raises ProtocolError PROTOCOL if it is not JSON."""
    try:
        text = text if isinstance(text, str) else str(text, "utf-8")
        return _standard(_TOKEN.sub(_quoted, text))
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError as error:
        raise _malformed(str(error)) from None


def _quoted(match: re.Match[str]) -> str:
    before, key = match.groups()
    if key is None:
        return match[0]
    # Refuse a key that is not JSON.
    loads(key)
    return f"{before}{json.dumps(key)}"


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
