"""Renders pull requests from a template and decodes their answers in place: what a pull costs here is mostly this. Pure.

Both agree with the general encoder and decoder (message_requests, frame) for every input. They only save work that is the same
for all requests and answers of a queue: a request differs from the last one in three numbers, and so does an answer in four.

Rules: an answer is read here only if its header is, byte for byte, one that the general decoder has read, with other numbers in
the same places. Every other frame goes to the general decoder: errors, empty answers, requests by the server, binary headers. A
body is a view of the receive buffer, which is never written again where a frame was decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final, TypeAlias

from orderedmq.endpoint import Credentials
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire import message_requests
from orderedmq.rocketmq.wire.acl import SIGNATURE, signed
from orderedmq.rocketmq.wire.codes import ResponseCode
from orderedmq.rocketmq.wire.frame import MAX_RECEIVED_FRAME, FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rows.filters import Filter

#: Bytes of the buffer that a pull's answers are received into: some 250 answers of 32 small messages.
RECEIVE_BUFFER: Final = 4 * 1024 * 1024
#: Least free bytes to receive into: with fewer, a system call would bring too little.
_LEAST_FREE: Final = 256 * 1024
#: Answers with other headers between two that are learned: learning one costs as much as reading some dozens.
_LEARN_AFTER: Final = 16

_PREFIX: Final = struct.Struct(">II")
#: The word of header type and length is below this for a JSON header.
_NOT_JSON: Final = 1 << 24
_MAX_OPAQUE: Final = 2**31 - 1
#: The numbers of an answer's header, in any order: one of at most 31 bits, and texts. 18 digits always fit 64 bits.
_OPAQUE: Final = rb"0|[1-9][0-9]{0,9}"
_NUMBER: Final = rb"[0-9]{1,18}"
#: The fields of a request that differ from one to the next.
_PATCHED: Final = ("queueOffset", "maxMsgNums", SIGNATURE)
_NUMBERS: Final = ("nextBeginOffset", "minOffset", "maxOffset")


class PullTemplate:
    """Renders requests for messages of one queue; see `message_requests.pull`."""

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
        # JSON has no order, so what differs goes to the end, instead of the two brackets there.
        header = encode(RemotingCommand(request.code, 0, 0, None, fixed))[8:]
        self._head = header.replace(b'"opaque":0,', b"", 1)[:-2]
        assert header.index(b'"opaque":0,') < header.index(b'"extFields":{"')
        assert header.endswith(b'"}}')

    def request(self, offset: int, count: int) -> Request[PullResult]:
        """Return the request in its general form."""
        return self._names.request(message_requests.pull(self._queue, self._group, offset, count, matching=self._matching))

    def render(self, opaque: int, offset: int, count: int) -> bytes:
        """Return the request's frame."""
        if self.credentials is None:
            header = self._head + b',"queueOffset":"%d","maxMsgNums":"%d"},"opaque":%d}' % (offset, count, opaque)
        else:
            tail = b',"queueOffset":"%d","maxMsgNums":"%d"' % (offset, count)
            request = self.request(offset, count)
            # Base64 needs no escapes.
            tail += b',"Signature":"%s"' % signed(request.ext, request.body, self.credentials)[SIGNATURE].encode()
            header = self._head + tail + b'},"opaque":%d}' % opaque
        return _PREFIX.pack(4 + len(header), len(header)) + header


#: An answer with messages, and the number of its request.
Found: TypeAlias = tuple[int, PullResult]


class PullDecoder(FrameDecoder):
    """Decodes received bytes into answers with messages (`Found`), and into commands where they are anything else.

    As `FrameDecoder`, with `take` instead of ``next_command``. Bodies of `Found` are views; they keep their buffer alive.
    """

    def __init__(
        self,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        *,
        max_frame: int = MAX_RECEIVED_FRAME,
        buffer_size: int = RECEIVE_BUFFER,
    ) -> None:
        """``allocate`` returns a new writable buffer of that many bytes."""
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
        """Return the free part of the buffer, for the next bytes; never empty."""
        if len(self._view) - self._end < self._least:
            # The answers before keep the old buffer.
            self._move(self._allocate(max(self._size, 2 * (self._end - self._start))))
        return self._view[self._end :]

    def take(self, events: list[Found | RemotingCommand]) -> None:
        """Append the answers and commands that are complete. Raises ProtocolError behind them, and again at every later call."""
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
        """Append the answers up to the first frame with another header."""
        view, start, end = self._view, self._start, self._end
        fields, suggested, most = self._fields, self._suggested, self._max_frame
        # A named tuple's own way to make one takes twice the time.
        make = tuple.__new__
        while end - start >= 8:
            length, header_length = _PREFIX.unpack_from(view, start)
            middle, stop = start + 8 + header_length, start + 4 + length
            if not (header_length < _NOT_JSON and middle <= stop <= end and length <= most):
                break
            found = known.fullmatch(view, start + 8, middle)
            if found is None:
                break
            opaque, after, least, last = map(int, found.group(*fields))
            if opaque > _MAX_OPAQUE:
                break
            events.append(
                (opaque, make(PullResult, (PullStatus.FOUND, after, least, last, suggested, view[middle:stop], False)))
            )
            start = stop
        self._start = start

    def _learn(self, header: bytes, command: RemotingCommand) -> None:
        """Read such headers without the general decoder from now on, if only digits need to be told apart in them."""
        self._unknown = 0
        suggested = command.ext.get("suggestWhichBrokerId", "0")
        # Without an escape, a name in quotes is a field's name or a whole text. Where it occurs once, it is this field's.
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
