"""What RocketMQ's message trace says of a call of a listener. Pure.

Source: ConsumeMessageTraceHookImpl, ConsumeMessageOrderlyService, ConsumeMessageConcurrentlyService, ConsumeReturnType. The time
after which Java calls a consumption TIME_OUT (``consumeTimeout``) does not exist here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

#: The topic of traces, unless the user names another one (TopicValidator.RMQ_SYS_TRACE_TOPIC).
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
#: The region of a broker that names none (MixAll.DEFAULT_TRACE_REGION_ID).
DEFAULT_REGION: Final = "DefaultRegion"
#: Properties that a broker adds to a message, and fields of its answer to a send: its region, and whether it wants traces
#: ("false": no). MessageConst.PROPERTY_MSG_REGION, PROPERTY_TRACE_SWITCH.
REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"


def region_of(properties: Mapping[str, str]) -> str | None:
    """Return the region of a message's or an answer's broker; None if the broker wants no traces."""
    return None if properties.get(TRACE_ON) == "false" else properties.get(REGION) or DEFAULT_REGION


class ReturnType(Enum):
    """How a call ended; the values are the ordinals of ConsumeReturnType."""

    SUCCESS = 0
    EXCEPTION = 2
    RETURNNULL = 3
    FAILED = 4


class TracedMessage(NamedTuple):
    """A message that a listener was given. ``keys`` None: it has none. ``retries`` counts its former calls."""

    message_id: str
    keys: str | None
    retries: int


class Ended(NamedTuple):
    """The end of a call: its duration in ms, divided by the number of messages as in Java, and how it ended."""

    cost: int
    how: ReturnType


class TracedCall(NamedTuple):
    """A call of a listener that begins or, with ``ended``, has ended.

    ``request_id`` is the same in both, and in no other call. ``time`` is when it began, in ms since 1970.
    """

    group: str
    region: str
    request_id: str
    time: int
    messages: tuple[TracedMessage, ...]
    ended: Ended | None = None
