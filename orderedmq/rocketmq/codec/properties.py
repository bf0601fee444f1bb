"""Names and text form of a message's properties: ``name \\x01 value \\x02 name \\x01 value [\\x02]`` in UTF-8. Pure.

The rules are those of ``MessageDecoder``. Nothing is escaped, so a name or value with a separator would change other properties and is
refused. An entry without a name or a value is ignored. If two entries have the same name, the last one counts. The last separator may
be missing.
"""

from __future__ import annotations

from typing import Final

from orderedmq.model import MAX_PROPERTIES_BYTES
from orderedmq.text import text_of

NAME_END: Final = b"\x01"
VALUE_END: Final = b"\x02"

TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
SHARDING_KEY: Final = "__SHARDINGKEY"
UNIQ_KEY: Final = "UNIQ_KEY"
RETRY_TOPIC: Final = "RETRY_TOPIC"

#: Bytes reserved for the properties that a broker may add to a sent message: CLUSTER, MSG_REGION, TRACE_ON and WAIT.
BROKERS_SHARE: Final = 256
#: The maximum bytes of the properties of a sent message.
MAX_SENT_BYTES: Final = MAX_PROPERTIES_BYTES - BROKERS_SHARE


def parse_properties(data: bytes) -> dict[str, str]:
    """Return names and values in order (``MessageDecoder.string2messageProperties``). Malformed text is read as in Java (text.py)."""
    found: dict[str, str] = {}
    for entry in data.split(VALUE_END):
        name, _, value = entry.partition(NAME_END)
        if name and value:
            found[text_of(name)] = text_of(value)
    return found


def bad_property(name: str, value: str | None) -> str | None:
    """Return what is wrong with a property, and what to do; None if RocketMQ can carry it."""
    if not name:
        return "has an empty name"
    if not value:
        return "has no value. Leave it out"
    if any(separator in text for separator in "\x01\x02" for text in (name, value)):
        return "has the character \\x01 or \\x02, which separates properties in RocketMQ. Remove it"
    return None
