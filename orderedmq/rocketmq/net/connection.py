"""One connection to one server, shared by all threads of a process: many requests in flight, answers in any order.

A reader thread matches answers to requests by ``opaque``. Servers send requests of their own on the same connection, numbered
by a counter of their own, so the flag is checked before the number (NettyRemotingAbstract.processMessageReceived).

Rules: deadlines are monotonic seconds, and finite. A connection that has ended, for whatever reason, is never used again, and
every request in flight ends with CONNECTION_LOST. A child after a fork forgets its parent's connections.
"""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from orderedmq.conditions import UnavailableCondition
from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError, ProtocolError, RocketMQUnavailableError
from orderedmq.forks import BeginAnew
from orderedmq.rocketmq.net.deadline import Deadline, seconds_to
from orderedmq.rocketmq.net.transport import Transport, WriteTimeout, connect
from orderedmq.rocketmq.wire.acl import signed
from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE
from orderedmq.rocketmq.wire.frame import Bytes, FrameDecoder, RemotingCommand, encode_parts
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import Request, not_supported

T = TypeVar("T")

#: Takes a request from the server and returns the answer, None for an unknown request or one that wants no answer. Runs in the
#: reader thread.
PushHandler = Callable[[RemotingCommand], RemotingCommand | None]

#: Seconds between checks of the deadlines of requests that no thread waits for.
_TICK: Final = 0.5
#: Seconds for sending an answer to a server's request: nothing depends on it, and the reader must not be held up.
PUSH_ANSWER_TIMEOUT: Final = 1.0
#: Seconds without a byte since a request was sent, after which a missed deadline means that the server has vanished.
SILENCE: Final = 2.5


