"""Renders pull requests from a template and decodes their answers in place, because this work is most of a pull's cost here. Pure.

Results equal those of the general encoder and decoder (message_requests, frame) for every input. This module only saves the work that
is the same for all requests and answers of a queue: requests differ in three numbers, and answers differ in four.

Rules: an answer is read here only if its header equals, byte for byte except for the numbers, a header that the general decoder has
read. The general decoder reads every other frame: errors, empty answers, requests by the server, binary headers. A body is a view of
the receive buffer. The part of the buffer from which a frame was decoded is never written again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from orderedmq.endpoint import Credentials
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.codes import ResponseCode
from orderedmq.rocketmq.wire.frame import MAX_RECEIVED_FRAME, FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import SIGNATURE, Request, signed
from orderedmq.rows.filters import Filter

#: The size in bytes of the buffer for received answers. It holds about 250 answers of 32 small messages.
RECEIVE_BUFFER: Final = 4 * 1024 * 1024
#: The minimum of free bytes in the buffer. With fewer, a system call would read too little.
_LEAST_FREE: Final = 256 * 1024
#: The number of answers with unknown headers between two learned headers. Learning a header costs as much as reading dozens of answers.
_LEARN_AFTER: Final = 16

_PREFIX: Final = struct.Struct(">II")
#: If the header is JSON, the 4 bytes of header type and header length are a number below this.
_NOT_JSON: Final = 1 << 24
_MAX_OPAQUE: Final = 2**31 - 1
#: Patterns for the numbers in an answer's header. The opaque has at most 31 bits. The others are in quotes, and 18 digits always fit
#: in 64 bits.
_OPAQUE: Final = rb"0|[1-9][0-9]{0,9}"
_NUMBER: Final = rb"[0-9]{1,18}"
#: The fields that differ between requests.
_PATCHED: Final = ("queueOffset", "maxMsgNums", SIGNATURE)
_NUMBERS: Final = ("nextBeginOffset", "minOffset", "maxOffset")


class PullTemplate:
    """Renders the requests of `message_requests.pull` for one queue."""

    def __init__(
        self,
        queue: MessageQueue,
        group: str,
        matching: Filter | None = None,
        credentials: Credentials | None = None,
        names: Namespaces = NO_NAMESPACES,
    ) -> None:
        self._queue = queue
        self._group = group
        self._matching = matching
        self.credentials = credentials
        self._names = names
        request = self.request(0, 0)
        ext = request.ext if credentials is None else signed(request.ext, request.body, credentials)
        fixed = {name: value for name, value in ext.items() if name not in _PATCHED}
        # The order of JSON fields has no meaning, so the fields that differ go to the end, where the two closing brackets are cut off.
        header = encode(RemotingCommand(request.code, 0, 0, None, fixed))[8:]
        self._head = header.replace(b'"opaque":0,', b"", 1)[:-2]
        assert header.index(b'"opaque":0,') < header.index(b'"extFields":{"')
        assert header.endswith(b'"}}')

    def request(self, offset: int, count: int) -> Request[PullResult]:
        """Return the request of `message_requests.pull`, with the names that servers know."""
        return self._names.request(message_requests.pull(self._queue, self._group, offset, count, matching=self._matching))

    def render(self, opaque: int, offset: int, count: int) -> bytes:
        if self.credentials is None:
            header = self._head + b',"queueOffset":"%d","maxMsgNums":"%d"},"opaque":%d}' % (offset, count, opaque)
        else:
            tail = b',"queueOffset":"%d","maxMsgNums":"%d"' % (offset, count)
            request = self.request(offset, count)
            # The signature is in base64, which needs no escapes in JSON.
            tail += b',"Signature":"%s"' % signed(request.ext, request.body, self.credentials)[SIGNATURE].encode()
            header = self._head + tail + b'},"opaque":%d}' % opaque
        return _PREFIX.pack(4 + len(header), len(header)) + header


#: The number of a request, and its answer with messages.
Found: TypeAlias = tuple[int, PullResult]


class PullDecoder(FrameDecoder):
    """Decodes received bytes into answers with messages (`Found`), and all other frames into commands.

    Use it like `FrameDecoder`, but call `take` instead of ``next_command``. The body of a `Found` is a view that keeps its buffer alive.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        *,
        max_frame: int = MAX_RECEIVED_FRAME,
        buffer_size: int = RECEIVE_BUFFER,
    ) -> None:
        """``allocate`` returns a new writable buffer of the given size in bytes."""
        super().__init__(max_frame=max_frame, buffer_size=0)
        self._allocate = allocate
        self._size = max(buffer_size, 64)
        self._least = min(_LEAST_FREE, self._size // 2)
        self._view = memoryview(b"")
        self._known: re.Pattern[bytes] | None = None
        self._fields: list[int] = []
        self._suggested = 0
        self._unknown = _LEARN_AFTER

    def buffer(self) -> memoryview:
        """Return the free part of the buffer, into which to write the next bytes. It is never empty."""
        if len(self._view) - self._end < self._least:
            # Earlier answers still refer to the old buffer, so take a new one.
            self._move(self._allocate(max(self._size, 2 * (self._end - self._start))))
        return self._view[self._end :]

    def take(self, events: list[Found | RemotingCommand]) -> None:
        """Append all complete answers and commands. Raises ProtocolError at a malformed frame and in every later call."""
        while True:
            if self._known is not None and self._broken is None:
                self._take_found(self._known, events)
            start = self._start
            command = self.next_command()
            if command is None:
                return
            events.append(command)
            if command.code == ResponseCode.SUCCESS and command.is_response:
                self._unknown += 1
                if self._unknown > _LEARN_AFTER:
                    self._learn(self._view[start + 8 : self._start - len(command.body)].tobytes(), command)

    def _take_found(self, known: re.Pattern[bytes], events: list[Found | RemotingCommand]) -> None:
        """Append the answers that come before the first frame with a different header."""
        view, start, end = self._view, self._start, self._end
        fields, suggested, most = self._fields, self._suggested, self._max_frame
        # Calling PullResult would take twice as long.
        make = tuple.__new__
        while end - start >= 8:
            length, header_length = _PREFIX.unpack_from(view, start)
            middle, stop = start + 8 + header_length, start + 4 + length
            if not (header_length < _NOT_JSON and middle <= stop <= end and length <= most):
                break
            match = known.fullmatch(view, start + 8, middle)
            if match is None:
                break
            opaque, after, least, last = map(int, match.group(*fields))
            if opaque > _MAX_OPAQUE:
                break
            events.append(
                (opaque, make(PullResult, (PullStatus.FOUND, after, least, last, suggested, view[middle:stop], False)))
            )
            start = stop
        self._start = start

    def _learn(self, header: bytes, command: RemotingCommand) -> None:
        """Let `_take_found` read headers that differ from this one only in their numbers, unless the header is ambiguous."""
        self._unknown = 0
        suggested = command.ext.get("suggestWhichBrokerId", "0")
        # With no escapes in the header, a name in quotes can only be a key or a complete string value. If it occurs once, it is the key.
        names = ("opaque", *_NUMBERS)
        if b"\\" in header or not suggested.isascii() or not suggested.isdigit() or len(suggested) > 18:
            return
        if any(header.count(b'"%s"' % name.encode()) != 1 for name in names) or not all(map(command.ext.get, _NUMBERS)):
            return
        pattern = re.escape(header)
        for name in names:
            quote, number = (b"", _OPAQUE) if name == "opaque" else (b'"', _NUMBER)
            field = b'"%s":%s' % (name.encode(), quote)
            before, *rest = re.split(field + rb"[0-9]+(?=%s)" % (quote or rb"[,\\]"), pattern)
            if len(rest) != 1:
                return
            pattern = before + field + b"(?P<%s>%s)" % (name.encode(), number) + rest[0]
        self._suggested = int(suggested)
        self._known = re.compile(pattern)
        self._fields = [self._known.groupindex[name] for name in names]
