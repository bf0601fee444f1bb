"""Encodes RocketMQ's message traces: who sent a message, and who consumed it. Pure.

A trace is a line of fields. Each field ends with the character 1, and the line ends with the character 2. A message of the trace topic
has many traces. Its keys are the ids and keys of the traced messages, so that ``mqadmin queryMsgTraceById`` finds it.

As in Java, a field without a value is the text ``null``. Java traces a batch as one message, whose id is all ids joined by commas, so
no search finds it. Here each message of a batch has a trace. Java puts at most 20 traces into a message and begins a new message at
128,000 characters. Here a message is limited only by the size of its body and of its keys.

Source: TraceDataEncoder, TraceBean, TraceConstants, AsyncTraceDispatcher, SendMessageTraceHookImpl.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from orderedmq.model import MAX_KEY_BYTES
from orderedmq.rocketmq.codec.encode import SendBody
from orderedmq.rocketmq.codec.stored_message import KEYS, TAGS, UNIQ_KEY
from orderedmq.rows.message_trace import ReturnType, TracedCall

FIELD_END: Final = "\x01"
TRACE_END: Final = "\x02"
#: The maximum bytes of a trace message's body (AsyncTraceDispatcher.maxMsgSize) and of its keys. The keys are enough for 124 messages
#: that have no keys themselves.
MAX_BODY: Final = 128_000
MAX_KEYS: Final = MAX_KEY_BYTES

_NULL: Final = "null"
#: MessageType.Normal_Msg.
_NORMAL: Final = 0
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">H")
#: The positions of a body's length and of the body in a message of a batch (MessageDecoder.encodeMessage).
_LENGTH_AT, _BODY_AT = 16, 20
_UNIQ_KEY, _TAGS, _KEYS = (f"\x02{name}\x01".encode() for name in (UNIQ_KEY, TAGS, KEYS))


class Trace(NamedTuple):
    """One or more lines, and the keys by which to find them."""

    text: str
    keys: tuple[str, ...]


class Sent(NamedTuple):
    """A send request that a broker has answered.

    ``born`` is in ms since 1970, and ``cost`` in ms. ``message_ids`` are the broker's ids of the messages, joined by commas; "" if they
    are not known. ``store_host`` is the broker's address.
    """

    topic: str
    group: str
    region: str
    store_host: str
    body: SendBody
    born: int
    cost: int
    message_ids: str
    success: bool


def of_sent(sent: Sent) -> Iterator[Trace]:
    """Yield the trace of each message of a request."""
    ids = sent.message_ids.split(",")
    if len(ids) != sent.body.rows:
        ids = [""] * sent.body.rows
    begin = FIELD_END.join(("Pub", str(sent.born), sent.region, sent.group, sent.topic))
    end = f"{_bool(sent.success)}{TRACE_END}"
    for (key, tags, keys, length), stored in zip(_messages(sent.body), ids):
        yield Trace(
            f"{begin}\x01{key}\x01{tags}\x01{keys}\x01{sent.store_host}\x01{length}\x01{sent.cost}\x01{_NORMAL}\x01{stored}\x01{end}",
            _keys(key, keys),
        )


def of_call(call: TracedCall) -> Iterator[Trace]:
    """Yield the trace of each message of a call: SubBefore, or SubAfter if the call has ended."""
    if call.ended is None:
        begin = FIELD_END.join(("SubBefore", str(call.time), call.region, call.group, call.request_id))
        for message in call.messages:
            yield Trace(
                f"{begin}\x01{message.message_id}\x01{message.retries}\x01{message.keys or _NULL}{TRACE_END}",
                _keys(message.message_id, message.keys or _NULL),
            )
        return
    success = _bool(call.ended.how is ReturnType.SUCCESS)
    end = FIELD_END.join((str(call.ended.how.value), str(call.time), call.group)) + TRACE_END
    for message in call.messages:
        yield Trace(
            f"SubAfter\x01{call.request_id}\x01{message.message_id}\x01{call.ended.cost}\x01{success}\x01{message.keys or _NULL}\x01{end}",
            _keys(message.message_id, message.keys or _NULL),
        )


def packed(traces: Iterable[Trace]) -> Iterator[tuple[bytes, str]]:
    """Yield bodies and keys of messages for the trace topic. A key that does not fit is left out, but its trace is kept."""
    texts: list[str] = []
    keys: dict[str, None] = {}
    size = key_size = 0
    for text, own in traces:
        width = _bytes(text)
        more = sum(map(_bytes, own)) + len(own)
        if texts and (size + width > MAX_BODY or key_size + more > MAX_KEYS):
            yield "".join(texts).encode("utf-8", "replace"), " ".join(keys)
            texts, keys, size, key_size = [], {}, 0, 0
        texts.append(text)
        size += width
        if key_size + more <= MAX_KEYS:
            keys.update(dict.fromkeys(own))
            key_size += more
            continue
        for key in own:
            if key_size + _bytes(key) < MAX_KEYS:
                keys[key] = None
                key_size += _bytes(key) + 1
    if texts:
        yield "".join(texts).encode("utf-8", "replace"), " ".join(keys)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _keys(message_id: str, keys: str) -> tuple[str, ...]:
    return (message_id,) if keys == _NULL else (message_id, *keys.split())


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _messages(body: SendBody) -> Iterator[tuple[str, str, str, int]]:
    """Yield the id, tags, keys and body length of each message of a request."""
    if body.properties is not None:
        yield *_values(b"\x02" + body.properties.encode()), len(body.body)
        return
    data, at = bytes(body.body), 0
    while at < len(data):
        (length,) = _INT.unpack_from(data, at + _LENGTH_AT)
        begin = at + _BODY_AT + length
        (width,) = _SHORT.unpack_from(data, begin)
        at = begin + 2 + width
        yield *_values(b"\x02" + data[begin + 2 : at]), length


def _values(properties: bytes) -> tuple[str, str, str]:
    """Return the id, tags and keys; ``null`` for each that is missing. The last value of a property counts."""
    values = []
    for name in (_UNIQ_KEY, _TAGS, _KEYS):
        at = properties.rfind(name)
        if at < 0:
            values.append(_NULL)
            continue
        at += len(name)
        end = properties.find(b"\x02", at)
        values.append(str(properties[at : end if end >= 0 else len(properties)], "utf-8", "replace"))
    return values[0], values[1], values[2]
