"""Encodes commands as frames of the remoting protocol, and decodes frames into commands. Pure.

A frame is: length of the rest (4 bytes), header type (1 byte: JSON or ROCKETMQ), header length (3 bytes), header, body.
Integers are big-endian. This client writes JSON headers. A 4.9.x server answers with the request's header type, a 5.x server
with its own.
Source: NettyDecoder, RemotingCommand.decode, RocketMQSerializable.rocketMQProtocolDecode.

Rules: malformed bytes raise ProtocolError, and the decoder then stays broken, since the start of the next frame is unknown. A
frame costs one pass and one copy of its body. Memory grows with the bytes received, never with an announced length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from orderedmq.conditions import ProtocolCondition
from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, VERSION, LanguageCode, SerializeType

#: Bytes of the largest whole frame. For a larger one a server silently drops the connection
#: (``com.rocketmq.remoting.frameMaxLength``).
MAX_SENT_FRAME: Final = 16 * 1024 * 1024
#: Bytes of the largest answer. A 5.x broker can be configured to put up to 128 MiB of messages into one.
MAX_RECEIVED_FRAME: Final = 160 * 1024 * 1024
#: Initial bytes of a decoder's buffer: a dozen answers to pulls of 32 small messages.
BUFFER_SIZE: Final = 256 * 1024
#: Bytes of the largest buffer that is kept after the large answer for which it grew.
_KEPT_BUFFER: Final = 4 * 1024 * 1024

#: Bytes of a JSON header from which on the message ids in it are not decoded: of a thousand messages they take 33 KiB, and longer
#: to decode than all else.
_LONG_HEADER: Final = 4096
_IDS: Final = b'"msgId":"'

_PREFIX = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
#: The fixed fields of a ROCKETMQ header: code, language, version, opaque, flag.
_FIXED = struct.Struct(">hbhii")
_INT32 = range(-(2**31), 2**31)
#: Languages are only displayed, so one that this client does not know counts as OTHER.
_LANGUAGES = {int(language): language for language in LanguageCode}
_LANGUAGE_NAMES = {language.name: language for language in LanguageCode}

#: One encoder for all headers: json.dumps with these settings would make a new one for each.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

Bytes = bytes | bytearray | memoryview


@dataclass(slots=True)
class RemotingCommand:
    """A request or an answer. An answer repeats its request's ``opaque``; ``ext`` holds the fields that depend on ``code``."""

    code: int
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    ext: Mapping[str, str] = field(default_factory=dict)
    body: Bytes = b""
    version: int = VERSION
    language: LanguageCode = LanguageCode.PYTHON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


