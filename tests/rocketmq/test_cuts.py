"""Exchanges with real servers are recorded, and then cut after every byte of the request and of the answer.

Wherever the cut is, the client reports that the connection was lost and whether the server may have acted. It never returns a wrong
result and never uses the connection again. A server acts only on a whole request.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

import orderedmq
from orderedmq.errors import OrderedMQError, RocketMQUnavailableError
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.wire import admin_requests, group_requests, message_requests
from orderedmq.rocketmq.wire.request import Request
from tests.rocketmq.proxy import HOST
from tests.waits import first_good, soon


class World:
    """A topic of one queue with three messages, and a group that has committed."""

    def __init__(self, cluster: Cluster) -> None:
        self.namesrv, self.master = cluster.address, cluster.broker.address
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{self.topic}"
        self.broker = orderedmq.connect(namesrv_addr=cluster.address)
        self.broker.admin.create_topic(self.topic, 1)
        [self.queue] = self.broker.log.queues(self.topic)
        self.broker.log.append({self.queue: pa.record_batch({"body": pa.array([b"a", b"b", b"c"])})})
        for made in (admin_requests.create_group(self.group), group_requests.update_consumer_offset(self.group, self.queue, 1)):
            self.ask(made)

    def ask(self, request: Request[Any]) -> Any:
        connection = Connection.open(self.master, soon())
        try:
            return connection.call(request, soon())
        finally:
            connection.close()


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> Iterator[World]:
    made = World(cluster)
    yield made
    made.broker.close()


def _sent(world: World) -> Request[message_requests.SendResult]:
    return message_requests.send(world.queue, b"one", "TAGS\x01a\x02", group="p", born=1, batch=False)


def _heartbeat(world: World) -> Request[Any]:
    topics = [group_requests.topic_subscription(world.topic, {"subString": "*"})]
    return group_requests.heartbeat(f"me@{world.topic}", world.group, topics, version=1)


#: Requests to a nameserver (True) or a broker (False).
EXCHANGES: dict[str, tuple[bool, Callable[[World], Request[Any]]]] = {
    "route": (True, lambda w: message_requests.topic_route(w.topic)),
    "route of no topic": (True, lambda w: message_requests.topic_route("none")),
    "cluster": (True, lambda w: message_requests.cluster_info()),
    "end": (False, lambda w: message_requests.max_offset(w.queue)),
    "least offset": (False, lambda w: message_requests.min_offset(w.queue)),
    "offset at a time": (False, lambda w: message_requests.search_offset(w.queue, 1)),
    "statistics": (False, lambda w: message_requests.topic_stats(w.topic)),
    "pull": (False, lambda w: message_requests.pull(w.queue, "TOOLS_CONSUMER", 0, 2)),
    "pull at the end": (False, lambda w: message_requests.pull(w.queue, "TOOLS_CONSUMER", 3, 2)),
    "pull after the end": (False, lambda w: message_requests.pull(w.queue, "TOOLS_CONSUMER", 9, 2)),
    "offset": (False, lambda w: group_requests.consumer_offset(w.group, w.queue)),
    "no offset": (False, lambda w: group_requests.consumer_offset(w.group, w.queue._replace(queue_id=7))),
    "commit": (False, lambda w: group_requests.update_consumer_offset(w.group, w.queue, 2)),
    "heartbeat": (False, _heartbeat),
    "members": (False, lambda w: group_requests.consumer_list(w.group)),
    "leaving": (False, lambda w: group_requests.unregister(f"me@{w.topic}", w.group)),
    "lock": (False, lambda w: group_requests.lock(w.group, "me", [w.queue])),
    "unlock": (False, lambda w: group_requests.unlock(w.group, "me", [w.queue])),
    "send": (False, _sent),
    "new topic": (False, lambda w: admin_requests.create_topic(f"{w.topic}-new", 1)),
    "new group": (False, lambda w: admin_requests.create_group(f"{w.group}-new")),
}


@dataclass
class Recorded:
    """The bytes of an exchange on a new connection, and the client's result or error."""

    asked: bytes
    answered: bytes
    outcome: Any


