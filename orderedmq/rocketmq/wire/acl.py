"""RocketMQ's access control: requests that are signed with a secret key. Pure.

ACL 1.0 and 2.0 want the same signature. Source: AclClientRPCHook, AclUtils.combineRequestContent, AclSigner.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from orderedmq.rocketmq.wire.frame import Bytes

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"


@dataclass(frozen=True)
class Credentials:
    """An account of the cluster. What is secret is in no repr; Java calls it SessionCredentials."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)


def signature(data: bytes, secret_key: str) -> str:
    """Base64 of the HMAC-SHA1 of ``data``."""
    return base64.b64encode(hmac.digest(secret_key.encode(), data, hashlib.sha1)).decode()


def signed(ext: Mapping[str, str], body: Bytes, credentials: Credentials) -> dict[str, str]:
    """The fields of a request with the account and the signature over all of them and the body.

    Whatever is added to a request's fields later breaks the signature; its code, opaque, flag and version are not part of it.
    """
    fields = {**ext, ACCESS_KEY: credentials.access_key}
    if credentials.security_token is not None:
        fields[SECURITY_TOKEN] = credentials.security_token
    fields.pop(SIGNATURE, None)
    # Java's TreeMap sorts by UTF-16 units; names of fields are ASCII, where that is the order of code points.
    values = "".join(fields[name] for name in sorted(fields)).encode()
    fields[SIGNATURE] = signature(b"".join((values, body)), credentials.secret_key)
    return fields