def encode_parts(command: RemotingCommand) -> tuple[bytes, Bytes]:
    """Return a command's frame up to its body, and the body uncopied.

    Raises ProtocolError FRAME_TOO_LARGE above MAX_SENT_FRAME, PROTOCOL for a text that is not valid Unicode.
    """
    header: dict[str, Any] = {
        "code": int(command.code),
        "language": command.language.name,
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
    """Return a command as one frame; see `encode_parts`."""
    return b"".join(encode_parts(command))


def _prefix(kind: SerializeType, header: bytes, body_length: int) -> bytes:
    length = 4 + len(header) + body_length
    if 4 + length > MAX_SENT_FRAME:
        raise ProtocolError(
            ProtocolCondition.FRAME_TOO_LARGE,
            f"a request of {4 + length} bytes is more than the {MAX_SENT_FRAME} that a RocketMQ server reads: send fewer messages at once",
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

    @property
    def capacity(self) -> int:
        """The size of the buffer in bytes."""
        return len(self._view)

    def buffer(self) -> memoryview:
        """Return the free part of the buffer, for the next bytes; never empty."""
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
        """Count ``count`` bytes that were written to the front of `buffer`."""
        if not 0 <= count <= len(self._view) - self._end:
            raise ValueError(f"{count} bytes in a buffer of {len(self._view) - self._end}")
        self._end += count

    def feed(self, data: Bytes) -> list[RemotingCommand]:
        """Return the commands that ``data`` completes. Raises ProtocolError at the first malformed frame."""
        commands: list[RemotingCommand] = []
        rest = memoryview(data)
        while len(rest):
            space = self.buffer()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            self.received(count)
            self.take(commands)
        return commands

    def take(self, events: list[Any]) -> None:
        """Append the commands that are complete. Raises ProtocolError after them, and again at every later call."""
        while (command := self.next_command()) is not None:
            events.append(command)

    def next_command(self) -> RemotingCommand | None:
        """Return the next command, None if it is incomplete. Raises ProtocolError, and again at every later call."""
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
            raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header of {header_length} bytes in a frame of {length}")
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
            return "it is a TLS alert, the server wants TLS"
        if first == b"HTTP":
            return "it is HTTP, not a RocketMQ server's port"
        return "the peer is not a RocketMQ server, or its stream is damaged"


def _json_header(view: memoryview) -> RemotingCommand:
    try:
        text, ids = _without_ids(view)
        header = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header is not an object but {type(header).__name__}")
    remark = header.get("remark")
    if remark is not None and not isinstance(remark, str):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's remark is {type(remark).__name__}")
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
        _LANGUAGE_NAMES.get(str(header.get("language", "JAVA")), LanguageCode.OTHER),
    )


def _without_ids(view: memoryview) -> tuple[Bytes, str]:
    """Return a long header with an empty ``msgId``, and its text, which needs no decoding; any other header as it is, and "".

    A batch's answer has the id of each message in this field.
    """
    if len(view) < _LONG_HEADER:
        return view, ""
    header = bytes(view)
    begin = header.find(_IDS) + len(_IDS)
    end = header.find(b'"', begin)
    if begin < len(_IDS) or end < 0 or header.find(_IDS, end) >= 0:
        return view, ""
    ids = header[begin:end]
    # With an escape, the text may go on behind the quote. Bytes that are not ASCII may be malformed.
    if not ids.isascii() or b"\\" in ids:
        return view, ""
    return header[:begin] + header[end:], str(ids, "ascii")


def _int32(header: dict[str, Any], name: str, missing: int | None = None) -> int:
    value = header.get(name, missing)
    if type(value) is not int or value not in _INT32:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's {name} is {str(value)[:40]!r}, not a number of 32 bits")
    return value


def _ext(fields: Any) -> dict[str, str]:
    """Return the fields as strings. A JSON integer or boolean becomes its text; null means absent."""
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's extFields are {type(fields).__name__}")
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
    raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's field {name[:100]!r} is {type(value).__name__}")


def _binary_header(view: memoryview) -> RemotingCommand:
    try:
        code, language, version, opaque, flag = _FIXED.unpack_from(view)
        remark, at = _text(view, _FIXED.size, len(view), _INT)
        (ext_length,) = _INT.unpack_from(view, at)
        at += 4
        if at + ext_length != len(view):
            raise ProtocolError(
                ProtocolCondition.PROTOCOL, f"a header has fields of {ext_length} bytes where {len(view) - at} are left"
            )
        ext: dict[str, str] = {}
        while at < len(view):
            name, at = _text(view, at, len(view), _SHORT)
            ext[name], at = _text(view, at, len(view), _INT)
    except struct.error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header of {len(view)} bytes ends inside a field") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's text is not UTF-8: {error.reason}") from None
    return RemotingCommand(code, opaque, flag, remark or None, ext, b"", version, _LANGUAGES.get(language, LanguageCode.OTHER))


def _text(view: memoryview, at: int, end: int, length: struct.Struct) -> tuple[str, int]:
    (count,) = length.unpack_from(view, at)
    begin = at + length.size
    if not 0 <= count <= end - begin:
        raise ProtocolError(ProtocolCondition.PROTOCOL, f"a header's text of {count} bytes where {end - begin} are left")
    return str(view[begin : begin + count], "utf-8"), begin + count
