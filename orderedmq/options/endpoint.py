"""Parses the options that name a broker, its account and TLS. Rules: as in declared.py.

The command and the demo take an account from the environment.
"""

from __future__ import annotations

import os
import re
from typing import Final

from orderedmq.endpoint import Credentials, Endpoint, TlsOptions, parse_nameservers
from orderedmq.errors import ACCOUNT, RocketMQError
from orderedmq.options.declared import DEFAULT_DIRECTORY, Given
from orderedmq.options.values import conflict, half_given, invalid, only_for_cluster, parse_bool, parse_path

_NAMESPACES: Final = ("namespace", "namespaceV2")
_TLS: Final = ("tlsTrustCertPath", "tlsCertPath", "tlsKeyPath", "tlsKeyPassword", "tlsVerify", "tlsVerifyHostname")


def account() -> dict[str, str]:
    """Return the account's options that are set in the environment."""
    return {name: os.environ[variable] for name, variable in ACCOUNT.items() if os.environ.get(variable)}


def parse_endpoint(given: Given) -> Endpoint:
    """Return the broker that the options name. Raises OptionError."""
    if not given.has("namesrvAddr"):
        for name in (*ACCOUNT, "useTLS", *_TLS):
            if given.has(name):
                raise only_for_cluster(name, "file permissions protect a store")
        for name in _NAMESPACES:
            if given.has(name):
                raise only_for_cluster(name, "a store has no namespaces")
        text = given.text("path")
        return Endpoint(path=parse_path(DEFAULT_DIRECTORY if text is None else text, "path"))
    for name, other in (("accessKey", "secretKey"), ("secretKey", "accessKey"), ("securityToken", "accessKey")):
        if given.has(name) and not given.has(other):
            raise half_given(name, other)
    return Endpoint(
        namesrv_addr=given.value("namesrvAddr", _addresses),
        credentials=_credentials(given),
        tls=_tls(given),
        namespace=given.optional("namespace", _namespace),
        namespace_v2=given.optional("namespaceV2", _namespace),
    )


def _credentials(given: Given) -> Credentials | None:
    access_key, secret_key = given.optional("accessKey", _not_empty), given.optional("secretKey", _not_empty)
    if access_key is None or secret_key is None:
        return None
    return Credentials(access_key, secret_key, given.optional("securityToken", _not_empty))


def _tls(given: Given) -> TlsOptions | None:
    if not given.value("useTLS", parse_bool):
        for name in _TLS:
            if given.has(name):
                raise conflict(f"option {name} needs useTLS=true; set it, or drop {name}")
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
        raise invalid(option, error.message) from error


def _namespace(text: str, option: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise invalid(
            option, f"{text[:100]!r} is not a namespace: 1 to 64 letters, digits, '_' and '-', without the '%' behind it"
        )
    return text


def _not_empty(text: str, option: str) -> str:
    if not text:
        # Not shown: it may be a secret with a typing error.
        raise invalid(option, "the value is empty; set it, or drop the option")
    return text
