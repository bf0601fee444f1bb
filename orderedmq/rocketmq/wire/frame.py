"""Encodes commands as frames of the remoting protocol, and decodes frames into commands. Pure.

A frame is: length of the rest (4 bytes), header type (1 byte: JSON or ROCKETMQ), header length (3 bytes), header, body.
Integers are big-endian. This client writes JSON headers. A 4.9.x server answers with the header type of the request, a 5.x server
with its own header type.
Source: NettyDecoder, RemotingCommand.decode, RocketMQSerializable.rocketMQProtocolDecode.

Rules: malformed bytes raise ProtocolError, and the decoder then stays broken, because the start of the next frame is unknown.
Decoding a frame takes one pass and one copy of its body. Memory grows with the bytes received, never with an announced length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, VERSION, SerializeType

#: The size of the largest frame to send, in bytes. A server that receives a larger frame silently closes the connection
#: (``com.rocketmq.remoting.frameMaxLength``).
MAX_SENT_FRAME: Final = 16 * 1024 * 1024
#: The size of the largest answer to accept, in bytes. A 5.x broker can be configured to send up to 128 MiB of messages in an answer.
MAX_RECEIVED_FRAME: Final = 160 * 1024 * 1024
#: The initial size of a decoder's buffer, in bytes: enough for a dozen answers to pulls of 32 small messages.
BUFFER_SIZE: Final = 256 * 1024
#: A buffer that has grown beyond this number of bytes for a large answer is replaced by a small one afterwards.
_KEPT_BUFFER: Final = 4 * 1024 * 1024

#: In a JSON header of at least this many bytes, the message ids are not decoded. The ids of a thousand messages take 33 KiB, and
#: decoding them takes longer than decoding everything else.
_LONG_HEADER: Final = 4096
_IDS: Final = b'"msgId":"'

_PREFIX = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
#: The fixed fields of a ROCKETMQ header: code, language, version, opaque, flag.
_FIXED = struct.Struct(">hbhii")
_INT32 = range(-(2**31), 2**31)

#: One encoder for all headers, because json.dumps with these settings would make a new encoder for each header.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

Bytes = bytes | bytearray | memoryview


@dataclass(slots=True)
class RemotingCommand:
    """A request or an answer. An answer has the ``opaque`` of its request. ``ext`` has the fields that depend on ``code``."""

    code: int
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    ext: Mapping[str, str] = field(default_factory=dict)
    body: Bytes = b""
    version: int = VERSION

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


def encode_parts(command: RemotingCommand) -> tuple[bytes, Bytes]:
    """Return a command's frame in two parts: the bytes before the body, and the body, which is not copied.

    Raises ProtocolError FRAME_TOO_LARGE above MAX_SENT_FRAME, and PROTOCOL if a text is not valid Unicode.
    """
    header: dict[str, Any] = {
        "code": int(command.code),
        "language": "PYTHON",
        "version": command.version,
        "opaque": command.opaque,
        "flag": command.flag,
    }
    if command.remark is not None:
        header["remark"] = command.remark
    if command.ext:
        header["extFields"] = command.ext
    try:
        encoded = _json(header).encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a request's field is not valid Unicode: {error.reason}") from None
    return _prefix(SerializeType.JSON, encoded, len(command.body)) + encoded, command.body


def encode(command: RemotingCommand) -> bytes:
    """Return a command as one frame. Raises the errors of `encode_parts`."""
    return b"".join(encode_parts(command))


def _prefix(kind: SerializeType, header: bytes, body_length: int) -> bytes:
    length = 4 + len(header) + body_length
    if 4 + length > MAX_SENT_FRAME:
        raise ProtocolError(
            ProtocolCondition.FRAME_TOO_LARGE,
            f"a request has {4 + length} bytes, but a RocketMQ server reads at most {MAX_SENT_FRAME}. Send fewer messages in one request",
        )
    return _PREFIX.pack(length, kind << 24 | len(header))


class FrameDecoder:
    """Decodes received bytes into commands.

    Write into `buffer`, report the number of bytes with `received`, then call `next_command` until it returns None.
    """

    def __init__(self, *, max_frame: int = MAX_RECEIVED_FRAME, buffer_size: int = BUFFER_SIZE) -> None:
        self._max_frame = max_frame
        self._size = max(buffer_size, 64)
        self._view = memoryview(bytearray(self._size))
        self._start = 0
        self._end = 0
        self._broken: ProtocolError | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether no part of a frame is in the buffer."""
        return self._start == self._end

    def buffer(self) -> memoryview:
        """Return the free part of the buffer, into which to write the next bytes. It is never empty."""
        capacity = len(self._view)
        if self._start == self._end:
            self._start = self._end = 0
            if capacity > max(self._size, _KEPT_BUFFER):
                self._view = memoryview(bytearray(self._size))
        elif capacity - self._end < self._size // 4:
            if self._start:
                self._move(self._view)
            elif self._end == capacity:
                self._move(memoryview(bytearray(2 * capacity)))
        return self._view[self._end :]

    def _move(self, view: memoryview) -> None:
        length = self._end - self._start
        view[:length] = self._view[self._start : self._end]
        self._view, self._start, self._end = view, 0, length

    def received(self, count: int) -> None:
        """Record that ``count`` bytes have been written to the start of `buffer`."""
        if not 0 <= count <= len(self._view) - self._end:
            raise ValueError(f"{count} bytes do not fit in the {len(self._view) - self._end} free bytes of the buffer")
        self._end += count

    def take(self, events: list[Any]) -> None:
        """Append all complete commands to ``events``. Raises ProtocolError at a malformed frame and in every later call."""
        while (command := self.next_command()) is not None:
            events.append(command)

    def next_command(self) -> RemotingCommand | None:
        """Return the next command; None if it is incomplete. Raises ProtocolError at a malformed frame and in every later call."""
        if self._broken is not None:
            raise ProtocolError(self._broken.sub, self._broken.message)
        try:
            return self._next()
        except ProtocolError as error:
            self._broken = error
            raise

    def _next(self) -> RemotingCommand | None:
        available = self._end - self._start
        if available < 4:
            return None
        (length,) = _LENGTH.unpack_from(self._view, self._start)
        if not 4 <= length <= self._max_frame:
            raise ProtocolError(
                ProtocolCondition.PROTOCOL if length < 4 else ProtocolCondition.FRAME_TOO_LARGE,
                f"a frame announces {length} bytes, outside the range of 4 to {self._max_frame}: {self._hint()}",
            )
        if available < 8:
            return None
        word = _LENGTH.unpack_from(self._view, self._start + 4)[0]
        kind, header_length = word >> 24, word & 0xFFFFFF
        if header_length > length - 4:
            raise ProtocolError(
                ProtocolCondition.PROTOCOL, f"a header of {header_length} bytes does not fit in a frame of {length}"
            )
        if kind not in (SerializeType.JSON, SerializeType.ROCKETMQ):
            raise ProtocolError(ProtocolCondition.PROTOCOL, f"a frame has a header of the unknown type {kind}")
        if available < 4 + length:
            return None
        begin = self._start + 8
        middle, end = begin + header_length, self._start + 4 + length
        decode = _json_header if kind == SerializeType.JSON else _binary_header
        command = decode(self._view[begin:middle])
        command.body = bytes(self._view[middle:end])
        self._start = end
        return command

    def _hint(self) -> str:
        first = bytes(self._view[self._start : self._start + 4])
        if first[:2] == b"\x15\x03":
            return "it is a TLS alert, so the server requires TLS"
        if first == b"HTTP":
            return "it is HTTP, so this is not a RocketMQ server's port"
        return "the peer is not a RocketMQ server, or its stream is damaged"


