"""A socket to one server, plain or with TLS, whose calls never block longer than their time limits.

One thread may receive while another sends. TLS runs over memory (ssl.MemoryBIO), because two threads must not use one OpenSSL object
at the same time, and a reader that waits inside the object would block every writer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Final, cast

from orderedmq.conditions import OptionCondition, RocketMQCondition, UnavailableCondition
from orderedmq.endpoint import TlsOptions, parse_address
from orderedmq.errors import OptionError, RocketMQError, RocketMQUnavailableError
from orderedmq.rocketmq.net.deadline import Deadline, seconds_to
from orderedmq.rocketmq.wire.frame import Bytes

#: Seconds for one attempt to connect, TLS included (Java: ``connectTimeoutMillis``).
CONNECT_TIMEOUT: Final = 3.0
_TLS_RECORDS: Final = 64 * 1024
#: OpenSSL's names of the alerts by which a server refuses a client's certificate, or the lack of one.
_CERTIFICATE_REFUSED: Final = frozenset(
    {
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_NO_CERTIFICATE",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "TLSV1_ALERT_ACCESS_DENIED",
        "TLSV1_ALERT_UNKNOWN_CA",
    }
)
#: The maximum number of parts in one write. The system refuses more than IOV_MAX, which is 1024 on Linux and macOS (writev(2)).
_MOST_PARTS: Final = 1024


def ssl_context(options: TlsOptions) -> ssl.SSLContext:
    """Return the SSL context for the options. Raises OptionError INVALID if a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = options.verify and options.verify_hostname
    context.verify_mode = ssl.CERT_REQUIRED if options.verify else ssl.CERT_NONE
    if options.verify and options.ca_file is None:
        context.load_default_certs()
    encrypted = False

    def password() -> str:
        """Return the password, empty if there is none. Without this function, OpenSSL would ask for one at the terminal."""
        nonlocal encrypted
        encrypted = True
        return options.key_password or ""

    try:
        if options.ca_file is not None:
            context.load_verify_locations(options.ca_file)
        if options.cert_file is not None:
            context.load_cert_chain(options.cert_file, options.key_file, password)
    except (OSError, ValueError) as error:
        # OpenSSL asks for a password only if the key is encrypted.
        if encrypted and isinstance(error, ssl.SSLError) and not error.reason:
            key = options.key_file or options.cert_file
            why = "tlsKeyPassword is wrong. Correct it" if options.key_password else "tlsKeyPassword is not set. Set it"
            raise OptionError(OptionCondition.INVALID, f"the TLS key {key} is encrypted, but {why}") from None
        names = ", ".join(name for name in (options.ca_file, options.cert_file, options.key_file) if name)
        raise OptionError(OptionCondition.INVALID, f"the TLS files {names} cannot be used: {error}") from None
    return context


class WriteTimeout(Exception):
    """The deadline passed before everything was written. ``partial``: a frame may have been written only in part."""

    def __init__(self, partial: bool) -> None:
        self.partial = partial
        super().__init__("the server does not read")


def connect(address: str, deadline: float, context: ssl.SSLContext | None = None) -> Transport:
    """Return a connection to a server. ``deadline`` is in monotonic seconds.

    Raises RocketMQUnavailableError UNREACHABLE, RocketMQError ADDRESS, and RocketMQError TLS if one side does not trust the other.
    """
    host, port = parse_address(address)
    deadline = min(deadline, Deadline.after(CONNECT_TIMEOUT))
    try:
        opened = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise _unreachable(address, error) from None
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setblocking(False)
        if context is None:
            return Transport(opened)
        transport = _TlsTransport(opened, context, address, host)
        transport.handshake(deadline)
    except (ssl.SSLEOFError, ConnectionError):
        opened.close()
        raise RocketMQUnavailableError(
            UnavailableCondition.UNREACHABLE,
            f"{address} ended the TLS handshake: it may not support TLS, or it may be stopping",
        ) from None
    except ssl.SSLError as error:
        opened.close()
        raise _no_tls(address, error) from None
    except (OSError, WriteTimeout) as error:
        opened.close()
        raise _unreachable(address, error) from None
    except BaseException:
        opened.close()
        raise
    return transport


def _no_tls(address: str, error: ssl.SSLError) -> RocketMQError:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = (
            f"{error.verify_message}. Set tlsTrustCertPath to the PEM file of the server's authority, or tlsVerifyHostname=false if "
            "the server's certificate names another host. Set tlsVerify=false only for experiments"
        )
    elif error.reason in _CERTIFICATE_REFUSED:
        why = (
            f"the server refused this client's certificate, or requires one ({error.reason}). Set tlsCertPath and tlsKeyPath to the PEM "
            "files of a certificate that the server trusts"
        )
    else:
        why = f"{error.reason or error}. Compare the options whose names begin with tls with the requirements of the server"
    return RocketMQError(RocketMQCondition.TLS, f"TLS with {address} failed: {why}")


