"""The record of a listener's call in RocketMQ's message trace. Pure.

Source: ConsumeMessageTraceHookImpl, ConsumeMessageOrderlyService, ConsumeMessageConcurrentlyService, ConsumeReturnType. This package has
no ``consumeTimeout``, after which Java reports a call as TIME_OUT.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

#: The topic of traces, unless the user names another one (TopicValidator.RMQ_SYS_TRACE_TOPIC).
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
#: The region of a broker that names no region (MixAll.DEFAULT_TRACE_REGION_ID).
DEFAULT_REGION: Final = "DefaultRegion"
#: Names of properties that a broker adds to each message, and of fields in its answer to a send: the broker's region, and whether it
#: wants traces ("false": no). MessageConst.PROPERTY_MSG_REGION, PROPERTY_TRACE_SWITCH.
REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"


def region_of(properties: Mapping[str, str]) -> str | None:
    """Return the region of the broker from a message's properties or an answer's fields, or None if the broker wants no traces."""
    return None if properties.get(TRACE_ON) == "false" else properties.get(REGION) or DEFAULT_REGION


class ReturnType(Enum):
    """How a listener's call ended. The values are the ordinals of ConsumeReturnType."""

    SUCCESS = 0
    EXCEPTION = 2
    RETURNNULL = 3
    FAILED = 4


class TracedMessage(NamedTuple):
    """A message that a listener was given. ``keys``: None if it has none. ``retries``: the number of earlier calls with this message."""

    message_id: str
    keys: str | None
    retries: int


class Ended(NamedTuple):
    """The end of a listener's call: how it ended, and its duration in ms, divided by the number of messages as in Java (``cost``)."""

    cost: int
    how: ReturnType


class TracedCall(NamedTuple):
    """The beginning of a listener's call or, with ``ended``, its end.

    ``request_id`` is unique to the call and the same at its beginning and end. ``time``: when the call began, in ms since the epoch.
    """

    group: str
    region: str
    request_id: str
    time: int
    messages: tuple[TracedMessage, ...]
    ended: Ended | None = None
