"""One connection to one server, shared by all threads of a process: many requests on their way, answers in any order.

A reader thread hands answers to those who wait, by ``opaque``. Servers send requests of their own on the same connection, numbered by
a counter of their own, so the flag is looked at before the number (NettyRemotingAbstract.processMessageReceived).

Rules: deadlines are monotonic seconds, and finite. A connection that was cut, by whichever side and for whatever reason, is never used
again, and everything on its way ends with CONNECTION_LOST. A child made by fork forgets its parent's connections.
"""

from __future__ import annotations

import itertools
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQUnavailableError
from orderedmq.rocketmq.net.transport import Stuck, Transport, connect
from orderedmq.rocketmq.wire.acl import Credentials, signed
from orderedmq.rocketmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, ResponseCode
from orderedmq.rocketmq.wire.frame import Bytes, FrameDecoder, RemotingCommand, encode_parts
from orderedmq.rocketmq.wire.request import Request

T = TypeVar("T")

#: A request of the server's, and what to answer: None when it wants no answer or is not known here. Runs in the reader thread.
PushHandler = Callable[[RemotingCommand], RemotingCommand | None]

#: Seconds between looks at deadlines that nobody waits for.
_TICK: Final = 0.5
#: Seconds for an answer to a server's request: nothing depends on it, and the reader must not be held up.
_PUSH_ANSWER: Final = 1.0
#: Seconds without a byte, while something was asked, after which a missed deadline means that the server is gone without a word.
SILENCE: Final = 2.5