def _unreachable(address: str, error: Exception) -> RocketMQUnavailableError:
    return RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, f"this client cannot connect to {address}: {error}")


class Transport:
    """A connected socket. Its methods raise the system's errors as OSError, and callers convert these.

    With TLS, `recv_into` and `send` also raise RocketMQError TLS if the server has refused this client's certificate. With TLS 1.3, a
    server reports that after the client's handshake has succeeded.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._readable = select.poll()
        self._readable.register(opened, select.POLLIN)

    def recv_into(self, buffer: memoryview, timeout: float) -> int | None:
        """Return the number of received bytes: 0 at the end of the stream, None if no byte came within ``timeout`` seconds."""
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            if not self._readable.poll(timeout * 1000):
                return None
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None

    def send(self, parts: Sequence[Bytes], deadline: float) -> None:
        """Write all parts. Raises WriteTimeout at the deadline."""
        views = [memoryview(part) for part in parts if len(part)]
        whole = unsent = sum(len(view) for view in views)
        while unsent:
            try:
                count = self._socket.sendmsg(views[:_MOST_PARTS])
            except BlockingIOError:
                self._wait_writable(deadline, partial=unsent < whole)
                continue
            unsent -= count
            while count:
                size = min(count, len(views[0]))
                views[0] = views[0][size:]
                count -= size
                if not len(views[0]):
                    del views[0]

    def _wait_writable(self, deadline: float, *, partial: bool) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        if not writable.poll(seconds_to(deadline) * 1000):
            raise WriteTimeout(partial)

    def shutdown(self) -> None:
        """End the connection for both sides, and wake threads that are receiving or sending."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The connection has already ended.
            pass

    def close(self) -> None:
        """Close the descriptor without telling the server, because the connection may belong to a process that has forked this one."""
        self._socket.close()


class _TlsTransport(Transport):
    def __init__(self, opened: socket.socket, context: ssl.SSLContext, address: str, host: str) -> None:
        super().__init__(opened)
        self._address = address
        self._refused: ssl.SSLError | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._lock = threading.Lock()
        # Held from a read of the socket until TLS has its bytes, because after a failed write a second thread reads.
        self._receiving = threading.Lock()
        self._records = memoryview(bytearray(_TLS_RECORDS))

    def handshake(self, deadline: float) -> None:
        """Do the TLS handshake. Raises ssl.SSLError, WriteTimeout at the deadline."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                super().send([self._outgoing.read()], deadline)
                if not self._receive(seconds_to(deadline)):
                    raise WriteTimeout(True) from None
            else:
                super().send([self._outgoing.read()], deadline)
                return

    def recv_into(self, buffer: memoryview, timeout: float) -> int | None:
        while True:
            with self._lock:
                try:
                    # With a buffer, `read` returns a number, contrary to its type stub.
                    return cast("int", cast("object", self._tls.read(len(buffer), buffer)))
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
                except ssl.SSLError as error:
                    if error.reason not in _CERTIFICATE_REFUSED:
                        raise
                    self._refused = error
                    raise _no_tls(self._address, error) from None
            if not self._receive(timeout):
                return None

    def _receive(self, timeout: float) -> bool:
        """Pass bytes from the socket to TLS. Return whether bytes came or the stream has ended."""
        with self._receiving:
            count = super().recv_into(self._records, timeout)
            if count is None:
                return False
            with self._lock:
                if count:
                    self._incoming.write(self._records[:count])
                else:
                    self._incoming.write_eof()
        return True

    def send(self, parts: Sequence[Bytes], deadline: float) -> None:
        try:
            with self._lock:
                for part in parts:
                    view = memoryview(part)
                    while len(view):
                        view = view[self._tls.write(view) :]
                data = self._outgoing.read()
            super().send([data], deadline)
        except WriteTimeout:
            # Encrypted data depends on the data encrypted before it, so the stream is broken even if nothing was written.
            raise WriteTimeout(True) from None
        except OSError:
            # The server may have reported the refusal before it closed the connection, and no thread may have read that yet.
            with contextlib.suppress(OSError, RocketMQError):
                self.recv_into(memoryview(bytearray(1)), 0.0)
            if self._refused is None:
                raise
            raise _no_tls(self._address, self._refused) from None
