"""The column lock_token: under which lock, of which broker, a row was read; as text, for whoever works on the rows."""

from __future__ import annotations

from orderedmq.broker import Broker, kept
from orderedmq.errors import LockError
from orderedmq.lock import LockToken
from orderedmq.model import MessageQueue


def encode(path: str, identity: str, token: LockToken | None) -> str | None:
    """``epoch:group:identity:path``; None without a group. Every row carries it, so it is short."""
    return None if token is None else f"{token.epoch}:{token.group}:{identity}:{path}"


def decode(text: str, queue: MessageQueue) -> tuple[Broker, LockToken]:
    """A connection to the broker, and the token as far as the broker looks at it. Raises LockError LOST for text that is no token."""
    epoch, _, rest = text.partition(":")
    group, _, rest = rest.partition(":")
    identity, _, path = rest.partition(":")
    if not (epoch.isascii() and epoch.isdigit() and group and path):
        raise LockError(
            "LOST", f"lock_token {text!r} of queue {queue} was not written by the source; leave the column as it was read"
        )
    return kept(path, identity), LockToken(group, queue, "", "", int(epoch), 0)
