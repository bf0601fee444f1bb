"""The options that name a broker, an account and TLS settings. The reader and the writer have them, and the command.

The command and the demo also take the account and the TLS settings from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from orderedmq.endpoint import Credentials, CredentialsFile, Endpoint, TlsOptions, parse_nameservers
from orderedmq.errors import RocketMQError
from orderedmq.options.values import (
    DEFAULT_DIRECTORY,
    conflict,
    half_given,
    invalid,
    option,
    options_of,
    parse_bool,
    parse_path,
    parse_store_path,
)

_PROTECTED: Final = "file permissions protect a store"
_NO_NAMESPACES: Final = "a store has no namespaces"


def _addresses(text: str, option: str) -> str:
    try:
        return ";".join(parse_nameservers(text))
    except RocketMQError as error:
        raise invalid(f"{option} (--namesrv)", error.message) from error


def _namespace(text: str, option: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise invalid(
            option,
            f"{text[:100]!r} is not a namespace, which has 1 to 64 letters, digits, '_' and '-'. Leave out the '%' after it",
        )
    return text


def _not_empty(text: str, option: str) -> str:
    if not text:
        # The error does not show the value, because it may be a secret.
        raise invalid(option, "the value is empty. Set it, or drop the option")
    return text


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """The checked options of a connection. Exactly one of ``path`` and ``namesrv_addr`` is set."""

    path: str | None = option(
        parse_store_path,
        "directory of the embedded broker, on a local disk",
        shown=f"{DEFAULT_DIRECTORY} in the working directory",
    )
    namesrv_addr: str | None = option(
        _addresses, "instead of path: the nameservers of a RocketMQ cluster, as host:port;host:port or http://host:port"
    )
    access_key: str | None = option(
        _not_empty, "with namesrvAddr: the name of the account, if the cluster has access control", only_cluster=_PROTECTED
    )
    secret_key: str | None = option(_not_empty, "the account's secret key", only_cluster=_PROTECTED, secret=True)
    security_token: str | None = option(
        _not_empty, "the account's token, if it is a temporary account", only_cluster=_PROTECTED, secret=True
    )
    credentials_file: str | None = option(
        parse_path,
        "instead of accessKey: a private JSON file with accessKey, secretKey and perhaps securityToken, on each machine that runs "
        "Spark. It is read again before each connection and after a refusal, so the account may change while a query runs",
        only_cluster=_PROTECTED,
    )
    namespace: str | None = option(
        _namespace,
        "with namesrvAddr: the namespace of topics and groups, which RocketMQ names namespace%topic",
        only_cluster=_NO_NAMESPACES,
    )
    namespace_v2: str | None = option(
        _namespace,
        "with namesrvAddr: the namespace that each request names, for servers that support this",
        only_cluster=_NO_NAMESPACES,
    )
    use_tls: bool = option(
        parse_bool, "with namesrvAddr: encrypt the connections", "false", name="useTLS", only_cluster=_PROTECTED
    )
    tls_trust_cert_path: str | None = option(
        parse_path, "PEM file of the certificate authorities to trust", shown="the system's", only_cluster=_PROTECTED
    )
    tls_cert_path: str | None = option(parse_path, "PEM file of the client's certificate", only_cluster=_PROTECTED)
    tls_key_path: str | None = option(parse_path, "PEM file of the client's key", only_cluster=_PROTECTED)
    tls_key_password: str | None = option(_not_empty, "the password of the client's key", only_cluster=_PROTECTED, secret=True)
    tls_verify: bool = option(parse_bool, "false: do not verify servers' certificates", "true", only_cluster=_PROTECTED)
    tls_verify_hostname: bool = option(
        parse_bool,
        "false: do not compare a server's name with its certificate (routes may contain IP addresses)",
        "true",
        only_cluster=_PROTECTED,
    )

    def check(self, given: Collection[str], streaming: bool | None) -> None:
        """Raise OptionError if the options, of which the user gave those in ``given``, do not fit together."""
        del streaming
        if self.credentials_file is not None:
            for name in ACCOUNT:
                if name in given:
                    raise conflict(
                        f"options credentialsFile and {_spelled(name)} exclude each other: the file contains the account. Drop one"
                    )
        for name, other in (("accessKey", "secretKey"), ("secretKey", "accessKey"), ("securityToken", "accessKey")):
            if name in given and other not in given:
                raise half_given(_spelled(name), _spelled(other))
        if not self.use_tls:
            for name in given:
                if name.startswith("tls"):
                    raise conflict(f"option {name} needs useTLS=true. Set it, or drop {name}")
        for name, other in (("tlsCertPath", "tlsKeyPath"), ("tlsKeyPath", "tlsCertPath")):
            if name in given and other not in given:
                raise half_given(name, other)
        # Refuses an account that cannot be sent.
        _ = self.endpoint

    @cached_property
    def endpoint(self) -> Endpoint:
        """The address of the broker, with the account and TLS settings."""
        if self.path is not None:
            return Endpoint(self.path)
        account: Credentials | CredentialsFile | None = None
        if self.credentials_file is not None:
            account = CredentialsFile(self.credentials_file)
        elif self.access_key is not None and self.secret_key is not None:
            account = Credentials(self.access_key, self.secret_key, self.security_token)
        tls = TlsOptions(
            self.tls_trust_cert_path,
            self.tls_cert_path,
            self.tls_key_path,
            self.tls_key_password,
            self.tls_verify,
            self.tls_verify_hostname,
        )
        return Endpoint(None, self.namesrv_addr, account, tls if self.use_tls else None, self.namespace, self.namespace_v2)


#: An account's options. The command has no flags for an account, because every user of a machine can see a command's arguments.
ACCOUNT: Final = ("accessKey", "secretKey", "securityToken")
_WHOLE: Final = (("path", "namesrvAddr"), (*ACCOUNT, "credentialsFile"))
#: Option → environment variable, for the account and TLS.
VARIABLES: Final = {
    option.name: f"ORDEREDMQ_{field.upper()}"
    for field, option in options_of(BrokerOptions).items()
    if option.only_cluster == _PROTECTED
}
#: The environment variables of the command's address, which is a store or a cluster.
ADDRESS_VARIABLES: Final = {"path": "ORDEREDMQ_PATH", "namesrvAddr": "ORDEREDMQ_NAMESRV"}
SECRETS: Final = frozenset(option.name for option in options_of(BrokerOptions).values() if option.secret)


def _spelled(name: str) -> str:
    """Return the name of an account's option with the name of its environment variable."""
    return f"{name} ({VARIABLES[name]})"


def from_environment() -> dict[str, str]:
    """Return the options of the account and of TLS that are set in the environment."""
    return {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}


def address_from_environment() -> dict[str, str]:
    """Return the address that is set in the environment, if there is one. Raises OptionError CONFLICT if there are two."""
    address = {name: os.environ[variable] for name, variable in ADDRESS_VARIABLES.items() if os.environ.get(variable)}
    if len(address) > 1:
        raise conflict(f"the environment variables {' and '.join(ADDRESS_VARIABLES.values())} exclude each other. Unset one")
    return address


def to_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for these options, for `from_environment` in another process. Other options are left out."""
    return {VARIABLES[name]: value for name, value in options.items() if name in VARIABLES}


def layered(*layers: Mapping[str, str]) -> dict[str, str]:
    """Return the merged options of several layers; earlier layers have precedence.

    An address and an account are each taken as a whole from one layer, so that one account's key is never combined with another's
    secret.
    """
    options: dict[str, str] = {}
    for layer in layers:
        decided = {name for whole in _WHOLE if not options.keys().isdisjoint(whole) for name in whole}
        options = {name: value for name, value in layer.items() if name not in decided} | options
    return options
