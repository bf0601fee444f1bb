"""A puller that does the least possible: it writes many ready-made requests at once, counts answers in one buffer, and decodes nothing.

Only the bytes of a request come from the client's code. Any unexpected answer ends the puller.
"""

from __future__ import annotations

import re
import socket
import struct
from typing import Final

from orderedmq.model import MessageQueue
from orderedmq.rocketmq.wire.pull_frames import PullTemplate

#: Messages in one pull (the most that a broker returns by default), and messages in flight.
STEP: Final = 32
FLIGHT: Final = 4096
_BUFFER: Final = 4 << 20
_PREFIX: Final = struct.Struct(">II")
_FOUND: Final = re.compile(rb'\{"code":0,')


def raw_pull(address: str, queue: MessageQueue, count: int, step: int = STEP) -> None:
    """Pull the first ``count`` messages of a queue, ``step`` at a time. The broker must return that many."""
    host, _, port = address.rpartition(":")
    template = PullTemplate(queue, "TOOLS_CONSUMER")
    requests = [template.render(at // step, at, min(step, count - at)) for at in range(0, count, step)]
    view = memoryview(bytearray(_BUFFER))
    start = end = answered = 0
    with socket.create_connection((host, int(port))) as opened:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = min(FLIGHT // step, len(requests))
        opened.sendall(b"".join(requests[:asked]))
        while answered < len(requests):
            if _BUFFER - end < _BUFFER // 4:
                view[: end - start] = view[start:end]
                start, end = 0, end - start
            received = opened.recv_into(view[end:])
            assert received, "the broker has closed the connection"
            end += received
            before = answered
            while end - start >= 8:
                length, _ = _PREFIX.unpack_from(view, start)
                if end - start < 4 + length:
                    break
                assert _FOUND.match(view, start + 8), "the broker has returned no messages"
                start += 4 + length
                answered += 1
            more = min(asked + answered - before, len(requests))
            if more > asked:
                opened.sendall(b"".join(requests[asked:more]))
                asked = more
