"""Signs requests with an account's secret key, as RocketMQ's access control requires. Pure.

ACL 1.0 and 2.0 use the same signature. Source: AclClientRPCHook, AclUtils.combineRequestContent, AclSigner.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from orderedmq.endpoint import Credentials
from orderedmq.rocketmq.wire.frame import Bytes

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"


def signature(data: bytes, secret_key: str) -> str:
    """Return the HMAC-SHA1 of ``data`` in base64."""
    return base64.b64encode(hmac.digest(secret_key.encode(), data, hashlib.sha1)).decode()


def signed(ext: Mapping[str, str], body: Bytes, credentials: Credentials) -> dict[str, str]:
    """Return a request's fields, extended by the account and by a signature over all fields and the body.

    The signature does not cover code, opaque, flag and version. Adding a field afterwards invalidates it.
    """
    fields = {**ext, ACCESS_KEY: credentials.access_key}
    if credentials.security_token is not None:
        fields[SECURITY_TOKEN] = credentials.security_token
    fields.pop(SIGNATURE, None)
    # Java's TreeMap sorts by UTF-16 units. Field names are ASCII, so code points have the same order.
    values = "".join(fields[name] for name in sorted(fields)).encode()
    fields[SIGNATURE] = signature(b"".join((values, body)), credentials.secret_key)
    return fields
