"""One connection to one server, shared by all threads of a process: many requests in flight, answers in any order.

A reader thread matches answers to requests by ``opaque``. Servers also send requests on the same connection and number them by their
own counter, so a command's response flag is checked before its number (NettyRemotingAbstract.processMessageReceived).

Rules (`wire.stream` has the rules of every stream): deadlines are finite, in monotonic seconds. When a connection ends, every request
in flight ends with CONNECTION_LOST, or with TLS if the server refused the client's certificate.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from orderedmq.conditions import UnavailableCondition
from orderedmq.endpoint import Credentials
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.rocketmq.net.account import NO_ACCOUNT, Account
from orderedmq.rocketmq.net.deadline import Deadline, seconds_to
from orderedmq.rocketmq.net.transport import Transport, WriteTimeout, connect
from orderedmq.rocketmq.wire.frame import Bytes, FrameDecoder, RemotingCommand, encode_parts
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.request import Request, answer_to, signed
from orderedmq.rocketmq.wire.stream import SILENCE, Stream

T = TypeVar("T")

#: Takes a request from the server and returns the answer; None if the request is unknown or needs no answer. Runs in the reader
#: thread.
PushHandler = Callable[[RemotingCommand], RemotingCommand | None]

#: Seconds between checks of the deadlines of requests for which no thread waits.
_TICK: Final = 0.5
#: Seconds for sending an answer to a server's request. Nothing depends on the answer, and it must not block the reader for longer.
PUSH_ANSWER_TIMEOUT: Final = 1.0


class Pending(Generic[T]):
    """A request in flight."""

    __slots__ = (
        "_connection",
        "_done",
        "_error",
        "_may_be_written",
        "_on_done",
        "_response",
        "credentials",
        "deadline",
        "opaque",
        "request",
    )

    def __init__(
        self,
        connection: Connection,
        request: Request[T],
        opaque: int,
        deadline: float,
        on_done: Callable[[Pending[T]], None] | None,
        credentials: Credentials | None,
    ) -> None:
        """``credentials`` are those that sign the request."""
        self.request = request
        self.credentials = credentials
        self.opaque = opaque
        self.deadline = deadline
        self._connection = connection
        self._on_done = on_done
        self._response: RemotingCommand | None = None
        self._error: OrderedMQError | None = None
        # Whether some of the request's bytes may have been written.
        self._may_be_written = False
        # Held until there is a result. A lock is the cheapest object to wait for.
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises immediately."""
        return self._response is not None or self._error is not None

    def result(self) -> T:
        """Return the parsed answer, and wait for it until the deadline.

        Raises the error for the answer's response code, or RocketMQUnavailableError: TIMEOUT or CONNECTION_LOST (the server may have
        executed the request), UNREACHABLE (the request was never sent). Raises RocketMQError TLS if the server refused the client's
        certificate.
        """
        if not self._done.acquire(timeout=seconds_to(self.deadline)):
            self._connection._expire(self)
            # If another thread has taken the request first, that thread has finished the request or is about to.
            self._done.acquire()
        self._done.release()
        if self._error is not None:
            raise self._error
        assert self._response is not None
        try:
            return self.request.answer(self._response, self._connection.address)
        except RocketMQError as error:
            explained = self._connection.account.explain(error, self.credentials)
            if explained is error:
                raise
            raise explained from None

    def _finish(self, response: RemotingCommand | None, error: OrderedMQError | None) -> None:
        self._response, self._error = response, error
        self._done.release()
        if self._on_done is not None:
            self._on_done(self)


