"""Finds free ports of this machine, and sends single requests to a server.

This module has a short implementation of the protocol, so that servers are checked without the client that is tested against them.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import struct
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError

HOST: Final = "127.0.0.1"
#: These ports are below those of outgoing connections, so that the port of a killed server is still free when it restarts.
_PORTS: Final = range(20_000, 32_000)


#: Ports that `find_free_port` has returned in this process. They may look free, because their servers do not listen yet or were killed.
_returned_ports: Final[set[int]] = set()


def find_free_port(*offsets: int) -> int:
    """Return a port whose neighbours at ``offsets`` (0: itself) are all free. Raises ServersError PORT_IN_USE.

    The ports are reserved while this process runs: this function does not return them in another process of the same user, even while
    their server is killed and does not listen.
    """
    for port in random.sample(_PORTS, min(200, len(_PORTS))):
        ports = {port + offset for offset in offsets or (0,)}
        if not ports & _returned_ports and _reserved(ports) and all(map(is_free, ports)):
            _returned_ports.update(ports)
            return port
    raise ServersError(ServersCondition.PORT_IN_USE, f"no free port was found from {_PORTS.start} to {_PORTS.stop - 1}")


@cache
def _reservations() -> int | None:
    """Open the file in which each process of this user locks the bytes at its ports' numbers. Return None if it cannot be opened.

    The system releases these locks when a process ends, however it ends. It also releases them when the process closes any other
    descriptor of the file, so the file is opened only once.
    """
    path = os.path.join(tempfile.gettempdir(), f"orderedmq-ports-{os.geteuid()}")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _reserved(ports: Iterable[int]) -> bool:
    """Reserve the ports for this process, and return whether that succeeded.

    Ports that a failed attempt has reserved stay reserved, because there are enough others.
    """
    file = _reservations()
    if file is None:
        return True
    try:
        for port in ports:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def is_free(port: int) -> bool:
    """Whether a server could listen on the port."""
    # RocketMQ 4.9 listens on all interfaces, whatever its settings. Some systems allow that even if another server listens on loopback,
    # so check both.
    for host in ("", HOST):
        with socket.socket() as probe:
            # Java sets this option too, so that a port counts as free while the system still remembers its closed connections.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def answers(address: str, code: int) -> bool:
    """Whether the server at ``address`` answers a request with success."""
    try:
        return ask(address, code)[0] == 0
    except OSError:
        return False


def ask(
    address: str, code: int, fields: Mapping[str, str] | None = None, body: bytes = b"", timeout: float = 3.0
) -> tuple[int, bytes]:
    """Send one request on a new connection and return the response's code and body. Raises OSError."""
    host, _, port = address.rpartition(":")
    # With this version number, a nameserver answers with valid JSON.
    request = {"code": code, "language": "OTHER", "version": 409, "opaque": 1, "flag": 0, "extFields": dict(fields or {})}
    header = json.dumps(request).encode()
    with socket.create_connection((host, int(port)), timeout) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body)
        with connection.makefile("rb") as stream:
            length, head = struct.unpack(">ii", _exactly(stream.read(8), 8))
            payload = _exactly(stream.read(length - 4), length - 4)
    head &= 0xFFFFFF
    return int(json.loads(payload[:head])["code"]), payload[head:]


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) < length:
        raise ConnectionError("the server closed the connection")
    return data
