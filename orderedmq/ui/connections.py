"""Limits of connections, so that whoever can connect, without a login, cannot keep others from the page.

Rules: a connection waits for a request from its start, and from the end of each answer, until the head of the next request is complete,
however it trickles in. It is closed when it has waited for too long, or does not take what is sent to it. An address has no more than its
share of connections, and all addresses together no more than the sum: another one takes the place of the connection that has waited
longest, of its address or of the address that has most. Where none waits, the new one is refused.

So silent connections keep nobody out, wherever they come from. A proxy, whose users all have its address, loses idle connections to its
next request at worst.
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
class Limits:
    """Seconds and numbers of connections.

    ``waiting``: for the head of a request. ``idle``: for the first byte of a further request. ``taking``: for a client to take what is
    buffered for it. ``per_address`` and ``total``: of connections.
    """

    waiting: float = 10
    idle: int = 5
    taking: float = 30
    per_address: int = 100
    total: int = 200


#: Connections that one turn of the loop accepts before their limits are looked at.
BACKLOG: Final = 100


class Connections:
    """The connections that are open, each by its two ends."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[tuple[Any, Any], Limited] = {}

    def add(self, new: Limited) -> bool:
        """Take a connection in, if need be in place of one that waits. Returns whether there was a place."""
        of_address = [one for one in self._open.values() if one.address == new.address]
        if len(of_address) >= self.limits.per_address and not _close_one(of_address):
            return False
        if len(self._open) >= self.limits.total and not _close_one(self._waiting_of_one()):
            return False
        self._open[new.ends] = new
        return True

    def _waiting_of_one(self) -> list[Limited]:
        """Return the waiting connections of the address that has most of them."""
        found = defaultdict[str, list[Limited]](list)
        for one in self._open.values():
            if one.waits:
                found[one.address].append(one)
        return max(found.values(), key=len, default=[])

    def remove(self, gone: Limited) -> None:
        if self._open.get(gone.ends) is gone:
            del self._open[gone.ends]

    def serving(self, app: ASGIApp) -> ASGIApp:
        """Return the application so that a connection does not wait while its request is answered."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            found = self._open.get((scope["client"], scope["server"]))
            if found is None:
                # It was closed a moment ago, of which the answer will hear.
                await app(scope, receive, send)
                return
            found.begin()
            try:
                await app(scope, receive, send)
            finally:
                found.done()

        return serve

    def protocol(self) -> type[Limited]:
        """Return uvicorn's protocol of a connection, with these limits."""

        class Here(Limited):
            connections_of_all = self

        return Here


class Limited(H11Protocol):
    """A connection. Only methods of `asyncio.Protocol` are changed."""

    connections_of_all: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # As the application sees them.
        self.ends = self.client, self.server
        self.address = address_of("" if self.client is None else self.client[0])
        #: Requests that are answered: several, if a client does not wait for the answers.
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
        """Whether it waits for a request."""
        return self._requests == 0

    def begin(self) -> None:
        """The head of a request is there."""
        self._requests += 1
        self._stop()

    def done(self) -> None:
        """A request is answered."""
        self._requests -= 1
        if self.waits and not self.transport.is_closing():
            self._wait()

    def end(self) -> None:
        """Close the connection at once, also if the client does not take what was sent to it."""
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
    """Close the connection that has waited longest. Returns whether any waits."""
    waiting = [one for one in those if one.waits]
    if waiting:
        min(waiting, key=lambda one: one.since).end()
    return bool(waiting)


def address_of(text: str) -> str:
    """Return what counts as one address: of IPv6 the first 64 bits, because a host may have all addresses that begin with them."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or IPv6Address(int(found) >> 64 << 64))