class Server:
    """Reads a number of bytes from each connection, writes an answer and closes it. ``fate`` has the number and the answer."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self.fate = (0, b"")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                expected, answer = self.fate
                read = 0
                while read < expected and (data := peer.recv(expected - read)):
                    read += len(data)
                peer.sendall(answer)
                # Unread bytes would turn the close into a reset, which may discard the answer, so read them first.
                peer.shutdown(socket.SHUT_WR)
                while expected and answer and peer.recv(1 << 16):
                    pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def outcome(address: str, request: Request[Any]) -> tuple[Any, Connection]:
    """Return the result or error of a request on a new connection, which stays open, and that connection."""
    connection = Connection.open(address, soon())
    try:
        return connection.call(request, soon(10.0)), connection
    except Exception as error:
        return error, connection


def record(address: str, request: Request[Any]) -> Recorded:
    """Forward the request and the answer byte for byte, and record them."""
    listener = socket.create_server((HOST, 0))
    host, _, port = address.rpartition(":")
    asked, answered = bytearray(), bytearray()

    def serve() -> None:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))

        def forward() -> None:
            while data := near.recv(1 << 16):
                asked.extend(data)
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

        up = threading.Thread(target=forward)
        up.start()
        while data := far.recv(1 << 16):
            answered.extend(data)
            near.sendall(data)
        up.join()
        near.close()
        far.close()

    serving = threading.Thread(target=serve)
    serving.start()
    found, connection = outcome(f"{HOST}:{listener.getsockname()[1]}", request)
    connection.close()
    serving.join()
    listener.close()
    return Recorded(bytes(asked), bytes(answered), found)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, OrderedMQError):
        # The text of the error names the server, so compare only its type and condition.
        return type(one) is type(other) and one.condition == other.condition
    return bool(one == other)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_that_is_cut_at_any_byte_is_a_lost_connection(world: World, server: Server, name: str) -> None:
    nameserver, make = EXCHANGES[name]
    request = make(world)
    recorded = record(world.namesrv if nameserver else world.master, request)
    server.fate = (len(recorded.asked), recorded.answered)
    whole, connection = outcome(server.address, request)
    connection.close()
    assert same(whole, recorded.outcome)
    cuts = [(count, b"") for count in range(len(recorded.asked) + 1)]
    cuts += [(len(recorded.asked), recorded.answered[:count]) for count in range(1, len(recorded.answered))]
    for cut in cuts:
        server.fate = cut
        error, connection = outcome(server.address, request)
        assert isinstance(error, RocketMQUnavailableError), (cut, error)
        # If nothing was read, the client may notice the lost connection even before it writes the request.
        assert error.sub == "CONNECTION_LOST" or (error.sub == "UNREACHABLE" and not cut[0]), (cut, error)
        assert connection.closed
        with pytest.raises(RocketMQUnavailableError) as again:
            connection.call(request, soon())
        assert again.value.sub == "UNREACHABLE", "an ended connection was used again"
        connection.close()


def written(request: Request[Any]) -> bytes:
    """Return the bytes of a request, without sending it to a real server."""
    with socket.create_server((HOST, 0)) as listener:
        connection = Connection.open(f"{HOST}:{listener.getsockname()[1]}", soon())
        connection.send(request, soon())
        near, _ = listener.accept()
        with near:
            out = near.recv(4, socket.MSG_WAITALL)
            out += near.recv(int.from_bytes(out, "big"), socket.MSG_WAITALL)
        connection.close()
    return out


def state(world: World) -> dict[str, Any]:
    """Return all state that the requests below would change."""
    return {
        "end": world.ask(message_requests.max_offset(world.queue)),
        "offset": world.ask(group_requests.consumer_offset(world.group, world.queue)),
        "group is there": f"{world.group}-cut" in world.ask(admin_requests.groups()),
        "topic is there": f"{world.topic}-cut" in {topic.name for topic in world.broker.log.topics()},
        # A lock that no client holds is granted.
        "lock is free": bool(world.ask(group_requests.lock(world.group, "other", [world.queue]))),
    }


def test_a_server_does_nothing_until_a_request_is_whole(world: World) -> None:
    queues = [world.queue]
    release = group_requests.unlock(world.group, "other", queues)
    before = state(world)
    world.ask(release)
    changing: list[Request[Any]] = [
        _sent(world),
        group_requests.update_consumer_offset(world.group, world.queue, 3),
        group_requests.lock(world.group, "me", queues),
        admin_requests.create_topic(f"{world.topic}-cut", 1),
        admin_requests.create_group(f"{world.group}-cut"),
    ]
    host, _, port = world.master.rpartition(":")
    for request in changing:
        whole = written(request)
        for count in range(1, len(whole)):
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(whole[:count])
    time.sleep(0.5)
    assert state(world) == before
    world.ask(release)
    # Sent as a whole, each request takes effect.
    for request in changing:
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(written(request))
            assert peer.recv(4)
    # A sent message can be read a moment after the answer.
    first_good(lambda: [name for name, value in state(world).items() if before[name] == value], lambda unchanged: not unchanged)
