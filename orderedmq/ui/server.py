"""Serves the application on an address of this machine until Ctrl-C."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.ui.connections import BACKLOG, ConnectionLimits, Connections

#: Seconds for which requests that are being answered delay the end.
_LAST_REQUESTS: Final = 2


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0: a free one. Raises OptionError INVALID if that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise OptionError(
            OptionCondition.INVALID,
            f"nothing can be served at {host} port {port} ({error.strerror or error}); give another --port, or another --host",
        ) from error
    return listening


def url_of(host: str, port: int) -> str:
    """Return the URL of what is served there. An IPv6 address may come with its brackets or without."""
    bare = host.strip("[]")
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}/"


def server(app: ASGIApp, limits: ConnectionLimits | None = None) -> uvicorn.Server:
    """Return a server for the application, which logs no request: addresses name keys of messages."""
    connections = Connections(limits or ConnectionLimits())
    return uvicorn.Server(
        uvicorn.Config(
            connections.serving(app),
            http=connections.protocol(),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=connections.limits.idle,
            timeout_graceful_shutdown=_LAST_REQUESTS,
        )
    )


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve the application until Ctrl-C, which is the usual end."""
    try:
        server(app).run(sockets=[listening])
    except KeyboardInterrupt:
        return