class Connection:
    """A connection to one server; see the module. `open` makes it. `close`, the server, or an error ends it."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        account: Account = NO_ACCOUNT,
        on_push: PushHandler | None = None,
        silence: float = SILENCE,
        names: Namespaces = NO_NAMESPACES,
    ) -> None:
        self.address = address
        self._names = names
        self._transport = transport
        self.account = account
        self._on_push = on_push
        self._stream: Stream[Pending[Any], RemotingCommand] = Stream(address, FrameDecoder(), time.monotonic(), silence)
        # Only the thread that removes a request from this dictionary finishes the request.
        self._pending = self._stream.in_flight
        self._writing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"rocketmq-{address}", daemon=True)
        self._reader.start()

    @classmethod
    def open(
        cls,
        address: str,
        deadline: float,
        *,
        tls: ssl.SSLContext | None = None,
        account: Account = NO_ACCOUNT,
        on_push: PushHandler | None = None,
        names: Namespaces = NO_NAMESPACES,
    ) -> Connection:
        """Connect to "host:port". Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS or TLS."""
        return cls(address, connect(address, deadline, tls), account=account, on_push=on_push, names=names)

    def __repr__(self) -> str:
        return f"<Connection to {self.address}, {len(self._pending)} in flight{', ended' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        """Whether the connection has ended for good."""
        return self._stream.lost is not None

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since bytes were last sent or received."""
        return now - self._stream.active

    # --- requests

    def call(self, request: Request[T], deadline: float) -> T:
        """Send a request and return its parsed answer. Raises the errors of `send` and `Pending.result`.

        If the account was renewed meanwhile, the request is sent again: the server refused it and did nothing.
        """
        return self.begin(request, deadline)()

    def begin(self, request: Request[T], deadline: float) -> Callable[[], T]:
        """Do what `call` does, but return a function that waits for the answer."""
        pending = self.send(request, deadline)

        def answer() -> T:
            try:
                return pending.result()
            except RocketMQUnavailableError as error:
                if error.sub != UnavailableCondition.ACCOUNT_RENEWED or time.monotonic() >= deadline:
                    raise
            return self.call(request, deadline)

        return answer

    def send(self, request: Request[T], deadline: float, on_done: Callable[[Pending[T]], None] | None = None) -> Pending[T]:
        """Send a request without waiting for its answer.

        Raises ProtocolError as `encode_parts` does. `Pending.result` raises every other error. ``on_done`` is called once, when there is
        a result, usually in the reader thread. So it must not wait or raise, but it may send requests.
        """
        [pending] = self.send_all([(request, on_done)], deadline)
        return pending

    def send_all(
        self, asked: Sequence[tuple[Request[T], Callable[[Pending[T]], None] | None]], deadline: float
    ) -> list[Pending[T]]:
        """Send several requests, each as in `send`, with one write, because a system call costs more than a request.

        If the write fails, some requests may have been sent completely. So pass several requests only if all are repeatable.
        """
        credentials = self.account.current
        numbers = self._stream.numbers(len(asked))
        sent: list[Pending[T]] = []
        parts: list[Bytes] = []
        for number, (request, on_done) in zip(numbers, asked):
            pending = Pending(self, self._names.request(request), number, deadline, on_done, credentials)
            parts += encode_parts(self._command(pending))
            sent.append(pending)
        self._stream.add(dict(zip(numbers, sent)), time.monotonic())
        # Check this only now, so that a `_cut` after the check finds the requests that were added above.
        why = self._stream.lost or self._write(parts, deadline, sent)
        if why is not None:
            for pending in sent:
                if self._pending.pop(pending.opaque, None) is not None:
                    pending._finish(None, self._stream.not_sent(pending.request.what, why))
        return sent

    def close(self) -> None:
        """End the connection and wait until the socket is closed. Requests in flight end with CONNECTION_LOST."""
        self._cut("this client closed it")
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _command(self, pending: Pending[Any]) -> RemotingCommand:
        request, credentials = pending.request, pending.credentials
        ext = request.ext if credentials is None else signed(request.ext, request.body, credentials)
        return RemotingCommand(request.code, pending.opaque, 0, None, ext, request.body)

    def _write(self, parts: Sequence[Bytes], deadline: float, sent: Sequence[Pending[Any]]) -> str | None:
        """Write frames. Return the reason if that failed, else None. If a frame was written only in part, end the connection."""
        broken = None
        if not self._writing.acquire(timeout=seconds_to(deadline)):
            return f"the connection to {self.address} was busy with other requests until the deadline"
        try:
            if self._stream.lost is not None:
                return self._stream.lost
            for pending in sent:
                pending._may_be_written = True
            # Requests that expired before they were marked above have been reported as not sent, so they must not be sent.
            if sent and all(pending.opaque not in self._pending for pending in sent):
                return "its deadline has passed"
            self._stream.active = time.monotonic()
            self._transport.send(parts, deadline)
            return None
        except WriteTimeout as error:
            why = self._stream.not_read
            broken = why if error.partial else None
        except (OSError, RocketMQError) as error:
            why = broken = self._stream.reason(error)
        finally:
            self._writing.release()
        # A server ignores an incomplete frame, so a single request was not sent. Of several requests, some may have been sent completely.
        for pending in sent if len(sent) == 1 or broken is None else ():
            if self._pending.pop(pending.opaque, None) is not None:
                pending._finish(None, self._stream.not_sent(pending.request.what, why))
        if broken is not None:
            self._cut(broken)
        return why

    # --- the reader thread

    def _read(self) -> None:
        why = "the reader failed"
        try:
            self._receive()
        except (OSError, RocketMQError) as error:
            why = self._stream.reason(error)
        finally:
            try:
                self._cut(why)
            finally:
                # Close the socket under the lock, so that no thread writes to the descriptor after the system has reused it.
                with self._writing:
                    self._transport.close()

    def _receive(self) -> None:
        """Read and dispatch commands until the stream ends. Raises OSError, RocketMQError TLS."""
        tick = time.monotonic() + _TICK
        while self._stream.lost is None:
            count = self._transport.recv_into(self._stream.buffer(), _TICK)
            now = time.monotonic()
            if count is not None:
                for command in self._stream.receive(count, now):
                    self._dispatch(command)
            if now >= tick:
                tick = now + _TICK
                for pending in list(self._pending.values()):
                    if pending.deadline <= now:
                        self._expire(pending)

    def _dispatch(self, command: RemotingCommand) -> None:
        if command.is_response:
            pending = self._pending.pop(command.opaque, None)
            # There is no entry if the request was given up.
            if pending is not None:
                pending._finish(command, None)
            return
        answer = answer_to(command, self._on_push(command) if self._on_push is not None else None)
        if answer is not None:
            self._write(encode_parts(answer), Deadline.after(PUSH_ANSWER_TIMEOUT), ())

    def _expire(self, pending: Pending[Any]) -> None:
        """Finish a request whose deadline has passed, and end the connection if the server has vanished."""
        vanished = self._stream.vanished(time.monotonic())
        if self._pending.pop(pending.opaque, None) is not None:
            pending._finish(None, self._stream.late(pending.request.what, written=pending._may_be_written))
        if vanished:
            self._cut()

    # --- the end

    def _cut(self, why: str = "") -> None:
        """End the connection and all requests in flight. ``why`` is the reason, unless the stream has already ended."""
        self._stream.end(why)
        self._transport.shutdown()
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                return
            pending._finish(None, self._error_of(pending))

    def _error_of(self, pending: Pending[Any]) -> OrderedMQError:
        what, lost = pending.request.what, self._stream.lost or ""
        if not pending._may_be_written:
            return self._stream.not_sent(what, lost)
        return self._stream.no_answer(f"the {what}, which may or may not have been executed")
