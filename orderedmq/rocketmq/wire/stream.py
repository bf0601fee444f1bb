"""The state of one stream of the remoting protocol, without I/O: request numbers, bytes in, events out, and why the stream ended.

`net.connection` and `net.lane` read and write the bytes, one with a reader thread and many callers, the other in the thread that pulls.
Decisions that must be the same in both are made here. Times are monotonic seconds, given by the caller.

Rules: a stream that has ended, for whatever reason, never goes on. A server that sent no valid frame at all does not speak this protocol,
and another attempt will not change that. A server is silent if requests are waiting for answers and no byte has arrived for ``silence``
seconds. If a request's deadline passes while the server is silent, the server has vanished and the stream ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Final, Generic, Protocol, TypeVar

from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQUnavailableError

#: Seconds without a byte after which a missed deadline means that the server has vanished.
SILENCE: Final = 2.5
#: Numbers of requests have 31 bits: Java's int, without its sign.
_NUMBERS: Final = 0x7FFFFFFF

E = TypeVar("E")
R = TypeVar("R")


class Decoder(Protocol[E]):
    """Decodes bytes into events; `frame.FrameDecoder` and `pull_frames.PullDecoder`."""

    @property
    def at_boundary(self) -> bool: ...
    def buffer(self) -> memoryview: ...
    def received(self, count: int) -> None: ...
    def take(self, events: list[E]) -> None: ...


class Stream(Generic[R, E]):
    """The state of one stream. ``R``: what the caller keeps of a request; ``E``: the decoder's events."""

    def __init__(self, address: str, decoder: Decoder[E], now: float, silence: float = SILENCE) -> None:
        self.address = address
        self._decoder = decoder
        self._silence = silence
        self._next = itertools.count()
        #: Requests without an answer, by number, in the order in which they were added.
        self.in_flight: dict[int, R] = {}
        #: Why the stream has ended, as a sentence; None as long as it has not.
        self.lost: str | None = None
        #: When a byte was last sent or received.
        self.active = now
        #: When the last byte came, or later when requests began to wait for one.
        self.heard = now
        # The same, but a new request does not reset it after another one was given up: otherwise a server that answers none of a series
        # of short requests would never count as vanished.
        self._silent_since = now
        self._gave_up = False
        self._spoke = False
        self._foreign: ProtocolError | None = None

    # --- requests

    def numbers(self, count: int, in_use: Container[int] = ()) -> list[int]:
        """Return ``count`` numbers for new requests, which neither a request in flight nor ``in_use`` has."""
        found: list[int] = []
        while len(found) < count:
            number = next(self._next) & _NUMBERS
            if number not in self.in_flight and number not in in_use:
                found.append(number)
        return found

    def add(self, requests: dict[int, R], now: float) -> None:
        """Record requests that are about to be sent."""
        if not self.in_flight:
            # Nothing was due before.
            self.heard = now
            if not self._gave_up:
                self._silent_since = now
        self.in_flight.update(requests)

    def silent_for(self, now: float) -> float:
        """Return the seconds for which requests have been waiting without a byte; 0 if none wait."""
        return now - self.heard if self.in_flight else 0.0

    def vanished(self, now: float) -> bool:
        """Return whether the server has vanished; if so, the stream has ended. Call it when a request's deadline has passed."""
        if not self.in_flight or now - self._silent_since < self._silence:
            return False
        self.end(f"{self.address} sent nothing for {self._silence:g} s")
        return True

    # --- bytes

    def buffer(self) -> memoryview:
        """Return where the next bytes belong; never empty."""
        return self._decoder.buffer()

    def receive(self, count: int, now: float) -> list[E]:
        """Take the bytes at the front of `buffer`, and return the events that they complete. 0 bytes are the stream's end.

        The stream ends after the events if the bytes that follow are no frame.
        """
        events: list[E] = []
        if not count:
            where = "" if self._decoder.at_boundary else " inside a frame"
            hint = "" if self._spoke else " before any answer; it may require TLS, or refuse this client"
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
                self._foreign = ProtocolError(error.sub, why)
            self.end(error.message)
        self._spoke = self._spoke or bool(events)
        return events

    # --- the end

    def end(self, why: str) -> None:
        """End the stream. The first reason counts."""
        if self.lost is None:
            self.lost = f"the connection to {self.address} has ended: {why}"

    @property
    def not_read(self) -> str:
        """The reason to end a stream when the server did not read what was written to it."""
        return f"{self.address} did not read before the deadline"

    def no_answer(self, what: str) -> OrderedMQError:
        """Return the error of a request that was in flight when the stream ended: the server may have carried it out."""
        return self._not_spoken or RocketMQUnavailableError(
            UnavailableCondition.CONNECTION_LOST, f"no answer to {what}: {self.lost}"
        )

    def not_sent(self, what: str, why: str) -> OrderedMQError:
        """Return the error of a request that the server cannot have carried out."""
        return self._not_spoken or RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"the {what} was not sent: {why}")

    def late(self, what: str, *, written: bool = True) -> RocketMQUnavailableError:
        """Give up a request whose deadline has passed; return its error. ``written``: whether some of its bytes may have been written."""
        self._gave_up = True
        sub = UnavailableCondition.TIMEOUT if written else UnavailableCondition.UNREACHABLE
        return RocketMQUnavailableError(sub, f"{self.address} did not answer the {what} in time")

    @property
    def _not_spoken(self) -> ProtocolError | None:
        # A new object for each request: it is raised, perhaps in several threads.
        return ProtocolError(self._foreign.sub, self._foreign.message) if self._foreign is not None else None
