"""Limits on connections, so that a client without a login cannot keep others from the page.

Rules: a connection *waits* from its start, and from the end of each answer, until the head of its next request is complete, even
if some bytes of that head have arrived. A connection is closed when it has waited for too long, and when its client does not read
the data sent to it. The number of connections is limited for each address and for all addresses together. At the first limit, a
new connection replaces the connection of its address that has waited longest. At the second limit, it replaces a waiting connection
of the address that has the most of them. If there is no waiting connection to replace, the new connection is refused.

So silent connections cannot keep other clients out, whatever addresses they use. All users of a proxy share its address; at worst
the proxy has to open a new connection for its next request.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits in seconds, and in numbers of connections.

    ``waiting``: maximum seconds until the head of a request is complete. ``idle``: until the first byte of a further request.
    ``taking``: until a client has read the data that is buffered for it. ``per_address`` and ``total``: numbers of connections.
    """

    waiting: float = 10
    idle: int = 5
    taking: float = 30
    per_address: int = 100
    total: int = 200


#: Maximum number of connections that the event loop accepts in one turn, before their limits are checked.
BACKLOG: Final = 100


class Connections:
    """The open connections, by the addresses of their two ends."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[tuple[Any, Any], Limited] = {}

    def add(self, new: Limited) -> bool:
        """Accept a connection and, at a limit, close a waiting one. Return whether the new connection was accepted."""
        of_address = [one for one in self._open.values() if one.address == new.address]
        if len(of_address) >= self.limits.per_address and not _close_one(of_address):
            return False
        if len(self._open) >= self.limits.total and not _close_one(self._waiting_of_one()):
            return False
        self._open[new.ends] = new
        return True

    def _waiting_of_one(self) -> list[Limited]:
        """Return the waiting connections of the address that has the most of them."""
        found = defaultdict[str, list[Limited]](list)
        for one in self._open.values():
            if one.waits:
                found[one.address].append(one)
        return max(found.values(), key=len, default=[])

    def remove(self, gone: Limited) -> None:
        if self._open.get(gone.ends) is gone:
            del self._open[gone.ends]

    def serving(self, app: ASGIApp) -> ASGIApp:
        """Return an application that marks a connection as not waiting while its request is answered."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            found = self._open.get((scope["client"], scope["server"]))
            if found is None:
                # The connection was closed a moment ago. The application finds out when it sends its answer.
                await app(scope, receive, send)
                return
            found.begin()
            try:
                await app(scope, receive, send)
            finally:
                found.done()

        return serve

    def protocol(self) -> type[Limited]:
        """Return the class with which uvicorn handles a connection, under these limits."""

        class Here(Limited):
            connections_of_all = self

        return Here


class Limited(H11Protocol):
    """A connection with limits. It overrides only methods that uvicorn's protocol inherits from `asyncio.Protocol`."""

    connections_of_all: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The application's scope identifies the connection by the same two addresses.
        self.ends = self.client, self.server
        self.address = address_of("" if self.client is None else self.client[0])
        #: Requests that are being answered: more than one if a client sends requests without waiting for answers.
        self._requests = 0
        self.since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        if self.connections_of_all.add(self):
            self._wait()
        else:
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._end_in(self.connections_of_all.limits.taking)
        super().pause_writing()

    def resume_writing(self) -> None:
        if not self.waits:
            self._stop()
        super().resume_writing()

    @property
    def waits(self) -> bool:
        """Whether the connection waits for a request."""
        return self._requests == 0

    def begin(self) -> None:
        """Note that the head of a request has arrived."""
        self._requests += 1
        self._stop()

    def done(self) -> None:
        """Note that a request was answered."""
        self._requests -= 1
        if self.waits and not self.transport.is_closing():
            self._wait()

    def end(self) -> None:
        """Close the connection immediately, even if the client has not read the data sent to it."""
        self._forget()
        self.transport.abort()

    def _wait(self) -> None:
        limits = self.connections_of_all.limits
        self.since = self.loop.time()
        self._end_in(limits.taking if self.transport.get_write_buffer_size() else limits.waiting)

    def _forget(self) -> None:
        self._stop()
        self.connections_of_all.remove(self)

    def _end_in(self, seconds: float) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self.end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _close_one(those: list[Limited]) -> bool:
    """Close the connection that has waited longest. Return False if no connection was waiting."""
    waiting = [one for one in those if one.waits]
    if waiting:
        min(waiting, key=lambda one: one.since).end()
    return bool(waiting)


def address_of(text: str) -> str:
    """Return the address by which connections are counted.

    Of an IPv6 address, only the first 64 bits count, because one host may own all addresses that begin with them.
    """
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