def _json_header(view: memoryview) -> RemotingCommand:
    try:
        text, ids = _without_ids(view)
        header = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header is not an object but of type {type(header).__name__}")
    remark = header.get("remark")
    if remark is not None and not isinstance(remark, str):
        raise ProtocolError(
            ProtocolCondition.PROTOCOL, f"a header's remark is not a string but of type {type(remark).__name__}"
        )
    ext = _ext(header.get("extFields"))
    if ids and "msgId" in ext:
        ext["msgId"] = ids
    return RemotingCommand(
        _int32(header, "code"),
        _int32(header, "opaque"),
        _int32(header, "flag", 0),
        remark,
        ext,
        b"",
        _int32(header, "version", 0),
    )


def _without_ids(view: memoryview) -> tuple[Bytes, str]:
    """Return a long header with its ``msgId`` emptied, and the text that was in ``msgId``. Return any other header unchanged, with "".

    The answer to a batch has the ids of all its messages in this field. They need no decoding.
    """
    if len(view) < _LONG_HEADER:
        return view, ""
    header = bytes(view)
    begin = header.find(_IDS) + len(_IDS)
    end = header.find(b'"', begin)
    if begin < len(_IDS) or end < 0 or header.find(_IDS, end) >= 0:
        return view, ""
    ids = header[begin:end]
    # With an escape, the text may continue after the quote. Bytes that are not ASCII may be malformed.
    if not ids.isascii() or b"\\" in ids:
        return view, ""
    return header[:begin] + header[end:], str(ids, "ascii")


def _int32(header: dict[str, Any], name: str, missing: int | None = None) -> int:
    value = header.get(name, missing)
    if type(value) is not int or value not in _INT32:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's {name} is {str(value)[:40]!r}, not a 32-bit integer")
    return value


def _ext(fields: Any) -> dict[str, str]:
    """Return the fields as strings. An integer or boolean becomes its JSON text, and a field that is null is left out."""
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise ProtocolError(
            ProtocolCondition.PROTOCOL, f"a header's extFields are not an object but of type {type(fields).__name__}"
        )
    for value in fields.values():
        if type(value) is not str:
            return {name: _ext_text(name, value) for name, value in fields.items() if value is not None}
    return fields


def _ext_text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's field {name[:100]!r} has type {type(value).__name__}")


def _binary_header(view: memoryview) -> RemotingCommand:
    try:
        code, _, version, opaque, flag = _FIXED.unpack_from(view)
        remark, at = _text(view, _FIXED.size, len(view), _INT)
        (ext_length,) = _INT.unpack_from(view, at)
        at += 4
        if at + ext_length != len(view):
            raise ProtocolError(
                ProtocolCondition.PROTOCOL, f"a header announces fields of {ext_length} bytes, but {len(view) - at} are left"
            )
        ext: dict[str, str] = {}
        while at < len(view):
            name, at = _text(view, at, len(view), _SHORT)
            ext[name], at = _text(view, at, len(view), _INT)
    except struct.error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header of {len(view)} bytes ends inside a field") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's text is not UTF-8: {error.reason}") from None
    return RemotingCommand(code, opaque, flag, remark or None, ext, b"", version)


def _text(view: memoryview, at: int, end: int, length: struct.Struct) -> tuple[str, int]:
    (count,) = length.unpack_from(view, at)
    begin = at + length.size
    if not 0 <= count <= end - begin:
        raise ProtocolError(
            ProtocolCondition.PROTOCOL, f"a header announces a text of {count} bytes, but {end - begin} are left"
        )
    return str(view[begin : begin + count], "utf-8"), begin + count
