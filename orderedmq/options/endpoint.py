"""Parses the options that name a broker, an account and TLS settings. Rules: as in declared.py.

The command and the demo also take the account and the TLS settings from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from orderedmq.endpoint import ACCOUNT, Credentials, CredentialsFile, Endpoint, TlsOptions, parse_nameservers
from orderedmq.errors import RocketMQError
from orderedmq.options.declared import DEFAULT_DIRECTORY, Given
from orderedmq.options.values import conflict, half_given, invalid, only_for_cluster, parse_bool, parse_path

_NAMESPACES: Final = ("namespace", "namespaceV2")
_FILE: Final = "credentialsFile"
_WHOLE: Final = (("path", "namesrvAddr"), (*ACCOUNT, _FILE))
_TLS: Final = ("tlsTrustCertPath", "tlsCertPath", "tlsKeyPath", "tlsKeyPassword", "tlsVerify", "tlsVerifyHostname")
#: Option → environment variable.
VARIABLES: Final = {
    **ACCOUNT,
    _FILE: "ORDEREDMQ_CREDENTIALS_FILE",
    "useTLS": "ORDEREDMQ_USE_TLS",
    "tlsTrustCertPath": "ORDEREDMQ_TLS_TRUST_CERT_PATH",
    "tlsCertPath": "ORDEREDMQ_TLS_CERT_PATH",
    "tlsKeyPath": "ORDEREDMQ_TLS_KEY_PATH",
    "tlsKeyPassword": "ORDEREDMQ_TLS_KEY_PASSWORD",
    "tlsVerify": "ORDEREDMQ_TLS_VERIFY",
    "tlsVerifyHostname": "ORDEREDMQ_TLS_VERIFY_HOSTNAME",
}


def from_environment() -> dict[str, str]:
    """Return the options of the account and of TLS that are set in the environment."""
    return {name: os.environ[variable] for name, variable in VARIABLES.items() if os.environ.get(variable)}


def to_environment(options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for these options, for `from_environment` in another process. Other options are left out."""
    return {VARIABLES[name]: value for name, value in options.items() if name in VARIABLES}


def layered(*layers: Mapping[str, str]) -> dict[str, str]:
    """Return the merged options of several layers; earlier layers have precedence.

    An address and an account are each taken as a whole from one layer, so that one account's key is never combined with another's
    secret.
    """
    found: dict[str, str] = {}
    for layer in layers:
        taken = {name for whole in _WHOLE if not found.keys().isdisjoint(whole) for name in whole}
        found = {name: value for name, value in layer.items() if name not in taken} | found
    return found


def parse_endpoint(given: Given) -> Endpoint:
    if not given.has("namesrvAddr"):
        for name in (*ACCOUNT, _FILE, "useTLS", *_TLS):
            if given.has(name):
                raise only_for_cluster(name, "file permissions protect a store")
        for name in _NAMESPACES:
            if given.has(name):
                raise only_for_cluster(name, "a store has no namespaces")
        text = given.text("path")
        return Endpoint(path=parse_path(DEFAULT_DIRECTORY if text is None else text, "path"))
    return Endpoint(
        namesrv_addr=given.value("namesrvAddr", _addresses),
        credentials=_credentials(given),
        tls=_tls(given),
        namespace=given.optional("namespace", _namespace),
        namespace_v2=given.optional("namespaceV2", _namespace),
    )


def _credentials(given: Given) -> Credentials | CredentialsFile | None:
    if (path := given.optional(_FILE, parse_path)) is not None:
        for name in ACCOUNT:
            if given.has(name):
                raise conflict(
                    f"options {_FILE} and {_spelled(name)} exclude each other: the file contains the account. Drop one"
                )
        return CredentialsFile(path)
    for name, other in (("accessKey", "secretKey"), ("secretKey", "accessKey"), ("securityToken", "accessKey")):
        if given.has(name) and not given.has(other):
            raise half_given(_spelled(name), _spelled(other))
    access_key, secret_key = given.optional("accessKey", _not_empty), given.optional("secretKey", _not_empty)
    if access_key is None or secret_key is None:
        return None
    return Credentials(access_key, secret_key, given.optional("securityToken", _not_empty))


def _spelled(name: str) -> str:
    """Return the name of an account's option with the name of its environment variable."""
    return f"{name} ({ACCOUNT[name]})"


def _tls(given: Given) -> TlsOptions | None:
    if not given.value("useTLS", parse_bool):
        for name in _TLS:
            if given.has(name):
                raise conflict(f"option {name} needs useTLS=true. Set it, or drop {name}")
        return None
    for name, other in (("tlsCertPath", "tlsKeyPath"), ("tlsKeyPath", "tlsCertPath")):
        if given.has(name) and not given.has(other):
            raise half_given(name, other)
    return TlsOptions(
        given.optional("tlsTrustCertPath", parse_path),
        given.optional("tlsCertPath", parse_path),
        given.optional("tlsKeyPath", parse_path),
        given.optional("tlsKeyPassword", _not_empty),
        given.value("tlsVerify", parse_bool),
        given.value("tlsVerifyHostname", parse_bool),
    )


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
