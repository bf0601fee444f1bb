"""Serves the application on an address of this machine until Ctrl-C."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError

#: Number of open connections, silent ones included, from which on a request is answered with status 503.
MOST_CONNECTIONS: Final = 200
#: Maximum size in bytes of the head of a request.
_HEAD_BYTES: Final = 16 << 10
#: Seconds that an idle connection is kept for a further request.
_IDLE: Final = 5
#: Seconds that the server, when it is stopped, waits for requests that are still being answered.
_LAST_REQUESTS: Final = 2


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 means any free port. Raises OptionError INVALID if the address cannot be used."""
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
    except (OSError, UnicodeError) as error:
        # A name with an empty or too long part is no OSError but a UnicodeError of the codec for names.
        why = getattr(error, "strerror", None) or error
        raise OptionError(
            OptionCondition.INVALID,
            f"the server cannot listen at {host} port {port} ({why}). Give another --port, or another --host",
        ) from error
    return listening


def url_of(host: str, port: int) -> str:
    """Return the URL of a server at this host and port. An IPv6 address may be given with or without brackets."""
    bare = host.strip("[]")
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}/"


def server(app: ASGIApp) -> uvicorn.Server:
    """Return a server for the application. It does not log requests, because their URLs contain keys of messages."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_LAST_REQUESTS,
        )
    )


def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve the application until Ctrl-C. Ctrl-C is the normal way to end it, so it raises nothing."""
    try:
        server(app).run(sockets=[listening])
    except KeyboardInterrupt:
        return
