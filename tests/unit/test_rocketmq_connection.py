"""One connection to a server that answers in any order, late, in slices, wrongly or not at all.

A push may have the number of a pending request, answers come late, unknown requests are answered, and any type of header is read. The
module is long because the tests of TLS need the same server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orderedmq.endpoint import Credentials, TlsOptions, parse_address
from orderedmq.errors import OptionError, OrderedMQError, ProtocolError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.account import Account
from orderedmq.rocketmq.net.connection import Connection, Pending
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.net.transport import connect, ssl_context
from orderedmq.rocketmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode
from orderedmq.rocketmq.wire.frame import RemotingCommand, encode
from orderedmq.rocketmq.wire.message_requests import PullResult, max_offset, pull, send
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rocketmq.wire.request import signature
from tests.unit.rocketmq_peer import Link, Peer, Script, answer
from tests.waits import soon, until

QUEUE = MessageQueue("T", "a", 0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(script: Script, **more: ssl.SSLContext) -> Peer:
        peers.append(Peer(script, **more))  # type: ignore[arg-type]
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def to() -> Iterator[Callable[..., Connection]]:
    opened: list[Connection] = []

    def connection(peer: Peer, **more: object) -> Connection:
        connection = Connection(peer.address, connect(peer.address, soon()), **more)  # type: ignore[arg-type]
        opened.append(connection)
        return connection

    yield connection
    for made in opened:
        made.close()


def error(pending: Pending[Any]) -> OrderedMQError:
    with pytest.raises(OrderedMQError) as caught:
        pending.result()
    assert "\n" not in str(caught.value)
    return caught.value


def lost(pending: Pending[Any]) -> RocketMQUnavailableError:
    failure = error(pending)
    assert isinstance(failure, RocketMQUnavailableError)
    assert failure.sub == "CONNECTION_LOST"
    assert failure.retriable
    assert failure.outcome_unknown
    return failure


def echo(link: Link) -> None:
    """Answers each request for a queue's end with the queue's number."""
    for request in link.requests():
        link.offset(request, int(request.ext["queueId"]))


def number(n: int) -> MessageQueue:
    return MessageQueue("T", "a", n)


# --- answers


def test_a_request_gets_its_answer(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    connection = to(serve(echo))
    assert connection.call(max_offset(number(42)), soon()) == 42
    assert connection.in_flight == 0
    assert not connection.closed


def test_answers_come_in_any_order(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    def script(link: Link) -> None:
        requests = [link.read() for _ in range(50)]
        for request in sorted(requests, key=lambda request: int(request.ext["queueId"]) * 7 % 50):
            link.offset(request, int(request.ext["queueId"]))
        link.wait_for_end()

    connection = to(serve(script))
    pending = [connection.send(max_offset(number(n)), soon()) for n in range(50)]
    assert [request.result() for request in reversed(pending)] == list(reversed(range(50)))
    assert pending[0].result() == 0, "the result must stay available"


def test_more_requests_go_in_one_call_than_the_system_takes_parts_in_one_write(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    """A request for the ends of all queues of a large topic does that. A refused write used to end the connection and the membership."""
    connection = to(serve(echo))
    pending = connection.send_all([(max_offset(number(n)), None) for n in range(3000)], soon())
    assert [request.result() for request in pending] == list(range(3000))
    assert not connection.closed


def test_threads_share_a_connection(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    connection = to(serve(echo))
    wrong: list[int] = []

    def ask(first: int) -> None:
        wrong.extend(n for n in range(first, first + 100) if connection.call(max_offset(number(n)), soon()) != n)

    threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_callbacks_may_send_the_next_request(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    connection, ends, done = to(serve(echo)), [], threading.Event()

    def next_one(pending: Pending[int]) -> None:
        ends.append(pending.result())
        if len(ends) < 100:
            connection.send(max_offset(number(len(ends))), soon(), next_one)
        else:
            done.set()

    connection.send(max_offset(number(0)), soon(), next_one)
    assert done.wait(10)
    assert ends == list(range(100))


def test_trap_1_a_push_with_the_number_of_a_request_is_not_its_answer(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    answered: list[RemotingCommand] = []

    def script(link: Link) -> None:
        request = link.read()
        push = RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, request.opaque, FLAG_ONEWAY, ext={"consumerGroup": "g"})
        asks = RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, request.opaque, 0)
        link.write(encode(push) + encode(asks))
        answered.append(link.read())
        link.offset(request, 7)
        link.wait_for_end()

    pushed: list[int] = []
    connection = to(serve(script), on_push=lambda command: pushed.append(command.code))
    assert connection.call(max_offset(QUEUE), soon()) == 7
    assert pushed == [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, RequestCode.GET_CONSUMER_RUNNING_INFO]
    # Only the request that is not one-way gets an answer. Code 3 says that the request is not supported.
    (reply,) = answered
    assert (reply.code, reply.flag, reply.opaque) == (3, FLAG_RESPONSE, 0)


def test_a_handler_answers_a_push(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    answered: list[RemotingCommand] = []

    def script(link: Link) -> None:
        link.write(encode(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, 99, 0)))
        answered.append(link.read())

    peer = serve(script)
    to(peer, on_push=lambda command: RemotingCommand(0, body=b"info"))
    until(lambda: bool(answered))
    assert (answered[0].code, answered[0].flag, answered[0].opaque, answered[0].body) == (0, FLAG_RESPONSE, 99, b"info")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_handler_ends_the_connection_with_its_error(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    def script(link: Link) -> None:
        link.read()
        link.write(encode(RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 1, FLAG_ONEWAY)))
        link.wait_for_end()

    def fails(command: RemotingCommand) -> RemotingCommand | None:
        raise ZeroDivisionError

    connection = to(serve(script), on_push=fails)
    assert "the reader failed" in lost(connection.send(max_offset(QUEUE), soon(60))).message


def test_trap_6_an_answer_after_its_deadline_is_ignored(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    second = threading.Event()

    def script(link: Link) -> None:
        late = link.read()
        request = link.read()
        link.offset(late, 1)
        link.offset(request, 2)
        second.set()
        link.wait_for_end()

    connection = to(serve(script))
    with pytest.raises(RocketMQUnavailableError) as caught:
        connection.call(max_offset(number(1)), soon(0.1))
    assert caught.value.sub == "TIMEOUT"
    assert caught.value.outcome_unknown
    assert connection.call(max_offset(number(2)), soon()) == 2


def test_a_refused_request_does_not_end_the_connection(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    def script(link: Link) -> None:
        link.reply(link.read(), 17, remark="topic[T] not exist")
        link.reply(link.read(), 0, offset="many")
        echo(link)

    connection = to(serve(script))
    with pytest.raises(TopicError, match="topic\\[T\\] not exist"):
        connection.call(max_offset(QUEUE), soon())
    with pytest.raises(ProtocolError, match="offset"):
        connection.call(max_offset(QUEUE), soon())
    assert connection.call(max_offset(number(5)), soon()) == 5


def test_requests_are_signed(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    seen: list[RemotingCommand] = []

    def script(link: Link) -> None:
        seen.append(link.read())
        link.offset(seen[0], 0)
        link.wait_for_end()

    to(serve(script), account=Account(Credentials("ak", "secret"))).call(max_offset(QUEUE), soon())
    ext = dict(seen[0].ext)
    given = ext.pop("Signature")
    assert given == signature("".join(ext[name] for name in sorted(ext)).encode(), "secret")
    assert ext["AccessKey"] == "ak"
    assert "secret" not in repr(seen[0])


# --- ends of connections


def test_a_connection_that_is_cut_inside_a_frame_is_lost(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    def script(link: Link) -> None:
        request = link.read()
        link.offset(request, 1)
        last = [link.read() for _ in range(3)][-1]
        link.write(answer(last, offset="3")[:-4])

    connection = to(serve(script))
    assert connection.call(max_offset(QUEUE), soon()) == 1
    called: list[Pending[int]] = []
    pending = [connection.send(max_offset(QUEUE), soon(), called.append) for _ in range(3)]
    for one in pending:
        assert "inside a frame" in lost(one).message
    until(lambda: connection.closed)
    assert sorted(map(id, called)) == sorted(map(id, pending)), "each callback must be called once"
    after = error(connection.send(max_offset(QUEUE), soon()))
    assert after.sub == "UNREACHABLE"
    assert not getattr(after, "outcome_unknown")  # noqa: B009


def test_closed_before_any_answer_has_a_hint(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    def script(link: Link) -> None:
        link.read()

    assert "because it requires TLS" in lost(to(serve(script)).send(max_offset(QUEUE), soon())).message


def test_after_a_protocol_error_a_connection_is_not_used_again(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    def script(link: Link) -> None:
        good, other = link.read(), link.read()
        link.write(answer(good, offset="1") + struct.pack(">II", 8, 9) + answer(other, offset="2"))
        link.wait_for_end()

    peer = serve(script)
    connection = to(peer)
    pending = [connection.send(max_offset(QUEUE), soon()) for _ in range(2)]
    assert pending[0].result() == 1
    assert "header of 9 bytes" in lost(pending[1]).message
    assert error(connection.send(max_offset(QUEUE), soon())).sub == "UNREACHABLE"
    assert peer.accepted == 1


@pytest.mark.parametrize(
    ("data", "says"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"), (b"\x15\x03\x03\x00\x02\x02\x46", "TLS")]
)
def test_an_error_names_a_server_of_another_protocol_and_is_not_retriable(
    serve: Callable[..., Peer], to: Callable[..., Connection], data: bytes, says: str
) -> None:
    def script(link: Link) -> None:
        link.read()
        link.write(data)
        link.wait_for_end()

    connection = to(serve(script))
    failure = error(connection.send(max_offset(QUEUE), soon()))
    assert isinstance(failure, ProtocolError)
    assert not failure.retriable
    assert says in failure.message
    assert isinstance(error(connection.send(max_offset(QUEUE), soon())), ProtocolError)


def test_half_open_is_found_by_the_first_deadline_and_ends_the_connection(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    connection = to(serve(lambda link: link.wait_for_end()), silence=0.2)
    long = connection.send(max_offset(QUEUE), soon(60))
    begin = time.monotonic()
    failure = error(connection.send(max_offset(QUEUE), soon(0.3)))
    assert failure.sub == "TIMEOUT"
    assert time.monotonic() - begin < 2
    assert "sent nothing" in lost(long).message
    assert connection.closed


def test_a_deadline_alone_does_not_end_a_connection_that_speaks(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    def script(link: Link) -> None:
        held = link.read()
        for _ in range(20):
            link.write(encode(RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 1, FLAG_ONEWAY)))
            time.sleep(0.02)
        link.read()
        link.offset(held, 5)
        link.wait_for_end()

    connection = to(serve(script), silence=0.2)
    held = connection.send(max_offset(QUEUE), soon())
    assert error(connection.send(max_offset(QUEUE), soon(0.3))).sub == "TIMEOUT"
    assert held.result() == 5


def test_a_deadline_holds_without_a_waiting_thread(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    connection = to(serve(lambda link: link.wait_for_end()))
    ended: list[Pending[int]] = []
    connection.send(max_offset(QUEUE), soon(0.1), ended.append)
    connection.send(max_offset(QUEUE), soon(60))
    until(lambda: bool(ended), "the request has ended", 3.0)
    assert error(ended[0]).sub == "TIMEOUT"
    assert connection.in_flight == 1


def test_a_server_that_does_not_read(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    stop = threading.Event()
    connection = to(serve(lambda link: stop.wait(20)))
    large = send(QUEUE, bytes(15 * 1024 * 1024), "", group="g", born=0)
    begin = time.monotonic()
    failure = error(connection.send(large, soon(0.3)))
    assert (failure.sub, "did not read" in failure.message) == ("UNREACHABLE", True)
    assert time.monotonic() - begin < 3
    # The stream ends inside the frame, so nothing can follow it.
    assert connection.closed
    stop.set()


def test_others_wait_for_a_large_request_until_their_own_deadline(
    serve: Callable[..., Peer], to: Callable[..., Connection]
) -> None:
    stop = threading.Event()
    connection = to(serve(lambda link: stop.wait(20)))
    sender = threading.Thread(
        target=lambda: connection.send(send(QUEUE, bytes(15 * 1024 * 1024), "", group="g", born=0), soon(1.5)), daemon=True
    )
    sender.start()
    until(lambda: connection.in_flight == 1)
    time.sleep(0.1)
    failure = error(connection.send(max_offset(QUEUE), soon(0.2)))
    assert failure.sub == "UNREACHABLE"
    assert not getattr(failure, "outcome_unknown")  # noqa: B009
    sender.join()
    stop.set()


def test_close_ends_all_waiting_requests(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    asked = threading.Event()

    def script(link: Link) -> None:
        for _ in range(10):
            link.read()
        asked.set()
        link.wait_for_end()

    connection = to(serve(script))
    errors: list[OrderedMQError] = []
    threads = [
        threading.Thread(target=lambda: errors.append(error(connection.send(max_offset(QUEUE), soon(60))))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    assert asked.wait(10)
    begin = time.monotonic()
    connection.close()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 2
    assert {failure.sub for failure in errors} == {"CONNECTION_LOST"}
    assert all("this client closed it" in failure.message for failure in errors)
    connection.close()


def test_close_out_of_a_callback(serve: Callable[..., Peer], to: Callable[..., Connection]) -> None:
    connection = to(serve(echo))
    done = threading.Event()

    def end(_pending: Pending[int]) -> None:
        connection.close()
        done.set()

    connection.send(max_offset(QUEUE), soon(), end)
    assert done.wait(10)
    assert connection.closed


def test_a_refused_connection_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RocketMQUnavailableError) as caught:
        Connection.open(f"127.0.0.1:{port}", soon())
    assert caught.value.sub == "UNREACHABLE"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h:1", ("h", 1)),
        ("[::1]:9876", ("::1", 9876)),
        ("mq.example.com.:1", ("mq.example.com.", 1)),
        (" 10.0.0.1:10911 ", ("10.0.0.1", 10911)),
    ],
)
def test_addresses_are_parsed(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


NO_ADDRESSES = ["", "h", "h:", ":1", "h:x", "h:0", "h:65536", "h:-1", "h:" + "9" * 5000]
NO_ADDRESSES += ["http://h:1", "https://h:1", "tcp://h:1", "//h:1", "h/x:1", "user@h:1", "a h:1"]
#: Names for which the system's look-up raises errors that are no OSError.
NO_NAMES = ["mq..example.com:1", ".mq:1", "a" * 64 + ".com:1", "ä" * 70 + ":1", "a\0b:1", "mq\ud800:1"]


@pytest.mark.parametrize("text", NO_ADDRESSES + NO_NAMES)
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(RocketMQError) as caught:
        Connection.open(text, soon())
    assert caught.value.sub == "ADDRESS"
    assert ("is not a name" in caught.value.message) is (text in NO_NAMES)


# --- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates: server.pem for localhost and 127.0.0.1, and client.pem."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    return folder


def server_context(certificates: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize("how", ["ca", "unverified"])
def test_requests_pass_over_tls(serve: Callable[..., Peer], certificates: Path, how: str) -> None:
    body = os.urandom(3 * 1024 * 1024)

    def script(link: Link) -> None:
        for request in itertools.islice(link.requests(), 20):
            link.reply(request, body=body, nextBeginOffset="1", minOffset="0", maxOffset="1")
        echo(link)

    options = TlsOptions(verify=False) if how == "unverified" else TlsOptions(ca_file=str(certificates / "server.pem"))
    connection = Connection.open(serve(script, tls=server_context(certificates)).address, soon(), tls=ssl_context(options))
    try:
        pending = [connection.send(pull(QUEUE, "g", n, 32), soon(30)) for n in range(20)]
        assert all(request.result().body == body for request in pending)
        assert connection.call(max_offset(number(9)), soon()) == 9
    finally:
        connection.close()


def test_a_lane_over_tls(serve: Callable[..., Peer], certificates: Path) -> None:
    body = os.urandom(1024 * 1024)

    def script(link: Link) -> None:
        for request in link.requests():
            link.reply(request, 0, body, "FOUND", nextBeginOffset="1", minOffset="0", maxOffset="1")

    options = TlsOptions(ca_file=str(certificates / "server.pem"))
    lane = Lane.open(serve(script, tls=server_context(certificates)).address, soon(), tls=ssl_context(options))
    try:
        lane.ask(PullTemplate(QUEUE, "g"), [(n, 1) for n in range(20)], soon(30))
        while lane.in_flight:
            for _, _, result in lane.receive(10.0):
                assert isinstance(result, PullResult)
                assert result.body == body
        assert not lane.closed
    finally:
        lane.close()


def test_tls_under_threads_that_read_and_write_at_once(serve: Callable[..., Peer], certificates: Path) -> None:
    def script(link: Link) -> None:
        for request in link.requests():
            link.reply(request, body=bytes(request.body), queueId="0", queueOffset=str(len(request.body)))

    connection = Connection.open(
        serve(script, tls=server_context(certificates)).address, soon(), tls=ssl_context(TlsOptions(verify=False))
    )
    wrong: list[int] = []

    def ask(size: int) -> None:
        request = send(QUEUE, bytes(size), "", group="g", born=0)
        wrong.extend(size for _ in range(15) if connection.call(request, soon(30)).queue_offset != size)

    threads = [threading.Thread(target=ask, args=(size,)) for size in (1, 100, 20_000, 300_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.close()
    assert wrong == []


def test_tls_with_a_certificate_of_the_clients(serve: Callable[..., Peer], certificates: Path) -> None:
    context = server_context(certificates, client_ca=certificates / "client.pem")
    peer = serve(echo, tls=context)
    options = TlsOptions(
        ca_file=str(certificates / "server.pem"),
        cert_file=str(certificates / "client.pem"),
        key_file=str(certificates / "client.key"),
    )
    connection = Connection.open(peer.address, soon(), tls=ssl_context(options))
    assert connection.call(max_offset(number(4)), soon()) == 4
    connection.close()


@pytest.mark.parametrize("own", [None, "server"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_refuses_the_certificate_of_the_client(
    serve: Callable[..., Peer], certificates: Path, version: ssl.TLSVersion, own: str | None
) -> None:
    """With TLS 1.3, the client's handshake ends before the server's, so the first read reports the refusal."""
    context = server_context(certificates, client_ca=certificates / "client.pem")
    context.maximum_version = version
    address = serve(echo, tls=context).address
    tls = ssl_context(
        TlsOptions(
            ca_file=str(certificates / "server.pem"),
            cert_file=own and str(certificates / f"{own}.pem"),
            key_file=own and str(certificates / f"{own}.key"),
        )
    )

    def by_connection() -> None:
        with contextlib.closing(Connection.open(address, soon(), tls=tls)) as connection:
            connection.call(max_offset(QUEUE), soon())

    def by_lane() -> None:
        with contextlib.closing(Lane.open(address, soon(), tls=tls)) as lane:
            lane.ask(PullTemplate(QUEUE, "g"), [(0, 1)], soon())
            [(_, _, result)] = lane.receive(5.0)
            assert isinstance(result, OrderedMQError)
            raise result

    for attempt in (by_connection, by_lane):
        with pytest.raises(RocketMQError) as caught:
            attempt()
        assert (caught.value.sub, caught.value.retriable) == ("TLS", False), caught.value
        assert caught.value.message.startswith(f"TLS with {address} failed: ")
        if version == ssl.TLSVersion.TLSv1_3 or own is not None:
            assert "Set tlsCertPath and tlsKeyPath" in caught.value.message


def test_a_write_after_the_refusal_reports_the_refusal(serve: Callable[..., Peer], certificates: Path) -> None:
    """The reader thread may have read the refusal already, or the server may have closed the socket before the write."""
    context = server_context(certificates, client_ca=certificates / "client.pem")
    tls = ssl_context(TlsOptions(ca_file=str(certificates / "server.pem")))
    connection = Connection.open(serve(echo, tls=context).address, soon(), tls=tls)
    until(lambda: connection.closed)
    assert error(connection.send(max_offset(QUEUE), soon())).sub == "TLS"
    connection.close()
    lane = Lane.open(connection.address, soon(), tls=tls)
    time.sleep(0.2)
    for _ in range(2):
        lane.ask(PullTemplate(QUEUE, "g"), [(0, 1)], soon())
    results = [result for _, _, result in lane.receive(5.0)]
    assert [result.sub for result in results if isinstance(result, OrderedMQError)] == ["TLS", "TLS"]


def test_an_alert_about_something_else_is_a_lost_connection(serve: Callable[..., Peer], certificates: Path) -> None:
    address = serve(echo, tls=server_context(certificates)).address
    transport = connect(address, soon(), ssl_context(TlsOptions(verify=False)))

    class Broken:
        def read(self, *_: object) -> int:
            broken = ssl.SSLError(1, "bad record mac")
            broken.reason = "SSLV3_ALERT_BAD_RECORD_MAC"
            raise broken

    transport._tls = Broken()  # type: ignore[attr-defined]
    connection = Connection(address, transport)
    until(lambda: connection.closed)
    assert error(connection.send(max_offset(QUEUE), soon())).sub == "UNREACHABLE"
    connection.close()


def test_an_untrusted_certificate_is_refused(serve: Callable[..., Peer], certificates: Path) -> None:
    address = serve(echo, tls=server_context(certificates)).address
    with pytest.raises(RocketMQError) as caught:
        Connection.open(address, soon(), tls=ssl_context(TlsOptions(ca_file=str(certificates / "client.pem"))))
    assert caught.value.sub == "TLS"
    assert not caught.value.retriable


def test_a_certificate_of_another_name(serve: Callable[..., Peer], certificates: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x",
         "-addext", "subjectAltName=DNS:elsewhere", "-keyout", tmp_path / "server.key", "-out", tmp_path / "server.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    address = serve(echo, tls=server_context(tmp_path)).address
    with pytest.raises(RocketMQError, match="127.0.0.1"):
        Connection.open(address, soon(), tls=ssl_context(TlsOptions(ca_file=str(tmp_path / "server.pem"))))
    options = TlsOptions(ca_file=str(tmp_path / "server.pem"), verify_hostname=False)
    connection = Connection.open(address, soon(), tls=ssl_context(options))
    assert connection.call(max_offset(number(6)), soon()) == 6
    connection.close()


def test_tls_where_the_server_has_none(serve: Callable[..., Peer]) -> None:
    def script(link: Link) -> None:
        link.socket.recv(100)

    with pytest.raises(RocketMQUnavailableError, match="it may not support TLS"):
        Connection.open(serve(script).address, soon(), tls=ssl_context(TlsOptions(verify=False)))

    def other(link: Link) -> None:
        link.socket.recv(100)
        link.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(RocketMQError) as caught:
        Connection.open(serve(other).address, soon(), tls=ssl_context(TlsOptions(verify=False)))
    assert caught.value.sub == "TLS"


def test_a_tls_handshake_that_does_not_end_is_cut_by_the_deadline(serve: Callable[..., Peer]) -> None:
    address = serve(lambda link: time.sleep(2)).address
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError):
        Connection.open(address, soon(0.3), tls=ssl_context(TlsOptions(verify=False)))
    assert time.monotonic() - begin < 1.5


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for options in (
        TlsOptions(ca_file="/nowhere.pem"),
        TlsOptions(ca_file=str(tmp_path / "bad.pem")),
        TlsOptions(cert_file="/nowhere.pem"),
    ):
        with pytest.raises(OptionError) as caught:
            ssl_context(options)
        assert caught.value.sub == "INVALID"
    assert "secret" not in repr(TlsOptions(key_password="secret"))


def test_an_encrypted_key_without_its_password(certificates: Path, tmp_path: Path) -> None:
    encrypted = tmp_path / "client.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", certificates / "client.key", "-out", encrypted, "-passout", "pass:right"],
        check=True, capture_output=True,
    )  # fmt: skip

    def refused(password: str | None) -> str:
        options = TlsOptions(cert_file=str(certificates / "client.pem"), key_file=str(encrypted), key_password=password)
        with pytest.raises(OptionError) as caught:
            ssl_context(options)
        assert caught.value.sub == "INVALID"
        return caught.value.message

    assert refused(None) == f"the TLS key {encrypted} is encrypted, but tlsKeyPassword is not set. Set it"
    assert refused("wrong") == f"the TLS key {encrypted} is encrypted, but tlsKeyPassword is wrong. Correct it"
    ssl_context(TlsOptions(cert_file=str(certificates / "client.pem"), key_file=str(encrypted), key_password="right"))
    # Another certificate than the key's is not blamed on the password.
    with pytest.raises(OptionError, match="the TLS files .* cannot be used"):
        ssl_context(TlsOptions(cert_file=str(certificates / "server.pem"), key_file=str(encrypted), key_password="right"))


def test_a_process_ends_with_connections_open(serve: Callable[..., Peer]) -> None:
    code = (
        "import sys, time\n"
        "from orderedmq.rocketmq.net.connection import Connection\n"
        "from orderedmq.rocketmq.wire.message_requests import max_offset\n"
        "from orderedmq.model import MessageQueue\n"
        "c = Connection.open(sys.argv[1], time.monotonic() + 10)\n"
        "print(c.call(max_offset(MessageQueue('T', 'a', 8)), time.monotonic() + 10))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, serve(echo).address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "8", "")