class Pending(Generic[T]):
    """A request in flight."""

    __slots__ = ("_connection", "_done", "_error", "_may_be_written", "_on_done", "_response", "deadline", "opaque", "request")

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
        # Whether some of its bytes may have been written.
        self._may_be_written = False
        # Held until there is a result: a lock is the cheapest thing to wait for.
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._response is not None or self._error is not None

    def result(self) -> T:
        """Return the parsed answer, waiting for it until the deadline.

        Raises the error that the answer's code stands for, or RocketMQUnavailableError: TIMEOUT or CONNECTION_LOST (the server
        may have done it), UNREACHABLE (it was never sent).
        """
        if not self._done.acquire(timeout=seconds_to(self.deadline)):
            self._connection._expire(self)
            # If another thread was faster, it has finished the request or is about to.
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
    """A connection to one server; see the module. Made by `open`; ended by `close`, by the server, or by an error."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        credentials: Credentials | None = None,
        on_push: PushHandler | None = None,
        silence: float = SILENCE,
        names: Namespaces = NO_NAMESPACES,
    ) -> None:
        self.address = address
        self._names = names
        self._transport = transport
        self._credentials = credentials
        self._on_push = on_push
        self._silence = silence
        self._numbers = itertools.count()
        # Only the thread that takes a request out of here finishes it.
        self._pending: dict[int, Pending[Any]] = {}
        self._writing = threading.Lock()
        self._cutting = threading.Lock()
        self._lost: str | None = None
        self._protocol_error: ProtocolError | None = None
        self._received = False
        self._active = time.monotonic()
        # When the first request after the last received byte was sent.
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
        names: Namespaces = NO_NAMESPACES,
    ) -> Connection:
        """Connect to "host:port". Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS or TLS."""
        return cls(address, connect(address, deadline, tls), credentials=credentials, on_push=on_push, names=names)

    def __repr__(self) -> str:
        return f"<Connection to {self.address}, {len(self._pending)} in flight{', ended' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, which is final."""
        return self._lost is not None

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since bytes went in either direction."""
        return now - self._active

    # --- requests

    def call(self, request: Request[T], deadline: float) -> T:
        """Send a request and wait for its answer; see `send` and `Pending.result`."""
        return self.send(request, deadline).result()

    def send(self, request: Request[T], deadline: float, on_done: Callable[[Pending[T]], None] | None = None) -> Pending[T]:
        """Send a request without waiting. Raises ProtocolError as `encode_parts`; the result raises every other error.

        ``on_done`` is called once, when there is a result, mostly in the reader thread: it must not wait or raise. It may send.
        """
        [pending] = self.send_all([(request, on_done)], deadline)
        return pending

    def send_all(
        self, asked: Sequence[tuple[Request[T], Callable[[Pending[T]], None] | None]], deadline: float
    ) -> list[Pending[T]]:
        """Send several requests with one write, as `send`: a system call costs more than a request does.

        If the write fails, some requests may have been sent whole: pass several only if they are repeatable.
        """
        made: list[Pending[T]] = []
        parts: list[Bytes] = []
        for request, on_done in asked:
            pending = Pending(self, self._names.request(request), deadline, on_done)
            number = next(self._numbers) & 0x7FFFFFFF
            while number in self._pending:
                number = next(self._numbers) & 0x7FFFFFFF
            pending.opaque = number
            parts += encode_parts(self._command(pending.request, number))
            made.append(pending)
        self._pending.update((pending.opaque, pending) for pending in made)
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
        # Checked only now: a cut after this check finds the requests that were added above.
        why = self._lost or self._write(parts, deadline, made)
        if why is not None:
            for pending in made:
                if self._pending.pop(pending.opaque, None) is not None:
                    pending._finish(None, self._unsent(pending.request, why))
        return made

    def close(self) -> None:
        """End the connection; requests in flight end with CONNECTION_LOST. Returns when the socket is closed."""
        self._cut("this client closed it")
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _command(self, request: Request[Any], number: int) -> RemotingCommand:
        ext = request.ext if self._credentials is None else signed(request.ext, request.body, self._credentials)
        return RemotingCommand(request.code, number, 0, None, ext, request.body)

    def _write(self, parts: Sequence[Bytes], deadline: float, made: Sequence[Pending[Any]]) -> str | None:
        """Write frames; return why that failed, or None. A frame that was written in part ends the connection."""
        broken = None
        if not self._writing.acquire(timeout=seconds_to(deadline)):
            return f"the connection to {self.address} was busy with other requests until the deadline"
        try:
            if self._lost is not None:
                return self._lost
            for pending in made:
                pending._may_be_written = True
            # Requests that expired before the mark above were reported as not sent, so they must not be sent.
            if made and all(pending.opaque not in self._pending for pending in made):
                return "its deadline has passed"
            self._active = time.monotonic()
            self._transport.send(parts, deadline)
            return None
        except WriteTimeout as error:
            why = f"{self.address} did not read before the deadline"
            broken = why if error.partial else None
        except OSError as error:
            why = broken = str(error)
        finally:
            self._writing.release()
        # A server ignores a part of a frame, so a single request was not sent. Of several, some may have been sent whole.
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
                # No frame was valid: this is not a RocketMQ server, and another attempt will not change that.
                self._protocol_error = ProtocolError(
                    error.sub, f"{self.address} does not speak RocketMQ's protocol: {error.message}"
                )
        except OSError as error:
            why = str(error)
        finally:
            try:
                self._cut(why)
            finally:
                # Under the lock, so that no thread writes to the descriptor after the system has reused it.
                with self._writing:
                    self._transport.close()

    def _receive(self) -> str:
        """Dispatch what comes until the stream ends; return why it ended. Raises ProtocolError, OSError."""
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
                where = "" if decoder.at_boundary else " inside a frame"
                hint = "" if self._received else " before any answer; it may require TLS, or refuse this client"
                return f"{self.address} closed it{where}{hint}"
            if now >= tick:
                tick = now + _TICK
                for pending in list(self._pending.values()):
                    if pending.deadline <= now:
                        self._expire(pending)

    def _dispatch(self, command: RemotingCommand) -> None:
        if command.is_response:
            pending = self._pending.pop(command.opaque, None)
            # None if the request was given up.
            if pending is not None:
                pending._finish(command, None)
            return
        answer = self._on_push(command) if self._on_push is not None else None
        if command.is_oneway:
            return
        if answer is None:
            answer = not_supported(command)
        answer.opaque, answer.flag = command.opaque, FLAG_RESPONSE
        self._write(encode_parts(answer), Deadline.after(PUSH_ANSWER_TIMEOUT), ())

    def _expire(self, pending: Pending[Any]) -> None:
        """Finish a request whose deadline has passed; end the connection if the server was silent for too long."""
        unheard = self._unheard_since
        if self._pending.pop(pending.opaque, None) is not None:
            sub = UnavailableCondition.TIMEOUT if pending._may_be_written else UnavailableCondition.UNREACHABLE
            pending._finish(
                None, RocketMQUnavailableError(sub, f"{self.address} did not answer the {pending.request.what} in time")
            )
        if unheard is not None and time.monotonic() - unheard >= self._silence:
            self._cut(f"{self.address} sent nothing for {self._silence:g} s")

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
        if not pending._may_be_written or self._protocol_error is not None:
            return self._unsent(pending.request, self._lost or "")
        return RocketMQUnavailableError(
            UnavailableCondition.CONNECTION_LOST,
            f"no answer to the {pending.request.what}, which may or may not have been done: {self._lost}",
        )

    def _unsent(self, request: Request[Any], why: str) -> OrderedMQError:
        if self._protocol_error is not None:
            return ProtocolError(self._protocol_error.sub, self._protocol_error.message)
        return RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"the {request.what} was not sent: {why}")

    def _forget(self) -> None:
        """Let go of the connection in a child after a fork, silently: it is the parent's, as are its threads and locks."""
        self._writing, self._cutting = threading.Lock(), threading.Lock()
        self._lost = self._lost or f"the connection to {self.address} is the parent process's"
        self._transport.close()
        for pending in self._pending.values():
            pending._on_done = None
            pending._finish(None, self._error_of(pending))
        self._pending = {}


_connections: Final = BeginAnew(Connection._forget)
