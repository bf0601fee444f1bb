"""A TCP proxy that breaks network connections on purpose, and records the frames that pass through it.

    with Proxy(broker.address) as proxy:
        proxy.plan(Path(down=Way(cut_after=100)))  # for the next connection; later ones work normally
        client = connect(proxy.address)
        proxy.connections[0].reset()

Each connection has two directions: ``up`` to the server, ``down`` to the client. Tests call from their threads; one other thread runs
the proxy.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeVar

from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.wire.codes import RequestCode

T = TypeVar("T")

HOST: Final = "127.0.0.1"
_PIECE: Final = 64 << 10


@dataclass(frozen=True)
class Way:
    """What happens to the bytes in one direction."""

    #: Number of bytes after which the connection is closed in both directions.
    cut_after: int | None = None
    #: Number of bytes after which no more bytes arrive, without an error.
    hold_after: int | None = None
    #: With ``cut_after``: the connection ends with a reset instead of an orderly close.
    reset: bool = False


@dataclass(frozen=True)
class Path:
    """What happens to one connection."""

    up: Way = Way()
    down: Way = Way()
    #: Whether the connection is reset immediately after it is accepted.
    refuse: bool = False


@dataclass(frozen=True)
class Exchange:
    """One frame that passed through the proxy."""

    #: time.monotonic() when the frame was complete.
    at: float
    up: bool
    code: int
    opaque: int
    fields: Mapping[str, str]
    body: bytes
    response: bool
    remark: str = ""


@dataclass
class Connection:
    """One connection through the proxy: the frames that passed, and methods to break it."""

    proxy: Proxy
    path: Path
    #: How many bytes came from the client and from the server, including bytes that were not passed on.
    up: int = 0
    down: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._writers: list[asyncio.StreamWriter] = []

    def hold(self) -> None:
        """Pass nothing on from now on, in either direction, and without an error, as on a half-open connection."""
        self.proxy._do(self._open.clear)

    def reset(self) -> None:
        self.proxy._do(lambda: self._close(True))

    def alter(self, path: Path) -> None:
        """Change the behaviour from now on. Numbers of bytes count from the beginning of the connection."""
        self.proxy._do(lambda: setattr(self, "path", path))

    def _close(self, reset: bool) -> None:
        for writer in self._writers:
            if reset:
                if not writer.is_closing():
                    # Without linger, unsent bytes are dropped and the other side sees a reset.
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
        self._open.set()
        self.closed.set()


class Proxy:
    """Listens on a free loopback port and forwards to ``target`` (``host:port``).

    ``rewrite`` replaces addresses in the bodies of answers, so that a nameserver sends clients through other proxies. If ``target``
    changes, later connections go to the new one.
    """

    def __init__(self, target: str, rewrite: Mapping[str, str] | None = None) -> None:
        self.target = target
        self.connections: list[Connection] = []
        self.rewrite = {old.encode(): new.encode() for old, new in (rewrite or {}).items()}
        #: The behaviour of connections without a plan.
        self.default = Path()
        self._plans: deque[Path] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._await(asyncio.start_server(self._accept, HOST, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"{HOST}:{self.port}"

    def plan(self, *paths: Path) -> None:
        """Set the behaviour of the next connections, in the order in which they are accepted."""
        self._do(lambda: self._plans.extend(paths))

    @property
    def exchanges(self) -> list[Exchange]:
        """The frames of all connections, ordered by time."""
        return sorted((e for c in list(self.connections) for e in list(c.exchanges)), key=lambda exchange: exchange.at)

    def requests(self, code: int | None = None) -> list[Exchange]:
        """Return the clients' requests, all of them or those with one code."""
        return [e for e in self.exchanges if e.up and not e.response and code in (None, e.code)]

    def spoil_sends(self, path: Callable[[Connection], Path], *, later: bool = True) -> None:
        """Alter the newest connection that was used for more than pulls. If there is none and ``later`` is true, plan for the
        next connection.
        """
        for connection in reversed(self.connections):
            asked = [exchange.code for exchange in list(connection.exchanges) if exchange.up]
            if not connection.closed.is_set() and set(asked) != {RequestCode.PULL_MESSAGE}:
                connection.alter(path(connection))
                return
        if later:
            self.plan(path(Connection(self, Path())))

    def each(self, what: Callable[[Connection], None]) -> None:
        """Call ``what`` for each open connection, for example ``proxy.each(Connection.reset)``."""
        for connection in list(self.connections):
            if not connection.closed.is_set():
                what(connection)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- in the proxy's thread ----------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        connection = Connection(self, self._plans.popleft() if self._plans else self.default)
        connection._writers.append(writer)
        self.connections.append(connection)
        try:
            if connection.path.refuse:
                connection._close(True)
                return
            host, _, port = self.target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            connection._writers.append(far_writer)
            if connection.closed.is_set():
                connection._close(False)
                return
            await asyncio.gather(
                self._pass(connection, reader, far_writer, True), self._pass(connection, far_reader, writer, False)
            )
            connection._close(False)
        except (OSError, asyncio.CancelledError):
            # An error on one side closes the other side. If the server cannot be reached, the client also sees a reset.
            connection._close(True)

    async def _pass(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool) -> None:
        """Forward one direction."""
        frames = Frames(up, connection.exchanges, self.rewrite if not up else {})
        sent = 0
        while data := await reader.read(_PIECE):
            if up:
                connection.up += len(data)
            else:
                connection.down += len(data)
            sent = await self._send(connection, frames.feed(data), writer, up, sent)
        await self._send(connection, frames.rest(), writer, up, sent)
        await connection._open.wait()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()

    async def _send(self, connection: Connection, data: bytes, writer: asyncio.StreamWriter, up: bool, sent: int) -> int:
        """Write ``data`` as far as the direction allows. Return how many bytes of the direction have been sent by now."""
        while data and not connection.closed.is_set():
            await connection._open.wait()
            way = self._way(connection, up)
            limits = [limit - sent for limit in (way.cut_after, way.hold_after) if limit is not None]
            piece = data[: max(0, min(*limits, len(data)) if limits else len(data))]
            data = data[len(piece) :]
            sent += len(piece)
            writer.write(piece)
            await writer.drain()
            if way.cut_after is not None and sent >= way.cut_after:
                connection._close(way.reset)
            elif way.hold_after is not None and sent >= way.hold_after:
                connection._open.clear()
        return sent

    @staticmethod
    def _way(connection: Connection, up: bool) -> Way:
        return connection.path.up if up else connection.path.down

    async def _end(self) -> None:
        self._server.close()
        for connection in self.connections:
            connection._close(True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- from a test's thread -----------------------------------------------------------------------------------------------

    def _do(self, what: Callable[[], T]) -> T:
        async def call() -> T:
            return what()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(60)


class Frames:
    """Finds frames of the remoting protocol in the bytes of one direction, and rewrites their bodies on request."""

    def __init__(self, up: bool, found: list[Exchange] | None, rewrite: Mapping[bytes, bytes]) -> None:
        """``found`` collects the frames; None records no frames."""
        self._up = up
        self._found = found
        self._rewrite = rewrite
        self._buffer = bytearray()
        #: Whether the bytes are passed on without inspection, for example because they are not frames.
        self._foreign = found is None and not rewrite

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on: the same bytes, or whole frames with new bodies."""
        if self._foreign:
            return data
        self._buffer += data
        out = []
        try:
            while len(self._buffer) >= 8:
                length, head = struct.unpack(">iI", self._buffer[:8])
                if not 4 <= length <= 64 << 20:
                    raise ValueError("no frame")
                if len(self._buffer) < 4 + length:
                    break
                frame = bytes(self._buffer[: 4 + length])
                del self._buffer[: 4 + length]
                out.append(self._frame(frame, head & 0xFFFFFF, head >> 24))
        except ValueError:
            self._foreign = True
            out.append(self.rest())
        return b"".join(out) if self._rewrite else data

    def rest(self) -> bytes:
        """Return bytes that were held back although they contain no whole frame."""
        rest = bytes(self._buffer) if self._rewrite else b""
        self._buffer.clear()
        return rest

    def _frame(self, frame: bytes, header_length: int, kind: int) -> bytes:
        header, body = frame[8 : 8 + header_length], frame[8 + header_length :]
        for old, new in self._rewrite.items():
            body = body.replace(old, new)
        if kind == 0 and self._found is not None:
            said = json.loads(header)
            fields = {name: str(value) for name, value in (said.get("extFields") or {}).items()}
            is_response = bool(said.get("flag", 0) & 1)
            self._found.append(
                Exchange(
                    time.monotonic(),
                    self._up,
                    said["code"],
                    said["opaque"],
                    fields,
                    body,
                    is_response,
                    said.get("remark") or "",
                )
            )
        return struct.pack(">i", 4 + len(header) + len(body)) + frame[4 : 8 + header_length] + body


class Network:
    """Proxies in front of a whole cluster. Clients that start at ``address`` never connect to a server directly."""

    def __init__(self, namesrv: str, brokers: list[str]) -> None:
        """``namesrv``: one address, or several separated by ``;``."""
        self.brokers = [Proxy(address) for address in brokers]
        rewrite = {proxy.target: proxy.address for proxy in self.brokers}
        self.namesrvs = [Proxy(address, rewrite) for address in namesrv.split(";")]
        self.namesrv = self.namesrvs[0]
        self.address = ";".join(proxy.address for proxy in self.namesrvs)

    @classmethod
    def before(cls, cluster: Cluster) -> Network:
        return cls(cluster.address, [broker.address for broker in cluster.brokers])

    @property
    def broker(self) -> Proxy:
        return self.brokers[0]

    def close(self) -> None:
        for proxy in (*self.namesrvs, *self.brokers):
            proxy.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
