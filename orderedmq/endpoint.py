"""The address of a broker (a directory, or a cluster's nameservers with an account and TLS), and how the kinds of brokers differ. Pure.

An Endpoint is pickled to executors with the options of a reader or a writer. No repr or message shows its secrets, and lock tokens contain
it without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from orderedmq.conditions import OptionCondition, RocketMQCondition
from orderedmq.errors import OptionError, RocketMQError

#: An account's options, and the environment variables from which the command takes them. The command has no flags for an account, because
#: every user of a machine can see a command's arguments.
ACCOUNT: Final = {
    "accessKey": "ORDEREDMQ_ACCESS_KEY",
    "secretKey": "ORDEREDMQ_SECRET_KEY",
    "securityToken": "ORDEREDMQ_SECURITY_TOKEN",
}


@dataclass(frozen=True)
class Capabilities:
    """The promises of a kind of broker.

    fenced: the broker itself refuses a change under a stale lock epoch, and a tenure continues across a restart (lineage).
    atomic_publish: one transaction makes a batch visible and moves the group offsets of its source.
    names_owner: the refusal of a lock names the owner.
    atomic_resize: one transaction gives a topic another number of queues. Otherwise it takes no messages for a while.
    """

    fenced: bool
    atomic_publish: bool
    names_owner: bool
    atomic_resize: bool


#: The capabilities of each kind of broker. Option checks need them before a connection exists.
EMBEDDED: Final = Capabilities(fenced=True, atomic_publish=True, names_owner=True, atomic_resize=True)
ROCKETMQ: Final = Capabilities(fenced=False, atomic_publish=False, names_owner=False, atomic_resize=False)


@dataclass(frozen=True)
class Credentials:
    """An account of the cluster (in Java: SessionCredentials). Its repr omits the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises OptionError INVALID for a value that cannot be sent. Its message does not show the value."""
        for name, value in (
            ("accessKey", self.access_key),
            ("secretKey", self.secret_key),
            ("securityToken", self.security_token),
        ):
            try:
                (value or "").encode()
            except UnicodeEncodeError:
                raise OptionError(
                    OptionCondition.INVALID,
                    f"an account's {name} contains half a character (a lone surrogate), as if its bytes were not UTF-8. Set it to UTF-8 text",
                ) from None


@dataclass(frozen=True)
class CredentialsFile:
    """A file with an account that may change while it is in use, such as an account with a temporary token.

    The file is a JSON object with ``accessKey``, ``secretKey`` and, for a temporary account, ``securityToken``. It is read before
    each new connection and after a server refuses the account. Replace the file in one step (rename), and keep it private.
    """

    path: str


#: An account, or a source of the account that is valid now. Several threads may call a callable at the same time.
CredentialsSource: TypeAlias = Credentials | CredentialsFile | Callable[[], Credentials]


@dataclass(frozen=True)
class TlsOptions:
    """How client and server authenticate each other. Files are in PEM format; ``key_password`` decrypts ``key_file``.

    ``ca_file`` has the certificates to trust (default: the system's). ``cert_file`` and ``key_file`` identify the client to
    servers that require it. Turn off ``verify`` for servers that make a self-signed certificate at each start, as RocketMQ's do by
    default (``tls.test.mode.enable``). Turn off ``verify_hostname`` where routes name brokers by IP address, as most routes do.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify: bool = True
    verify_hostname: bool = True


@dataclass(frozen=True)
class Endpoint:
    """The address of an embedded broker or of a RocketMQ cluster.

    Exactly one of ``path`` (an absolute directory) and ``namesrv_addr`` ("host:port;host:port") is set. The files of ``tls``
    must be on each machine that runs Spark. ``namespace`` and ``namespace_v2`` are the namespaces of a cluster's topics and groups.
    """

    path: str | None = None
    namesrv_addr: str | None = None
    credentials: CredentialsSource | None = None
    tls: TlsOptions | None = None
    namespace: str | None = None
    namespace_v2: str | None = None

    @property
    def embedded(self) -> bool:
        return self.path is not None

    @property
    def capabilities(self) -> Capabilities:
        """The promises of the broker at this address."""
        return EMBEDDED if self.embedded else ROCKETMQ

    def __str__(self) -> str:
        return self.path or self.namesrv_addr or ""


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ip6]:port``. Raises RocketMQError ADDRESS."""
    host, _, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or re.search(r"[\s/@]", host) or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
        raise RocketMQError(
            RocketMQCondition.ADDRESS,
            f"{address[:200]!r} is not the address of a RocketMQ server, because it does not have the form host:port"
            + (". Leave out https:// and set useTLS=true" if address.strip().lower().startswith("https://") else ""),
        )
    if not _is_name(host):
        raise RocketMQError(
            RocketMQCondition.ADDRESS,
            f"{address[:200]!r} is not the address of a RocketMQ server, because its host is not a name: each part between dots has 1 to "
            "63 characters",
        )
    return host, int(port)


def _is_name(host: str) -> bool:
    """Return whether the system can look the host up. Otherwise `socket.getaddrinfo` raises a ValueError, not an OSError."""
    try:
        return b"\0" not in host.encode("idna")
    except UnicodeError:
        return False


def parse_nameservers(text: str) -> tuple[str, ...]:
    """Return the addresses of ``a:9876;b:9876`` in order, without duplicates and ``http://``. Raises RocketMQError ADDRESS.

    The consoles of some clouds show a nameserver's address with ``http://``, which Java's and Go's clients drop.
    """
    texts = (re.sub("^http://", "", address.strip(), flags=re.IGNORECASE) for address in re.split("[;,]", text))
    addresses = tuple(dict.fromkeys(address for address in texts if address))
    if not addresses:
        raise RocketMQError(
            RocketMQCondition.ADDRESS, f"{text[:200]!r} names no nameserver. Give host:port, and separate several by ';'"
        )
    for address in addresses:
        parse_address(address)
    return addresses
