"""The state of one stream of the remoting protocol, without I/O: request numbers, received bytes, decoded events, and why it ended.

`net.connection` and `net.lane` read and write the bytes. A connection has a reader thread and many callers, and a lane works in the
thread that pulls. Decisions that must be the same in both are made here. Callers pass times as monotonic seconds.

Rules: a stream that has ended is never used again. A server that has sent no valid frame at all does not speak this protocol,
and another attempt will not change that. Nor does another attempt help if the server refuses this client before it has sent a frame. A
server is silent if requests are waiting for answers and no byte has arrived for ``silence`` seconds. If a request's deadline passes while
the server is silent, the server counts as vanished and the stream ends.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container
from typing import Final, Generic, Protocol, TypeVar

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQError, RocketMQUnavailableError

#: Seconds without a byte after which a missed deadline means that the server has vanished.
SILENCE: Final = 2.5
#: Request numbers have 31 bits: they are non-negative ints of Java.
_NUMBERS: Final = 0x7FFFFFFF

E = TypeVar("E")
R = TypeVar("R")


class Decoder(Protocol[E]):
    """Decodes bytes into events. Implemented by `frame.FrameDecoder` and `pull_frames.PullDecoder`."""

    @property
    def at_boundary(self) -> bool: ...
    def buffer(self) -> memoryview: ...
    def received(self, count: int) -> None: ...
    def take(self, events: list[E]) -> None: ...


class Stream(Generic[R, E]):
    """The state of one stream. ``R`` is the caller's record of a request, and ``E`` is an event of the decoder."""

    def __init__(self, address: str, decoder: Decoder[E], now: float, silence: float = SILENCE) -> None:
        self.address = address
        self._decoder = decoder
        self._silence = silence
        self._next = itertools.count()
        #: Requests that have no answer yet, by number, in the order in which they were added.
        self.in_flight: dict[int, R] = {}
        #: Why the stream has ended, as a sentence; None before the end.
        self.lost: str | None = None
        #: When a byte was last sent or received.
        self.active = now
        #: When the last byte came or, if that is later, when requests began to wait for a byte.
        self.heard = now
        # Like `heard`, but a new request does not change it after a request was given up. Otherwise a server that answers none of a
        # series of short requests would never count as vanished.
        self._silent_since = now
        self._gave_up = False
        self._spoke = False
        # The error of every request if the server does not speak this protocol, or refuses this client.
        self._refusal: RocketMQError | None = None

    # --- requests

    def numbers(self, count: int, in_use: Container[int] = ()) -> list[int]:
        """Return ``count`` numbers for new requests. They differ from those of requests in flight and those ``in_use``."""
        numbers: list[int] = []
        while len(numbers) < count:
            number = next(self._next) & _NUMBERS
            if number not in self.in_flight and number not in in_use:
                numbers.append(number)
        return numbers

    def add(self, requests: dict[int, R], now: float) -> None:
        """Record requests that are about to be sent."""
        if not self.in_flight:
            # No answer was due before.
            self.heard = now
            if not self._gave_up:
                self._silent_since = now
        self.in_flight.update(requests)

    def silent_for(self, now: float) -> float:
        """Return for how many seconds requests have been waiting without receiving a byte; 0 if no request is waiting."""
        return now - self.heard if self.in_flight else 0.0

    def vanished(self, now: float) -> bool:
        """Return whether the server has vanished, and end the stream if so. Call this when a request's deadline has passed."""
        if not self.in_flight or now - self._silent_since < self._silence:
            return False
        self.end(f"{self.address} sent nothing for {self._silence:g} s")
        return True

    # --- bytes

    def buffer(self) -> memoryview:
        """Return the buffer into which to write the next bytes. It is never empty."""
        return self._decoder.buffer()

    def receive(self, count: int, now: float) -> list[E]:
        """Take ``count`` bytes from the start of `buffer`, and return the events that they complete. 0 bytes end the stream.

        If malformed bytes follow the events, the stream ends after the events.
        """
        events: list[E] = []
        if not count:
            where = "" if self._decoder.at_boundary else " inside a frame"
            hint = "" if self._spoke else " before any answer, perhaps because it requires TLS or refuses this client"
            self.end(f"{self.address} closed it{where}{hint}")
            return events
        self.active = self.heard = self._silent_since = now
        self._gave_up = False
        self._decoder.received(count)
        try:
            self._decoder.take(events)
        except ProtocolError as error:
            if not self._spoke and not events:
                why = f"{self.address} does not speak RocketMQ's protocol: {error.message}"
                self._refusal = ProtocolError(error.sub, why)
            self.end(error.message)
        self._spoke = self._spoke or bool(events)
        return events

    # --- the end

    def end(self, why: str) -> None:
        """End the stream. If it has ended before, the first reason stays."""
        if self.lost is None:
            self.lost = f"the connection to {self.address} has ended: {why}"

    def reason(self, error: OSError | RocketMQError) -> str:
        """Return the reason for `end` after an error of the transport.

        A RocketMQError says that the server refuses this client. It becomes the error of every request, unless the server has sent a
        frame.
        """
        if not isinstance(error, RocketMQError):
            return str(error)
        if not self._spoke:
            self._refusal = error
        return error.message

    @property
    def not_read(self) -> str:
        """The reason to end a stream whose server did not read the written bytes in time."""
        return f"{self.address} did not read before the deadline"

    def no_answer(self, what: str) -> OrderedMQError:
        """Return the error of a request that was in flight when the stream ended. The server may have executed it."""
        return self._refused or RocketMQUnavailableError(
            UnavailableCondition.CONNECTION_LOST, f"there was no answer to {what}: {self.lost}"
        )

    def not_sent(self, what: str, why: str) -> OrderedMQError:
        """Return the error of a request that the server cannot have executed."""
        return self._refused or RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"the {what} was not sent: {why}")

    def late(self, what: str, *, written: bool = True) -> RocketMQUnavailableError:
        """Give up a request whose deadline has passed, and return its error. ``written``: some of its bytes may have been written."""
        self._gave_up = True
        sub = UnavailableCondition.TIMEOUT if written else UnavailableCondition.UNREACHABLE
        return RocketMQUnavailableError(sub, f"{self.address} did not answer the {what} in time")

    @property
    def _refused(self) -> RocketMQError | None:
        # Make a new object for each request, because several threads may raise it.
        return copy.copy(self._refusal)