def _seconds_to(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


class Pending(Generic[T]):
    """A request on its way."""

    __slots__ = ("_began", "_connection", "_done", "_error", "_on_done", "_response", "deadline", "opaque", "request")

    def __init__(
        self, connection: Connection, request: Request[T], deadline: float, on_done: Callable[[Pending[T]], None] | None = None
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.opaque = -1
        self._connection = connection
        self._on_done = on_done
        self._response: RemotingCommand | None = None
        self._error: OrderedMQError | None = None
        # Whether a byte of it may have been written.
        self._began = False
        # Held until the end: a lock is the cheapest thing to wait for.
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._response is not None or self._error is not None

    def result(self) -> T:
        """What the answer says, waiting for it until the deadline.

        Raises the error that the answer's code stands for, or RocketMQUnavailableError: TIMEOUT, CONNECTION_LOST (the server may have
        done it), UNREACHABLE (it was never sent).
        """
        if not self._done.acquire(timeout=_seconds_to(self.deadline)):
            self._connection._expire(self)
            # Whoever was faster than that has finished it, or is about to.
            self._done.acquire()
        self._done.release()
        if self._error is not None:
            raise self._error
        assert self._response is not None
        return self.request.answer(self._response, self._connection.address)

    def _finish(self, response: RemotingCommand | None, error: OrderedMQError | None) -> None:
        self._response, self._error = response, error
        self._done.release()
        if self._on_done is not None:
            self._on_done(self)


class Connection:
    """See the module. Made by `Connection.open`; ended by `close`, by the server, or by a stream that is not the protocol."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        credentials: Credentials | None = None,
        on_push: PushHandler | None = None,
        silence: float = SILENCE,
    ) -> None:
        self.address = address
        self._transport = transport
        self._credentials = credentials
        self._on_push = on_push
        self._silence = silence
        self._numbers = itertools.count()
        # Whoever takes a request out of here, and nobody else, finishes it.
        self._pending: dict[int, Pending[Any]] = {}
        self._writing = threading.Lock()
        self._cutting = threading.Lock()
        self._lost: str | None = None
        self._stranger: ProtocolError | None = None
        self._received = False
        self._active = time.monotonic()
        # Since when something was asked and not a byte came.
        self._unheard_since: float | None = None
        self._reader = threading.Thread(target=self._read, name=f"rocketmq-{address}", daemon=True)
        _connections.add(self)
        self._reader.start()

    @classmethod
    def open(
        cls,
        address: str,
        deadline: float,
        *,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
        on_push: PushHandler | None = None,
    ) -> Connection:
        """Connect to "host:port". Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS or TLS."""
        return cls(address, connect(address, deadline, tls), credentials=credentials, on_push=on_push)

    def __repr__(self) -> str:
        return f"<Connection to {self.address}, {len(self._pending)} on their way{', ended' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more; it stays so."""
        return self._lost is not None

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def idle(self, now: float) -> float:
        """Seconds since bytes went in either direction."""
        return now - self._active

    # --- requests

    def call(self, request: Request[T], deadline: float) -> T:
        """Send and wait; see `Pending.result`. Raises ProtocolError FRAME_TOO_LARGE, too."""
        return self.send(request, deadline).result()

    def send(self, request: Request[T], deadline: float, on_done: Callable[[Pending[T]], None] | None = None) -> Pending[T]:
        """Send, and let the answer come. Raises ProtocolError FRAME_TOO_LARGE; every other error is the result's.

        ``on_done`` is called once, when there is a result, mostly in the reader thread: it must not wait or raise. It may send.
        """
        [pending] = self.send_all([(request, on_done)], deadline)
        return pending

    def send_all(
        self, asked: Sequence[tuple[Request[T], Callable[[Pending[T]], None] | None]], deadline: float
    ) -> list[Pending[T]]:
        """As `send`, several requests with one write: a system call costs more than a request does. Where it fails, none was sent whole,
        or nobody knows which were: give it several only if they may be done twice.
        """
        made: list[Pending[T]] = []
        parts: list[Bytes] = []
        for request, on_done in asked:
            pending = Pending(self, request, deadline, on_done)
            number = next(self._numbers) & 0x7FFFFFFF
            while number in self._pending:
                number = next(self._numbers) & 0x7FFFFFFF
            pending.opaque = number
            parts += encode_parts(self._command(request, number, 0))
            made.append(pending)
        self._pending.update((pending.opaque, pending) for pending in made)
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
        # Only now: a cut that is missed here finds the requests above.
        why = self._lost or self._write(parts, deadline, made)
        if why is not None:
            for pending in made:
                if self._pending.pop(pending.opaque, None) is not None:
                    unsent = RocketMQUnavailableError("UNREACHABLE", f"the {pending.request.what} was not sent: {why}")
                    pending._finish(None, self._stranger or unsent)
        return made

    def tell(self, request: Request[Any], deadline: float) -> None:
        """Send what the server does not answer, not even by an error. Raises RocketMQUnavailableError UNREACHABLE."""
        parts = encode_parts(self._command(request, next(self._numbers) & 0x7FFFFFFF, FLAG_ONEWAY))
        why = self._lost or self._write(parts, deadline, ())
        if why is not None:
            raise self._unsent(request, why)

    def close(self) -> None:
        """End the connection; what is on its way ends with CONNECTION_LOST. Returns when the socket is closed."""
        self._cut("it was closed here")
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _command(self, request: Request[Any], number: int, flag: int) -> RemotingCommand:
        ext = request.ext if self._credentials is None else signed(request.ext, request.body, self._credentials)
        return RemotingCommand(request.code, number, flag, None, ext, request.body)

    def _write(self, parts: Sequence[Bytes], deadline: float, made: Sequence[Pending[Any]]) -> str | None:
        """Write frames; else why that could not be. A frame that was begun is ended, or the connection is."""
        broken = None
        if not self._writing.acquire(timeout=_seconds_to(deadline)):
            return f"the connection to {self.address} was busy with other requests until the deadline"
        try:
            if self._lost is not None:
                return self._lost
            for pending in made:
                pending._began = True
            # Said to be unsent already, at the deadline; so it must not be sent. The mark above comes first.
            if made and all(pending.opaque not in self._pending for pending in made):
                return "its deadline has passed"
            self._active = time.monotonic()
            self._transport.send(parts, deadline)
            return None
        except Stuck as error:
            why = f"{self.address} did not read until the deadline"
            broken = why if error.partial else None
        except OSError as error:
            why = broken = str(error)
        finally:
            self._writing.release()
        # No server acts on a part of a frame; of several, some may be whole.
        for pending in made if len(made) == 1 or broken is None else ():
            if self._pending.pop(pending.opaque, None) is not None:
                pending._finish(None, self._unsent(pending.request, why))
        if broken is not None:
            self._cut(broken)
        return why

    # --- the reader thread

    def _read(self) -> None:
        why = "the reader failed"
        try:
            why = self._receive()
        except ProtocolError as error:
            why = error.message
            if not self._received:
                # Not one frame was right: this is no RocketMQ server, and asking again makes it none.
                self._stranger = ProtocolError(error.sub, f"{self.address} does not speak RocketMQ's protocol: {error.message}")
        except OSError as error:
            why = str(error)
        finally:
            try:
                self._cut(why)
            finally:
                # Under the lock: nobody may write to a descriptor that is something else's by then.
                with self._writing:
                    self._transport.close()

    def _receive(self) -> str:
        """Hand out what comes until the stream ends; returns why it did. Raises ProtocolError, OSError."""
        decoder = FrameDecoder()
        tick = time.monotonic() + _TICK
        while True:
            count = self._transport.recv_into(decoder.buffer(), _TICK)
            now = time.monotonic()
            if count:
                self._active, self._unheard_since = now, None
                decoder.received(count)
                while (command := decoder.next_command()) is not None:
                    self._received = True
                    self._dispatch(command)
            elif count == 0:
                where = "" if decoder.at_boundary else " inside of a frame"
                hint = "" if self._received else " before it answered anything; it may want TLS, or not want this client"
                return f"{self.address} ended it{where}{hint}"
            if now >= tick:
                tick = now + _TICK
                for pending in list(self._pending.values()):
                    if pending.deadline <= now:
                        self._expire(pending)

    def _dispatch(self, command: RemotingCommand) -> None:
        if command.is_response:
            pending = self._pending.pop(command.opaque, None)
            # None: the answer to a request that was given up.
            if pending is not None:
                pending._finish(command, None)
            return
        answer = self._on_push(command) if self._on_push is not None else None
        if command.is_oneway:
            return
        if answer is None:
            answer = RemotingCommand(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {command.code} is not supported"
            )
        answer.opaque, answer.flag = command.opaque, FLAG_RESPONSE
        self._write(encode_parts(answer), time.monotonic() + _PUSH_ANSWER, ())

    def _expire(self, pending: Pending[Any]) -> None:
        """A deadline has passed."""
        unheard = self._unheard_since
        if self._pending.pop(pending.opaque, None) is not None:
            sub = "TIMEOUT" if pending._began else "UNREACHABLE"
            pending._finish(
                None, RocketMQUnavailableError(sub, f"{self.address} did not answer the {pending.request.what} in time")
            )
        if unheard is not None and time.monotonic() - unheard >= self._silence:
            self._cut(f"{self.address} did not say anything for {self._silence:g} s")

    # --- the end

    def _cut(self, why: str) -> None:
        with self._cutting:
            if self._lost is None:
                self._lost = f"the connection to {self.address} has ended: {why}"
        self._transport.shutdown()
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                return
            pending._finish(None, self._error_of(pending))

    def _error_of(self, pending: Pending[Any]) -> OrderedMQError:
        if not pending._began or self._stranger is not None:
            return self._unsent(pending.request, self._lost or "")
        return RocketMQUnavailableError(
            "CONNECTION_LOST", f"no answer to the {pending.request.what}, which may have been done or not: {self._lost}"
        )

    def _unsent(self, request: Request[Any], why: str) -> OrderedMQError:
        if self._stranger is not None:
            return ProtocolError(self._stranger.sub, self._stranger.message)
        return RocketMQUnavailableError("UNREACHABLE", f"the {request.what} was not sent: {why}")

    def _forget(self) -> None:
        """In a child after fork: let go without a word, the connection is the parent's, and so are its threads and locks."""
        self._writing, self._cutting = threading.Lock(), threading.Lock()
        self._lost = self._lost or f"the connection to {self.address} is the parent process's"
        self._transport.close()
        for pending in self._pending.values():
            pending._on_done = None
            pending._finish(None, self._error_of(pending))
        self._pending = {}


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connection in list(_connections):
        connection._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
