"""Connections that send nothing, send slowly, or do not read their answer do not keep other users from the web page."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import orderedmq
from orderedmq.ui import guard
from orderedmq.ui.connections import ConnectionLimits, address_of
from orderedmq.ui.server import listen, server
from tests.ui_site import served
from tests.waits import until


def connect(port: int, address: str, begin: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(address, 0))
    made.sendall(begin)
    return made


def closed(one: socket.socket) -> bool:
    """Whether the server has closed a connection on which it has sent nothing."""
    if not select.select([one], [], [], 0)[0]:
        return False
    try:
        return one.recv(1, socket.MSG_PEEK) == b""
    except ConnectionResetError:
        return True


def get(port: int, address: str, path: str = "/") -> int:
    """Return the status of an answer to a client with this address."""
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60, source_address=(address, 0))
    try:
        asked.request("GET", path)
        return asked.getresponse().status
    finally:
        asked.close()


async def small(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def running(app: Any, limits: ConnectionLimits) -> Iterator[tuple[int, uvicorn.Server]]:
    with listen("127.0.0.1", 0) as listening:
        made = server(app, limits)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: made.started, "the server has started")
        try:
            yield listening.getsockname()[1], made
        finally:
            made.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.holds("web page robust")
def test_connections_that_send_nothing_keep_nobody_from_the_page(tmp_path: Path) -> None:
    with (
        orderedmq.connect(tmp_path) as broker,
        served(broker, limits=ConnectionLimits(waiting=600), token="a-secret-of-this-test", hosts=None) as site,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(connect(site.port, "127.0.0.2")) for _ in range(210)]
        until(lambda: sum(map(closed, silent)) >= 110)
        # The newest connections are still open. Other clients are served, both from another address and from the same one.
        assert not closed(silent[-1])
        assert [get(site.port, address, "/login") for address in ("127.0.0.1", "127.0.0.2", "127.0.0.1")] == [200, 200, 200]
        assert sum(map(closed, silent)) == 111


@pytest.mark.holds("web page robust")
@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["first", "next"])
@pytest.mark.parametrize("trickle", [b"", b"GET / HTTP/1.1\r\nx: "], ids=["silent", "trickling"])
def test_a_request_that_does_not_come_is_not_waited_for(begin: bytes, trickle: bytes) -> None:
    with running(small, ConnectionLimits(waiting=0.4, idle=1)) as (port, _), connect(port, "127.0.0.1", begin) as one:
        if begin:
            until(lambda: b"ok" in one.recv(4096, socket.MSG_PEEK))
            one.recv(4096)
        one.sendall(trickle)

        def ended() -> bool:
            if trickle:
                try:
                    one.sendall(b"y")
                except OSError:
                    return True
            return closed(one)

        until(ended)


def test_all_addresses_together_have_a_limit_and_one_that_is_new_is_served() -> None:
    with running(small, ConnectionLimits(waiting=600, per_address=3, total=6)) as (port, made), ExitStack() as stack:
        silent = {
            address: [stack.enter_context(connect(port, address)) for _ in range(3)] for address in ("127.0.0.2", "127.0.0.3")
        }
        until(lambda: len(made.server_state.connections) == 6)
        assert get(port, "127.0.0.4") == 200
        # The connection that has waited longest was closed to make room.
        assert [closed(one) for those in silent.values() for one in those] == [True, False, False, False, False, False]
        kept = stack.enter_context(connect(port, "127.0.0.5"))
        more = [stack.enter_context(connect(port, "127.0.0.3")) for _ in range(9)]
        until(lambda: sum(map(closed, more)) == 6)
        assert not closed(kept)


def test_requests_that_are_answered_are_not_given_up_for_others() -> None:
    going = threading.Event()
    asked = threading.Semaphore(0)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        from starlette.concurrency import run_in_threadpool

        asked.release()
        if scope["path"] == "/slow":
            await run_in_threadpool(going.wait, 60)
        await small(scope, receive, send)

    request = b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n"
    with running(slow, ConnectionLimits(waiting=0.4, per_address=2)) as (port, _), ExitStack() as stack:
        busy = [stack.enter_context(connect(port, "127.0.0.2", request)) for _ in range(2)]
        assert all(asked.acquire(timeout=60) for _ in busy)
        third = stack.enter_context(connect(port, "127.0.0.2"))
        until(lambda: closed(third))
        assert get(port, "127.0.0.1") == 200
        # This lasts longer than the server waits for a request.
        silent = stack.enter_context(connect(port, "127.0.0.1"))
        until(lambda: closed(silent))
        going.set()
        for one in busy:
            until(lambda one=one: b"ok" in one.recv(4096, socket.MSG_PEEK))  # type: ignore[misc]


def test_an_answer_that_is_not_taken_is_given_up() -> None:
    done = threading.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        done.set()

    with (
        running(large, ConnectionLimits(taking=0.4)) as (port, made),
        connect(port, "127.0.0.1", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
    ):
        assert done.wait(60)
        until(lambda: not made.server_state.connections)


def test_a_form_that_trickles_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FORM_SECONDS", 0.3)
    head = b"POST /login HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
    with (
        orderedmq.connect(tmp_path) as broker,
        served(broker, token="a-secret-of-this-test", hosts=None) as site,
        connect(site.port, "127.0.0.1", head + b"token=") as one,
    ):
        assert b" 408 " in one.recv(4096)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_a_host_with_many_addresses_counts_as_one(text: str, address: str) -> None:
    assert address_of(text) == address
