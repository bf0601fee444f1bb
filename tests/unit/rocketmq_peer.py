"""Servers on loopback that follow a test's script: the server's end of RocketMQ connections."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE, RequestCode
from orderedmq.rocketmq.wire.frame import FrameDecoder, RemotingCommand, encode
from orderedmq.rocketmq.wire.pull_frames import PullDecoder


def pieces_into(decoder: FrameDecoder | PullDecoder, data: bytes | bytearray) -> Iterator[None]:
    """Give ``data`` to a decoder in pieces of the size of its buffer, and yield after each piece."""
    rest = memoryview(data)
    while len(rest):
        space = decoder.buffer()
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        decoder.received(count)
        yield


def feed(decoder: FrameDecoder, data: bytes | bytearray) -> list[RemotingCommand]:
    """Return the commands that ``data`` completes. Raises ProtocolError at the first malformed frame."""
    commands: list[RemotingCommand] = []
    for _ in pieces_into(decoder, data):
        decoder.take(commands)
    return commands


class Link:
    """One accepted connection."""

    def __init__(self, peer: Peer, opened: socket.socket) -> None:
        self.peer = peer
        self.socket = opened
        self._decoder = FrameDecoder()
        self._read: list[RemotingCommand] = []

    def read(self) -> RemotingCommand:
        """The next request. Raises EOFError if the client has closed the connection."""
        while not self._read:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._read += feed(self._decoder, data)
        return self._read.pop(0)

    def read_all(self) -> list[RemotingCommand]:
        """The next request, and all requests that arrived with it. Raises EOFError if the client has closed the connection."""
        first = self.read()
        rest, self._read = self._read, []
        return [first, *rest]

    def requests(self) -> Iterator[RemotingCommand]:
        while True:
            yield self.read()

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self, request: RemotingCommand, code: int = 0, body: bytes = b"", remark: str | None = None, **ext: str) -> None:
        self.write(answer(request, code, body, remark, **ext))

    def offset(self, request: RemotingCommand, value: int) -> None:
        self.reply(request, offset=str(value))

    def wait_for_end(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(EOFError):
            while True:
                self.read()


def answer(request: RemotingCommand, code: int = 0, body: bytes = b"", remark: str | None = None, **ext: str) -> bytes:
    return encode(RemotingCommand(code, request.opaque, FLAG_RESPONSE, remark, ext, body))


Script = Callable[[Link], None]


class Peer:
    """A server that runs ``script`` for each connection in a separate thread, and closes the connection when the script returns."""

    def __init__(self, script: Script, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._script = script
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.accepted = 0
        self._links: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deafen(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.deafen()
        for opened in self._links:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._links.append(opened)
            thread = threading.Thread(target=self._serve, args=(opened,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, opened: socket.socket) -> None:
        # The client may close a connection at any time, even during a handshake.
        with contextlib.suppress(OSError, EOFError):
            if self._tls is not None:
                opened = self._tls.wrap_socket(opened, server_side=True)
                self._links.append(opened)
            with opened:
                self._script(Link(self, opened))
        opened.close()


class Cluster:
    """Nameservers that all give the same answers, and brokers by address."""

    def __init__(self) -> None:
        self.routes: dict[str, dict[str, dict[str, str]]] = {}
        #: Fields that the nameserver adds to its answers. A Proxy adds its region.
        self.fields: dict[str, Any] = {}
        #: The permissions of the topics' queues: 4 to read, 2 to write.
        self.perm = 6
        #: The topics' numbers of queues for reading and for writing, at each broker.
        self.counts = (1, 1)
        #: Brokers that report to the nameservers.
        self.reporting = {"a"}
        self.asked: list[tuple[int, RemotingCommand]] = []
        self.peers: list[Peer] = []

    def serve(self, script: Script, port: int = 0) -> Peer:
        self.peers.append(Peer(script, port=port))
        return self.peers[-1]

    def nameserver(self, port: int = 0) -> Peer:
        def script(link: Link) -> None:
            for request in link.requests():
                self.asked.append((link.peer.port, request))
                if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                    brokers = self.routes.get(request.ext["topic"])
                    if brokers is None:
                        link.reply(request, 17, remark="No topic route info")
                        continue
                    datas = [
                        {"brokerName": name, "cluster": "C", "brokerAddrs": addresses} for name, addresses in brokers.items()
                    ]
                    queues = [
                        {
                            "brokerName": name,
                            "readQueueNums": self.counts[0],
                            "writeQueueNums": self.counts[1],
                            "perm": self.perm,
                        }
                        for name in brokers
                    ]
                    link.reply(request, body=json.dumps({"brokerDatas": datas, "queueDatas": queues}).encode(), **self.fields)
                elif request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
                    table = {name: {"brokerName": name, "brokerAddrs": self.addresses(name)} for name in self.reporting}
                    link.reply(request, body=json.dumps({"brokerAddrTable": table, "clusterAddrTable": {}}).encode())
                else:
                    link.reply(request, body=b'{"topicList":["T"]}')

        return self.serve(script, port)

    def addresses(self, name: str) -> dict[str, str]:
        """The addresses of a broker in the first route that has it; without one, an address that does not exist."""
        return next((brokers[name] for brokers in self.routes.values() if name in brokers), {"0": "h:1"})

    def broker(self, name: str, *, value: int = 0, topic: str = "T", port: int = 0, broker_id: int = 0) -> Peer:
        """A broker that answers ``value`` to every request, and is in the route of ``topic``."""

        def script(link: Link) -> None:
            for request in link.requests():
                link.reply(request, offset=str(value), queueId="0", queueOffset=str(value))

        return self.scripted(name, script, topic=topic, port=port, broker_id=broker_id)

    def scripted(self, name: str, script: Script, *, topic: str = "T", port: int = 0, broker_id: int = 0) -> Peer:
        peer = self.serve(script, port)
        self.routes.setdefault(topic, {}).setdefault(name, {})[str(broker_id)] = peer.address
        return peer

    def lookups(self) -> int:
        return sum(1 for _, request in self.asked if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
