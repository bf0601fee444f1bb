"""A connection only for pulls, which one thread uses at a time. The thread sends many requests in one write, and also reads the answers.

A `Connection` can be shared because it has a reader thread, locks, and an object and a wake-up for each request. These cost more than a
pull itself, so a lane does without them.

Rules (`wire.stream` has the rules of every stream): deadlines are monotonic seconds. When a lane ends, all its requests in flight end
with the same error. Any thread may call `shutdown`.

A broker answers every request, in any order. A Proxy drops answers when too many are waiting (behind_proxy.UNWRITTEN). One answer to a
later request proves little. So on a lane to a Proxy, a request is sent again when ``PASSED`` later requests were sent and answered one after
the other, each sent after the answer to the previous one, or when no answer has come for a while. The first answer counts, and any other
answer to the same request is ignored.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import pyarrow as pa

from orderedmq.errors import OrderedMQError, RocketMQError
from orderedmq.rocketmq.net.account import NO_ACCOUNT, Account
from orderedmq.rocketmq.net.connection import PUSH_ANSWER_TIMEOUT
from orderedmq.rocketmq.net.deadline import Deadline
from orderedmq.rocketmq.net.transport import Transport, WriteTimeout, connect
from orderedmq.rocketmq.wire.frame import RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.pull_frames import Found, PullDecoder, PullTemplate
from orderedmq.rocketmq.wire.request import answer_to
from orderedmq.rocketmq.wire.stream import SILENCE, Stream

#: Round trips of later requests after which a request is sent again. In measurements with a Proxy that dropped nothing, 10 % of the
#: requests were sent twice with the value 2, and nearly none with 4.
PASSED: Final = 4
#: The outcome of a pull: (offset, maximum number of messages, result). When a lane ends, all its requests in flight get the same error
#: object. This is a tuple because a named tuple or class would cost as much as all other work on an answer here.
Answer: TypeAlias = tuple[int, int, PullResult | OrderedMQError]
#: Seconds without a byte after which a lane with requests in flight ends, whatever their deadlines are. A broker drops a pull that
#: it could not begin within 5 s (BrokerConfig.waitTimeMillsInPullQueue), so waiting longer is useless.
STALLED: Final = 6.0
#: Seconds without a byte after which the oldest request on a lane to a Proxy is sent again. The time doubles after each repetition.
QUIET: Final = 0.1
#: A request without an answer: (offset, maximum number of messages, deadline, template).
_Asked: TypeAlias = tuple[int, int, float, PullTemplate]


class RoundTrips:
    """Counts round trips. Requests are identified by their numbers."""

    def __init__(self) -> None:
        #: The number of round trips that were made one after the other.
        self._made = 0
        #: Requests that have no answer yet, in the order of sending, with the number of round trips made before each was sent.
        self._sent: dict[int, int] = {}

    def sent(self, numbers: Iterable[int]) -> None:
        """Record that requests were sent."""
        self._sent.update(dict.fromkeys(numbers, self._made))

    def answered(self, numbers: Collection[int]) -> list[int]:
        """Record that requests were answered. Return the requests to send again: each at most once, and no more than were answered."""
        before = self._made
        for number in numbers:
            if self._sent.pop(number, None) == before:
                self._made = before + 1
        again: list[int] = []
        for number, made in self._sent.items():
            if self._made - made < PASSED or len(again) == len(numbers):
                break
            again.append(number)
        for number in again:
            del self._sent[number]
        return again

    def doubt(self) -> None:
        """Record that the server was silent for a long time. After the next answers, all unanswered requests are sent again."""
        self._sent = dict.fromkeys(self._sent, self._made - PASSED)


def _is_answer(event: Found | RemotingCommand) -> bool:
    return isinstance(event, tuple) or event.is_response


def _allocate(size: int) -> memoryview:
    # Arrow's allocator reuses memory. The C library returns large buffers to the system, and fresh pages cost more than decoding.
    return memoryview(pa.allocate_buffer(size)).cast("B")


class Lane:
    """A connection to one broker; see the module."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        account: Account = NO_ACCOUNT,
        silence: float = SILENCE,
        names: Namespaces = NO_NAMESPACES,
        proxied: bool = False,
    ) -> None:
        """``proxied``: the server is a Proxy."""
        self.address = address
        self.proxied = proxied
        #: Arguments for the templates of requests on this lane.
        self.account, self.names = account, names
        self._transport = transport
        self._stalled = STALLED
        self._stream: Stream[_Asked, Found | RemotingCommand] = Stream(
            address, PullDecoder(_allocate), time.monotonic(), silence
        )
        #: Requests that have no answer yet, by number, in the order of their deadlines.
        self._asked = self._stream.in_flight
        #: For requests that were sent again to a Proxy: maps each new number to the request's first number, the key in ``_asked``.
        self._repeats: dict[int, int] = {}
        self._trips = RoundTrips()
        self._quiet = QUIET

    @classmethod
    def open(
        cls,
        address: str,
        deadline: float,
        *,
        tls: ssl.SSLContext | None = None,
        account: Account = NO_ACCOUNT,
        names: Namespaces = NO_NAMESPACES,
        proxied: bool = False,
    ) -> Lane:
        """Connect to "host:port". Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS or TLS."""
        return cls(address, connect(address, deadline, tls), account=account, names=names, proxied=proxied)

    def __repr__(self) -> str:
        return f"<Lane to {self.address}, {self.in_flight} in flight{', ended' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether the lane has ended for good."""
        return self._stream.lost is not None

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since bytes were last sent or received."""
        return now - self._stream.active

    def ask(self, template: PullTemplate, ranges: Sequence[tuple[int, int]], deadline: float) -> None:
        """Request ranges, each (offset, maximum number of messages), in one write. Raises nothing, because `receive` returns errors."""
        numbers, now = self._stream.numbers(len(ranges), self._repeats), time.monotonic()
        self._stream.add({number: (begin, most, deadline, template) for number, (begin, most) in zip(numbers, ranges)}, now)
        if self.closed:
            return
        if self.proxied:
            self._trips.sent(numbers)
        self._stream.active = now
        render = template.render
        self._send(b"".join([render(number, begin, most) for number, (begin, most) in zip(numbers, ranges)]), deadline)

    def _send(self, frames: bytes, deadline: float) -> None:
        try:
            self._transport.send([frames], deadline)
        except WriteTimeout:
            self._cut(self._stream.not_read)
        except (OSError, RocketMQError) as error:
            self._cut(self._stream.reason(error))

    def receive(self, timeout: float) -> list[Answer]:
        """Return the answers that have come. Wait up to ``timeout`` seconds for the first. A failed request has an error as its result."""
        answers: list[Answer] = []
        if not self.closed:
            if self.proxied and self._asked:
                timeout = min(timeout, max(0.0, self._stream.heard + self._quiet - time.monotonic()))
            try:
                if not self._read(timeout, answers):
                    self._expire(answers)
            except WriteTimeout:
                self._cut(self._stream.not_read)
            except (OSError, RocketMQError) as error:
                self._cut(self._stream.reason(error))
        if self.closed and self._asked:
            lost = self._stream.no_answer("a pull")
            answers += [(begin, most, lost) for begin, most, _, _ in self._asked.values()]
            self._asked.clear()
        return answers

    def _read(self, timeout: float, answers: list[Answer]) -> bool:
        """Add the answers that have come to ``answers``. Return whether any bytes have come. Raises the errors of `Transport`."""
        count = self._transport.recv_into(self._stream.buffer(), timeout)
        if count is None:
            return False
        events = self._stream.receive(count, time.monotonic())
        if self.proxied:
            self._quiet = QUIET
            events = [self._as_first_sent(event) for event in events]
        for event in events:
            if isinstance(event, tuple):
                number, result = event
                # There is no entry if the request was given up.
                if (asked := self._asked.pop(number, None)) is not None:
                    answers.append((asked[0], asked[1], result))
            else:
                self._dispatch(event, answers)
        if self.closed:
            # The stream has ended after these events.
            self._cut()
        elif self.proxied:
            numbers = [event[0] if isinstance(event, tuple) else event.opaque for event in events if _is_answer(event)]
            self._repeat(self._trips.answered(numbers))
        return True

    def _as_first_sent(self, event: Found | RemotingCommand) -> Found | RemotingCommand:
        """Return the event. If it answers a repeated request, replace its number by the request's first number."""
        if isinstance(event, tuple):
            return self._repeats.pop(event[0], event[0]), event[1]
        return replace(event, opaque=self._repeats.pop(event.opaque, event.opaque)) if _is_answer(event) else event

    def _repeat(self, numbers: Sequence[int]) -> None:
        """Repeat the requests that have no answer yet, in one write and under new numbers."""
        frames: list[bytes] = []
        waiting = [first for first in numbers if first in self._asked]
        for first, number in zip(waiting, self._stream.numbers(len(waiting), self._repeats)):
            begin, most, _, template = self._asked[first]
            self._repeats[number] = first
            frames.append(template.render(number, begin, most))
        if frames:
            self._repeats = {number: first for number, first in self._repeats.items() if first in self._asked}
            self._send(b"".join(frames), Deadline.after(self._stalled))

    def _dispatch(self, command: RemotingCommand, answers: list[Answer]) -> None:
        """Handle a command: any event that is not an answer with messages. Raises the errors of `Transport`."""
        if command.is_response:
            asked = self._asked.pop(command.opaque, None)
            if asked is not None:
                begin, most, _, template = asked
                answers.append((begin, most, self._outcome(template, begin, most, command)))
        elif (answer := answer_to(command)) is not None:
            self._transport.send([encode(answer)], Deadline.after(PUSH_ANSWER_TIMEOUT))

    def _outcome(self, template: PullTemplate, begin: int, most: int, response: RemotingCommand) -> PullResult | OrderedMQError:
        try:
            return template.request(begin, most).answer(response, self.address)
        except OrderedMQError as error:
            return self.account.explain(error, template.credentials)

    def _expire(self, answers: list[Answer]) -> None:
        """Give up requests whose deadline has passed, and end the lane if the server has been silent for too long."""
        now = time.monotonic()
        silent = self._stream.silent_for(now)
        if self._asked and silent >= self._stalled:
            self._cut(f"{self.address} sent nothing for {self._stalled:g} s")
            return
        if self.proxied and self._asked and silent >= self._quiet:
            self._quiet *= 2
            self._trips.doubt()
            self._repeat([next(iter(self._asked))])
        late = []
        for number, asked in self._asked.items():
            if asked[2] > now:
                break
            late.append(number)
        if late and self._stream.vanished(now):
            self._cut()
            return
        for number in late:
            begin, most, _, template = self._asked.pop(number)
            answers.append((begin, most, self._stream.late(template.request(begin, most).what)))

    # --- the end

    def close(self) -> None:
        """End the lane. Only the thread that uses the lane may call this."""
        self._cut("this client closed it")

    def __del__(self) -> None:
        # If a task ends between two pulls, it does not give its lane back.
        self._transport.close()

    def shutdown(self) -> None:
        """Shut down the socket, so that the lane ends in the thread that uses it."""
        self._transport.shutdown()

    def _cut(self, why: str = "") -> None:
        """End the lane. ``why`` is the reason, unless the stream has already ended."""
        self._stream.end(why)
        self._transport.shutdown()
        self._transport.close()
