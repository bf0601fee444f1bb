"""The column lock_token: the broker and the lock under which a row was read, as text, for code that processes the rows.

It says whether an account was used, but not the account's keys, because rows are shown, stored and sent elsewhere.
"""

from __future__ import annotations

import json

from orderedmq.broker import Broker
from orderedmq.conditions import LockCondition, OptionCondition
from orderedmq.connections import kept
from orderedmq.core.lock import LockToken
from orderedmq.endpoint import Credentials, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError
from orderedmq.model import MessageQueue


def encode(endpoint: Endpoint, identity: str, token: LockToken | None) -> str | None:
    """Return a lock as JSON; None without a group.

    The JSON is ``[epoch, group, client id, identity, path or null, namesrvAddr or null, with account?]``.
    """
    if token is None:
        return None
    account = endpoint.credentials is not None
    fields = [token.epoch, token.group, token.client_id, identity, endpoint.path, endpoint.namesrv_addr, account]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def decode(
    text: str, queue: MessageQueue, credentials: Credentials | None = None, tls: TlsOptions | None = None
) -> tuple[Broker, LockToken]:
    """Return a connection to the broker, and the token with the fields that the broker checks.

    Raises LockError LOST for text that `encode` did not write, OptionError MISSING if the source used an account and
    ``credentials`` is None.
    """
    try:
        epoch, group, client_id, identity, path, namesrv_addr, account = json.loads(text)
        written = isinstance(epoch, int) and all(
            isinstance(one, str) for one in (group, client_id, identity, path or namesrv_addr)
        )
    except (ValueError, TypeError):
        written = False
    if not written:
        raise LockError(
            LockCondition.LOST,
            f"lock_token {text!r} of queue {queue} was not written by the source; leave the column as it was read",
        )
    if account and credentials is None:
        raise OptionError(
            OptionCondition.MISSING,
            f"the source reads queue {queue} with an account (accessKey), but rows do not carry its keys: give them to the listener, too: "
            "consume_orderly(..., credentials=orderedmq.Credentials(access_key, secret_key))",
        )
    endpoint = Endpoint(path) if path is not None else Endpoint(None, namesrv_addr, credentials, tls)
    return kept(endpoint, identity), LockToken(group, queue, "", client_id, epoch, 0)
