"""The proxy changes connections as planned, and in no other way."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.rocketmq.proxy import Connection, Network, Path, Proxy, Way
from tests.waits import until


def frame(code: int, opaque: int, body: bytes = b"", flag: int = 0, **fields: str) -> bytes:
    header = json.dumps({"code": code, "opaque": opaque, "flag": flag, "extFields": fields}).encode()
    return struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body


class Far:
    """A server that answers each piece of data with ``answer(data)``."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.answer = answer
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.got = bytearray()
        self.ended: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
        except OSError:
            pass

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.got += data
                    connection.sendall(self.answer(data))
                self.ended.append("end")
            except ConnectionResetError:
                self.ended.append("reset")

    def close(self) -> None:
        # Wake the thread that waits in accept().
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far(lambda data: data)
    yield made
    made.close()


@pytest.fixture
def proxy(far: Far) -> Iterator[Proxy]:
    with Proxy(far.address) as made:
        yield made


def connect(proxy: Proxy) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", proxy.port), 30)
    made.settimeout(30)
    return made


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def drain(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def test_a_good_connection_loses_nothing(proxy: Proxy, far: Far) -> None:
    data = bytes(range(256)) * 4000
    with connect(proxy) as client:
        threading.Thread(target=client.sendall, args=(data,)).start()
        assert read(client, len(data)) == data
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    until(lambda: far.ended == ["end"])
    assert (proxy.connections[0].up, proxy.connections[0].down) == (len(data), len(data))


def test_plans_are_used_in_order_and_then_no_more(proxy: Proxy) -> None:
    proxy.plan(Path(down=Way(cut_after=1)), Path(down=Way(cut_after=2)))
    for got in (1, 2, 4):
        with connect(proxy) as client:
            client.sendall(b"abcd")
            assert read(client, 4) == b"abcd"[:got]


def test_delay_holds_up_nothing_behind_it(proxy: Proxy) -> None:
    proxy.default = Path(up=Way(delay=0.2), down=Way(delay=0.2))

    def took() -> float:
        with connect(proxy) as client:
            began = time.monotonic()
            for _ in range(10):
                client.sendall(b"x")
                time.sleep(0.01)
            assert read(client, 10) == b"x" * 10
            return time.monotonic() - began

    times = [took()]
    # If the delays were added up, each try would take 4 s. A busy machine may also make single tries slow.
    while times[-1] >= 1.5:
        assert len(times) < 10, times
        times.append(took())
    assert min(times) >= 0.4


def test_slices(proxy: Proxy) -> None:
    proxy.default = Path(down=Way(slice=3, pause=0.3))
    pieces: list[bytes] = []
    # A client that reads too late receives two pieces as one, so try again.
    for _ in range(10):
        with connect(proxy) as client:
            client.sendall(b"abcdefgh")
            pieces = []
            while sum(map(len, pieces)) < 8:
                pieces.append(client.recv(100))
        if len(pieces) == 3:
            break
    assert pieces == [b"abc", b"def", b"gh"]


def test_cut_up_keeps_the_rest_from_the_server(proxy: Proxy, far: Far) -> None:
    proxy.default = Path(up=Way(cut_after=3))
    with connect(proxy) as client:
        client.sendall(b"abcdefgh")
        drain(client)
        until(lambda: bool(far.ended))
        assert far.got == b"abc"


def test_reset(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"a"
        proxy.connections[0].reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert proxy.connections[0].closed.is_set()


def test_reset_after_bytes(proxy: Proxy) -> None:
    proxy.default = Path(down=Way(cut_after=2, reset=True))
    with connect(proxy) as client:
        client.sendall(b"abcd")
        with pytest.raises(ConnectionResetError):
            drain(client)


def test_refuse(proxy: Proxy, far: Far) -> None:
    proxy.plan(Path(refuse=True))
    with pytest.raises(ConnectionResetError), connect(proxy) as client:
        drain(client)
    assert far.got == b""


def test_half_open_and_release(proxy: Proxy, far: Far) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"a"
        proxy.connections[0].hold()
        client.sendall(b"bc")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert far.got == b"a"
        client.settimeout(30)
        proxy.each(Connection.release)
        assert read(client, 2) == b"bc"


def test_hold_after_bytes(proxy: Proxy) -> None:
    proxy.default = Path(down=Way(hold_after=2))
    with connect(proxy) as client:
        client.sendall(b"abcd")
        assert read(client, 2) == b"ab"
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(30)
        proxy.connections[0].release()
        assert read(client, 2) == b"cd"


def test_no_server_is_a_reset() -> None:
    with socket.socket() as silent:
        # No server listens at the port, and no other process can get it.
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Proxy(address) as proxy, pytest.raises(ConnectionResetError), connect(proxy) as client:
            drain(client)


def test_frames_are_remembered_however_they_are_cut(proxy: Proxy) -> None:
    both = frame(105, 1, topic="t") + frame(105, 1, b"body", flag=1)
    with connect(proxy) as client:
        for byte in both:
            client.sendall(bytes([byte]))
        assert read(client, len(both)) == both
    ups = [(e.code, e.opaque, dict(e.fields), e.body, e.response) for e in proxy.exchanges if e.up]
    assert ups == [(105, 1, {"topic": "t"}, b"", False), (105, 1, {}, b"body", True)]
    assert [e.code for e in proxy.requests(105)] == [105]


def test_other_protocols_pass() -> None:
    far = Far(lambda data: b"\x16\x03\x01\x02" + b"\xff" * 20)
    with Proxy(far.address, {"a": "b"}) as proxy, connect(proxy) as client:
        client.sendall(b"\x16\x03\x01\x02" + b"\x00" * 20)
        assert read(client, 24) == b"\x16\x03\x01\x02" + b"\xff" * 20
    far.close()


def test_a_network_sends_clients_through_its_proxies() -> None:
    far = Far(lambda data: frame(0, 1, b'{"0":"127.0.0.1:7"}', flag=1))
    with Network(far.address, ["127.0.0.1:7"]) as network, connect(network.namesrv) as client:
        client.sendall(frame(105, 1, topic="t"))
        length = struct.unpack(">i", read(client, 4))[0]
        assert read(client, length).endswith(b'{"0":"%s"}' % network.broker.address.encode())
    far.close()
